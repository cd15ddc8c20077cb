"""``--elastic-schedule search`` with real processes: the order changes while training goes on, and no bit does."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from megatron_elastic.emulation.forecast import forecast
from megatron_elastic.emulation.profile import Profile
from megatron_elastic.plan.predict import ScaleTable
from megatron_elastic.plan.work.order import WORTH
from tests.emulation.test_emulated import emulate
from tests.emulation.test_emulation import profile_of
from tests.jobs import BATCH, Grid, Job, Jobs, assert_same_training, inject

PP4 = Grid(tp=1, pp=4, steps=26)
KILLED_AT = 10
"""Where others use the machine a search may take as long as eight steps, before it and after."""
COSTS = profile_of(layer_ms=15, latency_ms=1, boundary=1_000_000, positions=True)
SEARCH = ("--elastic-schedule", "search")


def ordered(job: Job) -> list[int]:
    """First steps in which work is done in another order that was found."""
    return [event["step"] for event in job.events("switched") if event.get("ordered")]


def test_an_emulated_job_is_as_fast_as_was_foreseen(jobs: Jobs, tmp_path: Path) -> None:
    """A step takes a third of a second, so that an order is found within the first ones."""
    job = jobs.run(*PP4.flags, *SEARCH, *emulate(tmp_path / "profile.json", COSTS))
    assert_same_training(job, jobs.undisturbed(*PP4.flags))
    (found,) = job.events("ordered")
    (first,) = ordered(job)
    before, after = (forecast(job.layouts()[0], Profile.parse(COSTS.text), each) for each in ("1f1b", "search"))
    assert found["present_ms"] == pytest.approx(before.pipeline_ms)
    assert found["ms"] == pytest.approx(after.pipeline_ms)
    assert found["bound_ms"] <= found["ms"] < 0.95 * found["present_ms"]
    table = ScaleTable.from_json((job.run_dir / "scale_table.json").read_text())
    entry = table.entries[len(job.layouts()[-1].ranks)]
    assert entry.tp * entry.pp * entry.dp == entry.devices == 8
    assert entry.tokens_per_s == pytest.approx(1e3 * BATCH * 32 / entry.step_ms, rel=1e-3)
    assert {*table.entries, *table.left_out} == set(range(1, 17))
    assert table.present is not None and (table.present.layers, table.present.pp, table.present.dp) == (4, 4, 2)
    assert all(0.8 <= (entry.confidence or 0) <= 1 for entry in table.entries.values())
    times = [line["step_ms"] for step, line in job.metrics().items() if step > first]
    assert statistics.median(times) > 0.9 * after.step_ms, "as fast as it should be at most; benches tell how exactly"


@pytest.mark.parametrize(("grid", "flags"), [
    (PP4, ()), (Grid(tp=2, pp=2, steps=26), ("--num-virtual-stages-per-pipeline-rank", "2")),
], ids=["PP4", "TP2 PP2 with two chunks"])  # fmt: skip
def test_a_rank_dies_in_a_step_of_a_searched_order(
    jobs: Jobs, tmp_path: Path, grid: Grid, flags: tuple[str, ...]
) -> None:
    """The others go on in a known one, until they have a better one, if there is one; or in one that was searched while
    all waited for units that moved.
    """
    emulated = emulate(tmp_path / "profile.json", COSTS)
    job = jobs.run(*grid.flags, *flags, *SEARCH, *emulated, *inject(f"5@{KILLED_AT}:backward_weight"))
    assert_same_training(job, jobs.undisturbed(*grid.flags, *flags), [5])
    early, *late = ordered(job)
    found = [event for event in job.events("ordered") if event["epoch"] >= job.events("fault")[0]["epoch"]]
    assert early <= KILLED_AT and found, job.output
    looked_for = [event for event in found if "seconds" in event]
    assert late or all(event["ms"] > (1 - WORTH) * event["present_ms"] for event in looked_for)


def test_an_order_is_searched_for_the_clocks_of_cells(jobs: Jobs, tmp_path: Path) -> None:
    """And clocks are planned for the order, before and after a rank has died."""
    grid = PP4
    told = Profile.parse(json.dumps(json.loads(COSTS.text) | {"clock_steps": [1.0, 1.25]}))
    job = jobs.run(*grid.flags, *SEARCH, *emulate(tmp_path / "profile.json", told), "--elastic-dvfs", "performance",
                   *inject(f"5@{KILLED_AT}:backward"))  # fmt: skip
    assert_same_training(job, jobs.undisturbed(*grid.flags), [5])
    layouts = {layout.epoch: layout for layout in job.layouts()}
    fast = {event["epoch"]: {int(leader): clock for leader, clock in event["clocks"].items()}
            for event in job.events("clocks")}  # fmt: skip
    found = job.events("ordered")
    assert ordered(job) and len(found) >= 2, job.output
    for event in found:
        later = min((epoch for epoch in layouts if epoch > event["epoch"]), default=None)
        layout = layouts[later if later is not None and event.get("ahead") else event["epoch"]]
        clocks = {rank: fast[layout.epoch].get(layout.cell_of(rank).leader, 1.0) for rank in layout.ranks}
        assert max(clocks.values()) == 1.25
        assert event["ms"] == pytest.approx(forecast(layout, told, "search", clocks).pipeline_ms)
    usual, searched = job.events("clocks")[0], job.events("clocks")[-1]
    last = layouts[searched["epoch"]]
    clocks = {rank: fast[last.epoch].get(last.cell_of(rank).leader, 1.0) for rank in last.ranks}
    assert searched["step_ms"] == pytest.approx(forecast(last, told, "search", clocks).step_ms, rel=1e-3)
    assert searched["step_ms"] < searched["base_ms"] and usual["step_ms"] < usual["base_ms"]


def test_chunks_are_placed_otherwise_while_it_runs(jobs: Jobs, tmp_path: Path) -> None:
    """From one chunk a stage to those of the fastest order, as soon as that is found; a rank dies there."""
    grid = Grid(tp=1, pp=4, steps=26)
    flags = (*grid.flags, "--num-layers", "8")
    emulated = emulate(tmp_path / "profile.json", COSTS)
    job = jobs.run(*flags, *SEARCH, "--elastic-placement", "search", *emulated, *inject("1@20:backward"))
    assert_same_training(job, jobs.undisturbed(*flags), [1], stages_stay=False)
    first, *others = job.events("ordered")
    assert first["placed_ms"] < 0.98 * first["ms"]
    layouts = job.layouts()
    ways = [list(layout.through(layout.pipeline_size)) for layout in layouts]
    assert ways[0] == [0, 1, 2, 3]
    (placed, *_) = [index for index, way in enumerate(ways) if way == first["through"]]
    lost = next(index for index, layout in enumerate(layouts) if layout.lost)
    assert 0 < placed < lost, "the rank that dies has two chunks by then"
    before = [event for event in others if event["epoch"] < layouts[lost].epoch]
    assert before and all("through" not in event for event in before), "there is nothing better than that"
    assert ordered(job), "in its best order"


def test_costs_have_to_be_known(jobs: Jobs) -> None:
    job = jobs.start(*PP4.flags, *SEARCH)
    job.finish(2)
    assert "--elastic-schedule search needs to know what units cost: add --elastic-profile measured" in job.output


# ---- recomputed chunks --------------------------------------------------------------------------------


def short_of_memory(limit: float, experts: bool = False) -> Profile:
    """Layers that keep 3 MB a grain, and an input of 64 kB; devices of so many MB; links so slow that more stages
    with room for it are no way out.
    """
    profile = json.loads(profile_of(layer_ms=15, latency_ms=60, boundary=64_000, positions=True,
                                    memory=int(limit * 1e6)).text)  # fmt: skip
    profile["units"]["layer"]["activation_bytes"] = 3_000_000
    if experts:
        profile["units"]["experts"] = profile["units"]["embedding"]
    return Profile.parse(json.dumps(profile))


def recomputed(job: Job) -> list[list[int]]:
    """Of each layout, the stages that are recomputed."""
    return [[stage for stage in range(layout.pipeline_size) if layout.recomputes(stage, 0)]
            for layout in job.layouts()]  # fmt: skip


PP2 = Grid(tp=1, pp=2, steps=8)
TOO_LITTLE = short_of_memory(27.5)
"""For units, slices and two grains of the first stage with two layers; with a rank lost, too, for one of each stage."""


def test_what_did_not_fit_runs_with_chunks_recomputed(jobs: Jobs, tmp_path: Path) -> None:
    emulated = emulate(tmp_path / "profile.json", TOO_LITTLE)
    refused = jobs.start(*PP2.flags, *emulated)
    refused.finish(2)
    assert "GB of activations, but has" in refused.output
    job = jobs.run(*PP2.flags, *SEARCH, *emulated)
    assert_same_training(job, jobs.undisturbed(*PP2.flags))
    assert recomputed(job)[0] == [0]
    assert "OutOfMemory" not in job.output


@pytest.mark.parametrize(("grid", "profile", "flags", "lost"), [
    pytest.param(PP2, TOO_LITTLE, (), (), id="PP2"),
    pytest.param(PP2, TOO_LITTLE, (), ("5@6:backward",), id="PP2, a rank dies"),
    pytest.param(Grid(tp=2, pp=2, steps=8), short_of_memory(33.5), ("--swiglu", "--normalization", "RMSNorm"),
                 ("3@6:forward",), id="TP2 PP2, a rank dies"),
    pytest.param(PP2, short_of_memory(27.5, experts=True),
                 ("--num-experts", "2", "--expert-model-parallel-size", "2", "--moe-aux-loss-coeff", "0.01"), (),
                 id="PP2 with experts"),
])  # fmt: skip
def test_chunks_are_recomputed_while_it_runs(
    jobs: Jobs, tmp_path: Path, grid: Grid, profile: Profile, flags: tuple[str, ...], lost: tuple[str, ...]
) -> None:
    """A profile says that the present order does not fit: another comes into force, with what it recomputes. Nothing is
    emulated, so that dropout is drawn twice.
    """
    (tmp_path / "profile.json").write_text(profile.text)
    job = jobs.run(*grid.flags, *flags, *SEARCH, "--elastic-profile", str(tmp_path / "profile.json"),
                   *inject(*lost))  # fmt: skip
    reference, gone = jobs.undisturbed(*grid.flags, *flags), [int(spec[0]) for spec in lost]
    assert_same_training(job, reference, gone, stages_stay=False)
    first, *others = recomputed(job)
    assert first == [] and any(others), job.output
    assert job.events("ordered")[0]["recomputed"]


def test_a_rank_dies_where_only_recomputed_chunks_fit(jobs: Jobs, tmp_path: Path) -> None:
    """The others' devices have room for what it owned, and go on recomputing."""
    emulated = emulate(tmp_path / "profile.json", TOO_LITTLE)
    job = jobs.run(*PP2.flags, *SEARCH, *emulated, *inject("2@4:backward"))
    assert_same_training(job, jobs.undisturbed(*PP2.flags), [2], stages_stay=False)
    assert all(recomputed(job)), "in every layout"
    assert "OutOfMemory" not in job.output
