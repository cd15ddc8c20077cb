"""Outbox: what this rank sends to ranks of its host.

A small message is one frame. A larger one is cut into pieces that lie in the arena, where one copy serves all its
readers. What finds no room waits here: readers are asked to copy what they do not expect yet and to tell when they
release a block, so a message that nobody expects cannot hold up one that somebody waits for.
"""

from __future__ import annotations

import ctypes
import select
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_elastic.comm.host.arena import Arena, address_of
from megatron_elastic.comm.host.mailbox import BLOCK, INLINE, SQUEEZE, WHOLE, Neighbour, encode
from megatron_elastic.comm.operation import Send
from megatron_elastic.comm.tag import is_older

_PIECE = 1 << 20
"""Bytes of a piece: the receiver copies one while the sender writes the next."""


@dataclass(slots=True)
class _Parcel:
    """A message that is not written whole yet; it keeps its buffer alive."""

    to: list[Neighbour]
    tag: int
    buffer: torch.Tensor
    at: int
    send: Send
    background: bool


class Outbox:
    """Writes messages into mailboxes, in order for each tag.

    Args:
        rank: this rank.
        arena: where large messages are put.
        events: told to look for room in full mailboxes.
    """

    def __init__(self, rank: int, arena: Arena, events: select.epoll) -> None:
        self._rank = rank
        self._arena = arena
        self._events = events
        self._queues: tuple[deque[_Parcel], deque[_Parcel]] = (deque(), deque())
        """Parcels that wait for room: a step's, and background traffic's."""
        self._queued: tuple[Counter[int], Counter[int]] = (Counter(), Counter())
        """How many parcels of each tag wait in each queue."""
        self._full: dict[int, Neighbour] = {}
        """Whose mailbox is full, by its descriptor."""
        self._readers: dict[int, Neighbour] = {}
        """Who was ever given a block."""
        self._fed: set[int] = set()
        """Who was given blocks since readers were last asked for room."""

    @property
    def busy(self) -> bool:
        """Whether something waits to be written."""
        return bool(self._full or self._queues[0] or self._queues[1])

    def send(self, to: Sequence[Neighbour], tag: int, buffer: torch.Tensor, background: bool) -> Send:
        """Send a contiguous tensor to some neighbours. It is copied at once if there is room."""
        send = Send(to[0].rank)
        size, address = buffer.nbytes, address_of(buffer)
        queue, queued = self._queues[background], self._queued[background]
        if tag in queued:
            pass  # behind the one with the same tag
        elif size <= INLINE:
            frame = encode(tag, WHOLE, size, 0, size, 0, ctypes.string_at(address, size))
            for neighbour in to:
                self._write(neighbour, frame, send)
            return send
        parcel = _Parcel(list(to), tag, buffer, 0, send, background)
        if queue or not self._write_pieces(parcel):
            send.left += 1
            queue.append(parcel)
            queued[tag] += 1
            self._ask_for_room()
        return send

    def progress(self) -> None:
        """Write what has found room."""
        for fd, neighbour in list(self._full.items()):
            while neighbour.backlog and neighbour.write(neighbour.backlog[0][0]):
                self._written(neighbour.backlog.popleft()[1])
            if not neighbour.backlog:
                del self._full[fd]
                self._events.unregister(fd)
        for queue, queued in zip(self._queues, self._queued, strict=True):
            while queue and self._write_pieces(queue[0]):
                parcel = queue.popleft()
                parcel.send.written()
                if queued[parcel.tag] == 1:
                    del queued[parcel.tag]
                else:
                    queued[parcel.tag] -= 1
        if self._queues[0] or self._queues[1]:
            self._ask_for_room()
        elif self._arena.hungry:
            self._arena.hungry = False

    def answer(self, neighbour: Neighbour, frame: bytes) -> None:
        """Write a frame that is no message."""
        self._write(neighbour, frame, None)

    def advance(self, epoch: int) -> None:
        """Forget what has not been written of older epochs' messages."""
        for queue, queued in zip(self._queues, self._queued, strict=True):
            kept = [parcel for parcel in queue if not is_older(parcel.tag, epoch)]
            queue.clear()
            queue.extend(kept)
            queued.clear()
            queued.update(parcel.tag for parcel in kept)

    def forget(self, neighbour: Neighbour) -> None:
        """A rank is dead: nothing is for it any more."""
        self._arena.forget(neighbour.rank)
        self._readers.pop(neighbour.rank, None)
        self._fed.discard(neighbour.rank)
        if self._full.pop(neighbour.mailbox, None) is not None:
            self._events.unregister(neighbour.mailbox)
        while neighbour.backlog:
            self._written(neighbour.backlog.popleft()[1])
        for queue in self._queues:
            for parcel in queue:
                parcel.to = [each for each in parcel.to if each is not neighbour]

    def _write(self, neighbour: Neighbour, frame: bytes, send: Send | None) -> None:
        if neighbour.backlog or not neighbour.write(frame):
            if not neighbour.backlog:
                self._full[neighbour.mailbox] = neighbour
                self._events.register(neighbour.mailbox, select.EPOLLOUT)
            neighbour.backlog.append((frame, send))
            if send is not None:
                send.left += 1

    def _written(self, send: Send | None) -> None:
        if send is not None:
            send.written()

    def _write_pieces(self, parcel: _Parcel) -> bool:
        """Write as many pieces as find room. Returns whether all did."""
        size, address, to = parcel.buffer.nbytes, parcel.buffer.data_ptr(), parcel.to
        if size <= INLINE:
            frame = encode(parcel.tag, WHOLE, size, 0, size, 0, ctypes.string_at(address, size))
            for neighbour in to:
                self._write(neighbour, frame, parcel.send)
            return True
        readers = tuple(neighbour.rank for neighbour in to)
        while parcel.at < size and to:
            length = min(_PIECE, size - parcel.at)
            block = self._arena.put(address + parcel.at, length, readers, parcel.background)
            if block is None:
                return False
            start = block + self._arena.header(len(readers))
            for i, neighbour in enumerate(to):
                self._readers[neighbour.rank] = neighbour
                self._fed.add(neighbour.rank)
                self._write(neighbour, encode(parcel.tag, BLOCK, size, start, length, block + i), parcel.send)
            parcel.at += length
        return True

    def _ask_for_room(self) -> None:
        # A holder that has been asked answers, and sees from then on that this rank is hungry: its later releases are
        # told. Whoever was given a block since must be asked again, because it may not expect what is in it.
        if self._arena.hungry:
            asked = set(self._fed)
        else:
            self._arena.hungry = True
            asked = self._arena.holders()
        self._fed.clear()
        for rank in asked:
            self._write(self._readers[rank], encode(self._rank, SQUEEZE), None)
