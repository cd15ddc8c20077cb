"""``--elastic-dvfs`` with real processes: clocks follow layouts, and are as they were when a job has ended, however."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from megatron_elastic.emulation.forecast import forecast
from megatron_elastic.emulation.profile import Profile
from megatron_elastic.plan.work.clock import loads
from megatron_elastic.power.regulator import restore_left_behind
from tests.emulation.test_emulated import emulate, lines
from tests.emulation.test_emulation import profile_of
from tests.jobs import Grid, Job, Jobs, assert_same_training, inject

GRID = Grid(tp=1, pp=2, steps=10, ranks=4)


def profile(*steps: float) -> Profile:
    """Two layers a stage, which take 48 ms of each grain, a fifth of it at any of the clocks that devices have."""
    data = json.loads(profile_of(layer_ms=8, positions=True).text)
    data["units"]["layer"]["clock_share"] = 0.8
    return Profile.parse(json.dumps(data | {"clock_steps": steps}))


def set_clocks(job: Job) -> dict[int, float]:
    """Those that are set, by rank; not those that are just being written."""
    files = [file for file in (job.run_dir / "clocks").glob("*") if file.name.isdecimal()]
    return {int(file.name): float(file.read_text()) for file in files}


def after_the_last(job: Job) -> list[int]:
    """Steps in the last layout for which clocks were planned before they began."""
    metrics, last = job.metrics(), job.events("clocks")[-1]
    steps = [step for step, line in metrics.items() if line["epoch"] == last["epoch"]]
    return [step for step in steps if lines(job, job.layouts()[-1].ranks[0])[step - 1]["time"] > last["time"]][2:]


def test_who_holds_up_the_others_runs_faster(jobs: Jobs, tmp_path: Path) -> None:
    """One cell does what two did: at three times the clock that takes no longer than before."""
    told = profile(0.5, 1.0, 1.5, 3.0)
    job = jobs.run(*GRID.flags, *emulate(tmp_path / "p.json", told), "--elastic-dvfs", "performance",
                   *inject("3@3:forward"), ranks=4)  # fmt: skip
    assert_same_training(job, jobs.undisturbed(*GRID.flags, ranks=4), [3])
    first, last, end = job.events("clocks")[0], job.events("clocks")[-1], job.layouts()[-1]
    assert set(first["clocks"].values()) == {3.0}, "nobody waits: all as fast as they can be"
    assert last["epoch"] == end.epoch and last["step_ms"] < last["base_ms"]
    work = loads(end, told.costs(end.units))
    bottleneck = max(work, key=lambda leader: work[leader].at(1.0))
    assert last["clocks"][str(bottleneck)] == 3.0
    steps = after_the_last(job)
    noted = [lines(job, bottleneck)[step - 1] for step in steps]
    assert {line["clock"] for line in noted} == {3.0}
    assert [line["busy_ms"] for line in noted] == pytest.approx([work[bottleneck].at(3.0)] * len(noted))
    clocks = {rank: last["clocks"].get(str(end.cell_of(rank).leader), 1.0) for rank in end.ranks}
    before, after = forecast(job.layouts()[0], told, "1f1b"), forecast(end, told, "1f1b", clocks)
    assert before.step_ms / after.step_ms >= 0.95 * 3 / 4, "of what three of four ranks can do at the base clock"
    assert after.step_ms == pytest.approx(last["step_ms"], rel=1e-3)
    assert min(line["ms"] for line in noted) > 0.95 * after.step_ms, "by this machine's time, which others use, too"
    assert set_clocks(job) == {}, "set back"


def test_who_waits_saves_energy(jobs: Jobs, tmp_path: Path) -> None:
    told = profile(0.5, 0.75, 1.0, 1.05)
    job = jobs.run(*GRID.flags, *emulate(tmp_path / "p.json", told), "--elastic-dvfs", "energy", "--elastic-policy",
                   "recycle", "--elastic-schedule", "split", *inject("3@3:forward"), ranks=4)  # fmt: skip
    last, end = job.events("clocks")[-1], job.layouts()[-1]
    assert last["step_ms"] <= last["base_ms"] and last["clocks"] == {"0": 0.75, "1": 0.75, "2": 1.05}
    work, power, scale = loads(end, told.costs(end.units)), told.power, told.emulation.time_scale
    clocks = {rank: last["clocks"][str(rank)] for rank in end.ranks}
    before, after = (forecast(end, told, "split", each) for each in ({}, clocks))
    assert after.step_ms <= before.step_ms and after.joules < 0.95 * before.joules
    for step in after_the_last(job):
        noted = {rank: lines(job, rank)[step - 1] for rank in end.ranks}
        # How long a step takes here, others decide, too: they would have waited as much longer at the base clock.
        busy = {rank: work[rank].at(1.0) for rank in noted}
        usual = sum(power.joules(busy[rank], each["ms"] - busy[rank], 1.0) for rank, each in noted.items())
        assert sum(each["joules"] for each in noted.values()) < usual / scale
        for rank, each in noted.items():
            assert each["busy_ms"] == pytest.approx(work[rank].at(clocks[rank]))
            drawn = power.joules(each["busy_ms"], each["ms"] - each["busy_ms"], clocks[rank])
            assert each["joules"] == pytest.approx(drawn / scale, rel=1e-3)
    assert set_clocks(job) == {}


def test_clocks_are_set_back_when_all_ranks_are_killed(jobs: Jobs, tmp_path: Path) -> None:
    """By the agent, which outlives them; and by whoever comes next, if that is killed, too."""
    env = {"TMPDIR": str(tmp_path)}
    flags = [*GRID.flags, *emulate(tmp_path / "p.json", profile(1.0, 1.5)), "--elastic-dvfs", "performance",
             "--train-iters", "500"]  # fmt: skip
    for and_the_agent in (False, True):
        job = jobs.start(*flags, env=env, ranks=4)
        job.read_until("ranks are up")
        while len(set_clocks(job)) < 4:
            os.sched_yield()
        if and_the_agent:
            os.kill(job.process.pid, signal.SIGKILL)
            job.finish(-signal.SIGKILL)
            assert set(set_clocks(job)) == set(range(4)), "nobody was there to set them back"
            said: list[str] = []
            restore_left_behind(said.append, tmp_path / f"megatron_elastic-clocks-{os.getuid()}")
            assert not said
        else:
            for pid in [job.pid(rank) for rank in range(4)]:
                os.kill(pid, signal.SIGKILL)
            job.finish(1)
        assert set_clocks(job) == {}


def test_what_cannot_be_set_is_one_warning(jobs: Jobs, tmp_path: Path) -> None:
    """Training goes on: ranks that share processors have no frequency of their own."""
    (tmp_path / "p.json").write_text(profile(1.0, 1.5).text)
    job = jobs.run("--elastic-profile", str(tmp_path / "p.json"), *Grid(tp=1, pp=2, steps=5, ranks=4).flags,
                   "--elastic-dvfs", "performance", "--elastic-actuator", "cpufreq", *inject("3@3:forward"), ranks=4)
    assert job.output.count("clocks stay as they are (cpufreq)") == 1
    (event,) = job.events("clocks_refused")
    assert event["node"] == 0 and "cpufreq" in event["reason"]


def test_bad_flags(jobs: Jobs, tmp_path: Path) -> None:
    bare = json.loads(profile(1.0, 1.5).text)
    del bare["power"], bare["emulation"]
    (tmp_path / "bare.json").write_text(json.dumps(bare))
    for code, flags, message in (
        (2, [], "--elastic-dvfs needs --elastic-profile FILE"),
        (2, ["--elastic-profile", str(tmp_path / "bare.json")], 'has no "power"'),
    ):
        job = jobs.start(*GRID.flags, "--elastic-dvfs", "energy", *flags, ranks=4)
        job.finish(code)
        assert message in job.output
