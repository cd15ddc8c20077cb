"""Instruments: what the dials of a node's ranks show, as its agent reads them without asking, and when that is told."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from msgspec.structs import replace

from megatron_elastic.cluster.messages import Metered
from megatron_elastic.faults.odometer import Odometers
from megatron_elastic.observe.dials import Chore, Figures

_EVERY = 5.0
"""Seconds after which what has changed is told."""
_SOON = 1.0
"""And copies and chores, if a good part more is done."""
_PART = 0.05
"""That is so much of them."""
_LONG = 2.0
"""Seconds that a chore must have taken to be told of."""
_PAGE = os.sysconf("SC_PAGESIZE")


class Instruments:
    """One node's. ``odometers``: of its ranks."""

    def __init__(self, odometers: Odometers) -> None:
        self._odometers = odometers
        self._told: dict[int, Figures] = {}
        self._begun: dict[int, tuple[str, float]] = {}
        """By rank: the chore it is at, and since when it was seen at that."""
        self._at = float("-inf")
        """When something was told last."""

    def forget(self) -> None:
        """Somebody who has been told nothing is to be told from now on."""
        self._told.clear()
        self._at = float("-inf")

    def look(self, pids: Mapping[int, int], slots: Mapping[int, int], now: float) -> Metered | None:
        """Look at the ranks whose processes and slots are given. Returns what is to be told, if anything is.

        ``now``: by a clock that does not jump. Copies that begin or are complete are told at once.
        """
        for known in (self._told, self._begun):
            for rank in known.keys() - pids.keys():
                del known[rank]
        seen = {rank: self._seen(rank, slots[rank], now) for rank in pids}
        since = now - self._at
        news = any(_is_news(self._told.get(rank), each, since >= _SOON) for rank, each in seen.items())
        if not news and since < _EVERY:
            return None
        shown = {rank: replace(each, resident=_resident(pids[rank])) for rank, each in seen.items()}
        if not news and shown == self._told:
            return None
        self._told, self._at = shown, now
        return Metered(figures=shown)

    def _seen(self, rank: int, slot: int, now: float) -> Figures:
        """What the dials of a rank show, of chores only those that have taken long."""
        figures = self._odometers.figures(slot, 0)
        if figures.chore is None:
            self._begun.pop(rank, None)
            return figures
        what, begun = self._begun.get(rank, ("", now))
        if what != figures.chore.what:
            begun = now
        self._begun[rank] = figures.chore.what, begun
        return figures if now - begun >= _LONG else replace(figures, chore=None)


def _is_news(told: Figures | None, now: Figures, soon: bool) -> bool:
    """Whether copies or chores are to be told of. ``soon``: also that some more is done."""
    if _chore_is_news(None if told is None else told.chore, now.chore, soon):
        return True
    if told is None or (told.epoch, told.copies) != (now.epoch, now.copies):
        return now.copies > 0
    more = now.copied - told.copied
    return more > 0 and (now.copied == now.copies or (soon and more >= _PART * now.copies))


def _chore_is_news(told: Chore | None, now: Chore | None, soon: bool) -> bool:
    if told is None or now is None or told.what != now.what:
        return told is not now
    return soon and now.done - told.done >= _PART * max(now.size, 1)


def _resident(pid: int) -> int:
    """Bytes of a process in memory; 0 if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    except (OSError, IndexError, ValueError):
        return 0
