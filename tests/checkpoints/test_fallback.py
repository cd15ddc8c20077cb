"""State that dies with its owner and all replicas: everybody goes back to the newest checkpoint, without a restart."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.jobs import Grid, Job, Jobs, assert_exactly_once, assert_same_training, inject

DP4 = Grid(tp=1, pp=1, steps=8, ranks=4)
SMALL = ("--num-layers", "2", "--micro-batch-size", "2")
BOTH = ("1@6:vote", "2@6:vote")
"""Rank 1 owns slices whose only replicas rank 2 holds."""


def run(jobs: Jobs, *flags: str) -> Job:
    return jobs.run(*DP4.flags, *SMALL, *flags, ranks=4)


def undisturbed(jobs: Jobs) -> Job:
    return jobs.undisturbed(*DP4.flags, *SMALL, ranks=4)


def saving(folder: Path, every: int = 2) -> tuple[str, ...]:
    return ("--save", str(folder), "--save-interval", str(every))


def test_owner_and_replica_die(jobs: Jobs, tmp_path: Path) -> None:
    """What the steps since the checkpoint had done is done again, and the numbers are the same."""
    job = run(jobs, *saving(tmp_path / "saved"), *inject(*BOTH))
    assert_same_training(job, undisturbed(jobs), [1, 2])
    (event,) = job.events("fallback")
    assert (event["step"], event["lost_steps"]) == (4, [5])
    assert "is held by no live rank" in event["reason"]
    assert "WARNING" in job.output
    assert [event["decision"] for event in job.events("recovered")] == ["reload"]
    assert [event["step"] for event in job.events("saved")] == [2, 4, 6, 8]
    assert len(job.events("started")) == 1


def test_another_dies_while_they_go_back(jobs: Jobs, tmp_path: Path) -> None:
    job = run(jobs, *saving(tmp_path / "saved"), *inject(*BOTH, "0@reload"))
    assert_same_training(job, undisturbed(jobs), [0, 1, 2])
    (event,) = job.events("fallback")
    assert (event["step"], event["lost_steps"]) == (4, [5])
    assert job.layouts()[-1].ranks == (3,)


def test_back_to_the_checkpoint_that_was_loaded(jobs: Jobs, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    run(jobs, *saving(folder, 4))
    (folder / "latest_checkpointed_iteration.txt").write_text("4")
    job = run(jobs, "--load", str(folder), *inject(*BOTH))
    assert_exactly_once(job, 5)
    assert [event["step"] for event in job.events("fallback")] == [4]
    expected = undisturbed(jobs).metrics()
    for step, line in job.metrics().items():
        assert line["loss_hex"] == expected[step]["loss_hex"]


def test_without_replicas_every_loss_goes_back(jobs: Jobs, tmp_path: Path) -> None:
    job = run(jobs, "--elastic-replicas", "0", *saving(tmp_path / "saved"), *inject("3@4:backward", "0@7:apply"))
    assert_same_training(job, undisturbed(jobs), [0, 3])
    first, second = job.events("fallback")
    assert (first["step"], first["lost_steps"]) == (2, [3])
    assert (second["step"], second["lost_steps"]) in ((6, []), (6, [7]))  # if anybody knew that step 7 was voted


@pytest.mark.parametrize("pair", [(1, 2), (0, 3)], ids=str)
def test_with_two_replicas_any_two_may_die(jobs: Jobs, pair: tuple[int, int]) -> None:
    job = run(jobs, "--elastic-replicas", "2", *inject(*(f"{rank}@4:vote" for rank in pair)))
    assert_same_training(job, undisturbed(jobs), pair)
    assert job.events("fallback") == []


def test_an_owner_and_its_replica_die_while_a_newcomer_follows(jobs: Jobs, tmp_path: Path) -> None:
    """If the newcomer's copies are not live yet all four go back, it too; in any case all are replaced."""
    grid = Grid(tp=1, pp=1, steps=60, ranks=4)
    flags = ("--elastic-respawn", *saving(tmp_path / "saved", 6), *inject("1@8:backward"))
    job = jobs.start(*grid.flags, *SMALL, *flags, ranks=4)
    job.read_until("follow from step")
    layout = job.layouts()[-1]
    copies = ({layout.owners[u][k], *layout.replicas[u][k]} - {4} for u in range(len(layout.units)) for k in range(4))
    victims = next(leaders for leaders in copies if len(leaders) == 2)
    for rank in victims:
        os.kill(job.pid(rank), signal.SIGKILL)
    job.read_until("slices and grains are even over 4 ranks")
    job.finish()
    assert_same_training(job, jobs.undisturbed(*grid.flags, *SMALL, ranks=4), [1, *victims])
    assert len(job.layouts()[-1].ranks) == 4
