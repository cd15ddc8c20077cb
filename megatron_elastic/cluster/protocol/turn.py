"""Turn: one event being worked into a job: the job as it becomes, and what is to be done, in order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from immutables import Map
from msgspec.structs import replace

from megatron_elastic.cluster.messages import Order, Stop, ToRank
from megatron_elastic.cluster.protocol.effects import (
    CancelTimer,
    Effect,
    End,
    Record,
    Say,
    Send,
    SetTimer,
    Tell,
    WriteEvent,
)
from megatron_elastic.cluster.protocol.job import Job, Outcome, Rank
from megatron_elastic.plan.errors import advised


class Turn:
    """Lives for one ``advance``. ``job`` is replaced, never changed, so who holds the job before keeps it as it was."""

    __slots__ = ("effects", "job", "now")

    def __init__(self, job: Job, now: float) -> None:
        self.job = job
        self.now = now
        self.effects: list[Effect] = []

    # ---- what the job becomes ------------------------------------------------------------

    def set(self, **fields: Any) -> None:
        """Replace fields of the job."""
        self.job = replace(self.job, **fields)

    def set_rank(self, rank: int, **fields: Any) -> Rank:
        """Replace fields of a rank; returns what it has become."""
        changed = replace(self.job.ranks[rank], **fields)
        self.set(ranks=self.job.ranks.set(rank, changed))
        return changed

    def new_epoch(self) -> int:
        """An epoch that nothing had before, and that no later coordinator will begin."""
        self.set(newest_epoch=self.job.newest_epoch + 1)
        step = 0 if self.job.ledger is None else self.job.ledger.written
        self.do(Record(self.job.newest_epoch, step))
        return self.job.newest_epoch

    # ---- what is to be done ----------------------------------------------------------------

    def do(self, effect: Effect) -> None:
        """Have something done."""
        self.effects.append(effect)

    def send(self, message: ToRank, ranks: Iterable[int]) -> None:
        """Send a message to ranks."""
        self.do(Send(message, tuple(ranks)))

    def tell(self, node: int, message: Order) -> None:
        """Send a message to the agent of a node, if it is there."""
        if node in self.job.nodes:
            self.do(Tell(node, message))

    def record(self, kind: str, **fields: Any) -> None:
        """Write an event down."""
        self.do(WriteEvent(kind, self.job.epoch, self.now, fields))

    def say(self, line: str, tells: str = "") -> None:
        """Print one line for people. ``tells``: the kind of the event on record that it tells of."""
        self.do(Say(line, tells))

    def set_timer(self, name: str, delay: float) -> None:
        """Have ``Expired`` happen in ``delay`` seconds; replaces the timer of that name."""
        serial = self.job.serial + 1
        self.set(serial=serial, timers=self.job.timers.set(name, serial))
        self.do(SetTimer(name, serial, delay))

    def cancel_timer(self, name: str) -> None:
        """Forget a timer; nothing happens if there is none of that name."""
        if name in self.job.timers:
            self.set(timers=self.job.timers.delete(name))
            self.do(CancelTimer(name))

    def end(self, ok: bool, reason: str, code: int = 1) -> None:
        """Decide how the job ends, and tell every agent, who tells its ranks. Later calls change nothing.

        If it does not end well, what ranks have raised lately is told with the reason, which sends nobody to a
        checkpoint that there is not, and ``code`` is what launchers end with.
        """
        if self.job.outcome is not None:
            return
        if not ok:
            reason = advised(reason, bool(self.job.trust.newest_save))
            reason = "\n\n".join([reason, *map(str, self.job.errors)])
        for name in sorted(self.job.timers):
            self.do(CancelTimer(name))
        self.record("finished" if ok else "failed", reason=reason)
        for node in sorted(self.job.nodes):
            self.tell(node, Stop(ok=ok, reason=reason, code=code))
        self.set(outcome=Outcome(ok, reason, code), timers=Map())
        self.do(End(ok, reason, code))
