"""Saving: which checkpoint is due, and writing it, between two steps or while training goes on.

A checkpoint is written in three parts: all ranks plan it between two steps, each writes its own part (``Draft``) in a
thread, and all meet between two steps once more to complete it. With ``--async-save`` steps are done meanwhile; else
all wait, and can be interrupted.

Until it is complete a checkpoint is in a folder of another name, made for the layout it was begun under. Ranks that
a fault has put out of that layout may still be writing there; they do not meet those who begin again.

A checkpoint that a rank cannot write is given up, and the next one is tried when it is due. All ranks agree on that.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_elastic.adaptor.checkpoints.draft import Draft, Written
from megatron_elastic.adaptor.checkpoints.folder import has_step, mark_newest, publish, step_folder
from megatron_elastic.faults.odometer import DISK, Odometer
from megatron_elastic.observe.dials import SAVE, Dials

Prepare = Callable[[Path], Draft]
"""Plans a checkpoint in a folder, on all ranks of the layout."""


class Outcome(NamedTuple):
    """What has become of a checkpoint."""

    step: int
    problem: str | None
    """Why it could not be written; None if it is complete."""


class DiskFault(NamedTuple):
    """A fault on purpose (``--elastic-inject disk``): ``full``, what is to be written ``until`` then cannot be;
    ``slow``, it waits until then.
    """

    what: str
    until: float
    """By ``time.monotonic()``."""

    def meet(self) -> None:
        """Something is to be written. Raises OSError."""
        left = self.until - time.monotonic()
        if self.what == "slow":
            threading.Event().wait(min(max(left, 0.0), threading.TIMEOUT_MAX))
        elif left > 0:
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} (injected)")


class Saving:
    """The checkpoints of a job, as one rank sees them.

    Args:
        directory: where they go; None if the job saves none.
        interval: steps from one to the next; None or 0 for none but those that are asked for.
        retain: of how many steps multiples are kept when a newer one is there; None: all are.
        rank: this one.
        saved: step of the newest complete one; 0 without one.
        patience: seconds that a disk may keep everybody waiting before a checkpoint is given up.
        odometer: notes that the disk is waited for.
        check: raises if a wait must end.
    """

    def __init__(
        self, directory: str | Path | None, interval: int | None, retain: int | None, rank: int, saved: int,
        patience: float, odometer: Odometer, check: Callable[[], None],
    ) -> None:  # fmt: skip
        self._directory = None if directory is None else Path(directory)
        self._interval = interval
        self._retain = retain
        self._rank = rank
        self._patience = patience
        self._odometer = odometer
        self._check = check
        self._begun: _Write | None = None
        self.saved = saved
        """Step of the newest complete checkpoint that this rank knows of; 0 without one."""
        self.failed = 0
        """Step of the one that was given up last under this layout; 0 without one."""
        self.fault = DiskFault("full", 0.0)
        """What is wrong with the disk on purpose."""

    def due(self, done: int) -> bool:
        """Whether a checkpoint is to be begun after ``done`` steps: now, or since one that was lost to a fault.

        None is while another is being written: then it is as soon as that is done.
        """
        if self._directory is None or not self._interval or self._begun is not None:
            return False
        return done - done % self._interval > max(self.saved, self.failed)

    def wanted(self, done: int) -> bool:
        """Whether the job saves at all and has not saved the state after ``done`` steps, nor tried to."""
        return self._directory is not None and done > max(self.saved, self.failed)

    def gave_up(self, done: int) -> bool:
        """Whether the checkpoint of ``done`` steps was given up. That of no step never is."""
        return 0 < done == self.failed

    def begin(self, step: int, epoch: int, prepare: Prepare) -> None:
        """Begin the checkpoint of ``step`` steps. Every rank of the layout of ``epoch`` calls it; none may be begun."""
        assert self._begun is None and self._directory is not None
        token = [secrets.token_hex(4)]
        dist.broadcast_object_list(token)  # no leftovers of another job are in the way
        folder = self._directory / f"{step_folder(self._directory, step).name}.partial-{epoch}-{token[0]}"
        self._begun = _Write(self._rank, step, folder, prepare(folder), self.fault, self._odometer.dials)

    def written(self) -> bool:
        """Whether a checkpoint is begun, and all ranks have written their parts. Asked of all ranks of the layout."""
        if self._begun is None:
            return False
        answer = torch.tensor([int(self._begun.errand.done.is_set())])
        dist.all_reduce(answer, dist.ReduceOp.MIN)
        return bool(answer.item())

    def late(self, done: int) -> int | None:
        """Step of a checkpoint that is still being written after ``done`` steps, when the next one is due."""
        write, every = self._begun, self._interval
        if write is None or not every or done % every or done <= write.step:
            return None
        return write.step

    def complete(self) -> Outcome | None:
        """Wait until what is begun is written, and complete it, or give it up. Every rank of the layout calls it.

        Returns what has become of it, or None if nothing is begun.
        """
        write = self._begun
        if write is None:
            return None
        self._wait(write.errand)
        problem = self._publish(write)
        self._begun = None
        if problem is None:
            self.saved, self.failed = write.step, 0
        else:
            self.failed, write.abandoned = write.step, True  # whatever still waits for the disk, on any rank
        return Outcome(write.step, problem)

    def go_back(self, step: int) -> None:
        """The job goes on from the checkpoint of ``step`` steps: later ones are not what it was trained to any more."""
        if self._directory is not None and dist.get_rank() == 0 and has_step(self._directory, step):
            mark_newest(self._directory, step)

    def abandon(self, saved: int) -> None:
        """Another layout: ``saved`` is the step of the newest complete checkpoint. What was being written is forgotten.

        What was given up is tried again: newcomers do not know of it.
        """
        if self._begun is not None:
            self._begun.abandoned = True
        self._begun, self.saved, self.failed = None, saved, 0

    def _publish(self, write: _Write) -> str | None:
        """Let the first rank give the checkpoint its name, if all have written their parts; returns what is wrong."""
        first = dist.get_rank() == 0
        told: list[Written | str] = [[]] * dist.get_world_size()
        dist.gather_object(write.outcome, told if first else None)
        answer: list[str | None] = [None]
        if first:
            errand = _Errand(lambda: write.publish(told, self._retain))
            self._wait(errand)
            answer[0] = errand.problem
        dist.broadcast_object_list(answer)
        return answer[0]

    def _wait(self, errand: _Errand) -> None:
        with self._odometer.waiting(DISK):
            errand.wait(self._check, self._patience)


class _Errand:
    """Something that a disk may keep waiting: a thread does it, so that who waits for it can be interrupted."""

    def __init__(self, do: Callable[[], None]) -> None:
        self.done = threading.Event()
        self.problem: str | None = None
        """What the disk did not do, once it is done or given up."""
        self._error: Exception | None = None
        """What is no fault of a disk."""
        threading.Thread(target=self._run, args=(do,), name="checkpoint", daemon=True).start()

    def wait(self, check: Callable[[], None], limit: float) -> None:
        """Return when it is done, or cannot be within ``limit`` seconds, or raise what ``check`` raises."""
        deadline = time.monotonic() + limit
        while not self.done.wait(0.02):
            check()
            if time.monotonic() > deadline:
                self.problem = f"the disk does not answer for {limit:g} s (--elastic-wait-timeout)"
                return
        if self._error is not None:
            raise self._error

    def _run(self, do: Callable[[], None]) -> None:
        try:
            do()
        except (OSError, RuntimeError) as error:  # torch has the second for a full disk
            self.problem = " ".join(str(_cause(error)).split()) or type(error).__name__
        except Exception as error:
            self._error = error
        self.done.set()


class _Write:
    """One checkpoint on its way to disk."""

    def __init__(
        self, rank: int, step: int, partial: Path, draft: Draft, fault: DiskFault, dials: Dials
    ) -> None:
        self.step = step
        self.abandoned = False
        """It was given up, or there is another layout: others may be on their way by now."""
        self._written: Written = []
        self._rank, self._partial, self._draft, self._first = rank, partial, draft, dist.get_rank() == 0
        self._fault, self._dials = fault, dials
        self.errand = _Errand(self._write)
        """Ends when this rank's part is written, or it is known that it cannot be."""

    @property
    def outcome(self) -> Written | str:
        """What this rank has written, or why it could not."""
        return self._written if self.errand.problem is None else f"rank {self._rank}: {self.errand.problem}"

    def publish(self, told: Sequence[Written | str], retain: int | None) -> None:
        """Give it its name, if that are the outcomes of parts that are all written. The first rank does.

        Raises what goes wrong, and nothing is left of it: it would take the room that others need.
        """
        try:
            if problems := [each for each in told if isinstance(each, str)]:
                raise OSError("; ".join(problems))
            self._draft.complete([each for each in told if not isinstance(each, str)])
            publish(self._partial, self.step, lambda: not self.abandoned, retain)
        except (OSError, RuntimeError):
            shutil.rmtree(self._partial, ignore_errors=True)
            raise

    def _write(self) -> None:
        if self._first:
            older = set(self._partial.parent.glob("iter_*.partial-*")) - {self._partial}
            if not self.abandoned:  # else there may be newer ones among them
                for folder in older:
                    shutil.rmtree(folder, ignore_errors=True)
        with self._dials.at(SAVE, self._draft.size):
            self._fault.meet()
            self._written = self._draft.write(partial(self._dials.finish, SAVE))
        if self.abandoned:  # who comes so late makes a folder anew that was removed
            shutil.rmtree(self._partial, ignore_errors=True)


def _cause(error: BaseException) -> BaseException:
    """What the system said, if it is behind the error."""
    behind = error.__cause__ or error.__context__
    return error if isinstance(error, OSError) or behind is None else _cause(behind)
