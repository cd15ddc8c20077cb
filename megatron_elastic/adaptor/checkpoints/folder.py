"""Folder: where a job's checkpoints are, as Megatron-LM lays them out.

``DIR/iter_0000010/`` holds a checkpoint and ``DIR/latest_checkpointed_iteration.txt`` names the newest complete one.

A power cut takes what was not synced, names of files included. So a checkpoint is synced before it gets its name, and
its name before the tracker says it: at every moment the tracker on disk names a complete one.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from megatron_elastic.config import UsageError

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
"""What the tracker says, and the checkpoint is called, where a model was converted: it has no number."""
COMPLETE = "metadata.json"
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
    if not wanted():  # before it takes the place of one that is as good
        raise OSError(f"{target} is late")
    old = target.with_name(f"{target.name}.partial-old")
    if target.exists():
        os.rename(target, old)
    os.rename(partial, target)
    _sync(folder)
    if not wanted():
        raise OSError(f"{target} is late")
    before = _before(folder) if retain else None
    mark_newest(folder, iteration)
    shutil.rmtree(old, ignore_errors=True)
    if retain and before and before != iteration and before % retain:
        shutil.rmtree(step_folder(folder, before), ignore_errors=True)  # which leaves links alone, as Megatron does


def _before(folder: Path) -> int | None:
    """The newest so far; None, too, if somebody else has written into the tracker what is no number."""
    try:
        return newest(folder)
    except ValueError:
        return None


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
    """Steps done in the newest complete checkpoint; None without one, and 0 in one that was converted (``RELEASE``).

    It is the one that the tracker names. Without a tracker, or with an empty one, some program was cut off before it
    had written that: then it is the newest that is complete. Raises ValueError if the tracker holds anything else.
    """
    text = _tracked(folder)
    if text:
        return 0 if text == RELEASE else int(text)
    return max(whole_steps(folder), default=None)


def newest_folder(folder: Path) -> Path | None:
    """Where the newest complete checkpoint is; None without one. Raises UsageError for a tracker that names none."""
    try:
        step = newest(folder)
    except ValueError:
        raise UsageError(
            f"{folder / TRACKER} says {_tracked(folder)!r}: it should hold the number of a checkpoint, or "
            f"{RELEASE}; write that of one that is there into it"
        ) from None
    if step is None:
        return None
    return folder / RELEASE if is_release(folder) else step_folder(folder, step)


def older(folder: Path) -> str:
    """What to do if a checkpoint cannot be used: with which one training could go on instead."""
    steps = [step for step in whole_steps(folder.parent) if step_folder(folder.parent, step).name < folder.name]
    if not steps:
        return "there is no older one beside it"
    return f"to go on from the one before, write {steps[-1]} into {folder.parent / TRACKER}"


def is_release(folder: Path) -> bool:
    """Whether the tracker names a checkpoint that was converted from something else, and so has weights alone."""
    return _tracked(folder) == RELEASE


def whole_steps(folder: Path) -> list[int]:
    """Steps of the checkpoints in a folder that are complete, by their names, whatever the tracker says."""
    names = [re.fullmatch(r"iter_(\d{7,})", path.parent.name) for path in folder.glob(f"iter_*/{COMPLETE}")]
    return sorted(int(name[1]) for name in names if name is not None)


def _tracked(folder: Path) -> str:
    tracker = folder / TRACKER
    return tracker.read_text().strip() if tracker.is_file() else ""


def has_step(directory: str | Path, step: int) -> bool:
    """Whether there is a complete checkpoint of ``step`` steps under ``directory``."""
    return (step_folder(Path(directory), step) / COMPLETE).is_file()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
