"""Forecast: a step's time by a profile, without a job: what an emulated job is to take if nothing disturbs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from megatron_elastic.emulation.profile import Profile
from megatron_elastic.layout import Layout
from megatron_elastic.pipeline.program import Op
from megatron_elastic.pipeline.search import find
from megatron_elastic.pipeline.simulate import Step, run, scheduled
from megatron_elastic.plan.choice import SEARCH
from megatron_elastic.plan.costs.cost import Costs
from megatron_elastic.plan.work.clock import speeds
from megatron_elastic.plan.work.order import Order, unpacked

SHARES = {"backward": 1.0, "backward_input": 0.5, "backward_weight": 0.5}
"""What each kind of operation takes of a unit's backward pass."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """Of one step, from vote to vote, as when each is like the one before.

    Attributes:
        pipeline_ms: of it, what the passes alone take.
        joules: of all its ranks, as the real devices would draw them.
    """

    pipeline_ms: float
    step_ms: float
    joules: float


def forecast(
    layout: Layout, profile: Profile, schedule: str, clocks: Mapping[int, float] | None = None,
    order: Order | None = None,
) -> Forecast:
    """A step of ``layout`` under ``--elastic-schedule``.

    ``clocks``: by rank, in place of the profile's. ``order``: in which work is done; None: under ``search`` that
    which is found for these clocks.
    """
    costs = replace(profile.costs(layout.units), overhead_ms=0.0)  # which nothing emulates
    of_ranks = profile.clocks() if clocks is None else clocks
    clock = {leader: clock_of(layout, leader, of_ranks) for leader in layout.cells}
    if order is not None:
        layout = replace(layout, recomputed=order.recomputed)
        program = unpacked(order.program, layout)
    elif schedule == SEARCH:
        found = find(layout, costs, speeds(layout, costs, clock))
        layout, program = replace(layout, recomputed=found.recomputed), found.program
    else:
        program = scheduled(schedule, layout)
    step = Step.of(program, layout, costs, clock)
    joules = 0.0
    for leader in layout.cells:
        busy = step.line.busy(leader)
        each = profile.power.joules(busy, step.ms - busy, clock[leader])
        joules += layout.cell_size * each / profile.emulation.time_scale
    return Forecast(run(program, layout, costs, clock).makespan, step.ms, joules)


@dataclass(frozen=True, slots=True)
class Times:
    """Milliseconds that a whole grain takes in each chunk of a stage, at one clock."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]

    @classmethod
    def of(cls, layout: Layout, stage: int, costs: Costs, clock: float) -> Times:
        """Of a stage."""
        chunks = [
            [costs.units[unit].at(clock) for unit in chunk if layout.home(unit) == stage]
            for chunk in layout.chunks(stage)
        ]
        return cls(
            tuple(sum(cost.forward_ms for cost in chunk) for chunk in chunks),
            tuple(sum(cost.backward_ms for cost in chunk) for chunk in chunks),
        )

    def ms(self, op: Op) -> float:
        """Of one operation."""
        return self.forward[op.chunk] if op.kind == "forward" else SHARES[op.kind] * self.backward[op.chunk]


def clock_of(layout: Layout, rank: int, clocks: Mapping[int, float]) -> float:
    """At which a rank computes: that of the slowest of its cell, who do everything together."""
    return min(clocks.get(member, 1.0) for member in layout.cell_of(rank).ranks)
