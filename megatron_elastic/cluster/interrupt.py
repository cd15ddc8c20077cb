"""Interrupt: the flag that unwinds a rank's waits when the layout must change.

Raised by the thread that listens to the coordinator, looked at by every wait and hook point of the training thread.
"""

from __future__ import annotations

import os


class Interrupted(Exception):
    """The layout must change: unwind to the step loop and report.

    Attributes:
        epoch: the epoch that begins; 0 when the rank itself noticed and the coordinator does not know yet.
        suspects: ranks whose links broke, when the rank itself noticed.
    """

    def __init__(self, epoch: int = 0, suspects: tuple[int, ...] = ()) -> None:
        super().__init__(f"epoch {epoch} begins" if epoch else f"links to rank(s) {list(suspects)} broke")
        self.epoch = epoch
        self.suspects = suspects


class JobStopped(Exception):
    """The job is over although this rank is not done; the message says why."""


class InterruptFlag:
    """Raised while an interrupt waits to be acknowledged, or the job has been stopped.

    ``raised`` is cheap to read; ``fd`` is readable while raised, so that epoll loops wake.
    """

    def __init__(self) -> None:
        self.raised = False
        self.epoch = 0
        self.lost: frozenset[int] = frozenset()
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._acknowledged = 0
        self._stopped: str | None = None

    def raise_for(self, epoch: int, lost: frozenset[int]) -> None:
        """Begin ``epoch``; an older epoch than the newest known one is ignored."""
        if epoch > self.epoch:
            self.epoch, self.lost = epoch, lost
            self._set()

    def stop(self, reason: str) -> None:
        """Make every check raise JobStopped from now on."""
        self._stopped = reason
        self._set()

    def check(self) -> None:
        """Raise JobStopped or Interrupted if there is a reason to unwind."""
        if self._stopped is not None:
            raise JobStopped(self._stopped)
        if self.epoch > self._acknowledged:
            raise Interrupted(epoch=self.epoch)

    def acknowledge(self, epoch: int) -> None:
        """This rank has unwound for ``epoch``; stays raised if a newer one came meanwhile."""
        self._acknowledged = max(self._acknowledged, epoch)
        if self._acknowledged >= self.epoch and self._stopped is None:
            self.raised = False
            try:
                os.eventfd_read(self.fd)
            except BlockingIOError:
                pass
            if self.epoch > self._acknowledged or self._stopped is not None:
                self._set()

    def close(self) -> None:
        """Release the file descriptor."""
        os.close(self.fd)

    def _set(self) -> None:
        self.raised = True
        os.eventfd_write(self.fd, 1)
