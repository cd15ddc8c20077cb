"""Recomputed chunks: the search takes them where they pay, all that says what they cost agrees, and no bit changes."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_elastic import planner
from megatron_elastic.layout import Layout, LayoutError, changed, decode, difference, encode
from megatron_elastic.pipeline.dag import Dag
from megatron_elastic.pipeline.program import check
from megatron_elastic.pipeline.search import NotFitting, Problem, best, choose, find, fits, lower_bound
from megatron_elastic.pipeline.search.exact import solve
from megatron_elastic.pipeline.search.problem import BACKWARD, FORWARD, INPUT, WEIGHT
from megatron_elastic.pipeline.simulate import run
from megatron_elastic.plan.costs.cost import Costs, UnitCost
from megatron_elastic.plan.costs.fit import device_bytes, overflow
from megatron_elastic.plan.costs.recomputation import recomputing, sets
from megatron_elastic.plan.work import order
from tests.placements import along
from tests.schedules.test_exact import drawn
from tests.schedules.test_search import QUICK, alike, jobs, problems
from tests.tiers.examples import examples


@st.composite
def tight(draw: st.DrawFn) -> Problem:
    """Memory for one grain at least, if all is recomputed; inputs of any size."""
    problem = draw(problems())
    inlet = tuple(draw(st.floats(0, 1.2)) * size for size in problem.kept)
    whole = max(sum(problem.kept[at] for at, where in enumerate(problem.route[0]) if where == device)
                for device in range(problem.devices))  # fmt: skip
    limit = whole * draw(st.floats(0.4, 3))
    return replace(problem, inlet=tuple(map(min, inlet, problem.kept)), limits=(limit,) * problem.devices)


def highest(problem: Problem, recomputed: tuple[int, ...], orders: list[list[int]]) -> list[float]:
    """[device] = the most that is there at a time, counted by what each operation has in its hands."""
    found = []
    for ops in orders:
        there: dict[tuple[int, int], float] = {}
        most = 0.0
        for op in ops:
            kind, grain, at = problem.numbers.parts(op)
            if kind == FORWARD:
                there[grain, at] = problem.inlet[at] if at in recomputed else problem.kept[at]
            elif kind in (INPUT, BACKWARD):
                there[grain, at] = problem.kept[at]
            most = max(most, sum(there.values()))
            if kind == INPUT:
                there[grain, at] = problem.late[at]
            elif kind in (BACKWARD, WEIGHT):
                del there[grain, at]
        assert not there
        found.append(most)
    return found


@settings(max_examples=40, deadline=None, phases=QUICK)
@given(tight())
def test_what_is_chosen_fits_and_is_no_slower_than_without(problem: Problem) -> None:
    try:
        plain: float | None = best(problem.recomputing(()), {}).ms
    except NotFitting:
        plain = None
    try:
        found, recomputed = choose(problem, {})
    except NotFitting:
        assert plain is None
        everything = tuple(at for at, (kept, inlet) in enumerate(zip(problem.kept, problem.inlet, strict=True))
                           if kept > inlet)  # fmt: skip
        with pytest.raises(NotFitting):
            best(problem.recomputing(everything), {})
        return
    assert plain is None or found.ms <= plain
    assert found.ms == pytest.approx(problem.recomputing(recomputed).makespan(found.orders))
    assert found.ms >= found.bound * (1 - 1e-9)
    assert found.bound <= lower_bound(problem.recomputing(recomputed)) * (1 + 1e-9)
    for most, limit in zip(highest(problem, recomputed, found.orders), problem.limits, strict=True):
        assert most <= limit * (1 + 1e-6)


@settings(max_examples=20, deadline=None, phases=QUICK)
@given(tight())
def test_with_memory_enough_nothing_is_recomputed(problem: Problem) -> None:
    all_of_it = problem.within([problem.grains * sum(problem.kept)] * problem.devices)
    assert choose(all_of_it, {}).recomputed == ()


def test_by_hand() -> None:
    """Two stages of four grains; what is kept of one fits, or of two if one is an input. With the first stage
    recomputed it may begin another grain while the second goes on with one.
    """
    problem = replace(alike(2, 4, 1.0), inlet=(0.0, 0.25))
    assert best(problem.recomputing(()), {}).ms == 4 * 5, "one grain after the other, but for what is left of the last"
    found, recomputed = choose(problem, {})
    assert recomputed == (0,)
    assert found.ms < 4 * 5
    solved = solve(problem, found.orders, 20, recomputed=recomputed)
    assert solved.proved and solved.makespan == pytest.approx(found.ms)


@pytest.mark.parametrize("memory", [0.7, 0.85, 1.0])
def test_it_is_near_the_optimum(memory: float) -> None:
    """What the solver finds, which may recompute whatever it wants, is valid, and hardly better."""
    gaps = []
    for seed in range(3):
        problem = replace(drawn(seed, memory), inlet=(10.0,) * 3)
        found, recomputed = choose(problem, {})
        solved = solve(problem, found.orders, 3, recomputed=recomputed)
        with_these = problem.recomputing(solved.recomputed)
        assert with_these.fits(solved.orders)
        assert solved.makespan == pytest.approx(with_these.makespan(solved.orders))
        assert solved.bound <= solved.makespan <= found.ms * (1 + 1e-9)
        for most, limit in zip(highest(problem, solved.recomputed, solved.orders), problem.limits, strict=True):
            assert most <= limit * (1 + 1e-6)
        gaps.append(found.ms / solved.makespan)
    assert max(gaps) < 1.05, gaps


# ---- layouts ---------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None, phases=QUICK)
@given(jobs(), st.integers(1, 900))
def test_all_that_says_what_is_recomputed_agrees(job: tuple[Layout, Costs], boundary: int) -> None:
    """The search, the simulator and the graph of a step, of layouts of all kinds."""
    layout, costs = job
    costs = replace(costs, boundary_bytes=boundary)
    try:
        found = find(layout, costs)
    except NotFitting:
        return
    if costs.memory_bytes is None:
        assert not found.recomputed
    again = replace(layout, recomputed=found.recomputed)
    check(found.program, again)
    assert run(found.program, again, costs).makespan == pytest.approx(found.ms)
    assert fits(found.program, again, costs)
    assert found.ms >= found.bound_ms * (1 - 1e-9)
    dag = Dag.of(found.program, again, costs)
    now = dict.fromkeys(layout.cells, 0)
    changes = [(node.start_ms, 1, node.allocated_bytes, node.cell) for node in dag.nodes]
    changes += [(node.end_ms, 0, node.kept_bytes - node.allocated_bytes - node.freed_bytes, node.cell)
                for node in dag.nodes]  # fmt: skip
    for _, _, change, cell in sorted(changes):
        now[cell] += change
        if costs.memory_bytes is not None:
            fixed = max(device_bytes(layout, rank, costs) for rank in layout.cells[cell].ranks)
            assert now[cell] + fixed <= costs.memory_bytes + 1e-3
    assert not any(now.values())


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.floats(0, 9), max_size=7))
def test_sets_come_by_what_they_take(times: list[float]) -> None:
    found = list(sets(times))
    assert found[0] == () and sorted(found[-1]) == list(range(len(times)))
    sums = [sum(times[index] for index in some) for some in found]
    assert sums == pytest.approx(sorted(sums))
    if len(times) <= 4:
        assert {frozenset(some) for some in found} == {
            frozenset(some) for size in range(len(times) + 1) for some in combinations(range(len(times)), size)
        }


def a_job(memory: int, layers: tuple[int, ...] = (2, 2)) -> tuple[Layout, Costs]:
    """Two stages, four grains; a layer keeps 100 bytes, an input 10. Units take nothing else."""
    layout = along((0, 1), layers, 1, 4, tied=False)
    layer, nothing = UnitCost(1.0, 2.0, 0, 0, 100), UnitCost(0.0, 0.0, 0, 0, 0)
    return layout, Costs(tuple(layer if name.startswith("layer") else nothing for name in layout.units),
                         boundary_bytes=10, memory_bytes=memory)  # fmt: skip


def test_as_little_as_is_needed() -> None:
    """The first stage keeps two grains, the second one; what is recomputed keeps an input of each but one."""
    for memory, stages in ((400, []), (399, [0]), (200, [0])):
        layout, costs = a_job(memory)
        found = recomputing(layout, costs)
        assert [stage for stage in range(2) if found.recomputes(stage, 0)] == stages
        assert overflow(found, found.ranks, costs) is None
    layout, costs = a_job(199)
    assert recomputing(layout, costs) == layout, "nothing is enough"


def test_layouts_say_what_is_recomputed() -> None:
    layout, _ = a_job(1)
    assert "recomputed" not in layout.to_json() + str(layout)
    again = replace(layout, recomputed=layout.stages[1].units)
    assert [again.recomputes(stage, 0) for stage in range(2)] == [False, True]
    assert Layout.from_json(again.to_json()) == again == decode(encode(again))
    assert "(recomputed)" in str(again).splitlines()[2]
    assert difference(layout, again) is None, "rare, and told as a whole"
    told = difference(again, replace(again, epoch=5))
    assert told is not None and changed(again, told) == replace(again, epoch=5)
    with pytest.raises(LayoutError, match="are recomputed"):
        replace(layout, recomputed=(3, 2)).validate()


def test_the_plan_command_shows_what_is_recomputed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layout, costs = a_job(240)
    (tmp_path / "layout.json").write_text(layout.to_json())
    (tmp_path / "profile.json").write_text(costs.to_json(layout.units))
    argv = ["--layout", str(tmp_path / "layout.json"), "--profile", str(tmp_path / "profile.json"), "--untied",
            "--event", "pp:2", "--schedule", "search"]  # fmt: skip
    assert planner.main([*argv, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    expected = list(find(layout, costs).recomputed)
    assert expected and figures["layouts"]["before"]["recomputed"] == expected
    assert planner.main(argv) == 0
    assert "recomputed" in capsys.readouterr().out


@pytest.mark.parametrize("recomputed", [(3,), (3, 4), (1, 2, 5, 9)])
def test_what_is_recomputed_in_a_v_stays_so_where_memory_is_not_known(recomputed: tuple[int, ...]) -> None:
    """ZB-V is among the known orders there, too, and is made for devices with room for two grains a stage."""
    plain = along((0, 1, 2, 1, 0), (2, 2, 3, 2, 2), 1, 6)
    layout = replace(plain, recomputed=recomputed)
    costs = Costs(tuple(UnitCost(1.0, 2.0, 6, 12, 50) for _ in layout.units), boundary_bytes=10)
    assert layout.placement == ("v", 2)
    found = find(layout, costs)
    check(found.program, layout)
    assert found.recomputed == recomputed
    assert find(plain, costs).ms <= found.ms <= found.usual_ms


def test_an_order_that_does_not_fit_is_left() -> None:
    """Even for a slower one, as costs that come late may tell."""
    layout, costs = a_job(399)
    found = order.search(layout, costs, None)
    assert found is not None and not found.present_fits
    roomy = order.search(layout, replace(costs, memory_bytes=400), None)
    assert roomy is not None and roomy.present_fits and roomy.recomputed == ()
