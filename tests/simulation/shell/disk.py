"""Disk: the records of a run as files have them: what was written stays, whoever coordinates."""

from __future__ import annotations

from collections.abc import Callable

from tests.simulation.errors import Violation


class Disk:
    """One run directory, which all nodes share or one has for itself."""

    def __init__(self) -> None:
        self.lines: list[int] = []

    @property
    def written(self) -> int:
        """The last step on record; -1 without records."""
        return max(self.lines, default=-1)

    def line(self, step: int) -> None:
        """A line of metrics. Each step's must be there once, in order."""
        if self.lines and step <= self.lines[-1]:
            raise Violation("ledger", f"the line of step {step} follows that of step {self.lines[-1]}")
        self.lines.append(step)


class Recorder:
    """Writes lines in the background, for the coordinators of one process.

    Args:
        later: calls something after a while, as long as the disk takes.
        wrote: told of each line.
    """

    def __init__(self, disk: Disk, later: Callable[[Callable[[], None]], None], wrote: Callable[[int], None]) -> None:
        self._disk = disk
        self._later = later
        self._wrote = wrote
        self._waiting: list[int] = []
        self.recorded = 0
        """Steps up to this one are on record, as this recorder knows."""

    def write(self, step: int) -> None:
        """Have a line written."""
        self._waiting.append(step)
        if len(self._waiting) == 1:
            self._later(self.close)

    def drop(self) -> None:
        """What is not written yet is not to be."""
        self._waiting.clear()

    def close(self) -> None:
        """Write all that waits."""
        waiting, self._waiting = self._waiting, []
        for step in waiting:
            self._disk.line(step)
            self.recorded = step
            self._wrote(step)
