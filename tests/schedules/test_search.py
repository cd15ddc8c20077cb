"""Searched programs: valid, as fast as the simulator says, no worse than what is known, no better than possible."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from megatron_elastic.layout import Layout, gpt_units
from megatron_elastic.pipeline.program import Op, check, live
from megatron_elastic.pipeline.search import Deadlock, NotFitting, Problem, best, find, lower_bound
from megatron_elastic.pipeline.search.candidates import v_shaped
from megatron_elastic.pipeline.search.found import programs
from megatron_elastic.pipeline.search.greedy import Policy, greedy
from megatron_elastic.pipeline.search.problem import FORWARD, INPUT, WEIGHT, TooLong
from megatron_elastic.pipeline.simulate import run
from megatron_elastic.plan.costs.cost import Costs, UnitCost
from megatron_elastic.plan.costs.fit import device_bytes
from tests import placements
from tests.schedules.test_schedule import uneven

MS = st.floats(0.05, 8)
QUICK = (Phase.explicit, Phase.reuse, Phase.generate)
"""What is found wrong is not made smaller: a search takes longer than what is usually tested so."""


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Layout, Costs]:
    """A layout, and costs with a memory that 1F1B may or may not fit."""
    kind = draw(st.sampled_from(["loop", "uneven", "placed"]))
    if kind == "placed":
        layout = draw(placements.layouts(4))
    elif kind == "loop":
        pp, dp, chunks = draw(st.integers(1, 5)), draw(st.integers(1, 3)), draw(st.sampled_from([1, 1, 2]))
        split = [[1] * chunks for _ in range(pp)]
        units, stage_units = gpt_units(pp * chunks, pp, draw(st.booleans()), False, split=split)
        grains = draw(st.integers(1, 10)) * (1 if chunks == 1 else pp) * dp
        layout = Layout.grid(tp=1, pp=pp, dp=dp, stage_units=stage_units, units=units, num_grains=grains,
                             num_slices=dp, replicas=0)
    else:
        widths = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
        layout = uneven(draw(st.integers(1, 14)), widths, random.Random(draw(st.integers(0, 1000))))
    costs = Costs(
        tuple(
            UnitCost(draw(MS), draw(MS), 4000, 12000, draw(st.integers(1, 900))) for _ in layout.units
        ),
        boundary_bytes=1000, bandwidth=1e6, latency_ms=draw(st.sampled_from([0.0, 0.01, 1.0])),
    )  # fmt: skip
    if draw(st.booleans()):
        fixed = max(device_bytes(layout, rank, costs) for rank in layout.ranks)
        costs = replace(costs, memory_bytes=int(fixed) + draw(st.integers(900, 12_000)))
    return layout, costs


@settings(max_examples=30, deadline=None, phases=QUICK)
@given(jobs())
def test_what_is_found_is_valid_fits_and_takes_what_the_simulator_says(job: tuple[Layout, Costs]) -> None:
    layout, costs = job
    try:
        found = find(layout, costs)
    except NotFitting:
        assert costs.memory_bytes is not None
        return
    check(found.program, layout)
    line = run(found.program, replace(layout, recomputed=found.recomputed), costs)
    assert line.makespan == pytest.approx(found.ms)
    assert found.ms >= found.bound_ms * (1 - 1e-9)
    known = list(programs(layout).values())
    # Without a memory that is known, as much as the first two keep is taken to be there.
    fitting = known[:2] if costs.memory_bytes is None else [
        program for program in known if _fits(layout, costs, program.cells)
    ]  # fmt: skip
    assert found.ms <= min((run(program, layout, costs).makespan for program in fitting), default=found.ms) + 1e-6
    assert found.recomputed or _fits(layout, costs, found.program.cells), "test_recompute.py has the others"


def _fits(layout: Layout, costs: Costs, cells: Mapping[int, tuple[Op, ...]]) -> bool:
    """Whether activations fit, counted another way."""
    if costs.memory_bytes is None:
        return True
    for leader, ops in cells.items():
        stage, now = layout.stage_of(leader), 0
        most = 0
        for op in ops:
            held = [unit for unit in layout.chunks(stage)[op.chunk] if layout.home(unit) == stage]
            size = sum(costs.units[unit].activation_bytes for unit in held)
            now += {"forward": size, "backward_input": 0}.get(op.kind, -size)
            most = max(most, now)
        if most > costs.memory_bytes - device_bytes(layout, leader, costs) + 1e-3:
            return False
    return True


def alike(stages: int, grains: int, memory: float, chunks: int = 1, v: bool = False) -> Problem:
    """Operations of one millisecond each, on so many stages, and memory for so many chunks of a grain."""
    way = [stage for _ in range(chunks) for stage in range(stages)]
    if v:
        way = [*range(stages), *reversed(range(stages))]
    ones = (1.0,) * len(way)
    return Problem(
        route=(tuple(way),) * grains, forward=ones, backward=tuple(2 * one for one in ones), input=ones, weight=ones,
        kept=ones, late=ones, link=tuple(0 * one for one in ones), limits=(memory,) * stages, speed=(1.0,) * stages,
    )  # fmt: skip


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Of one pipeline: chunks round robin, or as a V; halves of backwards and what they free of any size."""
    stages, v = draw(st.integers(1, 4)), draw(st.booleans())
    problem = alike(stages, draw(st.integers(1, 6)), 1.0, 2 if v else draw(st.integers(1, 3)), v)
    count = problem.positions
    times = [tuple(draw(MS) for _ in range(count)) for _ in range(3)]
    kept = tuple(float(draw(st.integers(1, 9))) for _ in range(count))
    late = tuple(float(draw(st.integers(0, int(size)))) for size in kept)
    whole = sum(kept[position] for position in range(count) if problem.route[0][position] == 0)
    return replace(
        problem, forward=times[0], input=times[1], weight=times[2], kept=kept, late=late,
        backward=tuple(a + b for a, b in zip(times[1], times[2], strict=True)),
        link=tuple(draw(st.floats(0, 2)) for _ in range(count)),
        limits=tuple(draw(st.floats(0.5, 4)) * max(whole, 9.0 * count) for _ in range(stages)),
        speed=tuple(draw(st.floats(0.5, 2)) for _ in range(stages)),
    )  # fmt: skip


@settings(max_examples=30, deadline=None, phases=QUICK)
@given(problems())
def test_orders_of_any_placement(problem: Problem) -> None:
    """Every operation is done once and in an order that can be; memory is enough; the bound is one."""
    try:
        found = best(problem, {})
    except NotFitting:
        most = [sum(problem.kept[p] for p in range(problem.positions) if problem.route[0][p] == device)
                for device in range(problem.devices)]  # fmt: skip
        assert any(size > limit for size, limit in zip(most, problem.limits, strict=True)), "room for a grain is enough"
        return
    done = sorted(problem.numbers.parts(op)[1:] for ops in found.orders for op in ops if op % (4 * problem.positions)
                  < problem.positions)  # fmt: skip
    assert done == [(grain, position) for grain in range(problem.grains) for position in range(problem.positions)]
    assert problem.fits(found.orders)
    assert found.ms == pytest.approx(problem.makespan(found.orders))
    assert found.ms >= lower_bound(problem) * (1 - 1e-9)


@settings(max_examples=30, deadline=None, phases=QUICK)
@given(problems(), st.floats(0.5, 1.5))
def test_orders_are_given_up_if_and_only_if_a_device_waits_longer_than_it_may(problem: Problem, part: float) -> None:
    try:
        orders = best(problem, {}).orders
    except NotFitting:
        return
    ends, stride = problem.ends(orders), 4 * problem.positions
    work = [sum(of[op % stride] for op in ops) for of, ops in zip(problem.durations, orders, strict=True)]
    waits = [(each[-1] - ms) for each, ms in zip(ends, work, strict=True)]
    assert problem.ends(orders, [ms + 1e-6 for ms in waits]) == ends
    less = [ms * part for ms in waits]
    if any(may < ms - 1e-6 for may, ms in zip(less, waits, strict=True)):
        with pytest.raises(TooLong):
            problem.ends(orders, less)


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_known_bubbles(stages: int) -> None:
    """Of operations that take equally long: ZB-H1 leaves P - 1 of them empty, ZB-H2 and ZB-V nothing that a later
    device does not wait for at the beginning.
    """
    grains = 4 * stages
    for memory in (stages, 2 * stages - 1):
        found = best(alike(stages, grains, memory), {})
        assert found.ms == 3 * grains + stages - 1 == found.bound
    v = alike(stages, grains, 2 * stages, 2, v=True)
    assert v.fits(v_shaped(v))
    assert v.makespan(v_shaped(v)) == best(v, {}).ms == 6 * grains + stages - 1


@pytest.mark.parametrize(("grains", "least"), [(1, 8 + 8 + 1), (2, 7 + 4 + 7 + 1), (8, 7 + 24)])
def test_the_bound_of_few_grains_is_their_way_there_and_back(grains: int, least: int) -> None:
    """On eight stages, as on the last one, which has them first late and to give them back early."""
    problem = alike(8, grains, 8.0)
    assert lower_bound(problem) == least == best(problem, {}).ms


@pytest.mark.parametrize("v", [False, True])
def test_the_bound_of_few_grains_with_two_chunks(v: bool) -> None:
    """The stage with the end of the model has all to do there between the ways."""
    problem = alike(8, 4, 16.0, 2, v)
    assert lower_bound(problem) == 15 + 4 * 2 + 15 + 1 <= best(problem, {}).ms


def test_a_deadlock_is_told() -> None:
    problem = alike(2, 1, 1.0)
    number = problem.numbers.of
    forward, back, weight = (number(kind, 0, 0) for kind in (FORWARD, INPUT, WEIGHT))
    other = [number(kind, 0, 1) for kind in (FORWARD, INPUT, WEIGHT)]
    assert problem.makespan([[forward, back, weight], other]) == 5
    for wrong in ([back, forward, weight], [forward, weight, back]):
        with pytest.raises(Deadlock):
            problem.ends([wrong, other])
    with pytest.raises(Deadlock):
        problem.ends([[forward, back, weight], [other[0], other[2], other[1]]])
    with pytest.raises(Deadlock):
        greedy(alike(2, 2, 0.5), Policy())


def test_a_large_pipeline() -> None:
    """64 stages and 512 grains; how long that takes is in docs/schedules.md."""
    units, stage_units = gpt_units(64, 64, False, False)
    layout = Layout.grid(tp=1, pp=64, dp=1, stage_units=stage_units, units=units, num_grains=512, num_slices=1,
                         replicas=0)  # fmt: skip
    costs = Costs(tuple(UnitCost(1.0, 2.0, 0, 0, 100) for _ in units), latency_ms=0.05)
    found = find(layout, replace(costs, memory_bytes=12_000))
    assert found.ms < found.usual_ms
    assert max(max(live(ops)) for ops in found.program.cells.values()) <= 120


def test_pipelines_side_by_side_do_the_same() -> None:
    units, stage_units = gpt_units(4, 4, False, False)
    layout = Layout.grid(tp=1, pp=4, dp=2, stage_units=stage_units, units=units, num_grains=16, num_slices=2,
                         replicas=0)  # fmt: skip
    costs = Costs(tuple(UnitCost(1.0, 2.0, 0, 0, 100) for _ in units))
    program = find(layout, costs).program
    assert find(layout, costs).program == program, "the same each time, on whichever machine"
    for left, right in zip(range(0, 8, 2), range(1, 8, 2), strict=True):
        assert [op._replace(grain=op.grain + 1) for op in program[left]] == list(program[right])
