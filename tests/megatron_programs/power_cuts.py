"""Saves checkpoints, and looks at what a power cut would have left at every moment: ``power_cuts.py FOLDER``.

Ways to lose: only what was synced is there, or that and the tracker; names are as they were last, and what was not
synced is empty; everything is there (the process was killed).

Prints how many moments there were, and how many starts would not have found the newest checkpoint that was complete, or
one of its files not whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_elastic.device import stand_in

stand_in.install()

# ruff: noqa: E402 - Megatron comes after that.
from megatron.core.dist_checkpointing import ShardedTensor

from megatron_elastic.adaptor.checkpoints import writer
from megatron_elastic.adaptor.checkpoints.draft import Draft
from megatron_elastic.adaptor.checkpoints.folder import TRACKER, newest, step_folder
from megatron_elastic.adaptor.checkpoints.saving import Saving
from megatron_elastic.faults.odometer import Odometer

Place = tuple[int, int]
"""Device and inode."""


class Disk:
    """What of a folder has been synced, by the calls that this process makes."""

    def __init__(self, root: Path, look: Callable[[Disk], None]) -> None:
        self.root = root
        self._look = look
        self._contents: dict[Place, bytes] = {}
        self._names: dict[Place, dict[str, Place]] = {}
        self._held: list[int] = []
        """Descriptors, so that no inode is used again."""
        for name in ("fsync", "rename", "replace", "unlink", "rmdir", "mkdir"):
            setattr(os, name, self._watched(getattr(os, name), self._synced if name == "fsync" else None))

    def _watched(self, call: Callable[..., Any], note: Callable[[int], None] | None) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            self._look(self)
            result = call(*args, **kwargs)
            if note is not None:
                note(args[0])
            self._look(self)
            return result

        return watched

    def _synced(self, descriptor: int) -> None:
        self._held.append(os.dup(descriptor))
        status, path = os.fstat(descriptor), Path(f"/proc/self/fd/{descriptor}").readlink()
        if path.is_dir():
            self._names[status.st_dev, status.st_ino] = {each.name: _place(each) for each in path.iterdir()}
        else:
            self._contents[status.st_dev, status.st_ino] = path.read_bytes()

    def synced(self, target: Path) -> None:
        """What is left if all else is lost."""
        self._restore(_place(self.root), target)

    def _restore(self, place: Place, target: Path) -> None:
        if place in self._contents:
            target.write_bytes(self._contents[place])
            return
        target.mkdir()
        for name, each in self._names.get(place, {}).items():
            if each in self._contents or each in self._names:
                self._restore(each, target / name)
            else:
                (target / name).touch()

    def tracked(self, target: Path) -> None:
        """The same if names are not written in their order: the tracker's is the first."""
        self.synced(target)
        tracker = self.root / TRACKER
        if tracker.exists():
            (target / TRACKER).write_bytes(self._contents.get(_place(tracker), b""))

    def named(self, target: Path) -> None:
        """What is left if names were written in time, and contents only when they were synced."""
        for path in (self.root, *sorted(self.root.rglob("*"))):
            copy = target / path.relative_to(self.root)
            if path.is_dir():
                copy.mkdir()
            else:
                copy.write_bytes(self._contents.get(_place(path), b""))

    def all(self, target: Path) -> None:
        """What is left if nothing is lost."""
        shutil.copytree(self.root, target)


def _place(path: Path) -> Place:
    status = path.stat()
    return status.st_dev, status.st_ino


class Starts:
    """Starts at every moment from what is left."""

    def __init__(self, folder: Path) -> None:
        self.moments = 0
        self.whole: set[tuple[int, str]] = set()
        """Step and digest of each checkpoint that was complete once."""
        self.certain: int | None = None
        """Step of the one that the job has said to be complete last."""
        self.coming = 0
        """The step that is being saved, or gone back to."""
        self._folder = folder
        self._busy = False
        self._loaded: list[tuple[str, int, str]] = []
        self._wrong: list[str] = []

    def look(self, disk: Disk) -> None:
        if self._busy:
            return
        self._busy = True
        self.moments += 1
        for left in (disk.synced, disk.tracked, disk.named, disk.all):
            target = self._folder / "left"
            left(target)
            self._start(target, left.__name__)
            shutil.rmtree(target)
        self._busy = False

    def _start(self, left: Path, how: str) -> None:
        step = newest(left)
        if step is not None:
            self._loaded.append((how, step, digest(step_folder(left, step))))
        if step not in (self.certain, self.coming):
            self._wrong.append(f"{how}: checkpoint {step} while {self.coming} comes after {self.certain}")

    def wrong(self) -> list[str]:
        """What was not as it must be."""
        return self._wrong + [f"{how}: checkpoint {step} is not whole"
                              for how, step, found in self._loaded if (step, found) not in self.whole]


def digest(folder: Path) -> str:
    """Of all files of a checkpoint."""
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()


def main(folder: Path) -> None:
    root = folder / "checkpoints"
    root.mkdir(parents=True)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    writer.apply()
    starts = Starts(folder)
    disk = Disk(root, starts.look)
    saving = Saving(root, 1, None, 0, 0, 60.0, Odometer.alone(), lambda: None)

    def prepare(value: float) -> Callable[[Path], Draft]:
        tensor = torch.full((3000,), value)
        state = {"w": ShardedTensor.from_rank_offsets("w", tensor), "iteration": int(value)}
        return lambda partial: Draft(partial, state)

    def save(step: int, epoch: int, value: float) -> None:
        starts.coming = step
        saving.begin(step, epoch, prepare(value))
        assert saving.complete() == (step, None)
        starts.certain = step
        starts.whole.add((step, digest(step_folder(root, step))))
        starts.look(disk)

    for step in (1, 2, 3):
        save(step, 0, float(step))
    starts.coming = 1
    saving.abandon(1)
    saving.go_back(1)
    starts.certain = 1
    starts.look(disk)
    for step in (2, 3):
        save(step, 1, 10.0 + step)
    assert (root / TRACKER).read_text() == "3"
    wrong = starts.wrong()
    print(json.dumps({"moments": starts.moments, "wrong": len(wrong), "first": wrong[:3]}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
