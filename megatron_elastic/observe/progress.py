"""Progress: how far a job is with what takes long besides training, of what the dials of its ranks show.

All ranks that are at the same of the ``dials.CHORES`` are told of as one, by events of kind ``progress``: when it
begins, when a tenth more is done, after each minute, and when it is over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from immutables import Map

from megatron_elastic.observe.dials import Chore, Figures

_TENTH = 0.1
_MINUTE = 60.0
"""Seconds after which it is told in any case."""
_OFTEN = 1.0
"""Seconds within which nothing but an end is told."""


class Shown(msgspec.Struct, frozen=True):
    """What was told last of one of the chores."""

    begun: float
    """When it was told first, in seconds since 1970."""
    at: float
    done: int


class Progress(msgspec.Struct, frozen=True):
    """What is known of chores.

    Attributes:
        chores: by rank, also of those that are done with what others are still at.
        over: ranks that are done.
        shown: by name of the chore.
    """

    chores: Map[int, Chore] = Map()
    over: Map[int, None] = Map()
    shown: Map[str, Shown] = Map()

    def seen(
        self, figures: Mapping[int, Figures], lost: Callable[[int], bool], now: float
    ) -> tuple[Progress, list[dict[str, Any]]]:
        """What is known once the dials of some ranks have shown this, and what is to be told, as fields of events.

        ``lost``: whether a rank is.
        """
        chores, over = self.chores, self.over
        for rank, each in figures.items():
            if each.chore is not None:
                chores, over = chores.set(rank, each.chore), over.delete(rank) if rank in over else over
            elif rank in chores:
                over = over.set(rank, None)
        known, told = Progress(chores, over, self.shown), list[dict[str, Any]]()
        for what in sorted({*self.shown, *(each.chore.what for each in figures.values() if each.chore is not None)}):
            known = known._tell(what, lost, now, told)
        return known, told

    def _tell(
        self, what: str, lost: Callable[[int], bool], now: float, told: list[dict[str, Any]]
    ) -> Progress:
        """Tell of one of the chores if it is time to."""
        shown = self.shown.get(what)
        if shown is not None and len(self.over) < len(self.chores) and now - shown.at < _OFTEN:
            return self
        at = {rank: chore for rank, chore in self.chores.items() if chore.what == what and not lost(rank)}
        done = sum(chore.size if rank in self.over else min(chore.done, chore.size) for rank, chore in at.items())
        size, busy = sum(chore.size for chore in at.values()), len(at.keys() - self.over.keys())
        begun = now if shown is None else shown.begun
        due = shown is None or done - shown.done >= _TENTH * max(size, 1) or now - shown.at >= _MINUTE
        if busy and not due:
            return self
        told.append({"what": what, "busy": busy, "done_bytes": done, "all_bytes": size, "seconds": now - begun})
        if busy:
            return Progress(self.chores, self.over, self.shown.set(what, Shown(begun, now, done)))
        others = [rank for rank, chore in self.chores.items() if chore.what != what]
        return Progress(
            Map({rank: self.chores[rank] for rank in others}),
            Map({rank: None for rank in others if rank in self.over}), self.shown.delete(what),
        )  # fmt: skip
