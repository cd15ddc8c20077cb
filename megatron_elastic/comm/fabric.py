"""Fabric: what carries messages between a rank and its peers.

Peers of this host are reached through mailboxes and shared memory (``comm.host.outbox``, ``comm.host.mailbox``,
``comm.host.arena``), those of other hosts over UCX links (``comm.links.link``). What arrives goes into the inbox.
"""

from __future__ import annotations

import select
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from megatron_elastic.comm.host.arena import Arena
from megatron_elastic.comm.host.mailbox import BLOCK, NUDGE, SQUEEZE, WHOLE, Frame, Mailbox, NearAddress, encode
from megatron_elastic.comm.host.message import Block, Whole
from megatron_elastic.comm.host.outbox import Outbox
from megatron_elastic.comm.inbox import Inbox
from megatron_elastic.comm.links.link import Links
from megatron_elastic.comm.links.seal import Seal
from megatron_elastic.comm.links.strangers import Strangers
from megatron_elastic.comm.operation import Send
from megatron_elastic.comm.peers import PeerAddress, Peers
from megatron_elastic.comm.tag import source_of
from megatron_elastic.observe.dials import SHARED_MEMORY, UCX, Dials

_ARENA_SIZE = 64 << 20


class Fabric:
    """A rank's. Every call but ``wake`` needs the transport's lock.

    Args:
        rank: this rank.
        inbox: is given what arrives.
        events: told to look for arrivals, for room and for the end of peers.
        unproved: bytes that messages may take which have not proved yet that they are of this job.
        find: says where ranks are that are not known yet, without those that are dead; may be interrupted.
        refused: called when the first message over a link is refused, with the reason.
        dials: count the bytes of messages.
    """

    def __init__(
        self, rank: int, inbox: Inbox, events: select.epoll, unproved: int,
        find: Callable[[Sequence[int]], Mapping[int, bytes]] | None, refused: Callable[[str], None],
        dials: Dials,
    ) -> None:  # fmt: skip
        self._sent, self._received = dials.sent, dials.received
        self._rank = rank
        self._inbox = inbox
        self._events = events
        self._unproved = unproved
        self._find = find
        self._refused = refused
        self._key = b""
        self._links: Links | None = None
        """None while nobody on another host matters."""
        self._arena = Arena(_ARENA_SIZE)
        self._mailbox = Mailbox()
        events.register(self._mailbox.fd, select.EPOLLIN)
        self.outbox = Outbox(rank, self._arena, events)
        self.peers = Peers(rank, events)
        self._strangers = Strangers(rank)
        self._cut: dict[int, float] = {}
        """Peers that nothing reaches, and until when."""
        self._frames: deque[Frame] = deque()
        """Taken from the mailbox and not yet looked at."""

    # ---- peers ------------------------------------------------------------------------------

    @property
    def address(self) -> bytes:
        """What peers must be given to reach this rank; those of other hosts once it listens for them."""
        near = NearAddress(self._arena.address, self._mailbox.fd)
        return PeerAddress(b"" if self._links is None else self._links.address, near).encode()

    @property
    def listening(self) -> bool:
        """Whether peers of other hosts can reach this rank."""
        return self._links is not None

    def listen(self) -> None:
        """Let peers of other hosts reach this rank, and this rank them. Idempotent."""
        if self._links is None:
            self._links = Links(self._rank, self.peers.died, self._refused, self._unproved)
            self._events.register(self._links.fd, select.EPOLLIN)
            if self._key:
                self._links.seal = Seal(self._rank, self._key)

    def trust(self, key: bytes) -> None:
        """Exchange messages with ranks of other hosts that know this key. Once; later calls change nothing."""
        if not self._key:
            self._key = key
            if self._links is not None:
                self._links.seal = Seal(self._rank, key)

    @property
    def refused(self) -> int:
        """Messages over links that were not of this job."""
        return 0 if self._links is None else self._links.refused

    def add_peers(self, addresses: Mapping[int, bytes]) -> None:
        """Learn where peers are. Links are made when first used. Raises msgspec.DecodeError for no address."""
        for peer, address in addresses.items():
            if peer in self.peers or peer == self._rank:
                continue
            self.peers.add(peer, address)
            for frame in self._strangers.take(peer):
                self._deliver(frame)

    def need(self, *peers: int) -> None:
        """This epoch depends on these peers. Those that are needed for the first time are looked up, all at once."""
        self.peers.watch(peers)
        unknown = [peer for peer in dict.fromkeys(peers) if peer not in self.peers and peer != self._rank]
        if self._find is None or not unknown:
            return
        self.add_peers(self._find(unknown))
        for peer in unknown:
            if peer not in self.peers:
                self.peers.died(peer)

    def advance(self, epoch: int, lost: Iterable[int]) -> None:
        """Enter an epoch: forget what of older ones is not written yet, let go of the dead."""
        self.outbox.advance(epoch)
        for peer, neighbour in self.peers.advance(lost).items():
            self._strangers.take(peer)
            if self._links is not None:
                self._links.forget(peer)
            if neighbour is not None:
                self.outbox.forget(neighbour)
            self.peers.forget(peer)

    # ---- messages ---------------------------------------------------------------------------

    def send(self, peer: int, tag: int, buffer: torch.Tensor, background: bool) -> Send:
        """Start sending a contiguous tensor. ``background``: it must leave room for others.

        Raises KeyError for a peer whose address is not known, RuntimeError for one of another host unless this rank
        listens.
        """
        self.need(peer)
        if self._cut and self._is_cut(peer):
            return Send(peer)
        neighbour = self.peers.near.get(peer)
        if neighbour is not None:
            self._sent[SHARED_MEMORY] += buffer.nbytes
            return self.outbox.send((neighbour,), tag, buffer, background)
        worker = self.peers.far.get(peer)
        if worker is not None:
            if self._links is None:
                raise RuntimeError(f"rank {self._rank} has no links, and rank {peer} is on another host: listen first")
            self._sent[UCX] += buffer.nbytes
            return Send(peer, self._links.send(peer, worker, tag, buffer))
        if peer not in self.peers:
            raise KeyError(f"rank {self._rank} knows no address of rank {peer}")
        return Send(peer)  # to the dead: who waits for anything in this epoch learns it

    def send_all(self, peers: Sequence[int], tag: int, buffer: torch.Tensor, background: bool) -> list[Send]:
        """Start sending the same contiguous tensor to some peers; those of this host share one copy of it."""
        self.need(*peers)
        neighbours = self.peers.near
        if self._cut:
            peers = [peer for peer in peers if not self._is_cut(peer)]
        near = [neighbours[peer] for peer in peers if peer in neighbours]
        sends = [self.send(peer, tag, buffer, background) for peer in peers if peer not in neighbours]
        if near:
            self._sent[SHARED_MEMORY] += buffer.nbytes * len(near)
            sends.append(self.outbox.send(near, tag, buffer, background))
        return sends

    def cut(self, peers: Sequence[int], seconds: float) -> None:
        """Fault: for so long nothing that is sent to these peers arrives, and nobody learns that."""
        self._cut |= dict.fromkeys(peers, time.monotonic() + seconds)

    def _is_cut(self, peer: int) -> bool:
        return time.monotonic() < self._cut.get(peer, 0.0)

    def take_in(self) -> None:
        """Give what has arrived to who expects it."""
        frames = self._frames
        frames.extend(self._mailbox.take())
        while frames:
            self._deliver(frames.popleft())
        if self._links is not None:
            for tag, message in self._links.progress():
                self._received[UCX] += message.length
                self._inbox.put(tag, message)

    def arm(self) -> bool:
        """Make events tell of what comes next. False if something has come already."""
        return self._links is None or self._links.arm()

    def wake(self) -> None:
        """Let whoever sleeps until something arrives look around."""
        self._mailbox.wake()

    def _deliver(self, frame: Frame) -> None:
        """Make a message of a frame from this host."""
        tag, size, start, length, release, kind, data = frame
        source = source_of(tag)
        neighbour = self.peers.near.get(source)
        if kind == NUDGE:
            pass  # to wake is all it is for
        elif neighbour is None and source not in self.peers:
            self._strangers.put(source, frame)
        elif kind == WHOLE:
            self._received[SHARED_MEMORY] += length
            self._inbox.put(tag, Whole(data))
        elif neighbour is None:
            self.peers.died(source)  # it had ended before its memory could be opened
        elif kind == SQUEEZE:
            self._inbox.squeeze(source)
            self.outbox.answer(neighbour, encode(self._rank, NUDGE))
        elif kind == BLOCK:
            if not (start + length <= neighbour.view.size and release < neighbour.view.size and length <= size):
                raise RuntimeError(
                    f"rank {self._rank} got a frame from rank {source} about {length} bytes at {start}: it has none"
                )
            self._received[SHARED_MEMORY] += length
            block = Block(neighbour.view, start, length, release)
            if size == length:
                self._inbox.put(tag, block)
            else:
                self._inbox.put_piece(tag, size, block)
        else:
            raise RuntimeError(f"rank {self._rank} got a frame of unknown kind {kind} from rank {source}")

    def close(self) -> None:
        """Close every link and the mailbox."""
        if self._links is not None:
            self._links.close()
        self.peers.close()
        self._mailbox.close()
        self._arena.close()
