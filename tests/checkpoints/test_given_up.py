"""A checkpoint that was given up, because a disk does not answer, does not come back when that answers again."""

from __future__ import annotations

import itertools
import mmap
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_elastic.adaptor.checkpoints import saving
from megatron_elastic.adaptor.checkpoints.folder import newest, whole_steps
from megatron_elastic.faults.odometer import Odometer


class Stuck:
    """A part of one file. While ``answers`` is not set the disk keeps waiting who does what ``at`` says."""

    def __init__(self, folder: Path, at: str, answers: threading.Event) -> None:
        self.folder, self.at, self.answers, self.size = folder, at, answers, 0

    def write(self, finished: Callable[[int], None]) -> list[Any]:
        self._meet("write")
        self.folder.mkdir(exist_ok=True)
        return []

    def complete(self, written: Any) -> None:
        self._meet("complete")
        (self.folder / "metadata.json").write_text("{}")

    def _meet(self, what: str) -> None:
        if self.at == what:
            assert self.answers.wait(60)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank, which has nobody to exchange anything with."""

    def gather(mine: Any, told: list[Any] | None) -> None:
        assert told is not None
        told[0] = mine

    monkeypatch.setattr(saving, "dist", SimpleNamespace(
        get_rank=lambda: 0, get_world_size=lambda: 1, broadcast_object_list=lambda objects: None,
        gather_object=gather))  # fmt: skip


@pytest.mark.parametrize("at", ["write", "complete"])
def test_it_is_not_published_later(
    alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """Another one is newer by then, and a disk that answers late must not take it away either."""
    answers, none, now = threading.Event(), threading.Event(), itertools.count()
    none.set()
    first: saving.Outcome | None = None
    # Time goes on with each look, as long as the first one is waited for.
    monkeypatch.setattr(saving, "time", SimpleNamespace(monotonic=lambda: 0 if first else next(now)))
    job = saving.Saving(tmp_path, 1, None, 0, 0, 10, Odometer.alone(), lambda: None)

    def prepare(at: str, answers: threading.Event) -> Callable[[Path], Any]:
        return lambda folder: Stuck(folder, at, answers)

    job.begin(1, 0, prepare(at, answers))
    first = job.complete()
    assert first is not None and first.problem is not None and "does not answer" in first.problem
    job.begin(2, 0, prepare("", none))
    assert job.complete() == saving.Outcome(2, None)
    answers.set()
    for thread in threading.enumerate():
        if thread.name == "checkpoint":
            thread.join(60)
    assert newest(tmp_path) == 2
    assert whole_steps(tmp_path) == [2]
    assert [path.name for path in tmp_path.glob("*.partial*")] == []


def test_none_is_given_up_before_the_first_step(tmp_path: Path) -> None:
    """A job that has nothing to train has nothing to save, either."""
    for directory in (None, tmp_path):
        kept = saving.Saving(directory, 1, None, 0, 0, 60.0, Odometer(mmap.mmap(-1, 4096), 0), lambda: None)
        assert not kept.gave_up(0)
        kept.failed = 3
        assert kept.gave_up(3) and not kept.gave_up(0)
