"""Clocking: the clocks that a job should run at in a layout, and what they give."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_elastic.layout import Layout
from megatron_elastic.plan.choice import SCHEDULES, SEARCH, step, takes_long
from megatron_elastic.plan.costs.cost import Costs
from megatron_elastic.plan.work import order
from megatron_elastic.plan.work.clock import clocks


@dataclass(frozen=True, slots=True)
class ClockPlan:
    """Attributes:
    clocks: of cells that are not to run at the base clock, by leader.
    step_ms, base_ms: of a step with them, and with all at the base clock.
    """

    clocks: Mapping[int, float]
    step_ms: float
    base_ms: float


def plan_clocks(layout: Layout, costs: Costs, schedule: str, present: bytes | None = None) -> ClockPlan:
    """The plan for ``layout`` under ``--elastic-schedule``; ``costs.clocking`` and ``costs.power`` must be known.

    ``present``: the packed program that cells have, if its order was searched; None: the usual one. To save energy many
    steps are simulated; where one takes long, nothing is planned.
    """
    assert costs.clocking is not None
    large = takes_long(layout)
    usual = SCHEDULES[0] if schedule == SEARCH else schedule
    searched = None if present is None or large else order.unpacked(present, layout)

    def step_ms(tried: Mapping[int, float]) -> float:
        if searched is None:
            return step(layout, costs, [usual], tried)
        return order.step_ms(searched, layout, costs, tried)

    base_ms = step_ms({})
    if costs.clocking.mode == "energy" and large:
        return ClockPlan({}, base_ms, base_ms)
    found = clocks(layout, costs, step_ms)
    others = {leader: clock for leader, clock in sorted(found.items()) if clock != 1.0}
    return ClockPlan(others, step_ms(found), base_ms)
