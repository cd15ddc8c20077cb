"""Saving: which checkpoint is due, and writing it, between two steps or while training goes on (``--async-save``).

A checkpoint is written in three parts, as Megatron's asynchronous one is: all ranks plan it between two steps, each
writes its files on its own, and all meet between two steps once more to complete it. With ``--async-save`` the second
part is a thread's, and steps are done meanwhile.

Until it is complete a checkpoint is in a folder of another name, made for the layout it was begun under. Ranks that
a fault has put out of that layout may still be writing there; they do not meet those who begin again.
"""

from __future__ import annotations

import queue
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from torch.distributed.checkpoint.api import CheckpointException

from megatron_elastic.adaptor import targets
from megatron_elastic.adaptor.checkpoints.folder import has_step, mark_newest, publish, step_folder
from megatron_elastic.config import UsageError

Prepare = Callable[[Path], AsyncRequest]
"""Plans a checkpoint in a folder, on all ranks of the layout."""


class Saving:
    """The checkpoints of a job, as one rank sees them.

    Args:
        directory: where they go; None if the job saves none.
        interval: steps from one to the next; None or 0 for none but those that are asked for.
        background: whether they are written while training goes on.
        first: the first step whose checkpoint is not on disk yet.
        check: raises if a wait must end.
    """

    def __init__(
        self, directory: str | Path | None, interval: int | None, background: bool, first: int,
        check: Callable[[], None],
    ) -> None:  # fmt: skip
        self._directory = None if directory is None else Path(directory)
        self._interval = interval
        self._background = background
        self._check = check
        self._begun: _Write | None = None
        self.first = first
        """The first step whose checkpoint is not on disk yet."""
        self.certain = first - 1
        """Step of the newest checkpoint of which this rank knows that it has its name; 0 without one."""

    def due(self, done: int) -> bool:
        """Whether a checkpoint is to be begun after ``done`` steps: now, or since one that was lost to a fault."""
        if self._directory is None or not self._interval:
            return False
        step = done - done % self._interval
        return step >= self.first and (self._begun is None or self._begun.step < step)

    def wanted(self, done: int) -> bool:
        """Whether the job saves at all and has not saved the state after ``done`` steps."""
        return self._directory is not None and done >= self.first

    def begin(self, step: int, epoch: int, prepare: Prepare) -> None:
        """Begin the checkpoint of ``step`` steps. Every rank of the layout of ``epoch`` calls it; none may be begun."""
        assert self._begun is None and self._directory is not None
        name = step_folder(self._directory, step).name
        partial = self._directory / f"{name}.partial-{epoch}"
        if dist.get_rank() == 0:
            for left in self._directory.glob("iter_*.partial-*"):
                shutil.rmtree(left, ignore_errors=True)
            partial.mkdir(parents=True)
        dist.barrier()
        # The one there was may yet get the answer of a write that a fault has made pointless.
        targets.RESULTS_QUEUE.replace(queue.Queue())
        self._begun = _Write(step, partial, prepare(partial))
        if self._background:
            self._begun.start()

    def written(self) -> bool:
        """Whether a checkpoint is begun, and all ranks have written their parts. Asked of all ranks of the layout."""
        if self._begun is None:
            return False
        answer = torch.tensor([int(self._begun.done.is_set())])
        dist.all_reduce(answer, dist.ReduceOp.MIN)
        return bool(answer.item())

    def complete(self) -> int | None:
        """Wait until what is begun is written, and complete it. Every rank of the layout calls it.

        Returns the step, or None if nothing is begun. Raises UsageError if a part could not be written.
        """
        write = self._begun
        if write is None:
            return None
        if not self._background:
            write.run()
        while not write.done.wait(0.02):
            self._check()
        dist.barrier()
        write.finish()
        if dist.get_rank() == 0:
            publish(write.partial, write.step)
        self._begun, self.first = None, write.step + 1
        return write.step

    def go_back(self, step: int) -> None:
        """The job goes on from the checkpoint of ``step`` steps: later ones are not what it was trained to any more."""
        if self._directory is not None and dist.get_rank() == 0 and has_step(self._directory, step):
            mark_newest(self._directory, step)

    def voted(self) -> None:
        """All ranks have voted: the first one, too, has done with what is complete, and was not lost before."""
        self.certain = self.first - 1

    def abandon(self, saved: int) -> None:
        """A fault: the newest complete checkpoint is that of step ``saved``. What was being written is forgotten."""
        self._begun, self.first, self.certain = None, saved + 1, min(self.certain, saved)


class _Write:
    """One checkpoint on its way to disk."""

    def __init__(self, step: int, partial: Path, request: AsyncRequest) -> None:
        self.step = step
        self.partial = partial
        """Where it is until it is complete."""
        self.done = threading.Event()
        """This rank's part is written, or it is known that it cannot be."""
        self._request = request
        self._arguments = list(request.async_fn_args)
        if request.preload_fn is not None:
            self._arguments[1] = request.preload_fn()

    def start(self) -> None:
        """Write this rank's part in the background."""
        threading.Thread(target=self.run, name=f"checkpoint {self.step}", daemon=True).start()

    def run(self) -> None:
        """Write this rank's part. What goes wrong is told by ``finish``."""
        try:
            if self._request.async_fn is not None:
                self._request.async_fn(*self._arguments, **self._request.async_fn_kwargs)
        finally:
            self.done.set()

    def finish(self) -> None:
        """Write the checkpoint's index, of what all ranks have written. Raises UsageError if one could not."""
        try:
            for finalize in self._request.finalize_fns:
                finalize()
        except CheckpointException as error:  # no Exception, and its text is a traceback for each rank
            if not error.failures:
                dist.barrier()  # the first rank knows why, and ends the job
            rank, (why, _) = next(iter(error.failures.items()))
            raise UsageError(f"--save {self.partial.parent}: rank {rank} could not write its part of the checkpoint of "
                             f"step {self.step}: {' '.join(str(why).split())}") from None
