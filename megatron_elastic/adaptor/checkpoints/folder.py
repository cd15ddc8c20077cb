"""Folder: where a job's checkpoints are, as Megatron-LM lays them out.

``DIR/iter_0000010/`` holds a checkpoint and ``DIR/latest_checkpointed_iteration.txt`` names the newest complete one.
"""

from __future__ import annotations

import os
from pathlib import Path

TRACKER = "latest_checkpointed_iteration.txt"


def step_folder(folder: Path, iteration: int) -> Path:
    """Where the checkpoint of an iteration is."""
    return folder / f"iter_{iteration:07d}"


def mark_newest(folder: Path, iteration: int) -> None:
    """Let the tracker name a checkpoint that is complete. Replaced at once: it never names anything else."""
    partial = folder / f"{TRACKER}.partial"
    partial.write_text(str(iteration))
    os.replace(partial, folder / TRACKER)


def latest_step(directory: str | Path | None) -> int:
    """Steps done in the newest checkpoint under ``directory``; 0 without one to load."""
    tracker = None if directory is None else Path(directory) / TRACKER
    return int(tracker.read_text().strip()) if tracker is not None and tracker.is_file() else 0


def has_step(directory: str | Path, step: int) -> bool:
    """Whether there is a checkpoint of ``step`` steps under ``directory``."""
    return step_folder(Path(directory), step).is_dir()
