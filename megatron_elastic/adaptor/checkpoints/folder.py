"""Folder: where a job's checkpoints are, as Megatron-LM lays them out.

``DIR/iter_0000010/`` holds a checkpoint and ``DIR/latest_checkpointed_iteration.txt`` names the newest complete one.

A power cut takes what was not synced, names of files included. So a checkpoint is synced before it gets its name, and
its name before the tracker says it: at every moment the tracker on disk names a complete one.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron_elastic.config import UsageError

TRACKER = "latest_checkpointed_iteration.txt"
_COMPLETE = "metadata.json"
"""Megatron writes it last."""


def step_folder(folder: Path, iteration: int) -> Path:
    """Where the checkpoint of an iteration is."""
    return folder / f"iter_{iteration:07d}"


def publish(partial: Path, iteration: int, wanted: Callable[[], bool], retain: int | None = None) -> None:
    """Give a complete checkpoint its name, in the folder where it lies, and let the tracker name it.

    One of that name was written before the job went back to an older one. With ``retain`` the newest so far is deleted,
    unless its iteration is a multiple of that. Raises OSError if the disk has taken so long that it is not ``wanted``
    as the newest any more.
    """
    folder = partial.parent
    sync(partial)
    target = step_folder(folder, iteration)
    old = target.with_name(f"{target.name}.partial-old")
    if target.exists():
        os.rename(target, old)
    os.rename(partial, target)
    _sync(folder)
    if not wanted():
        raise OSError(f"{target} is late")
    before = newest(folder) if retain else None
    mark_newest(folder, iteration)
    shutil.rmtree(old, ignore_errors=True)
    if retain and before and before != iteration and before % retain:
        shutil.rmtree(step_folder(folder, before), ignore_errors=True)  # which leaves links alone, as Megatron does


def sync(folder: Path) -> None:
    """Let all that is in a folder outlive a power cut. Its own name is another folder's matter."""
    for path in (*folder.rglob("*"), folder):
        _sync(path)


def mark_newest(folder: Path, iteration: int) -> None:
    """Let the tracker name a checkpoint that is complete. Replaced at once: it never names anything else."""
    partial = folder / f"{TRACKER}.partial"
    partial.write_text(str(iteration))
    _sync(partial)
    os.replace(partial, folder / TRACKER)
    _sync(folder)


def newest(folder: Path) -> int | None:
    """Steps done in the newest complete checkpoint; None without one.

    It is the one that the tracker names. Without a tracker, or with an empty one, some program was cut off before it
    had written that: then it is the newest that is complete. Raises ValueError if the tracker holds anything else.
    """
    tracker = folder / TRACKER
    text = tracker.read_text().strip() if tracker.is_file() else ""
    if text:
        return int(text)
    names = [re.fullmatch(r"iter_(\d{7,})", path.parent.name) for path in folder.glob(f"iter_*/{_COMPLETE}")]
    return max((int(name[1]) for name in names if name is not None), default=None)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a job's first weights come from.

    Attributes:
        directory: of a checkpoint; None: they are drawn.
        step: the checkpoint's; 0 without one.
        anew: nothing else is taken from it: training begins with its first step, and fresh optimizer states.
    """

    directory: str | None
    step: int
    anew: bool

    @property
    def done(self) -> int:
        """Steps that the job has behind it when it begins."""
        return 0 if self.anew else self.step

    @classmethod
    def of(cls, args: argparse.Namespace) -> Origin:
        """As Megatron's flags say: ``--load``, ``--ckpt-step``, ``--finetune``, ``--pretrained-checkpoint``.

        Raises UsageError if a checkpoint that is named is not there.
        """
        wanted, pretrained = getattr(args, "ckpt_step", None), getattr(args, "pretrained_checkpoint", None)
        step = wanted or latest_step(args.load)
        if args.load and wanted and not has_step(args.load, wanted):
            raise UsageError(f"--ckpt-step {wanted}: there is no {step_folder(Path(args.load), wanted)}, or it is not "
                             "complete; give the number of another one, or leave it out for the newest")
        if args.load and step:
            return cls(args.load, step, bool(getattr(args, "finetune", False)))
        if not pretrained:
            return cls(None, 0, False)
        if not latest_step(pretrained):
            raise UsageError(f"--pretrained-checkpoint {pretrained}: there is no checkpoint")
        return cls(pretrained, latest_step(pretrained), True)


def latest_step(directory: str | Path | None) -> int:
    """Steps done in the newest checkpoint under ``directory``; 0 without one to load."""
    return (newest(Path(directory)) or 0) if directory is not None else 0


def has_step(directory: str | Path, step: int) -> bool:
    """Whether there is a complete checkpoint of ``step`` steps under ``directory``."""
    return (step_folder(Path(directory), step) / _COMPLETE).is_file()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
