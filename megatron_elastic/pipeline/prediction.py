"""Prediction: how fast a layout is and what energy it takes, before anybody has computed a step of it.

A step is simulated, each cell at its clock; the fastest of the schedules that may be used counts. What is predicted is
the same for every policy's layouts, so that they are compared on equal ground.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from megatron_elastic.layout import Layout
from megatron_elastic.pipeline.simulate import Step, Timeline, scheduled
from megatron_elastic.plan import choice
from megatron_elastic.plan.choice import SCHEDULES
from megatron_elastic.plan.costs.cost import Costs
from megatron_elastic.plan.costs.power import PowerModel
from megatron_elastic.plan.policies import Outcome
from megatron_elastic.plan.work.clock import loads

MOST_SIMULATED = 100_000
"""Grains times stages beyond which step times are estimated instead of simulated, where nobody trains meanwhile."""


def takes_long(layout: Layout) -> bool:
    """Whether it would take long to simulate a step of ``layout``."""
    return choice.takes_long(layout, MOST_SIMULATED)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Of one step.

    Attributes:
        step_ms: with what is not the pipeline.
        grains: that are computed in it.
        joules: that all devices take; None without a power model.
    """

    step_ms: float
    grains: int
    joules: float | None = None

    def tokens_per_s(self, tokens: int) -> float:
        """``tokens``: of a grain."""
        return 1e3 * self.grains * tokens / self.step_ms

    def share_of(self, other: Prediction) -> float:
        """Grains a second, as a share of another's."""
        return self.grains / self.step_ms * other.step_ms / other.grains

    def joules_per_token(self, tokens: int) -> float | None:
        """``tokens``: of a grain."""
        return None if self.joules is None else self.joules / (self.grains * tokens)


def predict(
    layout: Layout,
    costs: Costs,
    clocks: Mapping[int, float] | None = None,
    *,
    schedules: Collection[str] = SCHEDULES,
    power: PowerModel | None = None,
) -> Prediction:
    """A step of ``layout`` under the fastest of ``schedules``.

    ``clocks``: by leader, as a multiple of that at which ``costs`` were measured; 1 for who is not there. Spares take
    no energy.
    """
    return predicted(Outcome((layout,)), costs, clocks, schedules=schedules, power=power)


def predicted(
    outcome: Outcome,
    costs: Costs,
    clocks: Mapping[int, float] | None = None,
    *,
    schedules: Collection[str] = SCHEDULES,
    power: PowerModel | None = None,
) -> Prediction:
    """The same for what a policy foresees: pipelines side by side, who wait for each other at the end of a step.

    ``clocks`` are for an outcome of one layout. Redundant forwards cost nothing where the cell would wait.
    """
    times = [_times(layout, costs, clocks or {}, schedules, outcome.redundant) for layout in outcome.layouts]
    step_ms = max(ms for ms, _ in times)
    joules = None
    if power is not None:
        joules = sum(
            layout.cell_size * power.joules(busy, step_ms - busy, (clocks or {}).get(leader, 1.0))
            for layout, (_, working) in zip(outcome.layouts, times, strict=True)
            for leader, busy in working.items()
        )
    return Prediction(step_ms, outcome.grains, joules)


def _times(
    layout: Layout, costs: Costs, clocks: Mapping[int, float], schedules: Collection[str], redundant: bool
) -> tuple[float, dict[int, float]]:
    """Milliseconds of a step, and those in which each cell computes."""
    if takes_long(layout):
        busy = {leader: load.at(clocks.get(leader, 1.0)) for leader, load in loads(layout, costs).items()}
        return costs.pace_of(layout).step_ms, busy
    found = fastest_of(layout, costs, clocks, schedules)
    busy = {cell.leader: found.line.busy(cell.leader) for cell in layout.cells.values() if not cell.shadow}
    return found.ms + (_redundant(layout, costs, found.line) if redundant else 0.0), busy


def fastest_of(
    layout: Layout, costs: Costs, clocks: Mapping[int, float], schedules: Collection[str] = SCHEDULES
) -> Step:
    """A step under the fastest of ``schedules``."""
    steps = (Step.of(scheduled(each, layout), layout, costs, clocks) for each in schedules)
    return min(steps, key=lambda step: step.ms)


def _redundant(layout: Layout, costs: Costs, line: Timeline) -> float:
    """Milliseconds by which the forwards of the next stage, the first being the last one's, do not fit where cells
    wait."""
    forward = [
        sum(costs.units[unit].forward_ms for unit in layout.at_home(stage)) for stage in range(layout.pipeline_size)
    ]
    return max(
        max(layout.load(cell) * forward[(index + 1) % layout.pipeline_size] - line.idle(cell.leader), 0.0)
        for index, stage in enumerate(layout.stages)
        for cell in stage.cells
    )
