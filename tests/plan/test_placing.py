"""Placing: other placements of chunks are right, fit devices, and are named only where they are faster."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from megatron_elastic.layout import PLACEMENTS, Layout, joined, way
from megatron_elastic.pipeline.program import check
from megatron_elastic.pipeline.search import NotFitting, find
from megatron_elastic.pipeline.search.found import fits, programs
from megatron_elastic.pipeline.simulate import run
from megatron_elastic.plan.costs.cost import Costs, UnitCost
from megatron_elastic.plan.costs.fit import device_bytes, overflow
from megatron_elastic.plan.work import order
from megatron_elastic.plan.work.placing import WORTH, elsewhere, ways
from tests.placements import along
from tests.placements import ways as any_way
from tests.tiers.examples import examples

MS = st.floats(0.5, 8)


@settings(max_examples=examples(500))
@given(stages=st.integers(2, 20), data=st.data())
def test_ways_can_be_gone(stages: int, data: st.DataObject) -> None:
    blocks = data.draw(st.integers(stages, 4 * stages))
    found = ways(stages, blocks)
    assert found[0] == tuple(range(stages))
    assert len(set(found)) == len(found)
    for through in found:
        assert len(through) <= blocks
        assert through[:stages] == tuple(range(stages))
        assert all(a != b for a, b in pairwise(through))
    if blocks >= 2 * stages:
        assert {joined(way(placement, stages, 2)) for placement in PLACEMENTS} <= set(found)


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Layout, Costs]:
    """Pipelines with chunks placed anyhow, and costs with a memory, or without."""
    through = draw(any_way(4))
    layers = [draw(st.integers(1, 3)) for _ in through]
    layout = along(through, layers, draw(st.integers(1, 2)), 2 * draw(st.integers(1, 5)), draw(st.booleans()))
    costs = Costs(
        tuple(UnitCost(draw(MS), draw(MS), 400, 1200, draw(st.integers(1, 900))) for _ in layout.units),
        boundary_bytes=1000, bandwidth=1e6, latency_ms=draw(st.sampled_from([0.0, 0.1])),
    )  # fmt: skip
    if draw(st.booleans()):
        fixed = max(device_bytes(layout, rank, costs) for rank in layout.ranks)
        costs = replace(costs, memory_bytes=int(fixed) + draw(st.integers(900, 30_000)))
    return layout, costs


USUAL_TAKES_MORE_MEMORY = (
    along((0, 1, 0), (1, 1, 1), 1, 4, tied=False),
    Costs(tuple(
        UnitCost(forward, backward, 400, 1200, kept) for forward, backward, kept in (
            (3.1, 4.77, 95), (0.84, 8.0, 208), (6.84, 1.5, 572), (4.73, 1.52, 322), (2.48, 8.0, 124))
    ), boundary_bytes=1000, bandwidth=1e6, latency_ms=0.0),
)  # fmt: skip
"""Where the usual order of what is found elsewhere would be the fastest, but for the memory that it takes."""


@settings(max_examples=10, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@example(USUAL_TAKES_MORE_MEMORY, True)
@given(jobs(), st.booleans())
def test_what_is_found_elsewhere_is_faster_and_right(job: tuple[Layout, Costs], tied: bool) -> None:
    layout, costs = job
    try:
        present = find(layout, costs)
    except NotFitting:
        return
    found = elsewhere(layout, costs, {}, tied, present.room, present.ms)
    if found is None:
        return
    other, program = found
    other.validate()
    assert other.way != layout.way
    assert sorted(other.ranks) == sorted(layout.ranks)
    assert (0 in other.stages[other.way[-1].stage].units) == (tied or other.way[-1].stage == 0)
    check(program.program, other)
    searched = replace(other, recomputed=program.recomputed)
    assert run(program.program, searched, costs).makespan == pytest.approx(program.ms)
    assert program.ms < present.ms * (1 - WORTH)
    assert overflow(other, other.ranks, costs) is None
    usual = next(iter(programs(other).values()))
    if fits(usual, searched, costs, present.room):
        assert program.ms <= run(usual, searched, costs).makespan + 1e-6


def test_a_placement_is_found_although_its_usual_order_does_not_fit() -> None:
    """It begins with chunks recomputed; the order that is found for it does without."""
    layout = along(range(4), [2] * 4, 1, 8, tied=False)
    free, layer = UnitCost(0, 0, 10, 10, 0), UnitCost(10, 20, 100, 100, 100)
    costs = Costs(tuple(layer if name.startswith("layer") else free for name in layout.units), latency_ms=0.0,
                  boundary_bytes=10, memory_bytes=1360)  # fmt: skip
    present = find(layout, costs)
    found = elsewhere(layout, costs, {}, False, present.room, present.ms)
    assert found is not None
    other, program = found
    assert other.through(4) == (0, 1, 2, 3, 0, 1, 2, 3) and other.recomputed
    plain = replace(other, recomputed=())
    assert overflow(plain, plain.ranks, costs) is not None and overflow(other, other.ranks, costs) is None
    assert program.recomputed == () and program.ms < present.ms * (1 - WORTH)
    with pytest.raises(NotFitting):
        find(layout, replace(costs, memory_bytes=400))  # less than units and slices take


@pytest.mark.parametrize("pp", [2, 4])
def test_a_v_is_found_where_it_pays(pp: int) -> None:
    """Layers that are alike, and memory for what is usually kept: there is less to wait for with two chunks a stage.
    What is said of it is what the search finds there.
    """
    layout = along(range(pp), [4] * pp, 1, 2 * pp, tied=False)
    free, layer = UnitCost(0, 0, 10, 10, 0), UnitCost(10, 20, 100, 100, 100)
    costs = Costs(tuple(layer if name.startswith("layer") else free for name in layout.units), latency_ms=0.0)
    found = order.search(layout, costs, None, tied=False)
    assert found is not None and found.stage_units is not None and found.placed_ms is not None
    assert found.placed_ms < (1 - WORTH) * found.ms < found.present_ms
    again = elsewhere(layout, costs, {}, False, find(layout, costs).room, found.ms)
    assert again is not None
    assert tuple(stage.units for stage in again[0].stages) == found.stage_units
    stay = order.search(layout, costs, None)
    assert stay is not None and stay.stage_units is None and stay.ms == found.ms
    there = order.search(again[0], costs, None, tied=False)
    assert there is not None and there.stage_units is None, "one does not go back and forth"
