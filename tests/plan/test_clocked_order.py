"""Clocks and a searched order of work together: each is found for the other."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace

import pytest

from megatron_elastic.layout import Layout
from megatron_elastic.pipeline.search import find
from megatron_elastic.pipeline.simulate import Step, run
from megatron_elastic.plan.choice import SEARCH, expected_clocks
from megatron_elastic.plan.costs.cost import Costs, UnitCost
from megatron_elastic.plan.costs.power import Clocking, PowerModel
from megatron_elastic.plan.work.clock import speeds
from megatron_elastic.plan.work.clocking import plan_clocks
from megatron_elastic.plan.work.order import search, unpacked
from tests.plan.test_policies import make
from tests.tiers.examples import examples

POWER = PowerModel(idle_w=90.0, static_w=150.0, dynamic_w=250.0)


def clocked(costs: Costs, mode: str, *steps: float) -> Costs:
    return replace(costs, power=POWER, clock_steps=steps, clocking=Clocking(mode))


def small_job(rng: random.Random) -> tuple[Layout, Costs]:
    """Three stages of two cells, whose layers are as unlike as they come, two layers a stage."""
    layout = make(3, 2, layers=6, grains=12)
    units = tuple(UnitCost(rng.uniform(1, 3), rng.uniform(2, 6), 6, 12, 1, clock_share=rng.choice((1.0, 0.6)))
                  for _ in layout.units)  # fmt: skip
    return layout, replace(Costs.assumed(layout.units), units=units)


def joules(layout: Layout, step: Step, clocks: Mapping[int, float]) -> float:
    """Of one device of each cell in a step."""
    busy = {leader: step.line.busy(leader) for leader in layout.cells}
    return sum(POWER.joules(ms, step.ms - ms, clocks.get(leader, 1.0)) for leader, ms in busy.items())


def test_an_order_is_searched_for_the_clocks_that_cells_get() -> None:
    """And clocks are what they would be anyway; what a step takes with them is that order's."""
    for seed in range(examples(10)):
        layout, usual = small_job(random.Random(seed))
        costs = clocked(usual, "performance", 1.0, 1.25, 1.5)
        costs = replace(costs, slow={layout.stages[0].cells[0].leader: 1.3})
        found = search(layout, costs, None)
        assert found is not None
        clocks = expected_clocks(layout, costs)
        assert max(clocks.values()) > 1.0
        fast, usually = (find(layout, costs, speeds(layout, costs, each)).ms for each in (clocks, {}))
        assert found.ms == fast < usually
        planned = plan_clocks(layout, costs, SEARCH, found.program)
        assert planned.clocks == {leader: clock for leader, clock in sorted(clocks.items()) if clock != 1.0}
        program = unpacked(found.program, layout)
        assert planned.step_ms == Step.of(program, layout, costs, planned.clocks).ms
        # A search knows one speed of a cell, for units of which clocks divide more and less.
        assert found.ms == pytest.approx(run(program, layout, costs, clocks).makespan, rel=5e-3)


def test_energy_is_saved_where_the_searched_order_takes_no_longer() -> None:
    saved = 0
    for seed in range(examples(10)):
        layout, usual = small_job(random.Random(seed))
        costs = clocked(usual, "energy", 0.8, 0.9, 1.0, 1.1)
        found = search(layout, costs, None)
        assert found is not None
        planned = plan_clocks(layout, costs, SEARCH, found.program)
        program = unpacked(found.program, layout)
        usually, saving = (Step.of(program, layout, costs, each) for each in ({}, planned.clocks))
        assert planned.base_ms == usually.ms
        assert planned.step_ms == saving.ms <= usually.ms * (1 + 1e-9)
        before, after = joules(layout, usually, {}), joules(layout, saving, planned.clocks)
        assert after <= before * (1 + 1e-9)
        saved += after < 0.99 * before
    assert saved, "in some"
