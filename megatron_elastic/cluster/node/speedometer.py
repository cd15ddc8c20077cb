"""Speedometer: what a grain takes on each of a node's ranks, as its agent reads it without asking.

Only what differs from what was told before is told again, or what is of another layout. What was seen in the layouts
before counts, as long as the rank does the same with a grain.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from statistics import median_low

from megatron_elastic.cluster.messages import Paced
from megatron_elastic.faults.odometer import Effort, Odometers

_SAMPLES = 3
"""Looks at which a rank had done more steps of which the middle one counts: one that was slow by chance does not."""
_FEW = 2
"""Fewer say nothing."""
_SAME = 0.1
"""Part of what was told by which it may be off."""


class Speedometer:
    """One node's. ``odometers``: of its ranks."""

    def __init__(self, odometers: Odometers) -> None:
        self._odometers = odometers
        self._marks: dict[int, Effort] = {}
        """What each rank had worked when it was last seen to have done another step."""
        self._paces: dict[int, deque[float]] = {}
        self._told: dict[int, tuple[int, float]] = {}
        """By rank: epoch and pace."""

    def forget(self) -> None:
        """Somebody who has been told nothing is to be told from now on."""
        self._told.clear()

    def restart(self) -> None:
        """Ranks may be faster or slower from now on: what was seen before does not count."""
        self._marks.clear()
        self._paces.clear()
        self.forget()

    def look(self, slots: Mapping[int, int]) -> list[Paced]:
        """Look at these ranks, given with their slots. Returns what is to be told."""
        for rank in self._marks.keys() - slots.keys():
            del self._marks[rank], self._paces[rank]
            self._told.pop(rank, None)
        news: dict[int, dict[int, float]] = defaultdict(dict)
        for rank, slot in slots.items():
            now, mark = self._odometers.effort(slot), self._marks.get(rank)
            if mark is None or (mark.since == now.since and now.grains < mark.grains):
                self._marks[rank], self._paces[rank] = now, deque(maxlen=_SAMPLES)
                continue
            if mark.since != now.since:  # it has begun anew, and all that it has done since is of one kind
                mark, self._paces[rank] = Effort(now.epoch, now.since, 0.0, 0.0), deque(maxlen=_SAMPLES)
            if now.grains > mark.grains:
                paces = self._paces[rank]
                paces.append((now.busy - mark.busy) / (now.grains - mark.grains))
                self._marks[rank] = now
                if len(paces) >= _FEW and self._differs(rank, now.epoch, pace := median_low(paces)):
                    self._told[rank] = now.epoch, pace
                    news[now.epoch][rank] = 1e3 * pace
        return [Paced(epoch=epoch, paces=paces) for epoch, paces in news.items()]

    def _differs(self, rank: int, epoch: int, pace: float) -> bool:
        when, told = self._told.get(rank, (-1, 0.0))
        return when != epoch or abs(pace - told) > _SAME * told
