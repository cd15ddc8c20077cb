"""Dataflow: who computes which grains and which samples, and what crosses the boundary between stages."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_elastic.layout import Cell, Layout, LayoutError, Part, Stage, gpt_units
from megatron_elastic.pipeline.program import Program, check
from megatron_elastic.pipeline.schedule import one_forward_one_backward, split_backward, usual
from megatron_elastic.pipeline.simulate import fastest, simulate
from megatron_elastic.plan import everything, improve, lose, replan
from megatron_elastic.plan.costs.cost import Costs, UnitCost
from megatron_elastic.plan.work.dataflow import resize, share
from megatron_elastic.plan.work.reroute import reroute
from tests.tiers.examples import examples


def grid(pp: int, dp: int, grains: int, samples: int, tp: int = 1, chunks: int = 1) -> Layout:
    units, stage_units = gpt_units(pp * chunks, pp, True, False, chunks=chunks)
    return Layout.grid(
        tp=tp, pp=pp, dp=dp, stage_units=stage_units, units=units, num_grains=grains, num_slices=dp, replicas=1,
        samples=samples,
    )  # fmt: skip


def narrowed(layout: Layout, losses: int, rng: Random) -> Layout:
    """The layout after the loss of so many ranks one after the other, as far as every stage keeps a cell."""
    for _ in range(losses):
        wide = [stage for stage in layout.stages if stage.width > 1]
        if wide:
            rank = rng.choice(rng.choice(rng.choice(wide).cells).ranks)
            layout = lose(layout, [rank], everything(layout), layout.epoch + 1)
    return layout


layouts = st.builds(
    lambda pp, dp, each, samples, losses, seed, chunks: narrowed(
        grid(pp, dp, dp * each, samples, chunks=chunks), losses, Random(seed)
    ),
    chunks=st.integers(1, 2),
    pp=st.integers(1, 5),
    dp=st.integers(1, 5),
    each=st.integers(1, 4),
    samples=st.integers(1, 6),
    losses=st.integers(0, 6),
    seed=st.integers(0, 2**32),
)


def samples_of(cell: Cell, layout: Layout) -> int:
    return layout.samples * len(cell.grains) + sum(part.size for part in cell.parts)


# ---- resize ---------------------------------------------------------------------------------


def test_three_cells_take_over_what_four_had() -> None:
    before = grid(2, 4, 8, 3)
    after = lose(before, [6], everything(before), 1)
    assert after.stages[0] == before.stages[0]
    assert after.stages[1].cells == (
        Cell((4,), (0, 4), parts=(Part(2, 0, 2),)),
        Cell((5,), (1, 5), parts=(Part(2, 2, 3), Part(6, 0, 1))),
        Cell((7,), (3, 7), parts=(Part(6, 1, 3),)),
    )
    assert [after.load(cell) for cell in after.stages[1].cells] == [8 / 3] * 3
    assert after.sharers(1, 2) == ((after.cell_of(4), Part(2, 0, 2)), (after.cell_of(5), Part(2, 2, 3)))
    assert after.common(0, Part(2, 2, 3)) == ((after.cell_of(2), Part(2, 2, 3)),)
    assert "4:[0 4 2:0-1]  5:[1 5 2:2-2 6:0-0]  7:[3 7 6:1-2]" in str(after)
    assert '"samples": 3' in after.to_json() and "samples" not in grid(2, 4, 8, 1).to_json()
    assert one_forward_one_backward(after).text().splitlines()[4:] == [
        "4: F0 B0 F2 B2 F4 B4",
        "5: F1 B1 F2 B2 F5 B5 F6 B6",
        "7: F3 B3 F7 B7 F6 B6",
    ]


@settings(max_examples=examples(2000), deadline=None)
@given(at=st.lists(st.integers(-1, 5), min_size=1, max_size=24), width=st.integers(1, 6), samples=st.integers(1, 9))
def test_resize_is_even_to_within_a_sample_and_moves_few(at: list[int], width: int, samples: int) -> None:
    old = [tuple(grain for grain, cell in enumerate(at) if cell == index) for index in range(width)]
    new = resize(old, len(at), samples)
    done = [part for _, parts in new for part in parts]
    done += [Part(grain, 0, samples) for whole, _ in new for grain in whole]
    assert sorted((part.grain, sample) for part in done for sample in range(part.start, part.stop)) == [
        (grain, sample) for grain in range(len(at)) for sample in range(samples)
    ]
    sizes = [samples * len(whole) + sum(part.size for part in parts) for whole, parts in new]
    assert max(sizes) - min(sizes) <= 1
    assert all(len(parts) <= 2 for _, parts in new)
    for was, (whole, _), size in zip(old, new, sizes, strict=True):
        assert len(whole) == size // samples
        assert len(set(was) & set(whole)) == min(len(whole), len(was)), "whole grains stay where they are"
    assert resize([whole for whole, _ in new], len(at), samples) == new, "what is even stays as it is"


paces = st.lists(st.sampled_from((0.5, 1.0, 1.25, 2.0, 3.7, 20.0)), min_size=6, max_size=6)


def optimal(total: int, slow: list[float]) -> float:
    """The earliest end of all that can be had when each cell has at least one."""
    cells = range(len(slow))
    ends = sorted(n * slow[index] for index in cells for n in range(1, total + 1))
    return next(end for end in ends if all(slow[index] <= end for index in cells)
                and sum(int(end / slow[index] + 1e-9) for index in cells) >= total)


@settings(max_examples=examples(2000), deadline=None)
@given(at=st.lists(st.integers(-1, 5), min_size=6, max_size=24), width=st.integers(1, 6), slow=paces)
def test_slower_cells_get_fewer_grains(at: list[int], width: int, slow: list[float]) -> None:
    old = [tuple(grain for grain, cell in enumerate(at) if cell == index) for index in range(width)]
    new = reroute(old, len(at), slow[:width])
    assert sorted(grain for share in new for grain in share) == list(range(len(at)))
    assert all(new), "a cell without a grain would be a shadow"
    ends = [len(share) * pace for share, pace in zip(new, slow, strict=False)]
    assert max(ends) <= optimal(len(at), slow[:width]) + 1e-9
    for was, now in zip(old, new, strict=True):
        assert len(set(was) & set(now)) == min(len(was), len(now)), "grains stay where they are"
    assert reroute(new, len(at), slow[:width]) == new, "what is shared out so stays as it is"


@settings(max_examples=examples(2000), deadline=None)
@given(grains=st.integers(6, 24), width=st.integers(1, 6), samples=st.integers(1, 9), slow=paces)
def test_slower_cells_get_fewer_samples(grains: int, width: int, samples: int, slow: list[float]) -> None:
    old = [tuple(range(index, grains, width)) for index in range(width)]
    new = resize(old, grains, samples, slow[:width])
    done = [part for _, parts in new for part in parts] + [Part(g, 0, samples) for whole, _ in new for g in whole]
    assert sorted((part.grain, sample) for part in done for sample in range(part.start, part.stop)) == [
        (grain, sample) for grain in range(grains) for sample in range(samples)
    ]
    ends = [(samples * len(whole) + sum(part.size for part in parts)) * pace
            for (whole, parts), pace in zip(new, slow, strict=False)]
    assert max(ends) <= optimal(grains * samples, slow[:width]) + 1e-9
    assert all(len(parts) <= 2 for _, parts in new)
    assert resize([whole for whole, _ in new], grains, samples, slow[:width]) == new


@settings(max_examples=examples(500), deadline=None)
@given(layout=layouts)
def test_cells_of_a_stage_have_equally_much_to_do(layout: Layout) -> None:
    for stage in layout.stages:
        sizes = [samples_of(cell, layout) for cell in stage.cells]
        assert max(sizes) - min(sizes) <= 1
        assert sum(sizes) == layout.num_grains * layout.samples
        if layout.num_grains % stage.width == 0 or layout.samples == 1:
            whole = reroute([cell.grains for cell in stage.cells], layout.num_grains)
            assert [cell.grains for cell in share(layout, stage.cells)] == whole
    assert Layout.from_json(layout.to_json()) == layout


@settings(max_examples=examples(500), deadline=None)
@given(layout=layouts, data=st.data())
def test_what_is_sent_is_what_both_sides_have(layout: Layout, data: st.DataObject) -> None:
    """Over every boundary, every sample once, from who has it to who needs it."""
    for stage in range(layout.pipeline_size - 1):
        for grain in range(layout.num_grains):
            sent: dict[tuple[int, int], list[Part]] = defaultdict(list)
            for sender, part in layout.sharers(stage, grain):
                for receiver, common in layout.common(stage + 1, part):
                    sent[sender.leader, receiver.leader].append(common)
            expected: dict[tuple[int, int], list[Part]] = defaultdict(list)
            for receiver, part in layout.sharers(stage + 1, grain):
                for sender, common in layout.common(stage, part):
                    expected[sender.leader, receiver.leader].append(common)
            assert sent == expected
            assert all(len(parts) == 1 for parts in sent.values()), "one message between two cells"
            row = sorted(part for parts in sent.values() for part in parts)
            assert (row[0].start, row[-1].stop) == (0, layout.samples)
            assert all(before.stop == after.start for before, after in pairwise(row))


@settings(max_examples=examples(1000), deadline=None)
@given(layout=layouts, split=st.booleans(), seed=st.integers(0, 2**32))
def test_programs_of_parts_are_right_and_end(layout: Layout, split: bool, seed: int) -> None:
    program, chunks = usual(layout), layout.num_chunks
    if split:
        program = split_backward(program, layout)
    stages = layout.pipeline_size
    live = {
        cell.leader: split * index + (stages - index if chunks == 1 else (chunks + 1) * stages - 2 * index - 1)
        for index, stage in enumerate(layout.stages)
        for cell in stage.cells
    }
    check(program, layout, live)
    rng = Random(seed)
    timeline = simulate(
        program, layout, lambda leader, stage, op: rng.uniform(0, 3), lambda result: rng.uniform(0, 2)
    )
    assert {leader: tuple(span.op for span in spans) for leader, spans in timeline.spans.items()} == program.cells
    assert Program.parse(program.text()) == program


def test_a_lost_cell_of_four_costs_a_third_instead_of_twice_the_time() -> None:
    """Four grains over three cells: one has two of them, or each has four thirds."""
    makespans = {}
    for samples in (1, 3):
        layout = grid(1, 4, 4, samples)
        layout = lose(layout, [3], everything(layout), 1)
        costs = Costs(tuple(UnitCost(1.0 * (name == "layer.0"), 2.0 * (name == "layer.0"), 1, 1, 1)
                            for name in layout.units))  # fmt: skip
        makespans[samples] = fastest(layout, costs)[1].makespan
        assert costs.pace_of(layout).step_ms == makespans[samples]
    assert makespans == {1: 6.0, 3: 4.0}


@settings(max_examples=examples(200), deadline=None)
@given(layout=layouts, newcomers=st.integers(1, 3), pp=st.integers(1, 5))
def test_ranks_join_and_units_move_with_parts_too(layout: Layout, newcomers: int, pp: int) -> None:
    goal: Layout | None = None
    ranks = {100 + i: 0 for i in range(newcomers)}
    for _ in range(4):
        better = improve(layout, ranks, layout.epoch + 1, goal)
        if better is None:
            break
        (layout, goal), ranks = better, {}
    assert improve(layout, {}, layout.epoch + 1) is None, "it has settled"
    for stage in layout.stages:
        sizes = [samples_of(cell, layout) for cell in stage.cells]
        assert max(sizes) - min(sizes) <= 1
    if pp <= sum(name.startswith("layer.") for name in layout.units):
        moved = replan(layout, Costs.assumed(layout.units), layout.epoch + 1, stages=[pp])
        for stage in moved.stages:
            sizes = [samples_of(cell, moved) for cell in stage.cells]
            assert max(sizes) - min(sizes) <= 1


def test_parts_that_do_not_make_a_grain_are_no_layout() -> None:
    good = lose(grid(1, 4, 4, 3), [3], everything(grid(1, 4, 4, 3)), 1)
    cells = good.stages[0].cells
    for parts, problem in (
        ((Part(3, 0, 2),), "samples 1 to 2 of grain 3 out of turn"),
        ((), "samples 1 to 2 of grain 3 out of turn"),
        ((Part(3, 0, 1), Part(3, 1, 1)), "out of turn"),
        ((Part(2, 0, 1),), r"grains \[0, 1, 2, 2, 3\]"),
    ):
        bad = replace(good, stages=(Stage(good.stages[0].units, (replace(cells[0], parts=parts), *cells[1:])),))
        with pytest.raises(LayoutError, match=problem):
            bad.validate()
    with pytest.raises(LayoutError, match="computes 3 samples of grain 3, which has 4"):
        replace(good, samples=4).validate()
    with pytest.raises(LayoutError, match="grains of 0 samples"):
        replace(good, samples=0).validate()


# ---- reroute --------------------------------------------------------------------------------


@settings(max_examples=examples(1000), deadline=None)
@given(
    at=st.lists(st.integers(-1, 5), min_size=1, max_size=24),
    width=st.integers(1, 6),
)
def test_reroute_is_balanced_and_moves_few(at: list[int], width: int) -> None:
    """A grain moves only from a cell that is gone, or would have too many."""
    old = [[grain for grain, cell in enumerate(at) if cell == index] for index in range(width)]
    new = reroute(old, len(at))
    assert sorted(grain for share in new for grain in share) == list(range(len(at)))
    sizes = [len(share) for share in new]
    assert max(sizes) - min(sizes) <= 1
    low, extra = divmod(len(at), width)
    kept = sum(len(set(was) & set(now)) for was, now in zip(old, new, strict=True))
    fuller = sum(len(was) > low for was in old)
    assert kept == sum(min(len(was), low) for was in old) + min(extra, fuller), "as many stay as can"
