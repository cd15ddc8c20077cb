"""Usage: how many devices were in use when, and by whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Usage:
    """Devices in use from each of ``times`` (seconds) on, up to the next."""

    times: list[float] = field(default_factory=list)
    rigid: list[int] = field(default_factory=list)
    """By jobs that are not elastic."""
    given: list[int] = field(default_factory=list)
    """By elastic ones, up to what they were submitted with."""
    extra: list[int] = field(default_factory=list)
    """By elastic ones, beyond that."""

    def note(self, now: float, rigid: int, given: int, extra: int) -> None:
        """From ``now`` on; what was said of the same moment before is replaced."""
        if self.times and self.times[-1] == now:
            self.rigid[-1], self.given[-1], self.extra[-1] = rigid, given, extra
            return
        self.times.append(now)
        self.rigid.append(rigid)
        self.given.append(given)
        self.extra.append(extra)

    def means(self, series: Sequence[int], end: float, columns: int) -> list[float]:
        """Means of one of the lists over ``columns`` equal parts of the time from 0 to ``end``."""
        wide = end / columns
        sums = [0.0] * columns
        for index, value in enumerate(series):
            at = self.times[index]
            until = min(end, self.times[index + 1] if index + 1 < len(series) else end)
            column = min(columns - 1, int(at / wide))
            while value and at < until and column < columns:
                edge = min(until, (column + 1) * wide)
                sums[column] += value * max(0.0, edge - at)
                at, column = edge, column + 1
        return [total / wide for total in sums]
