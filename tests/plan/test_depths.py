"""More or fewer stages after a loss, and cells of one host side by side."""

from __future__ import annotations

import random
from dataclasses import replace
from operator import ne

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_elastic.layout import Holdings, Layout, gpt_units
from megatron_elastic.pipeline.prediction import predicted
from megatron_elastic.pipeline.search import find
from megatron_elastic.pipeline.simulate import Step
from megatron_elastic.plan import NoLayout
from megatron_elastic.plan.choice import WORTH, best, fastest_grid, step, ways
from megatron_elastic.plan.costs.cost import Costs, Pace
from megatron_elastic.plan.costs.exchange import Exchange
from megatron_elastic.plan.graph import Planner
from megatron_elastic.plan.growth import even
from megatron_elastic.plan.policies import POLICIES
from megatron_elastic.plan.policies.policy import Policy
from megatron_elastic.plan.replan import fill
from tests.plan.test_policies import EXECUTABLE, LAYOUT, alike, make, random_job
from tests.tiers.examples import examples

ELASTIC = POLICIES["elastic"]
ROOMY = 10**9
"""Bytes of a device that all fits: it only has to be known for other numbers of stages to be tried."""


def test_widths_need_not_be_even_in_a_pipeline_of_another_depth() -> None:
    """13 cells are left, which only one or thirteen stages can share evenly."""
    costs = replace(alike(LAYOUT), memory_bytes=ROOMY)
    lost = [4, 5, 9]
    interim = ELASTIC.lose(LAYOUT, lost, Holdings.of(LAYOUT).without(lost), 1, costs)
    found = ways(interim, costs, tied=False)
    chosen = best(found)
    others = [way for way in found if way.name != "stages"]
    assert chosen.name == "stages" and chosen.layout.pipeline_size != 4
    assert chosen.cells == 13, "nobody waits"
    assert chosen.step_ms < min(way.step_ms for way in others) * (1 - WORTH)


@pytest.mark.parametrize("lost", [[4, 5], [4, 5, 8, 9], [0, 1, 4, 5, 8, 9, 12, 13]])
@pytest.mark.parametrize("schedule", ["1f1b", "split"])
def test_no_regular_pipeline_of_another_depth_is_faster(lost: list[int], schedule: str) -> None:
    """Which one is the fastest no estimate tells."""
    exchange = Exchange(sum_bytes=4, gradient_bytes=4, weight_bytes=2, memory_bandwidth=1e3)
    costs = replace(alike(LAYOUT), memory_bytes=ROOMY, exchange=exchange, bandwidth=1e4, latency_ms=0.0)
    interim = Policy.lose(ELASTIC, LAYOUT, lost, Holdings.of(LAYOUT).without(lost), 1, costs)
    cells, planner = len(interim.cells), Planner(LAYOUT.units, costs, False, LAYOUT.num_grains)
    graphs = [planner.split([cells // stages] * stages) for stages in range(1, cells + 1) if cells % stages == 0]
    regular = [step(even(fill(interim, costs, graph, 2), 2), costs, [schedule]) for graph in graphs]
    assert best(ways(interim, costs, False, [schedule])).step_ms <= min(regular) * (1 + WORTH)


def test_cells_that_would_have_no_grains_wait() -> None:
    """Seven are left, and five micro-batches: one stage of five is best, which ``arrange`` says, and not ``cells``, by
    which cells would be taken out of stages that stay.
    """
    layout = make(2, 4, layers=12, grains=5, replicas=1)
    costs = replace(alike(layout), memory_bytes=ROOMY)
    interim = Policy.lose(ELASTIC, layout, [0], Holdings.of(layout).without([0]), 1, costs)
    chosen = best(ways(interim, costs, False, ["1f1b"]))
    assert (chosen.name, [stage.width for stage in chosen.layout.stages]) == ("regular", [5])
    assert ELASTIC.cells(interim, 8, costs, ["1f1b"]) == 7
    settled = ELASTIC.settle(interim, costs, ["1f1b"])
    assert [stage.width for stage in settled.stages] == [5] and len(settled.spares) == 2


def test_the_exchange_of_few_regular_pipelines_is_counted_where_that_takes_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A coordinator with ten thousand ranks plans between other things; the one that it takes is among the best."""
    counted: list[Layout] = []
    usual = Costs.pace_of

    def pace_of(costs: Costs, layout: Layout) -> Pace:
        counted.append(layout)
        return usual(costs, layout)

    monkeypatch.setattr(Costs, "pace_of", pace_of)
    exchange = Exchange(sum_bytes=4, gradient_bytes=4, weight_bytes=2, memory_bandwidth=1e3)
    found = []
    for grains in (32, 1_000):
        layout = make(4, 4, layers=40, grains=grains)
        costs = replace(alike(layout), memory_bytes=ROOMY, exchange=exchange, bandwidth=1e3, latency_ms=0.0)
        counted.clear()
        found.append(fastest_grid(layout, 16, costs, False))
        assert len(counted) > 4 if grains == 32 else len(counted) <= 4
    assert sum(found[1].widths) == 16


def test_what_fits_has_to_be_known() -> None:
    interim = ELASTIC.lose(LAYOUT, [5], Holdings.of(LAYOUT).without([5]), 1, alike(LAYOUT))
    assert "stages" not in {way.name for way in ways(interim, alike(LAYOUT), tied=False)}


def test_a_coordinator_has_only_so_much_time_to_simulate_others() -> None:
    """The more micro-batches, the fewer graphs."""
    counts = []
    for grains in (32, 128, 300, 6_000):
        units, stage_units = gpt_units(40, 4, tied=False, positions=False)
        layout = Layout.grid(tp=1, pp=4, dp=4, stage_units=stage_units, units=units, num_grains=grains, num_slices=4,
                             replicas=1)  # fmt: skip
        costs = replace(alike(layout), memory_bytes=ROOMY)
        interim = ELASTIC.lose(layout, [], Holdings.of(layout), 1, costs)
        counts.append(sum(way.name == "stages" for way in ways(interim, costs, tied=False)))
    assert counts == sorted(counts, reverse=True) and counts[0] > counts[-1] == 0


def test_the_best_way_is_judged_by_the_order_that_a_job_will_have() -> None:
    """What is nearly found may be too good or too bad by some percent, as it knows no exchange."""
    schedules = ("1f1b", "split", "search")
    exchange = Exchange(sum_bytes=4, gradient_bytes=4, weight_bytes=2, memory_bandwidth=1e3)
    costs = replace(alike(LAYOUT), memory_bytes=ROOMY, exchange=exchange, bandwidth=1e4, latency_ms=0.0)
    interim = ELASTIC.lose(LAYOUT, [5], Holdings.of(LAYOUT).without([5]), 1, costs)
    found = ways(interim, costs, False, schedules)
    for way in {found[0].name: found[0], "best": best(found)}.values():
        goal = even(way.layout, way.layout.epoch)
        order = find(goal, costs).program
        assert way.step_ms == Step.of(order, goal, costs).ms
    nearly = {way.name: step(even(way.layout, 1), costs, schedules, {}) for way in found}
    assert any(nearly[way.name] != way.step_ms for way in (found[0], best(found)))


@pytest.mark.parametrize("lost", [[5], [4, 5], [4, 5, 9]])
def test_while_somebody_waits_only_what_is_no_better_is_left_out(lost: list[int]) -> None:
    schedules = ("1f1b", "split", "search")
    exchange = Exchange(sum_bytes=4, gradient_bytes=4, weight_bytes=2, memory_bandwidth=1e3)
    costs = replace(alike(LAYOUT), memory_bytes=ROOMY, exchange=exchange, bandwidth=1e4, latency_ms=0.0)
    interim = Policy.lose(ELASTIC, LAYOUT, lost, Holdings.of(LAYOUT).without(lost), 1, costs)
    briefly = ways(interim, costs, False, schedules, briefly=True)
    kept = [way.layout.stages for way in briefly]
    left_out = [way for way in ways(interim, costs, False, schedules) if way.layout.stages not in kept]
    assert left_out
    for way in left_out:
        assert step(even(way.layout, 1), costs, schedules, {}) > briefly[0].step_ms / max(way.gain for way in briefly)


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(0, 10**9))
def test_ours_is_never_below_any_other_that_may_change_its_depth(seed: int) -> None:
    layout, costs, lost = random_job(random.Random(seed))
    costs = replace(costs, memory_bytes=ROOMY)
    step_ms = {}
    for name in EXECUTABLE:
        try:
            step_ms[name] = predicted(POLICIES[name].foresee(layout, lost, costs), costs).step_ms
        except NoLayout:
            continue
    least = min(step_ms.values(), default=0.0)
    assert step_ms.get("elastic", 0.0) <= least * (1 + 2 * WORTH), (seed, lost, step_ms)


# ---- hosts ------------------------------------------------------------------------------------------


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(0, 10**9))
def test_each_host_has_stages_in_a_row(seed: int) -> None:
    rng = random.Random(seed)
    per_host, dp = rng.randint(1, 6), rng.randint(1, 4)
    pp = rng.randint(1, 5)
    units, stage_units = gpt_units(pp * 4, pp, tied=False, positions=False)
    layout = Layout.grid(tp=1, pp=pp, dp=dp, stage_units=stage_units, units=units, num_grains=2 * dp, num_slices=dp,
                         replicas=min(1, pp * dp - 1), ranks_per_host=per_host)  # fmt: skip
    costs, cells = alike(layout), pp * dp
    stages = rng.randint(1, min(cells, pp * 4))
    widths = [cells // stages + (stage < cells % stages) for stage in range(stages)]
    rng.shuffle(widths)
    graph = Planner(layout.units, costs, False, layout.num_grains).split(widths)
    filled = fill(layout, costs, graph, 1, by_host=True)
    filled.validate()
    assert [stage.width for stage in filled.stages] == widths
    assert [stage.units for stage in filled.stages] == list(graph.stage_units)
    order = [layout.host_of(cell.leader) for stage in filled.stages for cell in stage.cells]
    assert sum(map(ne, order, order[1:])) == len(set(order)) - 1


@pytest.mark.parametrize(("bandwidth", "way", "hosts"), [(1e4, "hosts", [[0], [1]]), (1e12, "reroute", [[0, 1]] * 2)])
def test_cells_change_places_so_that_a_stage_is_on_one_host(bandwidth: float, way: str, hosts: list[list[int]]) -> None:
    """Where gradients take long between hosts; where they do not, nobody moves."""
    layout = replace(make(2, 4, layers=8, grains=16), hosts=((0, 1, 4, 5), (2, 3, 6, 7)))
    exchange = Exchange(sum_bytes=4, gradient_bytes=4, weight_bytes=2, near_bandwidth=1e12)
    costs = replace(alike(layout), exchange=exchange, bandwidth=bandwidth, latency_ms=0.0)
    assert best(ways(layout, costs, tied=False)).name == way
    settled = ELASTIC.settle(layout, costs)
    assert [sorted({layout.host_of(cell.leader) for cell in stage.cells}) for stage in settled.stages] == hosts
    assert [stage.units for stage in settled.stages] == [stage.units for stage in layout.stages]
