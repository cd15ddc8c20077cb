"""Store: who leads the job, in which term, and the little that must outlive a leader.

A term is a fencing token: it grows with every leader, over all that ever lead, and a store takes a record only from
the newest. Everything else a new coordinator learns from the ranks.
"""

from __future__ import annotations

from typing import Protocol

import msgspec


class Durable(msgspec.Struct, frozen=True):
    """What a new coordinator must find although the one before is gone."""

    term: int
    """Who wrote it."""
    epoch: int
    """Highest epoch ever begun; a new coordinator begins above it."""
    step: int
    """Newest committed step known when this was written."""


class Leader(msgspec.Struct, frozen=True):
    """Who leads."""

    term: int
    address: str
    """``host:port`` where its coordinator listens."""


class Deposed(Exception):
    """Another leads now, or may: nothing may be decided in this term any more."""


class StoreError(Exception):
    """The store cannot be used as it is set up. The message says what to do."""


class Store(Protocol):
    """One process's place at a store. Used from one event loop.

    Every wait lasts until its caller cancels it; a store that is away, or takes no more what it has taken before, is
    asked again and again meanwhile, with pauses that grow to a bound. After ``open`` and until ``close`` everything may
    be called at any time, but only one ``lead`` and one ``record`` at a time.
    """

    async def open(self) -> None:
        """Get in touch. Raises StoreError if the store cannot be used, or does not answer at all."""

    async def lead(self, address: str) -> int:
        """Campaign until this process leads from ``address``; return its term. Whoever was deposed campaigns again.

        Raises StoreError if the store refuses that.
        """

    async def record(self, durable: Durable) -> None:
        """Write; durable for all later leaders on return.

        Raises Deposed if ``durable.term`` leads no more: then it may or may not have been written, but only from before
        the next leader's first look.
        """

    async def recall(self) -> Durable | None:
        """Read the newest record, linearizably: all that was recorded before this call began is seen."""

    async def deposed(self, term: int) -> None:
        """Return as soon as ``term`` cannot be sure to lead any more: before another can lead, where clocks allow."""

    def leader(self) -> Leader | None:
        """The newest leader heard of here, which may be gone already. Asks nobody."""

    async def followed(self, after: int) -> Leader:
        """Return the newest leader once its term is above ``after``."""

    async def close(self) -> None:
        """Step down if this process leads, and leave nothing behind. Waits inside other calls must have ended."""


def pack(durable: Durable) -> bytes:
    """``durable`` as bytes: few, whatever the size of the job, as stores hold little."""
    return msgspec.msgpack.encode(durable)


def unpack(data: bytes) -> Durable:
    """The inverse of ``pack``."""
    return msgspec.msgpack.decode(data, type=Durable)
