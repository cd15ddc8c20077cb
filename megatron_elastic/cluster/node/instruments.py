"""Instruments: what the dials of a node's ranks show, as its agent reads them without asking, and when that is told."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from megatron_elastic.cluster.messages import Metered
from megatron_elastic.faults.odometer import Odometers
from megatron_elastic.observe.dials import Figures

_EVERY = 5.0
"""Seconds after which what has changed is told."""
_SOON = 1.0
"""And copies, if a good part more has come."""
_PART = 0.05
"""That is so much of them."""
_PAGE = os.sysconf("SC_PAGESIZE")


class Instruments:
    """One node's. ``odometers``: of its ranks."""

    def __init__(self, odometers: Odometers) -> None:
        self._odometers = odometers
        self._told: dict[int, Figures] = {}
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
        for rank in self._told.keys() - pids.keys():
            del self._told[rank]
        since = now - self._at
        news = any(
            _is_news(self._told.get(rank), self._odometers.figures(slots[rank], 0), since >= _SOON) for rank in pids
        )
        if not news and since < _EVERY:
            return None
        shown = {rank: self._odometers.figures(slots[rank], _resident(pid)) for rank, pid in pids.items()}
        if not news and shown == self._told:
            return None
        self._told, self._at = shown, now
        return Metered(figures=shown)


def _is_news(told: Figures | None, now: Figures, soon: bool) -> bool:
    """Whether copies are to be told of. ``soon``: also that some more has come."""
    if told is None or (told.epoch, told.copies) != (now.epoch, now.copies):
        return now.copies > 0
    more = now.copied - told.copied
    return more > 0 and (now.copied == now.copies or (soon and more >= _PART * now.copies))


def _resident(pid: int) -> int:
    """Bytes of a process in memory; 0 if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    except (OSError, IndexError, ValueError):
        return 0
