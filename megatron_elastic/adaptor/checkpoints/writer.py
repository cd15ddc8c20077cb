"""Checkpoint writer: ranks write their checkpoint files themselves, in their own process.

Changes ``megatron.core.dist_checkpointing.strategies.filesystem_async`` (0.16.1), which forks two processes to write
and spawns a third to pass their answers. A forked copy of a rank holds its links and threads in an unknown state, the
spawned one runs the training script's imports again, and both need ``psutil`` or hang. Where training goes on meanwhile
a thread writes (``adaptor.checkpoints.saving``).
"""

from __future__ import annotations

import queue
from typing import Any

from megatron_elastic.adaptor import targets


def apply() -> None:
    """Write in the rank's own process from now on. Idempotent."""
    targets.WRITE_ONE.find()
    targets.WRITE.replace(staticmethod(_write_here))
    targets.PROCESS_MEMORY.replace(_unknown)
    targets.RESULTS_QUEUE.replace(queue.Queue())


def _write_here(transforms: list[Any], use_msc: bool, rank: int, buckets: list[Any], answers: Any) -> None:
    """Write this rank's files one by one; ``answers`` gets what was written, by file, or the exception."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    written: dict[int, Any] = {}
    for index, bucket in enumerate(buckets):
        own: queue.Queue[Any] = queue.Queue()
        pending: queue.Queue[int] = queue.Queue()
        pending.put(index)
        FileSystemWriterAsync.write_preloaded_data(transforms, index, bucket, own, pending, True, use_msc=use_msc)
        _, result = own.get()
        if isinstance(result, Exception):
            answers.put(result)
            return
        written[index] = result
    answers.put(written)


def _unknown() -> int:
    return 0
