"""Bound: exact under its rules, against all ways to cut and to share, and below whatever a planner comes to."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations, pairwise

import pytest

from megatron_elastic.pipeline.prediction import predict
from megatron_elastic.plan.bound import least_step_ms
from megatron_elastic.plan.choice import SCHEDULES
from megatron_elastic.plan.costs.cost import Costs, UnitCost
from megatron_elastic.plan.policies import POLICIES
from tests.plan.test_policies import LAYOUT, alike, random_job


def shares(cells: int, stages: int) -> Iterator[tuple[int, ...]]:
    """All widths of so many stages."""
    for cuts in combinations(range(1, cells), stages - 1):
        yield tuple(end - begin for begin, end in pairwise((0, *cuts, cells)))


def brute_force(costs: Costs, cells: int, grains: int) -> float:
    """The least of all cuts and widths, where nothing is exchanged."""
    units, best = costs.units, float("inf")
    for stages in range(1, min(cells, len(units)) + 1):
        for cuts in combinations(range(1, len(units)), stages - 1):
            ends = (0, *cuts, len(units))
            for widths in shares(cells, stages):
                longest = 0.0
                for (first, end), width in zip(pairwise(ends), widths, strict=True):
                    forward = sum(unit.forward_ms for unit in units[first:end])
                    backward = sum(unit.backward_ms for unit in units[first:end])
                    count = -(-grains // width)
                    before = sum(unit.forward_ms for unit in units[:first])
                    after = sum(unit.backward_ms for unit in units[:first]) / 2
                    work = max(count * (forward + backward), count * (forward + backward / 2) + after)
                    longest = max(longest, before + work)
                best = min(best, longest)
    return best


@pytest.mark.parametrize("seed", range(40))
def test_it_is_the_least_of_all_cuts_and_widths(seed: int) -> None:
    rng = random.Random(seed)
    units = tuple(UnitCost(rng.uniform(0.1, 3), rng.uniform(0.1, 6), 6, 12, 1) for _ in range(rng.randint(1, 6)))
    costs, cells, grains = Costs(units), rng.randint(1, 6), rng.randint(1, 9)
    assert least_step_ms(costs, cells, grains) == pytest.approx(brute_force(costs, cells, grains), rel=1e-5)


@pytest.mark.parametrize("seed", range(20))
def test_nothing_that_can_be_planned_is_below(seed: int) -> None:
    layout, costs, lost = random_job(random.Random(seed))
    outcome = POLICIES["elastic"].foresee(layout, lost, costs)
    least = least_step_ms(costs, len(layout.cells) - len(lost), layout.num_grains, layout.samples)
    for after in outcome.layouts:
        assert predict(after, costs, schedules=SCHEDULES).step_ms >= least * (1 - 1e-6)


def test_even_stages_by_hand() -> None:
    """Forty layers of 1 and 2 ms, 32 grains, 16 cells: one stage of all has the least to wait for. 32 / 16 = 2 grains
    of 120 ms each.
    """
    assert least_step_ms(alike(LAYOUT), 16, 32) == pytest.approx(240, rel=1e-5)
    assert least_step_ms(alike(LAYOUT), 15, 32) < 360, "which is what one stage of fifteen takes"
