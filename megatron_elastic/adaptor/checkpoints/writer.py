"""Checkpoint writer: ranks write their checkpoint files themselves, in their own process.

Changes ``megatron.core.dist_checkpointing.strategies.filesystem_async`` (0.16.1), which forks two processes to write
and spawns a third to pass their answers. A forked copy of a rank holds its links and threads in an unknown state, the
spawned one runs the training script's imports again, and both need ``psutil`` or hang.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from typing import Any

from megatron_elastic.adaptor import targets


def apply() -> None:
    """Write in the rank's own process from now on. Idempotent."""
    targets.WRITE_ONE.find()
    targets.WRITE.replace(staticmethod(_write_here))
    targets.PROCESS_MEMORY.replace(_unknown)
    targets.RESULTS_QUEUE.replace(queue.Queue())


def write_files(buckets: Sequence[Any], transforms: Sequence[Any] = (), use_msc: bool = False) -> dict[int, list[Any]]:
    """Write a rank's files, one by one. Returns what was written, by file; raises what goes wrong."""
    write: Callable[..., None] = targets.WRITE_ONE.find()
    written: dict[int, list[Any]] = {}
    for index, bucket in enumerate(buckets):
        own: queue.Queue[Any] = queue.Queue()
        pending: queue.Queue[int] = queue.Queue()
        pending.put(index)
        write(list(transforms), index, bucket, own, pending, True, use_msc=use_msc)
        _, result = own.get()
        if isinstance(result, Exception):
            raise result
        written[index] = result
    return written


def _write_here(transforms: list[Any], use_msc: bool, rank: int, buckets: list[Any], answers: Any) -> None:
    """Write this rank's files; ``answers`` gets what was written, by file, or the exception."""
    try:
        answers.put(write_files(buckets, transforms, use_msc))
    except Exception as error:
        answers.put(error)


def _unknown() -> int:
    return 0
