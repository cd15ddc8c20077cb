"""Checkpoints that cannot be written, or not in time: training goes on, and the next one is tried."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_elastic.adaptor.checkpoints.owned import boxes
from tests.disks import fill, freezer, mounted
from tests.jobs import Grid, Job, Jobs, assert_same_training, inject
from tests.tiers.examples import examples

PP2_DP2 = Grid(tp=1, pp=2, steps=8, ranks=4)
LONG = Grid(tp=1, pp=2, steps=30, ranks=4)
SOON = ("--elastic-wait-timeout", "40", "--elastic-report-timeout", "20")
"""After a failure at the very end another try is made every five seconds."""
TRACKER = "latest_checkpointed_iteration.txt"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", 32 << 10) as disk:
        yield disk


def saving(folder: Path, every: int) -> tuple[str, ...]:
    return ("--save", str(folder), "--save-interval", str(every))


def steps(job: Job, kind: str) -> list[int]:
    return [event["step"] for event in job.events(kind)]


def test_everything_is_on_a_disk_that_fills(jobs: Jobs, small_disk: Path) -> None:
    """Run directory, checkpoints and data: training goes on while it is full, with a loss meanwhile, and after."""
    data = small_disk / "data"
    data.mkdir()
    for path in jobs.data.iterdir():
        if path.is_file():
            (data / path.name).write_bytes(path.read_bytes())
    folder = small_disk / "checkpoints"
    on_disk = Jobs(small_disk, data, jobs.nursery)
    job = on_disk.start(*LONG.flags, *saving(folder, 4), ranks=4)
    job.read_until(" 6/30")
    fill(small_disk / "filler")
    assert "No space left" in job.read_until("could not be written")
    job.kill(3)
    job.read_until("recovered from")
    job.read_until("could not be written")
    (small_disk / "filler").unlink()
    job.finish()
    assert_same_training(job, jobs.undisturbed(*LONG.flags, ranks=4), [3])
    saved, failed = steps(job, "saved"), steps(job, "save_failed")
    assert len(failed) >= 2
    assert saved[0] < failed[0] < failed[-1] < saved[-1]
    assert (folder / TRACKER).read_text() == str(saved[-1])
    assert {path.name for path in folder.iterdir()} == {TRACKER, *(f"iter_{step:07d}" for step in saved)}


@pytest.mark.parametrize("flags", [(), ("--async-save",)], ids=["sync", "async"])
def test_checkpoints_that_never_fit(jobs: Jobs, tmp_path: Path, flags: tuple[str, ...]) -> None:
    """Each is tried and given up, on all ranks, whatever else happens; the last one ends the job with an error, after
    some more tries.
    """
    with mounted(tmp_path / "disk", 200) as disk:
        job = jobs.start(*PP2_DP2.flags, *saving(disk, 2), *flags, *inject("3@5:backward"), *SOON, ranks=4)
        message = job.finish(1)
    assert f"--save {disk}: the last checkpoint, of step 8, could not be written" in message
    assert "it goes on from step 0" in message
    assert list(job.metrics()) == list(range(1, 9))
    assert {2, 4, 6, 8} <= set(steps(job, "save_failed"))
    assert steps(job, "saved") == []
    assert steps(job, "save_failed").count(8) == 9


def test_room_that_is_made_at_the_very_end(jobs: Jobs, small_disk: Path) -> None:
    """The job has nothing left to do but to write its last checkpoint, and waits until it can."""
    fill(small_disk / "filler")
    job = jobs.start(*PP2_DP2.flags, *saving(small_disk, 100), *SOON, ranks=4)
    job.read_until("could not be written")
    (small_disk / "filler").unlink()
    job.finish()
    assert_same_training(job, jobs.undisturbed(*PP2_DP2.flags, ranks=4))
    assert steps(job, "saved") == [8] and set(steps(job, "save_failed")) == {8}


def test_disks_that_are_full_and_slow_on_purpose(jobs: Jobs, tmp_path: Path) -> None:
    """Rank 1's, until it dies, and rank 2's for a moment."""
    disks = ("--elastic-inject", "disk:rank=1,step=3,at=data,what=full",
             "--elastic-inject", "disk:rank=2,step=7,at=data,what=slow,for=0.5")  # fmt: skip
    job = jobs.run(*PP2_DP2.flags, *saving(tmp_path, 2), *disks, *inject("1@5:backward"), ranks=4)
    assert_same_training(job, jobs.undisturbed(*PP2_DP2.flags, ranks=4), [1])
    assert "No space left on device (injected)" in job.output
    assert steps(job, "save_failed") == [4]
    assert steps(job, "saved")[0] == 2 and steps(job, "saved")[-1] == 8


def test_a_disk_that_stands_still_can_be_interrupted(jobs: Jobs, tmp_path: Path) -> None:
    """All wait for it; a rank that dies meanwhile is recovered from at once."""
    with freezer(tmp_path / "disk") as disk:
        job = jobs.start(*PP2_DP2.flags, *saving(disk.path, 4), ranks=4)
        job.read_until(" 1/8")
        disk.freeze()
        job.read_until(" 4/8")
        job.read_until("saving a checkpoint: 0 B of ")
        job.kill(3)
        job.read_until("epoch 1 begins")
        disk.thaw()
        job.finish()
        assert_same_training(job, jobs.undisturbed(*PP2_DP2.flags, ranks=4), [3])
        assert steps(job, "saved") == [4, 8]
        told = [(event["what"], event["done_bytes"]) for event in job.events("progress") if event["busy"]]
        assert told[0] == ("save", 0)


def test_a_disk_that_stands_still_stops_nobody(jobs: Jobs, tmp_path: Path) -> None:
    """With ``--async-save`` training goes on, also with a rank less, and what can be written later is."""
    with freezer(tmp_path / "disk") as disk:
        job = jobs.start(*LONG.flags, *saving(disk.path, 4), "--async-save", ranks=4)
        job.read_until(" 1/30")
        disk.freeze()
        assert "the checkpoint of step 4 is still being written" in job.read_until("still being written")
        job.kill(3)
        job.read_until("3 ranks")
        job.read_until("still being written")
        job.read_until("lost ranks [3] (hangs in the kernel)")
        job.read_until("recovered from the loss of ranks [3]")
        disk.thaw()
        job.finish()
        assert_same_training(job, jobs.undisturbed(*LONG.flags, ranks=4), [3])
        saved = steps(job, "saved")  # how many depends on how far it is when the disk goes on
        assert saved == sorted(set(saved))
        assert saved[0] < 12
        assert saved[-1] >= 28, "that of step 28 is begun when the one before is written"
        assert steps(job, "save_failed") == []


def test_all_cells_write(jobs: Jobs, tmp_path: Path) -> None:
    """Each rank of a stage writes what it owns, and that is about as much as the others do."""
    grid = Grid(tp=2, pp=1, steps=2)
    jobs.run(*grid.flags, *saving(tmp_path, 2), "--hidden-size", "128")
    sizes = [(tmp_path / "iter_0000002" / f"__{rank}_0.distcp").stat().st_size for rank in range(8)]
    assert max(sizes) < 1.5 * min(sizes), sizes


def test_a_folder_that_cannot_be(jobs: Jobs, tmp_path: Path) -> None:
    """Known before anything starts."""
    (tmp_path / "file").touch()
    job = jobs.start(*PP2_DP2.flags, *saving(tmp_path / "file" / "checkpoints", 2), ranks=4)
    assert f"--save {tmp_path}/file/checkpoints: Not a directory" in job.finish(2)
    assert not (job.run_dir / "metrics.jsonl").exists() or job.metrics() == {}


shapes = st.lists(st.integers(1, 6), max_size=3)


@settings(max_examples=examples(2000), deadline=None)
@given(shape=shapes, data=st.data())
def test_boxes_are_what_lies_between(shape: list[int], data: st.DataObject) -> None:
    size = math.prod(shape)
    low = data.draw(st.integers(0, size))
    high = data.draw(st.integers(low, size))
    found = list(boxes(shape, low, high))
    cells = [
        tuple(a + b for a, b in zip(offset, inside, strict=True))
        for offset, extent in found
        for inside in itertools.product(*map(range, extent))
    ]
    assert cells == list(itertools.product(*map(range, shape)))[low:high]
    assert len(found) <= max(1, 2 * len(shape) - 1)
