"""Policies: what each makes of losses, that the coordinator goes on as foreseen, and that the bits stay."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_elastic import cli
from megatron_elastic.config import ElasticConfig, UsageError
from megatron_elastic.layout import Holdings, Layout, gpt_units, transfers
from megatron_elastic.pipeline.prediction import predict, predicted
from megatron_elastic.pipeline.search import find
from megatron_elastic.plan import NoLayout
from megatron_elastic.plan.choice import WORTH, best, fastest_grid, ways
from megatron_elastic.plan.costs.cost import Costs, UnitCost
from megatron_elastic.plan.costs.exchange import Exchange
from megatron_elastic.plan.graph import Planner
from megatron_elastic.plan.growth import improve
from megatron_elastic.plan.policies import POLICIES
from megatron_elastic.plan.policies.column import columns
from megatron_elastic.plan.work.order import foreseen
from megatron_elastic.planner import main
from tests.jobs import Grid, Jobs, assert_exactly_once, inject
from tests.simulation import run
from tests.tiers.examples import examples

EXECUTABLE = [name for name, policy in POLICIES.items() if policy.refusal is None]


def make(pp: int, dp: int, *, layers: int, grains: int, tp: int = 1, replicas: int = 2, samples: int = 1) -> Layout:
    units, stage_units = gpt_units(layers, pp, tied=False, positions=False)
    return Layout.grid(
        tp=tp, pp=pp, dp=dp, stage_units=stage_units, units=units, num_grains=grains, num_slices=dp,
        replicas=replicas, samples=samples,
    )  # fmt: skip


def alike(layout: Layout, ms: float = 1.0, **others: float) -> Costs:
    """Only layers take time."""
    return Costs(tuple(
        UnitCost(ms, 2 * ms, 6, 12, 1) if name.startswith("layer.") else UnitCost(0.0, 0.0, 6, 12, 1)
        for name in layout.units
    ), **others)  # type: ignore[arg-type]  # fmt: skip


def widths(layout: Layout) -> list[int]:
    return [stage.width for stage in layout.stages]


LAYOUT = make(4, 4, layers=40, grains=32)


@pytest.mark.parametrize(
    ("name", "after"),
    [("elastic", [4, 4, 4, 3]), ("recycle", [4, 3, 4, 4]), ("column", [3] * 4), ("oobleck", [3] * 4),
     ("varuna", [3] * 4)],
)
def test_what_is_left_after_one_loss(name: str, after: list[int]) -> None:
    (layout,) = POLICIES[name].foresee(LAYOUT, [5], alike(LAYOUT)).layouts
    assert sorted(widths(layout)) == sorted(after)
    assert layout.num_grains == 32
    if name == "recycle":
        assert [stage.units for stage in layout.stages] == [stage.units for stage in LAYOUT.stages]
    if name == "column":
        assert {cell.leader % 4 for cell in layout.cells.values()} == {0, 2, 3}, "the whole column 1 has left"
        assert layout.spares == (1, 9, 13)


def test_columns_that_lost_a_rank_leave_and_whole_ones_come_back() -> None:
    column = POLICIES["column"]
    costs = alike(LAYOUT)
    (layout,) = column.foresee(LAYOUT, [5, 10], costs).layouts
    assert widths(layout) == [2] * 4 and layout.spares == (1, 2, 6, 9, 13, 14)
    assert len(columns(layout)) == 2
    grown = replace(layout, spares=(*layout.spares, 16, 17), hosts=((*layout.hosts[0], 16, 17),))
    again = column.settle(grown, costs)
    assert widths(again) == [4] * 4 and len(columns(again)) == 4
    shared = [{cell.grains for cell in stage.cells} for stage in again.stages]
    assert all(each == shared[0] for each in shared), "who is in a column computes the same"


def test_the_fastest_regular_pipeline_counts_what_it_exchanges() -> None:
    """The more replicas of a stage, the more gradients there are to send."""
    planner, counts = Planner(LAYOUT.units, alike(LAYOUT), False, LAYOUT.num_grains), []
    for bandwidth in (1e12, 1e4, 2e3, 1e2):
        costs = replace(alike(LAYOUT), exchange=Exchange(sum_bytes=4, gradient_bytes=4, weight_bytes=2),
                        bandwidth=bandwidth, latency_ms=0.0, memory_bytes=10_000)  # fmt: skip
        graphs = [planner.split([15 // stages] * stages) for stages in range(1, 16)]
        found = fastest_grid(LAYOUT, 15, costs, False)
        each = [
            costs.pace_of(Layout.grid(
                tp=1, pp=len(graph.widths), dp=graph.widths[0], stage_units=graph.stage_units, units=LAYOUT.units,
                num_grains=32, num_slices=4, replicas=2)).step_ms
            for graph in (*graphs, found)
        ]  # fmt: skip
        assert each[-1] == min(each)
        counts.append(len(found.widths))
    assert counts == sorted(counts) and counts[0] < counts[-1]


def test_no_column_is_whole() -> None:
    """TorchFT could not go on; cells of broken ones make whole ones."""
    layout = make(2, 2, layers=4, grains=8, replicas=1)
    (after,) = POLICIES["column"].foresee(layout, [0, 3], alike(layout)).layouts
    assert widths(after) == [1, 1]
    with pytest.raises(NoLayout, match="each replica of the pipeline has lost a rank"):
        POLICIES["column-shrink"].foresee(layout, [0, 3], alike(layout))


def test_a_batch_that_shrinks() -> None:
    (layout,) = POLICIES["column-shrink"].foresee(LAYOUT, [5, 10], alike(LAYOUT)).layouts
    layout.validate()
    assert (layout.num_grains, widths(layout)) == (16, [2] * 4)
    costs = alike(LAYOUT)
    assert predict(layout, costs).step_ms == pytest.approx(predict(LAYOUT, costs).step_ms)
    assert predict(layout, costs).share_of(predict(LAYOUT, costs)) == pytest.approx(0.5)


def test_pipelines_of_several_lengths() -> None:
    outcome = POLICIES["oobleck-mixed"].foresee(LAYOUT, [5], alike(LAYOUT))
    assert sorted(layout.pipeline_size for layout in outcome.layouts) == [3, 4, 4, 4]
    assert outcome.grains == 32
    assert min(outcome.layouts, key=lambda layout: layout.pipeline_size).num_grains < 8, "the shorter one is slower"
    small = replace(alike(LAYOUT), memory_bytes=240)  # 42 units of 18 bytes and activations need four stages
    borrowed = POLICIES["oobleck-mixed"].foresee(LAYOUT, [5], small)
    assert sorted(layout.pipeline_size for layout in borrowed.layouts) == [4, 4, 7]


@pytest.mark.parametrize(
    ("lost", "left"), [([], [3, 5]), ([0], [3, 4]), ([0, 1], [3, 3]), ([0, 1, 2], [5]), ([0, 1, 2, 4, 5], [3])]
)
def test_pipelines_that_are_too_short_are_merged(lost: list[int], left: list[int]) -> None:
    """Four of two stages each, where the model needs three: none has a cell to lend."""
    layout = make(2, 4, layers=8, grains=8, replicas=1)
    small = replace(alike(layout), memory_bytes=88)  # 10 units of 18 bytes, and activations
    outcome = POLICIES["oobleck-mixed"].foresee(layout, lost, small)
    assert sorted(each.pipeline_size for each in outcome.layouts) == left
    assert outcome.grains == 8
    with pytest.raises(NoLayout, match="no pipeline can be made of 2 cells"):
        POLICIES["oobleck-mixed"].foresee(layout, [*range(6)], small)


def test_a_predecessor_stands_for_two() -> None:
    outcome = POLICIES["bamboo"].foresee(LAYOUT, [5], alike(LAYOUT))
    assert sorted(layout.pipeline_size for layout in outcome.layouts) == [3, 4, 4, 4]
    costs = alike(LAYOUT)
    assert predicted(outcome, costs).share_of(predict(LAYOUT, costs)) < 0.6, "one cell has twice as much to do"
    in_a_row = POLICIES["bamboo"].foresee(LAYOUT, [5, 9], costs)
    assert [layout.pipeline_size for layout in in_a_row.layouts] == [4] * 3
    nothing_lost = POLICIES["bamboo"].foresee(LAYOUT, [], costs)
    assert predicted(nothing_lost, costs).share_of(predict(LAYOUT, costs)) < 1, "what fits no bubble costs time"


def test_a_restart_takes_its_time() -> None:
    costs = alike(LAYOUT)
    varuna, oobleck = (POLICIES[name].foresee(LAYOUT, [5], costs) for name in ("varuna", "oobleck"))
    assert varuna.layouts == oobleck.layouts
    assert varuna.pause_ms > 60_000 > oobleck.pause_ms


def test_recycles_example_of_three_pipelines() -> None:
    """Three pipelines of four stages, six micro-batches each, a backward twice as long as a forward: 1F1B takes
    (6 + 4 - 1) x 3 = 27 slots. When one of stage 1 is lost, its two peers have nine: (9 + 4 - 1) x 3 = 36 where
    backwards are whole. In two parts, with weights' gradients in the bubbles, it cannot be less than a forward and nine
    times three, and takes three slots more at most.
    """
    layout = make(4, 3, layers=4, grains=18)
    costs = replace(alike(layout), latency_ms=0.0)
    assert predict(layout, costs, schedules=["1f1b"]).step_ms == pytest.approx(27)
    (after,) = POLICIES["recycle"].foresee(layout, [4], costs).layouts
    assert [len(cell.grains) for cell in after.stages[1].cells] == [9, 9]
    assert predict(after, costs, schedules=["1f1b"]).step_ms == pytest.approx(36)
    assert 28 <= predict(after, costs, schedules=["split"]).step_ms <= 31


def test_a_restart_goes_on_with_whole_replicas_of_any_cells() -> None:
    """Two broken replicas of four lack one cell each, of unlike stages: fourteen cells make three."""
    costs = alike(LAYOUT)
    outcome = POLICIES["restart"].foresee(LAYOUT, [5, 10], costs)
    assert widths(outcome.layouts[0]) == [3] * 4 and len(outcome.layouts[0].spares) == 2
    assert outcome.pause_ms > 60_000
    assert widths(POLICIES["column"].foresee(LAYOUT, [5, 10], costs).layouts[0]) == [2] * 4


def test_who_is_slow_by_what_its_units_cost() -> None:
    """Two layers of 3 ms each and a stage of ten layers: a grain should take 30 ms."""
    costs = alike(LAYOUT)
    assert POLICIES["resihp"].usual_ms(LAYOUT, 1, costs) == pytest.approx(30)
    assert POLICIES["resihp"].usual_ms(LAYOUT, 1, None) is None
    assert POLICIES["elastic"].usual_ms(LAYOUT, 1, costs) is None


@pytest.mark.parametrize("lost", [[5], [4, 5], [5, 10], [5, 10, 15], [4, 5, 10]])
def test_chameleon_chooses_the_better_one_for_each_loss(lost: list[int]) -> None:
    """With two of a stage's four cells lost that is new pipelines, of three cells a stage."""
    costs = alike(LAYOUT)
    (chosen,) = POLICIES["chameleon"].foresee(LAYOUT, lost, costs).layouts
    steps = {name: predict(POLICIES[name].foresee(LAYOUT, lost, costs).layouts[0], costs).step_ms
             for name in ("recycle", "oobleck")}
    assert predict(chosen, costs).step_ms <= min(steps.values()) * 1.001
    assert lost != [4, 5] or widths(chosen) == [3, 3, 3, 3]


def test_orders_that_are_searched_count_where_they_will_be() -> None:
    """Uneven stages wait less in an order that is searched: that is what a way is worth then."""
    costs = alike(LAYOUT)
    interim = POLICIES["elastic"].lose(LAYOUT, [5], Holdings.of(LAYOUT).without([5]), 1, costs)
    known, searched = (best(ways(interim, costs, False, foreseen(schedule))) for schedule in ("split", "search"))
    assert searched.step_ms < 0.95 * known.step_ms
    assert find(searched.layout, costs).ms <= searched.step_ms * 1.001


@settings(max_examples=examples(120), deadline=None)
@given(
    st.integers(1, 4), st.integers(1, 4), st.integers(0, 6), st.integers(0, 2), st.integers(1, 2),
    st.sampled_from((1, 2, 4)), st.randoms(use_true_random=False),
)  # fmt: skip
def test_all_settle_in_layouts_that_hold_all_state(
    pp: int, dp: int, more: int, few: int, tp: int, samples: int, rng: random.Random
) -> None:
    """Under any policy that can be run: what each layout needs is there, and it comes to rest."""
    layout = make(pp, dp, layers=pp * 2, grains=dp * 2 + more, tp=tp, replicas=few, samples=samples)
    lost = rng.sample(layout.ranks, rng.randint(1, min(3, len(layout.ranks))))
    costs = alike(layout)
    held = Holdings.of(layout).without(lost)
    for name in EXECUTABLE:
        policy = POLICIES[name]
        try:
            interim = policy.lose(layout, lost, held, 1, costs)
        except NoLayout:
            continue
        interim.validate()
        assert not set(lost) & {*interim.ranks, *interim.spares}
        transfers(interim, held)
        settled = policy.settle(interim, costs)
        assert settled.num_grains == layout.num_grains
        assert policy.settle(settled, costs) == settled
        if name not in ("elastic", "elastic-paused", "recycle", "resihp", "chameleon"):
            assert len(set(widths(settled))) == 1, f"{name} is regular"


def random_job(rng: random.Random) -> tuple[Layout, Costs, list[int]]:
    """A layout, what its units cost, and who is lost."""
    pp, dp = rng.randint(1, 5), rng.randint(2, 5)
    units, stage_units = gpt_units(pp * rng.randint(1, 6), pp, rng.random() < 0.5, positions=False)
    layout = Layout.grid(
        tp=1, pp=pp, dp=dp, stage_units=stage_units, units=units,
        num_grains=dp * rng.choice((2, 4, 8)) + rng.choice((0, 0, 1, 3)), num_slices=dp, replicas=3,
        samples=rng.choice((1, 1, 4)),
    )  # fmt: skip
    ms, noise = rng.uniform(0.5, 3), rng.choice((0.0, 0.0, 0.5))

    def cost(unit: str) -> UnitCost:
        layer = ms * rng.uniform(1 - noise, 1 + noise)
        forward = layer if unit.startswith("layer.") else rng.choice((0.01, ms, 2 * ms)) if unit == "head" else 0.01
        return UnitCost(forward, 2 * forward, 6, 12, 1)

    costs = Costs(tuple(map(cost, units)), boundary_bytes=rng.choice((0, 10**6)))
    return layout, costs, rng.sample(layout.ranks, rng.randint(1, min(3, pp * dp - 1)))


def assert_never_below(seed: int) -> None:
    layout, costs, lost = random_job(random.Random(seed))
    for schedules in (["1f1b"], ["1f1b", "split"]):
        step_ms = {}
        for name in EXECUTABLE:
            try:
                outcome = POLICIES[name].foresee(layout, lost, costs, schedules)
            except NoLayout:
                continue
            step_ms[name] = predicted(outcome, costs, schedules=schedules).step_ms
        if "elastic" in step_ms:
            least = min(step_ms, key=lambda name: step_ms[name])
            # A way that moves more has to gain a thousandth, and there may be two such choices in a row.
            assert step_ms["elastic"] <= step_ms[least] * (1 + 2 * WORTH), (seed, schedules, lost, step_ms)


@settings(max_examples=examples(160), deadline=None)
@given(st.integers(0, 10**9))
def test_ours_is_never_below_any_other_that_can_be_run(seed: int) -> None:
    assert_never_below(seed)


def test_the_ways_to_go_on_are_weighed() -> None:
    """What takes longer to move than it is of use until the next event is not worth it."""
    costs = alike(LAYOUT)
    interim = POLICIES["elastic"].lose(LAYOUT, [5], Holdings.of(LAYOUT).without([5]), 1, costs)
    found = ways(interim, costs, tied=False)
    assert found[0].name == "reroute"
    chosen = best(found)
    assert chosen.name == "cells" and chosen.step_ms == min(way.step_ms for way in found)
    heavy = replace(costs, units=tuple(replace(unit, optimizer_bytes=10**9) for unit in costs.units))
    soon = ways(interim, heavy, tied=False, horizon_ms=100.0)
    assert max(way.moves_ms for way in soon) > 100.0
    assert best(soon).moves_ms < 100.0
    assert best(ways(interim, heavy, tied=False)).name == "cells"


@pytest.mark.parametrize(("lost", "ms", "size", "moves"), [
    ([4, 5], 300.0, 12, True), ([5], 300.0, 12, False), ([4, 5], 300.0, 10**12, False), ([4, 5], 1.0, 12, False),
], ids=["half a stage", "a quarter", "large states", "short steps"])  # fmt: skip
def test_units_move_at_once_where_the_steps_until_they_have_been_copied_cost_more(
    lost: list[int], ms: float, size: int, moves: bool
) -> None:
    costs = alike(LAYOUT, ms, bandwidth=1e9)
    costs = replace(costs, units=tuple(replace(unit, optimizer_bytes=size) for unit in costs.units))
    held = Holdings.of(LAYOUT).without(lost)
    chosen = POLICIES["elastic"].lose(LAYOUT, lost, held, 1, costs)
    assert (chosen.stages != POLICIES["recycle"].lose(LAYOUT, lost, held, 1, costs).stages) == moves
    transfers(chosen, held)
    if moves:
        assert POLICIES["elastic"].settle(chosen, costs).stages == chosen.stages, "that is where it ends"


def test_who_only_follows_may_keep_copies_that_go_elsewhere_at_a_loss() -> None:
    """Newcomers that have been sent slices, and get nothing to do as cells move at once."""
    layout = LAYOUT
    costs = alike(LAYOUT, 300.0)
    newcomers = dict.fromkeys(range(16, 18), 16)
    grown, _ = improve(layout, newcomers, 1) or (layout, None)
    followers = {cell.leader for cell in grown.cells.values() if cell.shadow}
    assert followers & {copy for row in grown.replicas for copies in row for copy in copies}
    lost = [4, 5]
    held = Holdings.of(layout).without(lost)  # nothing has come yet
    chosen = POLICIES["elastic"].lose(grown, lost, held, 2, costs)
    chosen.validate()
    assert set(chosen.spares) >= followers and widths(chosen) == [4, 4, 3, 3]
    transfers(chosen, held)


# ---- megatron-elastic plan ------------------------------------------------------------------------


def test_all_in_one_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layout = tmp_path / "L.json"
    layout.write_text(LAYOUT.to_json())
    arguments = ["--layout", str(layout), "--event", "lose:rank=5", "--policy", "all", "--power", "90,150,250"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "undisturbed: step" in out and "considered by elastic" in out and "chosen" in out
    assert out.count("predicted only: ") == 3
    assert main([*arguments, "--json", "--dvfs", "performance", "--tokens", "4096"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert set(figures["policies"]) == set(POLICIES)
    assert figures["limit_share"] == 0.9375
    ours = figures["policies"]["elastic"]
    assert ours["clocked"]["share"] > ours["share"] >= figures["policies"]["recycle"]["share"]
    assert ours["tokens_per_s"] == pytest.approx(32 * 4096 * 1e3 / ours["step_ms"], rel=1e-4)
    assert [way["chosen"] for way in figures["considered"]].count(True) == 1
    for wrong in (["--event", "join:ranks=8"], ["--dvfs", "energy", "--power", "1"]):
        with pytest.raises(SystemExit) if "--power" in wrong else contextlib.nullcontext():
            assert main([*arguments, *wrong]) == 2
        capsys.readouterr()


# ---- the flag ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "why"), [("bamboo", "nothing twice"), ("column-shrink", "use 'column'"),
                                           ("oobleck-mixed", "unlike stages")])  # fmt: skip
def test_what_is_no_layout_is_refused(name: str, why: str) -> None:
    with pytest.raises(UsageError, match=rf"--elastic-policy {name} can only be predicted.*{why}"):
        ElasticConfig(policy=name)


def test_a_schedule_that_is_part_of_a_policy() -> None:
    with pytest.raises(UsageError, match="--elastic-policy recycle needs --elastic-schedule split, got 1f1b"):
        ElasticConfig(policy="recycle")
    ElasticConfig(policy="recycle", schedule="split")


# ---- the coordinator ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXECUTABLE)
def test_histories_under_a_policy(name: str) -> None:
    """Whatever happens, no invariant is violated (``tests/simulation``)."""
    total = run.some(range(321_000_000, 321_000_060), name)
    assert not total.violations
    assert total.ends["finished"] > 30


@pytest.mark.parametrize(
    "name",
    [
        "column",
        pytest.param("oobleck"),
        pytest.param("recycle"),
        pytest.param("varuna"),
    ],
)
def test_real_ranks_go_on_as_foreseen_with_the_same_bits(name: str, jobs: Jobs) -> None:
    """Two ranks are killed, of both stages and in different columns. Those that have left make a column together."""
    grid = Grid(tp=1, pp=2, steps=7)
    schedule = ["--elastic-schedule", POLICIES[name].schedule or "1f1b"]
    job = jobs.run(*grid.flags, *schedule, "--elastic-policy", name, *inject("1@2:backward", "6@4:forward"))
    reference = jobs.undisturbed(*grid.flags)
    assert cli.main(["compare", str(job.run_dir), str(reference.run_dir)]) == 0, job.output
    assert_exactly_once(job)
    layouts = job.layouts()
    assert (widths(layouts[-1]), layouts[-1].spares, layouts[-1].lost) == ([3, 3], (), (1, 6))
    first = next(layout for layout in layouts if layout.lost == (1,))
    foreseen = POLICIES[name].lose(layouts[0], [1], Holdings.of(layouts[0]).without([1]), first.epoch, None)
    assert [stage.cells for stage in first.stages] == [stage.cells for stage in foreseen.stages]
    for before, later in itertools.pairwise(layouts):
        assert set(before.lost) <= set(later.lost)


def test_real_ranks_go_back_to_the_checkpoint(jobs: Jobs, tmp_path: Path) -> None:
    """Under ``restart``: with the whole replicas that can be made, and the same bits."""
    grid = Grid(tp=1, pp=2, steps=7)
    reference = jobs.undisturbed(*grid.flags)
    saving = ["--save", str(tmp_path / "saved"), "--save-interval", "2"]
    job = jobs.run(*grid.flags, *saving, "--elastic-policy", "restart", *inject("1@5:forward"))
    assert cli.main(["compare", str(job.run_dir), str(reference.run_dir)]) == 0, job.output
    assert_exactly_once(job)
    (event,) = job.events("fallback")
    assert event["step"] in (2, 4) and "restart begins again" in event["reason"]
    assert job.events("recovered")[0]["decision"] == "reload"
    assert widths(job.layouts()[-1]) == [3, 3]


def test_real_ranks_take_the_way_that_is_best(jobs: Jobs, tmp_path: Path) -> None:
    """By costs that are given: it is written down with the others, and the bits stay."""
    grid = Grid(tp=1, pp=2, steps=12)
    reference = jobs.undisturbed(*grid.flags)
    first = reference.layouts()[0]
    profile = tmp_path / "P.json"
    profile.write_text(alike(first).to_json(first.units))
    job = jobs.run(*grid.flags, "--elastic-profile", str(profile), *inject("1@2:backward", "2@3:forward"))
    assert cli.main(["compare", str(job.run_dir), str(reference.run_dir)]) == 0, job.output
    considered = job.events("considered")
    assert considered, job.output
    names = [way["way"] for way in considered[-1]["ways"]]
    assert names[0] == "reroute" and considered[-1]["chosen"] in names
    steps = {way["way"]: way["step_ms"] for way in considered[-1]["ways"]}
    assert steps[considered[-1]["chosen"]] < steps["reroute"]


def test_cells_of_real_ranks_move_at_once(jobs: Jobs, tmp_path: Path) -> None:
    """By costs that are given steps take so long that all had better wait for it; two ranks of a stage are killed."""
    grid = Grid(tp=1, pp=2, steps=6)
    reference = jobs.undisturbed(*grid.flags)
    first = reference.layouts()[0]
    profile = tmp_path / "P.json"
    profile.write_text(alike(first, 2000.0).to_json(first.units))
    job = jobs.run(*grid.flags, "--elastic-profile", str(profile), *inject("0@3:backward", "2@3:backward"))
    assert cli.main(["compare", str(job.run_dir), str(reference.run_dir)]) == 0, job.output
    assert_exactly_once(job)
    left = next(layout for layout in job.layouts() if layout.lost == (0, 2))
    assert widths(left) == [3, 3], "a cell of the other stage takes part at once"
