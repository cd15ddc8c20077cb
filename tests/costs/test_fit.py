"""Fit: layouts that memory is not enough for are not gone to, nor over; and what could never fit does not begin."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_elastic.layout import Holdings, Layout, gpt_units
from megatron_elastic.plan import NoLayout, lose
from megatron_elastic.plan.choice import best, ways
from megatron_elastic.plan.costs.cost import Costs, UnitCost
from megatron_elastic.plan.costs.fit import device_bytes, live_bytes, overflow, overflow_on_the_way
from megatron_elastic.plan.graph import Planner
from megatron_elastic.plan.growth import even
from megatron_elastic.plan.policies import POLICIES
from tests.emulation.test_emulated import emulate
from tests.emulation.test_emulation import profile_of
from tests.jobs import Grid, Jobs, assert_same_training, inject

MB = 1_000_000
LAYER = UnitCost(5.0, 10.0, 6 * MB, 12 * MB, MB)
NOTHING = UnitCost(0.0, 0.0, 0, 0, 0)


def job(layers: tuple[int, ...], dp: int, memory: int, **others: int) -> tuple[Layout, Costs]:
    """A pipeline of so many layers a stage, on devices of so many bytes."""
    units, stages = gpt_units(sum(layers), len(layers), tied=False, positions=False, split=[[n] for n in layers])
    values = {"tp": 1, "num_grains": 4 * dp, "num_slices": dp, "replicas": 1} | others
    layout = Layout.grid(pp=len(layers), dp=dp, stage_units=stages, units=units, **values)
    return layout, Costs(tuple(LAYER if name.startswith("layer") else NOTHING for name in units), memory_bytes=memory)


def after(layout: Layout, *lost: int) -> Layout:
    return lose(layout, lost, Holdings.of(layout).without(lost), 1)


def most(layout: Layout, costs: Costs, split: bool = False) -> float:
    return max(device_bytes(layout, rank, costs) + live_bytes(layout, rank, costs, split) for rank in layout.ranks)


def test_a_split_schedule_needs_more() -> None:
    """The last of four stages keeps the activations of one grain, or of four."""
    layout, costs = job((2, 2, 2, 3), 2, 40 * MB)
    assert live_bytes(layout, 6, costs, split=False) == 3 * MB
    assert live_bytes(layout, 6, costs, split=True) == 12 * MB
    assert device_bytes(layout, 6, costs) == (18 + 18) * MB
    assert overflow(layout, layout.ranks, costs) is None
    assert "the device of rank 6 would hold" in (overflow(layout, layout.ranks, costs, split=True) or "")
    units = [stage.units for stage in layout.stages]
    assert Planner(layout.units, costs, False, 8).keep(units, [2] * 4).slowest_ms == 3 * 15 * 4
    with pytest.raises(NoLayout, match="does not fit 4 pipeline stages"):
        Planner(layout.units, costs, False, 8, split=True).keep(units, [2] * 4)


@settings(deadline=None, max_examples=60)
@given(
    layers=st.lists(st.integers(1, 4), min_size=2, max_size=4).map(tuple), dp=st.integers(2, 4), split=st.booleans(),
    more=st.integers(0, 40), data=st.data(),
)  # fmt: skip
def test_what_is_chosen_fits_all_along(
    layers: tuple[int, ...], dp: int, split: bool, more: int, data: st.DataObject
) -> None:
    """If anything does: the layout that is led to, and what there is while state is on its way."""
    layout, costs = job(layers, dp, 0)
    costs = replace(costs, memory_bytes=int(most(layout, costs, split)) + more * MB)
    schedules = ["split" if split else "1f1b"]
    lost = data.draw(st.sampled_from(layout.ranks))
    now = POLICIES["elastic"].lose(layout, [lost], Holdings.of(layout).without([lost]), 1, costs, schedules)
    found = ways(now, costs, False, schedules)
    for way in found:
        goal = even(way.layout, 1)
        assert (way.problem is None) == (overflow_on_the_way(now, goal, costs, split) is None)
    if any(way.problem is None for way in found):
        assert best(found).problem is None


def test_a_way_that_does_not_fit_in_between_is_not_gone() -> None:
    """The middle stage would give a layer to each side and so hold no more; but a side holds one more meanwhile."""
    layout, costs = job((3, 3), 4, 0)
    now = even(after(layout, 0), 1)
    roomy = ways(now, replace(costs, memory_bytes=1000 * MB), False, ["1f1b"])
    chosen = best(roomy)
    assert chosen.name != "reroute"
    needed = most(even(chosen.layout, 1), costs)
    tight = replace(costs, memory_bytes=int(max(needed, most(now, costs))))
    (same,) = [way for way in ways(now, tight, False, ["1f1b"]) if way.layout.stages == chosen.layout.stages]
    assert same.problem is not None and overflow(even(same.layout, 1), same.layout.ranks, tight) is None
    assert best(ways(now, tight, False, ["1f1b"])).problem is None


def test_slices_are_spread_at_once_where_one_cannot_own_those_of_two() -> None:
    """One copy of all that a cell owns is in the next one: that would own half of its stage's state."""
    layout, costs = job((2, 2), 4, 26 * MB)
    stay = after(layout, 1)
    assert "rank 2" in (overflow(stay, stay.ranks, costs) or "")
    held = Holdings.of(layout).without([1])
    now = POLICIES["elastic"].lose(layout, [1], held, 1, costs, ["1f1b"])
    assert overflow(now, now.ranks, costs) is None
    assert [stage.units for stage in now.stages] == [stage.units for stage in layout.stages]
    assert POLICIES["elastic"].lose(layout, [1], held, 1, replace(costs, memory_bytes=30 * MB)) == stay
    others = POLICIES["elastic"].lose(layout, [1], held, 1, replace(costs, memory_bytes=19 * MB), ["1f1b"])
    assert others.pipeline_size == 4, "of four stages each has less than of two"
    assert overflow(others, others.ranks, replace(costs, memory_bytes=19 * MB)) is None
    nothing = POLICIES["elastic"].lose(layout, [1], held, 1, replace(costs, memory_bytes=12 * MB))
    assert nothing == stay, "nothing fits: who does not is told so by its device"


def test_real_ranks_do_not_overflow_after_a_loss(jobs: Jobs, tmp_path: Path) -> None:
    grid = Grid(tp=1, pp=2, steps=6)
    profile = profile_of(layer_ms=2, memory=21_500_000, positions=True)
    job = jobs.run(*grid.flags, *emulate(tmp_path / "profile.json", profile), *inject("2@3:backward"))
    assert_same_training(job, jobs.undisturbed(*grid.flags), [2], stages_stay=False)
    assert "OutOfMemory" not in job.output


def test_a_schedule_that_keeps_too_much_does_not_begin(jobs: Jobs, tmp_path: Path) -> None:
    profile = profile_of(memory=18_002_500, positions=True)  # the last of two stages: one activation of 2 kB, or two
    grid = Grid(tp=1, pp=2, steps=2)
    job = jobs.start(*grid.flags, *emulate(tmp_path / "p.json", profile), "--elastic-schedule", "split")
    job.finish(2)
    assert "GB of activations, but has" in job.output
