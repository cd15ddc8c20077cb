"""Checkpoint writer: ranks write their checkpoint files themselves, in their own process.

Changes ``megatron.core.dist_checkpointing.strategies.filesystem_async`` (0.16.1), which forks two processes to write
and spawns a third to pass their answers. A forked copy of a rank holds its links and threads in an unknown state, the
spawned one runs the training script's imports again, and both need ``psutil`` or hang.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megatron_elastic.adaptor import targets


def apply() -> None:
    """Write in the rank's own process from now on. Idempotent."""
    targets.WRITE_ONE.find()
    targets.WRITE.replace(staticmethod(_write_here))
    targets.PROCESS_MEMORY.replace(_unknown)
    targets.RESULTS_QUEUE.replace(queue.Queue())


def size_of(buckets: Sequence[Any]) -> int:
    """Bytes of the tensors that go into a rank's files."""
    return sum(tensor.nbytes for _, _, (_, tensors) in buckets for _, tensor in tensors)


def write_files(
    buckets: Sequence[Any], transforms: Sequence[Any] = (), use_msc: bool = False,
    finished: Callable[[int], None] = lambda size: None,
) -> dict[int, list[Any]]:  # fmt: skip
    """Write a rank's files, one by one. Returns what was written, by file; raises what goes wrong.

    ``finished``: is told the bytes of each tensor that is written.
    """
    write: Callable[..., None] = targets.WRITE_ONE.find()
    written: dict[int, list[Any]] = {}
    for index, (name, key, (others, tensors)) in enumerate(buckets):
        own: queue.Queue[Any] = queue.Queue()
        pending: queue.Queue[int] = queue.Queue()
        pending.put(index)
        bucket = name, key, (others, _counted(tensors, finished))
        write(list(transforms), index, bucket, own, pending, True, use_msc=use_msc)
        _, result = own.get()
        if isinstance(result, Exception):
            raise result
        written[index] = result
    return written


def _counted(tensors: Sequence[tuple[Any, Any]], finished: Callable[[int], None]) -> Iterator[tuple[Any, Any]]:
    """What Megatron goes through once, writing one after the other."""
    for item, tensor in tensors:
        yield item, tensor
        finished(tensor.nbytes)


def _write_here(transforms: list[Any], use_msc: bool, rank: int, buckets: list[Any], answers: Any) -> None:
    """Write this rank's files; ``answers`` gets what was written, by file, or the exception."""
    try:
        answers.put(write_files(buckets, transforms, use_msc))
    except Exception as error:
        answers.put(error)


def _unknown() -> int:
    return 0
