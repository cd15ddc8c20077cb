"""Peers: whom this rank can talk to, who of them has ended, and whose end matters.

A peer's end is remembered until a layout lists it among the lost, or for ever if none does: a newcomer may die under
the layout that lets it in, which is then never true. It is a fault only in epochs that depend on the peer, by a message
to it or from it or by a group that it is a member of.
"""

from __future__ import annotations

import select
from collections.abc import Iterable, Sequence

import msgspec

from megatron_elastic.comm.host.mailbox import NearAddress, Neighbour


class PeerAddress(msgspec.Struct, frozen=True):
    """What a rank must know to talk to another; opaque to everybody else."""

    worker: bytes
    """Of its links; empty while it has none."""
    near: NearAddress

    def encode(self) -> bytes:
        """As it travels."""
        return msgspec.msgpack.encode(self)


class Peers:
    """The ranks whose addresses are known.

    Args:
        rank: this rank.
        events: told to look for the end of peers of this host.
    """

    def __init__(self, rank: int, events: select.epoll) -> None:
        self._rank = rank
        self._events = events
        self.near: dict[int, Neighbour] = {}
        """Living peers of this host."""
        self.far: dict[int, bytes] = {}
        """Living peers that only a link reaches: the address of their worker."""
        self.lost: set[int] = set()
        """Those that are dead for everybody. Nothing of theirs counts."""
        self._dead: set[int] = set()
        """Those that have ended, or whose link broke, and that are not lost yet."""
        self._watched: set[int] = set()
        """Those whose end is a fault in this epoch."""
        self._pidfds: dict[int, int] = {}
        """Which peer's end each descriptor tells."""

    def __contains__(self, peer: int) -> bool:
        """Whether the peer is or was known: who is not may only be early."""
        return peer in self.near or peer in self.far or peer in self._dead or peer in self.lost

    def add(self, peer: int, address: bytes) -> None:
        """Learn where a peer is. Raises msgspec.DecodeError for no address."""
        known = msgspec.msgpack.decode(address, type=PeerAddress)
        # At once: what a peer sent before it died can only be read in memory that was open by then.
        neighbour = Neighbour.open(peer, known.near, self._rank)
        if neighbour is None and known.worker:
            self.far[peer] = known.worker
        elif neighbour is None:
            self.died(peer)  # it was of this host
        else:
            self.near[peer] = neighbour
            self._pidfds[neighbour.pidfd] = peer
            self._events.register(neighbour.pidfd, select.EPOLLIN)

    def watch(self, peers: Iterable[int]) -> None:
        """This epoch depends on these peers."""
        self._watched.update(peers)

    @property
    def suspects(self) -> tuple[int, ...]:
        """The dead that this epoch depends on, ascending."""
        return tuple(sorted(self._dead & self._watched)) if self._dead else ()

    def died(self, peer: int) -> None:
        """A peer has ended, or its link broke."""
        if peer not in self.lost:
            self._dead.add(peer)

    def see(self, events: Sequence[tuple[int, int]]) -> None:
        """Take notice of ends that descriptors tell."""
        for fd, _ in events:
            if fd in self._pidfds:
                self.died(self._pidfds.pop(fd))
                self._events.unregister(fd)

    def look(self) -> None:
        """Take notice of peers of this host that are dying: their descriptors tell it later."""
        for peer, neighbour in self.near.items():
            if neighbour.view.life.ended:
                self._dead.add(peer)

    def advance(self, lost: Iterable[int]) -> dict[int, Neighbour | None]:
        """A new epoch depends on nobody yet. Returns the dead of older ones, who must be let go (``forget``)."""
        new = set(lost) - self.lost
        self.lost |= new
        gone = new | {peer for peer in self._dead if peer in self.near or peer in self.far}
        self._dead -= new
        self._watched.clear()
        return {peer: self.near.get(peer) for peer in gone}

    def forget(self, peer: int) -> None:
        """Close what is open of a peer that is dead."""
        self.far.pop(peer, None)
        neighbour = self.near.pop(peer, None)
        if neighbour is not None:
            if self._pidfds.pop(neighbour.pidfd, None) is not None:
                self._events.unregister(neighbour.pidfd)
            neighbour.close()

    def close(self) -> None:
        """Close what is open of everybody."""
        for neighbour in self.near.values():
            neighbour.close()
        self.near.clear()
