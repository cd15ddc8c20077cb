"""Transport: a model rank's links to other ranks: who can be reached, and whose link has broken."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from megatron_elastic.cluster.messages import Addresses, Reachable, Where
from megatron_elastic.layout import Layout
from tests.simulation.errors import Violation

if TYPE_CHECKING:
    from tests.simulation.ranks.meeting import Meeting
    from tests.simulation.ranks.rank import Rank, Waits

_LINKED, _NEAR = b"linked", b"near"
"""Addresses: of who can be reached from other hosts, and of who cannot."""


class Transport:
    """``listening``: whether other hosts can reach the rank from the beginning."""

    def __init__(self, rank: Rank, listening: bool) -> None:
        self.epoch = 0
        self.listening = listening
        self.known: set[int] = set()
        """Peers whose addresses are known."""
        self.broken: set[int] = set()
        """Peers whose links have broken."""
        self._missing: set[int] = set()
        """Peers whose addresses were asked for and are not told: they are dead, or about to be."""
        self._gone: set[int] = set()
        """Peers of this host whose processes have ended."""
        self._touched: set[int] = set()
        """Peers that something has been exchanged with."""
        self._forgotten: set[int] = set()
        """Peers that are lost."""
        self._rank = rank
        self._asked = 0
        self._met: Layout | None = None
        """The layout whose ranks' addresses are known for certain."""

    @property
    def address(self) -> bytes:
        """Where links to this rank start."""
        return _LINKED if self.listening else _NEAR

    def remembers(self, peer: int) -> bool:
        """Whether it has heard of a rank."""
        return peer in self._forgotten or peer in self.known

    def reach(self, layout: Layout) -> None:
        """Listen for other hosts, if the layout has any."""
        if len(layout.hosts) > 1 and not self.listening:
            self.listening = True
            self._rank.control.send(Reachable(rank=self._rank.rank, address=self.address))

    def find(self, layout: Layout, others: Collection[int] = ()) -> Waits:
        """Learn the addresses of the ranks of a layout, and of others that something is to be copied from or to."""
        rank = self._rank.rank
        unknown = [peer for peer in dict.fromkeys((*layout.ranks, *others)) if peer not in self.known and peer != rank]
        if not unknown:
            return
        self._asked += 1
        self._rank.control.send(Where(rank=rank, ask=self._asked, ranks=unknown))
        while True:
            answer: Addresses = yield (Addresses,)
            if answer.ask == self._asked:
                break  # others are to questions whose asker was interrupted
        for peer, address in answer.addresses.items():
            if layout.host_of(peer) != layout.host_of(rank) and address != _LINKED:
                raise Violation("no link", f"rank {rank} cannot reach rank {peer} of another host")
        self.known.update(answer.addresses)
        self._missing = self._missing.union(unknown).difference(self.known)

    def meeting(self, layout: Layout, kind: str, step: int, data: Any = None) -> Meeting:
        """Come to an exchange of the present layout. Does not wait."""
        if self._met is not layout:
            for peer in layout.ranks:
                if peer in self._missing:
                    self.broken.add(peer)
                elif peer not in self.known and peer != self._rank.rank:
                    raise Violation("no address", f"rank {self._rank.rank} does not know where rank {peer} is")
            self._met = layout
        self._touched.update(layout.ranks)
        return self._rank.world.meet(self._rank, (self.epoch, kind, step), layout, data)

    def advance(self, epoch: int, lost: Collection[int]) -> None:
        """An epoch begins, in which the lost have no part."""
        self.epoch = epoch
        for peer in lost:
            if peer not in self._forgotten:
                self._forgotten.add(peer)
                for peers in (self.broken, self._gone, self._touched):
                    peers.discard(peer)

    def note_gone(self, peer: int) -> None:
        """The process of a rank of this host has ended."""
        if peer in self.known and peer not in self._forgotten and self._rank.alive:
            self._gone.add(peer)
            self._rank.poke()

    def note_broken(self, peer: int) -> None:
        """A link has broken."""
        if peer not in self._forgotten and self._rank.alive and peer in self.known:
            self.broken.add(peer)
            self._rank.poke()

    def suspects(self) -> Collection[int]:
        """Who keeps the rank from going on."""
        return self.broken | (self._gone & self._touched) if self.broken or self._gone else ()
