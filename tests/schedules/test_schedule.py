"""Generated programs: the usual orders on fault-free layouts, and properties for layouts of any kind."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_elastic.layout import Cell, Layout, Stage, gpt_units, joined, way
from megatron_elastic.pipeline.program import Op, Program, ProgramError, check
from megatron_elastic.pipeline.schedule import one_forward_one_backward, rounds, split_backward, usual
from megatron_elastic.pipeline.simulate import Timeline, fastest, simulate
from megatron_elastic.pipeline.simulate import run as simulate_costs
from megatron_elastic.plan.costs.cost import Costs, UnitCost
from megatron_elastic.plan.costs.keeping import Keeping
from tests import placements
from tests.tiers.examples import examples

UNITS = {"forward": 1.0, "backward": 2.0, "backward_input": 1.0, "backward_weight": 1.0}
"""Milliseconds of an operation on one chunk of one."""


def grid(pp: int, dp: int, grains: int, chunks: int = 1) -> Layout:
    """One layer in each of so many chunks; there is one of several layers if there is one stage."""
    units, stage_units = gpt_units(pp * chunks, pp, True, False, chunks=chunks)
    return Layout.grid(
        tp=1, pp=pp, dp=dp, stage_units=stage_units, units=units, num_grains=grains, num_slices=dp, replicas=0
    )


def uneven(grains: int, widths: list[int], rng: random.Random, chunks: int = 1) -> Layout:
    """Stages of the given widths, with every grain at a random cell of each."""
    return spread(grid(len(widths), 1, grains, chunks), widths, rng)


def spread(layout: Layout, widths: list[int], rng: random.Random) -> Layout:
    """The same stages with other widths, and every grain at a random cell of each."""
    grains = layout.num_grains
    stages, rank = [], 0
    for width, stage in zip(widths, layout.stages, strict=True):
        at = [rng.randrange(width) for _ in range(grains)]
        cells = tuple(Cell((rank + i,), tuple(g for g in range(grains) if at[g] == i)) for i in range(width))
        stages.append(Stage(stage.units, cells))
        rank += width
    return replace(layout, stages=tuple(stages))


def run(program: Program, layout: Layout) -> Timeline:
    return simulate(program, layout, lambda leader, stage, op: UNITS[op.kind] / layout.num_chunks)


# ---- fault-free layouts ---------------------------------------------------------------------


def test_one_forward_one_backward_by_hand() -> None:
    program = one_forward_one_backward(grid(3, 2, 8))
    assert program.text().splitlines() == [
        "0: F0 F2 F4 B0 F6 B2 B4 B6",
        "1: F1 F3 F5 B1 F7 B3 B5 B7",
        "2: F0 F2 B0 F4 B2 F6 B4 B6",
        "3: F1 F3 B1 F5 B3 F7 B5 B7",
        "4: F0 B0 F2 B2 F4 B4 F6 B6",
        "5: F1 B1 F3 B3 F5 B5 F7 B7",
    ]
    assert program[4][:2] == (Op("forward", 0), Op("backward", 0))


def test_interleaved_by_hand() -> None:
    """Megatron's order for 2 stages of 2 chunks and 4 micro-batches."""
    assert usual(grid(2, 1, 4, 2)).text().splitlines() == [
        "0: F0 F1 F0.1 F1.1 F2 B0.1 F3 B1.1 F2.1 B0 F3.1 B1 B2.1 B3.1 B2 B3",
        "1: F0 F1 F0.1 B0.1 F1.1 B1.1 F2 B0 F3 B1 F2.1 B2.1 F3.1 B3.1 B2 B3",
    ]


def test_split_backward_by_hand() -> None:
    layout = grid(3, 1, 4)
    assert split_backward(one_forward_one_backward(layout), layout).text().splitlines() == [
        "0: F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3",
        "1: F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3",
        "2: F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3",
    ]


@settings(max_examples=examples(300), deadline=None)
@given(pp=st.integers(1, 7), dp=st.integers(1, 4), grains=st.integers(1, 40))
def test_one_forward_one_backward_is_the_textbook_order(pp: int, dp: int, grains: int) -> None:
    """As many forwards ahead as stages follow, then forward and backward in turn, then the backwards left."""
    layout = grid(pp, dp, grains)
    program = one_forward_one_backward(layout)
    for index, stage in enumerate(layout.stages):
        for cell in stage.cells:
            ahead = min(len(cell.grains), pp - index - 1)
            forwards = [Op("forward", grain) for grain in cell.grains]
            backwards = [Op("backward", grain) for grain in cell.grains]
            ops = forwards[:ahead]
            for forward, backward in zip(forwards[ahead:], backwards, strict=False):
                ops += [forward, backward]
            assert program[cell.leader] == (*ops, *backwards[len(forwards) - ahead :])


@settings(max_examples=examples(300), deadline=None)
@given(pp=st.integers(1, 6), each=st.integers(1, 5), chunks=st.integers(1, 4))
def test_the_bubbles_are_the_known_ones(pp: int, each: int, chunks: int) -> None:
    """(P-1)(F+B) for 1F1B, 1/chunks of it interleaved, and (P-1)(F+I-W) with the backward split (ZB-H1)."""
    grains = pp * each
    layout = grid(pp, 1, grains)
    plain = one_forward_one_backward(layout)
    work = 3.0 * grains
    assert run(plain, layout).makespan == work + 3 * (pp - 1)
    several = grid(pp, 1, grains, chunks)
    assert run(usual(several), several).makespan == pytest.approx(work + 3 * (pp - 1) / chunks)
    if each > 1:
        assert run(split_backward(plain, layout), layout).makespan == work + (pp - 1)


# ---- any layout -----------------------------------------------------------------------------


def uneven_layouts(most_chunks: int) -> st.SearchStrategy[Layout]:
    return st.builds(
        lambda grains, widths, seed, chunks: uneven(grains, widths, random.Random(seed), chunks),
        grains=st.integers(1, 24),
        widths=st.lists(st.integers(1, 6), min_size=1, max_size=7),
        seed=st.integers(0, 2**32),
        chunks=st.integers(1, most_chunks),
    )


layouts = uneven_layouts(1)
placed = st.builds(
    lambda layout, widths, seed: spread(layout, widths[: layout.pipeline_size], random.Random(seed)),
    layout=placements.layouts(), widths=st.lists(st.integers(1, 4), min_size=5, max_size=5),
    seed=st.integers(0, 2**32),
)  # fmt: skip
"""Chunks in any order and of any number and size."""


@settings(max_examples=examples(2000), deadline=None)
@given(layout=uneven_layouts(3) | placed, split=st.booleans(), seed=st.integers(0, 2**32))
def test_every_generated_program_is_right_and_ends(layout: Layout, split: bool, seed: int) -> None:
    """Whatever cells have which grains: the checker passes it within the promised memory; any operation times end."""
    program, keeping = usual(layout), Keeping(layout.way, layout.units)
    allowed = {
        cell.leader: int(keeping.most(index, layout.num_grains, split, [1.0] * len(layout.chunks(index))))
        for index, stage in enumerate(layout.stages) for cell in stage.cells
    }  # fmt: skip
    if split:
        program = split_backward(program, layout)
    check(program, layout, allowed)
    rng = random.Random(seed)
    timeline = simulate(
        program, layout, lambda leader, stage, op: rng.uniform(0, 3), lambda result: rng.uniform(0, 2)
    )
    for leader, ops in program.cells.items():
        spans = timeline.spans[leader]
        assert tuple(span.op for span in spans) == ops
        assert all(before.end <= after.start for before, after in pairwise(spans))
        assert timeline.busy(leader) + timeline.idle(leader) == pytest.approx(timeline.makespan)
        assert timeline.peak(leader) <= allowed[leader]


@settings(max_examples=examples(500), deadline=None)
@given(layout=layouts)
def test_a_step_ends_with_the_last_round(layout: Layout) -> None:
    """With even times the timetable of 1F1B is itself a schedule: 3 ms a round, and 3 ms for each further stage."""
    timeline = run(one_forward_one_backward(layout), layout)
    last = max(rounds(layout).values())
    assert timeline.makespan <= 3 * (last + 1) + 3 * (layout.pipeline_size - 1)


@settings(max_examples=examples(300), deadline=None)
@given(pp=st.integers(1, 6), dp=st.integers(2, 6), each=st.integers(1, 8), data=st.data())
def test_losing_one_cell_costs_no_more_rounds_than_its_heirs_have_grains(
    pp: int, dp: int, each: int, data: st.DataObject
) -> None:
    layout = grid(pp, dp, dp * each)
    at = data.draw(st.integers(0, pp - 1))
    stage = layout.stages[at]
    gone = stage.cells[data.draw(st.integers(0, dp - 1))]
    heirs = [cell for cell in stage.cells if cell is not gone]
    extra = {cell.leader: gone.grains[i :: len(heirs)] for i, cell in enumerate(heirs)}
    cells = tuple(Cell(cell.ranks, (*cell.grains, *extra[cell.leader])) for cell in heirs)
    layout = replace(layout, stages=(*layout.stages[:at], Stage(stage.units, cells), *layout.stages[at + 1 :]))
    assert 1 + max(rounds(layout).values()) == max(len(cell.grains) for cell in cells)


def test_one_cell_at_a_time_is_the_same_program() -> None:
    for chunks in (1, 2):
        layout = uneven(12, [2, 1, 3], random.Random(5), chunks)
        whole = usual(layout)
        for leader in whole.cells:
            assert usual(layout, {leader}).cells == {leader: whole[leader]}


def test_the_simulator_counts_transfers_between_stages_only() -> None:
    layout = grid(2, 1, 1)
    program = one_forward_one_backward(layout)
    timeline = simulate(program, layout, lambda leader, stage, op: 1.0, lambda result: 10.0)
    assert [(str(s.op), s.start, s.end) for s in timeline.spans[0]] == [("F0", 0, 1), ("B0", 23, 24)]
    assert [(str(s.op), s.start, s.end) for s in timeline.spans[1]] == [("F0", 11, 12), ("B0", 12, 13)]
    assert (timeline.makespan, timeline.busy(0), timeline.idle(0), timeline.peak(0)) == (24, 2, 22, 1)


def test_the_simulator_refuses_a_cycle() -> None:
    layout = grid(2, 1, 2)
    with pytest.raises(ProgramError, match="cycle"):
        simulate(Program.parse("0: F0 B0 F1 B1\n1: F1 F0 B1 B0"), layout, lambda leader, stage, op: 1.0)


    with pytest.raises(ProgramError, match="cell 0 cannot do B0 before the input gradient of grain 0 at stage 1"):
        simulate_costs(Program.parse("0: F0 B0 F1 B1\n1: F1 F0 B1 B0"), layout, Costs.assumed(layout.units))


@settings(max_examples=examples(200), deadline=None)
@given(
    st.integers(1, 4), st.integers(1, 3), st.sampled_from([1, 1, 2]), st.booleans(), st.integers(0, 10**9),
)
def test_whole_grains_are_simulated_as_all_others(pp: int, wide: int, chunks: int, split: bool, seed: int) -> None:
    """By numbers in place of names, to the last bit."""
    rng = random.Random(seed)
    layout = uneven(rng.randint(4, 9), [rng.randint(1, wide) for _ in range(pp)], rng, chunks if pp > 1 else 1)
    units = tuple(UnitCost(rng.uniform(0, 2), rng.uniform(0, 4), 6, 12, 1) for _ in layout.units)
    slow = {leader: rng.uniform(1, 3) for leader in layout.cells if rng.random() < 0.3}
    costs = Costs(units, boundary_bytes=rng.choice((0, 10**6)), bandwidth=1e9, slow=slow)
    clocks = {leader: rng.choice((0.5, 1.5)) for leader in layout.cells if rng.random() < 0.3}
    begins = {leader: rng.uniform(0, 5) for leader in layout.cells}
    program = split_backward(usual(layout), layout) if split else usual(layout)

    def ms(leader: int, stage: int, op: Op) -> float:
        held = [costs.units[unit].at(clocks.get(leader, 1.0)) for unit in layout.chunks(stage)[op.chunk]
                if layout.home(unit) == stage]  # fmt: skip
        forward, backward = sum(unit.forward_ms for unit in held), sum(unit.backward_ms for unit in held)
        usual_ms = {"forward": forward, "backward": backward}.get(op.kind, backward / 2)
        return usual_ms * slow.get(leader, 1.0)

    expected = simulate(program, layout, ms, lambda _: costs.boundary_ms, begins)
    assert simulate_costs(program, layout, costs, clocks, begins) == expected


@pytest.mark.parametrize("pp", [2, 3, 4, 8])
def test_a_v_is_faster_than_1f1b_in_the_memory_of_it(pp: int) -> None:
    layout = placements.along(joined(way("v", pp, 2)), [*[1] * (pp - 1), 2, *[1] * (pp - 1)], 1, 4 * pp, tied=False)
    layers = [[sum(layout.units[unit].startswith("layer") for unit in chunk) for chunk in layout.chunks(stage)]
              for stage in range(pp)]  # fmt: skip
    program = usual(layout)
    line = simulate(program, layout, lambda leader, stage, op: UNITS[op.kind] * layers[stage][op.chunk] / 2)
    work = 3.0 * 4 * pp
    assert line.makespan < work + 3 * (pp - 1)
    for leader, ops in program.cells.items():
        now = most = 0
        for op in ops:
            size = layers[layout.stage_of(leader)][op.chunk]
            now += size if op.kind == "forward" else -size
            most = max(most, now)
        assert most <= 2 * pp, "halves of what a stage of 1F1B keeps of a grain"


@settings(max_examples=examples(500), deadline=None)
@given(layout=layouts, more=st.lists(st.integers(0, 4), min_size=7, max_size=7))
def test_more_live_activations_can_be_allowed(layout: Layout, more: list[int]) -> None:
    stages = layout.pipeline_size
    live = [stages - stage + extra for stage, extra in zip(range(stages), more, strict=False)]
    program = one_forward_one_backward(layout, live=live)
    bounds = {cell.leader: live[index] for index, stage in enumerate(layout.stages) for cell in stage.cells}
    check(program, layout, bounds)


def test_fewer_live_activations_than_stages_follow_cannot_be_asked_for() -> None:
    with pytest.raises(ValueError, match=r"must be at least 3, .* but are \[3, 1, 1\]"):
        one_forward_one_backward(grid(3, 1, 4), live=[3, 1, 1])
    with pytest.raises(ValueError, match="at 3 stages"):
        one_forward_one_backward(grid(3, 1, 4), live=[3, 2])


def test_a_narrow_stage_with_room_keeps_its_neighbours_busy() -> None:
    """Stage 2 of 4 has one cell for two of the others, and the last stage takes longer: it needs a third activation."""
    layout = grid(4, 2, 16)
    narrow = Stage(layout.stages[2].units, (Cell(layout.stages[2].cells[0].ranks, tuple(range(16))),))
    layout = replace(layout, stages=(*layout.stages[:2], narrow, layout.stages[3]))
    units = tuple(UnitCost(4.0 * (name == "head"), 8.0 * (name == "head"), 1, 1, 1) for name in layout.units)
    units = tuple(
        UnitCost(2.0, 4.0, 1, 1, 1) if name.startswith("layer.") else unit
        for name, unit in zip(layout.units, units, strict=True)
    )
    usual = fastest(layout, Costs(units))[1].makespan
    roomy = fastest(layout, Costs(units, memory_bytes=1000))[1]
    assert roomy.makespan < 0.9 * usual
    assert roomy.peak(narrow.cells[0].leader) > 2


@settings(max_examples=examples(300), deadline=None)
@given(pp=st.integers(1, 6), dp=st.integers(1, 3), each=st.integers(1, 6), comm=st.sampled_from([0, 10**6]))
def test_the_estimate_is_exact_for_even_layouts(pp: int, dp: int, each: int, comm: int) -> None:
    layout = grid(pp, dp, dp * each)
    units = tuple(UnitCost(float(n.startswith("layer.")), 2.0 * n.startswith("layer."), 1, 1, 1) for n in layout.units)
    costs = Costs(units, boundary_bytes=comm, bandwidth=1e10, latency_ms=0.0)
    program, timeline = fastest(layout, costs)
    assert program == one_forward_one_backward(layout)
    if not comm or pp == 1:
        assert timeline.makespan == pytest.approx(costs.pace_of(layout).step_ms)
