"""Suspicion: ranks that seem dead or stand still get a short time to prove the contrary, and are killed after it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from megatron_elastic.cluster.messages import RankResumed, RankStopped
from megatron_elastic.cluster.roster import Roster
from megatron_elastic.cluster.timers import Timers

_FENCE_LIMIT = 10.0
"""Seconds until a killed rank counts as lost although nobody saw its process end."""


class Record(Protocol):
    """Writes an event down."""

    def __call__(self, kind: str, **fields: object) -> None: ...


class Suspicion:
    """Who is suspected, and what follows from it.

    Args:
        roster, timers: the coordinator's.
        limit: seconds that a suspect has.
        event: writes an event down.
        say: prints one line for people.
        lose: told of ranks that were killed and whose end nobody saw: (ranks, cause, since when).
    """

    def __init__(
        self,
        roster: Roster,
        timers: Timers,
        limit: float,
        event: Record,
        say: Callable[[str], None],
        lose: Callable[[list[int], str, float], None],
    ) -> None:
        self._roster = roster
        self._timers = timers
        self._limit = limit
        self._event = event
        self._say = say
        self._lose = lose

    def suspect(self, rank: int, cause: str, reason: str) -> None:
        """Kill ``rank`` unless what clears it comes in time: a report if it seemed dead, going on if it is stopped."""
        name = f"{cause} {rank}"
        member = self._roster[rank]
        if not member.lost and member.fenced is None and name not in self._timers:
            self._event("suspected", rank=rank, reason=reason)
            self._say(f"rank {rank} is suspected: {reason}")
            self._timers.set(name, self._limit, lambda: self.fence(rank, cause, reason))

    def stopped(self, message: RankStopped) -> None:
        """A rank's process does not run any more, but is there."""
        if self._roster[message.rank].stopped is None:
            self._roster[message.rank].stopped = message.time
            self.suspect(message.rank, "stopped", f"its process is stopped ({message.how})")

    def resumed(self, message: RankResumed) -> None:
        """A stopped rank goes on."""
        member = self._roster[message.rank]
        if member.stopped is None:
            return
        self._timers.cancel(f"stopped {message.rank}")
        self._event("resumed", rank=message.rank, stopped_ms=round((message.time - member.stopped) * 1e3, 3))
        self._say(f"rank {message.rank} runs again")
        member.stopped = None

    def reported(self, rank: int) -> None:
        """A rank has said something that only a living one can."""
        self._timers.cancel(f"fenced {rank}")

    def clear(self, rank: int) -> None:
        """Nothing is to be found out about a rank any more."""
        for name in ("fenced", "stopped", "killed"):
            self._timers.cancel(f"{name} {rank}")

    def fence(self, rank: int, cause: str, reason: str) -> None:
        """Kill a rank: whatever it is, it must not come back."""
        member = self._roster[rank]
        if member.lost or member.node is None:
            return
        member.fenced = cause
        self._event("fenced", rank=rank, reason=reason)
        self._say(f"killing rank {rank}: {reason}")
        member.node.kill(rank)
        since = member.stopped or time.time()
        self._timers.set(f"killed {rank}", _FENCE_LIMIT, lambda: self._lose([rank], cause, since))
