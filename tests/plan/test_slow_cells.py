"""Layouts of cells of which some are slow: these get fewer grains, and their stages fewer units."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_elastic.layout import Holdings, Layout, joined, way
from megatron_elastic.plan import NoLayout, StateLost
from megatron_elastic.plan.choice import WORTH, best, step, ways
from megatron_elastic.plan.costs.cost import Costs
from megatron_elastic.plan.graph import Planner
from megatron_elastic.plan.growth import even
from megatron_elastic.plan.policies import POLICIES
from tests.placements import along
from tests.plan.test_policies import LAYOUT, alike, make, random_job
from tests.tiers.examples import examples

ELASTIC = POLICIES["elastic"]
SLOW = LAYOUT.stages[1].cells[2].leader


def layers(layout: Layout) -> list[int]:
    """Of each stage."""
    return [sum(layout.units[unit].startswith("layer.") for unit in stage.units) for stage in layout.stages]


def share(layout: Layout, costs: Costs, slow: Mapping[int, float]) -> float:
    """Of what cells could compute in a step, what they compute: 1 where nobody ever waits."""
    work = layout.num_grains * sum(unit.grain_ms for unit in costs.units)
    there = sum(1 / slow.get(cell, 1.0) for cell in layout.cells)
    return work / step(layout, replace(costs, slow=slow), ["1f1b"]) / there


def settled(layout: Layout, costs: Costs, schedules: Collection[str] = ("1f1b",)) -> Layout:
    return ELASTIC.settle(layout, costs, schedules)


@pytest.mark.parametrize("times", [1.43, 2.0, 5.0])
def test_layers_leave_the_stage_of_a_slow_cell(times: float) -> None:
    """Were only grains shared by speed, all other stages would wait for that one."""
    costs = alike(LAYOUT)
    usual, slow = settled(LAYOUT, costs), {SLOW: times}
    assert usual.stages == LAYOUT.stages
    shared = even(LAYOUT, 1, slow)
    moved = settled(LAYOUT, replace(costs, slow=slow))
    at = moved.stage_of(SLOW)
    assert layers(moved)[at] < 10 <= min(each for stage, each in enumerate(layers(moved)) if stage != at)
    assert max(share(LAYOUT, costs, slow), share(shared, costs, slow)) < share(moved, costs, slow)
    assert len(moved.cells) == 16, "it still does what it can"


def test_layers_come_back_when_it_is_as_fast_as_the_others() -> None:
    costs = alike(LAYOUT)
    moved = settled(LAYOUT, replace(costs, slow={SLOW: 3.0}))
    back = settled(moved, costs)
    assert layers(moved) != layers(back) == layers(LAYOUT)


def test_layers_of_several_chunks_leave_too() -> None:
    """Each stage keeps as many chunks as it has."""
    layout = along(joined(way("loop", 4, 2)), [4] * 8, 2, 16, tied=False)
    slow = {layout.stages[1].cells[0].leader: 3.0}
    costs = alike(layout)
    moved = settled(layout, replace(costs, slow=slow))
    assert layers(moved)[1] < layers(layout)[1] == 8
    assert [position.stage for position in moved.way] == [position.stage for position in layout.way]
    assert share(even(layout, 1, slow), costs, slow) < share(moved, costs, slow)


def test_where_there_is_nobody_to_share_with_layers_are_all_that_can_move() -> None:
    """Four stages of one cell each: the slow one takes twice as long, so half as many layers keep it in step."""
    layout = make(4, 1, layers=28, grains=16)
    costs = replace(alike(layout), slow={2: 2.0})
    moved = settled(layout, costs)
    assert layers(moved) == [8, 8, 4, 8]
    assert step(moved, costs, ["1f1b"]) < 2 / 3 * step(layout, costs, ["1f1b"])


@pytest.mark.parametrize("name", ["elastic", "recycle", "resihp"])
def test_who_is_slow_gets_less_of_what_a_lost_cell_had(name: str) -> None:
    """And what the others have stays where it is: eight grains of rank 4, of which rank 6 would get a third."""
    slow = {SLOW: 3.0}
    shared = even(LAYOUT, 1, slow)
    held = Holdings.of(shared).without([4])
    left = POLICIES[name].lose(shared, [4], held, 2, replace(alike(LAYOUT), slow=slow))
    given = {cell.leader: set(cell.grains) for cell in left.stages[1].cells}
    assert [len(given[leader]) for leader in (5, SLOW, 7)] == [14, 4, 14]
    assert all(given[cell.leader].issuperset(cell.grains) for cell in shared.stages[1].cells if cell.leader in given)


def test_a_stage_takes_what_its_slowest_cell_takes() -> None:
    """Exact: of all cuts of the layers there is none with a faster slowest stage."""
    rng = random.Random(0)
    for _ in range(examples(20)):
        layout = make(3, 1, layers=6, grains=2)
        costs = replace(alike(layout), units=tuple(
            replace(unit, forward_ms=rng.uniform(1, 3)) for unit in alike(layout).units
        ))  # fmt: skip
        samples = [rng.uniform(1, 9) for _ in range(3)]
        planner = Planner(layout.units, costs, tied=False, grains=2)
        times = [unit.grain_ms for unit in costs.units]
        blocks = len(times)
        least = min(
            max(samples[0] * sum(times[:a]), samples[1] * sum(times[a:b]), samples[2] * sum(times[b:]))
            for a in range(1, blocks) for b in range(a + 1, blocks)
        )  # fmt: skip
        assert planner.split([1, 1, 1], samples=samples).slowest_ms == pytest.approx(least)


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(0, 10**9))
def test_it_is_never_worse_to_know_who_is_slow(seed: int) -> None:
    """After a loss: than to choose as if nobody was, and to share grains by speed then."""
    rng = random.Random(seed)
    layout, costs, lost = random_job(rng)
    try:
        left = ELASTIC.lose(layout, lost, Holdings.of(layout).without(lost), 1, costs)
    except (NoLayout, StateLost):
        return
    leaders = sorted(left.cells)
    slow = {leader: rng.choice((1.3, 2.0, 5.0)) for leader in rng.sample(leaders, rng.randint(1, min(2, len(leaders))))}
    known = replace(costs, slow=slow)
    for schedules in (["1f1b"], ["1f1b", "split"]):
        blind = even(best(ways(left, costs, left.is_tied, schedules)).layout, 2, slow)
        found = best(ways(left, known, left.is_tied, schedules))
        assert found.step_ms <= step(blind, known, schedules) * (1 + 2 * WORTH), (seed, schedules, slow)
