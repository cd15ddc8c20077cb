"""Chorus: what several ranks of a node say alike is told the coordinator once.

All ranks of a node answer an interrupt and a decision at about the same time, and mostly alike. The first waits a few
milliseconds for the others, at most; the order of what each rank says stays.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from megatron_elastic.cluster.messages import Built, FromRank, Ready, Recovered, Recut, Report, Said, Settled

_PATIENCE = 0.005
"""Seconds that what can be told together waits at most."""
Later = Callable[[float, Callable[[], object]], object]
_Alike = Built | Ready | Recovered | Recut | Report | Settled


class Chorus:
    """One node's ranks.

    Args:
        tell: tells the coordinator.
        later: calls something after so many seconds.
    """

    def __init__(self, tell: Callable[[Said], object], later: Later) -> None:
        self._tell = tell
        self._later = later
        self._waiting: list[Said] = []

    def say(self, message: FromRank, voices: int) -> None:
        """A rank says something; ``voices``: how many ranks of the node may."""
        if not isinstance(message, _Alike):
            self.flush()
            self._tell(Said(message=message))
            return
        first = not self._waiting
        at = self._join(message)
        if len(self._waiting[at].also) + 1 >= voices:
            self.flush()
        elif first:
            self._later(_PATIENCE, self.flush)

    def flush(self) -> bool:
        """Tell all that waits; returns whether anything did."""
        waiting, self._waiting = self._waiting, []
        for said in waiting:
            self._tell(said)
        return bool(waiting)

    def _join(self, message: _Alike) -> int:
        """Have it told with one like it that comes after all else its rank has said; returns which that is."""
        place = len(self._waiting)
        for at in reversed(range(len(self._waiting))):
            said = self._waiting[at]
            if message.rank == said.message.rank or message.rank in said.also:
                break
            if _together(said.message, message) is not None:
                place = at
        if place == len(self._waiting):
            self._waiting.append(Said(message=message))
        else:
            said = self._waiting[place]
            both = _together(said.message, message)
            assert both is not None
            self._waiting[place] = Said(message=both, also=[*said.also, message.rank])
        return place


def _together(one: FromRank, other: _Alike) -> FromRank | None:
    """What both say, as if ``one``'s rank said it; None if they are not alike."""
    same = replace(other, rank=one.rank)
    if isinstance(one, Recovered) and isinstance(same, Recovered):
        slowest = replace(one, edit_ms=max(one.edit_ms, same.edit_ms), state_ms=max(one.state_ms, same.state_ms))
        return slowest if one.epoch == same.epoch else None
    if isinstance(one, Report) and isinstance(same, Report):
        same = replace(same, interrupted_at=one.interrupted_at)
    return one if same == one else None
