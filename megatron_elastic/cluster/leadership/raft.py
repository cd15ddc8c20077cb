"""Raft: pysyncobj in a thread of its own, with the job's leadership as its replicated state."""

from __future__ import annotations

import functools
import hashlib
import hmac
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
from pysyncobj import FAIL_REASON, SyncObj, SyncObjConf, SyncObjConsumer, replicated

from megatron_elastic.cluster.leadership.door import Transport
from megatron_elastic.cluster.leadership.store import Leader

_log = logging.getLogger(__name__)
logging.getLogger("pysyncobj").addHandler(logging.NullHandler())  # or what it logs comes to stderr; programs may listen

TICK = 0.02
"""Seconds between two looks at the clock; messages and commands wake the thread at once."""
_HEARTBEATS = 8
"""Of the leader, within the limit."""
_SURE = 0.75
"""Part of the limit after which a leader that hears from no majority counts as deposed: before others elect another."""
_SPREAD = 1.6
"""The longest time without a leader that a member waits before it stands for election, in limits; the shortest is 1."""
_LEADING = 2
"""pysyncobj's state of a leader."""

ASK = "megatron-elastic"
"""pysyncobj's name for our question from outside; see ``Raft.answer``."""


class Book(SyncObjConsumer):
    """What is replicated. Its methods run on every member in the same order, with the same result."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        super().__init__()  # what is set from here on is in snapshots
        self.term = 0
        self.address = ""
        self.durable = b""

    @replicated
    def claim(self, address: str) -> int:
        """Begin the next term; return it."""
        self.term += 1
        self.address = address
        self._changed()
        return self.term

    @replicated
    def record(self, term: int, durable: bytes) -> bool:
        """Keep ``durable``, unless ``term`` is not the newest: then False."""
        if term != self.term:
            return False
        self.durable = durable
        return True

    @replicated
    def recall(self) -> bytes:
        """The newest record, as of this place in the order; empty without one."""
        return self.durable

    def leader(self) -> Leader | None:
        return Leader(self.term, self.address) if self.term else None

    def _deserialize(self, data: dict[str, Any]) -> None:
        super()._deserialize(data)
        self._changed()


class _Group(SyncObj):
    def _SyncObj__connectedToAnyone(self) -> bool:
        """pysyncobj asks this before it stands for election."""
        return bool(self._SyncObj__transport.may_stand())


def password(token: str) -> str:
    """What members prove to each other: from the job's token, for this use alone."""
    return hmac.new(token.encode(), b"megatron-elastic leadership", hashlib.sha256).hexdigest()


class Raft:
    """One member.

    Args:
        listening: see ``door.reserve``; closed by ``close``.
        me, others: members' addresses as all know them.
        token: the job's token.
        limit: seconds without the leader after which others stand for election.
        changed: called in the thread, without arguments, when the leader or this member's part may have changed.
    """

    def __init__(self, listening: socket.socket, me: str, others: Iterable[str], token: str, limit: float,
                 changed: Callable[[], None]) -> None:
        self.book = Book(changed)
        self.leading = False
        """Whether this member is the leader, as far as it knows."""
        self.reign = 0
        """How often it became the leader."""
        self._changed = changed
        self._ending = threading.Event()
        conf = SyncObjConf(
            password=password(token),
            autoTick=False,
            dynamicMembershipChange=True,
            raftMinTimeout=limit,
            raftMaxTimeout=_SPREAD * limit,
            appendEntriesPeriod=limit / _HEARTBEATS,
            leaderFallbackTimeout=_SURE * limit,
            connectionTimeout=4 * limit,
            connectionRetryTime=limit / 4,
            appendEntriesUseBatch=False,  # send at once
            # All in one message: its way to cut up long entries loses the last bytes of some, and followers drop what
            # they have beyond a message before they add what is in it: safe only if that is all that the leader has.
            appendEntriesBatchSizeBytes=1 << 30,
            dnsFailCacheTime=limit,
            commandsWaitLeader=False,  # what waited might reach a later leader
            logCompactionMinEntries=64,
            onStateChanged=self._state_changed,
        )
        self._sync = _Group(me, list(others), conf, consumers=[self.book],
                            transportClass=functools.partial(Transport, listening))
        self._sync._SyncObj__transport.setOnUtilityMessageCallback(ASK, self._asked)
        self._thread = threading.Thread(target=self._run, name="leadership", daemon=True)
        self._thread.start()

    def members(self) -> list[str]:
        """Addresses of all members, this one included."""
        return sorted(node.address for node in (self._sync.selfNode, *self._sync.otherNodes))

    def apply(self, method: Callable[..., Any], *args: Any, done: Callable[[Any], None]) -> None:
        """Put a call of one of the book's methods into the order.

        ``done`` is called in the thread with the result, or None if it may not have come in; or never, if the leader is
        lost meanwhile.
        """
        method(*args, callback=lambda result, error: done(result if error == FAIL_REASON.SUCCESS else None))

    def admit(self, address: str, done: Callable[[Any], None]) -> None:
        """Make ``address`` a member; ``done`` as in ``apply``, with True."""
        self._sync.addNodeToCluster(address, callback=lambda _, error: done(error == FAIL_REASON.SUCCESS or None))

    def dismiss(self, address: str, done: Callable[[Any], None]) -> None:
        """Let ``address`` be a member no more; ``done`` as in ``apply``, with True."""
        self._sync.removeNodeFromCluster(address, callback=lambda _, error: done(error == FAIL_REASON.SUCCESS or None))

    def close(self) -> None:
        """End the thread and close all connections. Blocks for a tick."""
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._ending.is_set():
                try:
                    self._sync.doTick(TICK)
                except Exception:
                    # An error with one connection must not be the end of all.
                    _log.exception("leadership: a turn of Raft failed; going on")
                    self._ending.wait(TICK)
        finally:
            self._sync.destroy()
            # pysyncobj leaves the pipe open by which commands wake its poller.
            notifier = self._sync._SyncObj__pipeNotifier
            os.close(notifier._PipeNotifier__pipeR)
            os.close(notifier._PipeNotifier__pipeW)

    def _state_changed(self, _: int, state: int) -> None:
        self.leading = state == _LEADING
        self.reign += self.leading
        self._changed()

    def _asked(self, args: list[Any], answer: Callable[[Any, Any], None]) -> None:
        """Somebody who is no member, but knows the token, asks: who leads, who are members, what is recorded."""
        if args == ["recall"]:
            self.apply(self.book.recall, done=lambda found: answer(Answer(None, [], found).packed(), None))
        else:
            answer(Answer(self.book.leader(), self.members()).packed(), None)


class Answer(msgspec.Struct, frozen=True):
    """What a member says to somebody outside."""

    leader: Leader | None
    members: list[str]
    durable: bytes | None = None
    """The newest record, if it was asked for and could be read; empty if there is none."""

    def packed(self) -> bytes:
        return msgspec.msgpack.encode(self)
