"""``--async-save``: training goes on while a checkpoint is written, and no fault leaves half a one behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs import Grid, Job, Jobs, assert_same_training, inject

PP2_DP2 = Grid(tp=1, pp=2, steps=8, ranks=4)
TRACKER = "latest_checkpointed_iteration.txt"


def run(jobs: Jobs, folder: Path, *flags: str, every: int = 3) -> Job:
    return jobs.run(*PP2_DP2.flags, *saving(folder, every), *flags, ranks=4)


def saving(folder: Path, every: int = 3) -> tuple[str, ...]:
    return ("--save", str(folder), "--save-interval", str(every), "--async-save")


def undisturbed(jobs: Jobs) -> Job:
    return jobs.undisturbed(*PP2_DP2.flags, ranks=4)


def saved(job: Job) -> list[int]:
    return [event["step"] for event in job.events("saved")]


def assert_complete(jobs: Jobs, folder: Path, *steps: int) -> None:
    """The folder holds these checkpoints and nothing else, and the first is that of its step, not of a later one."""
    names = {TRACKER, *(f"iter_{step:07d}" for step in steps)}
    assert {path.name for path in folder.iterdir()} == names
    assert (folder / TRACKER).read_text() == str(steps[-1])
    (folder / TRACKER).write_text(str(steps[0]))
    loaded = jobs.run(*PP2_DP2.flags, "--load", str(folder), ranks=4)
    expected = undisturbed(jobs).metrics()
    assert [line["loss_hex"] for line in loaded.metrics().values()] == [
        expected[step]["loss_hex"] for step in range(steps[0] + 1, PP2_DP2.steps + 1)
    ]


def test_training_goes_on(jobs: Jobs, tmp_path: Path) -> None:
    """What is written is the state of the step, whatever the steps after it do; what is begun is ended at the end."""
    job = run(jobs, tmp_path, every=4)
    assert_same_training(job, undisturbed(jobs))
    assert saved(job) == [4, 8]
    assert_complete(jobs, tmp_path, 4, 8)


@pytest.mark.parametrize(("fault", "again"), [("3@4:backward", 3), ("0@4:commit", 4)], ids=["back", "forward"])
def test_a_fault_while_it_is_written(jobs: Jobs, tmp_path: Path, fault: str, again: int) -> None:
    """It was not complete before the end of step 4: begun again at once, and of the step that is done by then."""
    job = run(jobs, tmp_path, *inject(fault))
    assert_same_training(job, undisturbed(jobs), [int(fault[0])])
    assert saved(job) == [again, 6, 8]
    assert_complete(jobs, tmp_path, again, 6, 8)


def test_a_fault_while_it_is_begun(jobs: Jobs, tmp_path: Path) -> None:
    job = run(jobs, tmp_path, *inject("1@4:checkpoint"))
    assert_same_training(job, undisturbed(jobs), [1])
    assert saved(job) == [3, 6, 8]


def test_state_that_is_lost_meanwhile(jobs: Jobs, tmp_path: Path) -> None:
    """The fallback is to a checkpoint that is complete, not to the one that is being written."""
    job = run(jobs, tmp_path, "--elastic-replicas", "0", *inject("3@7:backward"))
    assert_same_training(job, undisturbed(jobs), [3])
    (event,) = job.events("fallback")
    assert (event["step"], event["lost_steps"]) == (3, [4, 5, 6])
    assert saved(job) == [3, 6, 8]


def test_a_job_that_ends_meanwhile(jobs: Jobs, tmp_path: Path) -> None:
    """The tracker names the checkpoint before; what was begun has no name that anything would load."""
    flags = (*PP2_DP2.flags, *saving(tmp_path), "--elastic-on-error", "stop")
    job = jobs.start(*flags, "--elastic-inject", "raise:rank=1,step=7,at=forward", ranks=4)
    job.finish(1)
    assert (tmp_path / TRACKER).read_text() == "3"
    assert not (tmp_path / "iter_0000006").exists()
    again = jobs.run(*flags, "--load", str(tmp_path), ranks=4)
    assert list(again.metrics()) == [4, 5, 6, 7, 8]
    assert {path.name for path in tmp_path.iterdir()} == {TRACKER, "iter_0000003", "iter_0000006", "iter_0000008"}


def test_a_rank_joins_meanwhile(jobs: Jobs, tmp_path: Path) -> None:
    """Who begins a checkpoint completes it: before the layout changes."""
    grid = Grid(tp=1, pp=2, steps=40, ranks=4)
    flags = (*saving(tmp_path, every=1), "--elastic-respawn", *inject("3@2:backward"))
    job = jobs.run(*grid.flags, *flags, ranks=4)
    assert_same_training(job, jobs.undisturbed(*grid.flags, ranks=4), [3])
    assert len(job.layouts()[-1].ranks) == 4
    steps = saved(job)
    assert steps == sorted(set(steps)) and steps[-1] == 40
    assert (tmp_path / TRACKER).read_text() == "40"
