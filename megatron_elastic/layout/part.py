"""Part: some consecutive samples of a grain."""

from __future__ import annotations

from typing import NamedTuple


class Part(NamedTuple):
    """Samples ``start`` to ``stop - 1`` of a grain, in units of ``Layout.samples`` to the grain."""

    grain: int
    start: int
    stop: int

    def __str__(self) -> str:
        return f"{self.grain}:{self.start}-{self.stop - 1}"

    @property
    def size(self) -> int:
        """How many samples."""
        return self.stop - self.start

    def common(self, other: Part) -> Part | None:
        """The samples that are in both of two parts of one grain; None if there are none."""
        start, stop = max(self.start, other.start), min(self.stop, other.stop)
        return Part(self.grain, start, stop) if start < stop else None
