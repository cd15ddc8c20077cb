"""Mailbox: the pipe through which ranks of one host put frames to a rank.

The kernel makes a write of up to ``PIPE_BUF`` bytes whole or not at all, whoever else writes and whenever the writer
dies, keeps each writer's order, and wakes a reader that sleeps. So one pipe serves all senders without a lock, what a
sender wrote before it died can still be read, and no wake-up is lost. (A ring in shared memory would save the two
system calls, half a microsecond each; Python needs that long to keep a ring.)

A frame is a header and, for a small message, its bytes; a larger message's header says where they are
(``comm.host.arena``).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import threading
import weakref
from collections import deque

import msgspec

from megatron_elastic.comm.host.arena import ArenaAddress, ArenaView, here
from megatron_elastic.comm.operation import Send
from megatron_elastic.comm.tag import source_of

_HEADER = struct.Struct("<QQIIII")
INLINE = select.PIPE_BUF - _HEADER.size
"""Largest message, in bytes, that fits its frame."""
_BATCH = 1 << 16
_CAPACITY = 1 << 18
"""Bytes that a mailbox holds, if the system's limits allow."""


WHOLE, BLOCK, SQUEEZE, NUDGE = range(4)
"""Kinds of frames. WHOLE: a message. BLOCK: where a message or a piece of one is. SQUEEZE: the sender wants its blocks
back, and an answer. NUDGE: the answer; or a block was released."""

Frame = tuple[int, int, int, int, int, int, bytes]
"""(tag, bytes of the whole message, start, length, release, kind, data): ``length`` bytes are in ``data`` or, from
``start`` on, in the sender's arena; ``release`` is the byte there that releases the block."""


def encode(
    tag: int, kind: int, size: int = 0, start: int = 0, length: int = 0, release: int = 0, data: bytes = b""
) -> bytes:
    """A frame as it is written."""
    return _HEADER.pack(tag, size, start, length, release, kind) + data


_WAKE = encode(0, NUDGE)


class NearAddress(msgspec.Struct, frozen=True):
    """How ranks of the same host reach a rank: its arena, and the descriptor of its mailbox in its process."""

    arena: ArenaAddress
    mailbox: int


class Mailbox:
    """A rank's own mailbox. ``fd`` is readable while there are frames."""

    def __init__(self) -> None:
        # The writing end stays open too: a pipe that all writers have left is readable for ever.
        self.fd, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        with contextlib.suppress(OSError):
            fcntl.fcntl(self._writer, fcntl.F_SETPIPE_SZ, _CAPACITY)
        self._rest = b""
        self._closing = threading.Lock()
        """Held while it is closed, or written to in any thread."""

    def take(self) -> list[Frame]:
        """The frames that are here. Raises RuntimeError, naming its sender, for one that is larger than frames are."""
        frames: list[Frame] = []
        while True:
            try:
                data = os.read(self.fd, _BATCH)
            except BlockingIOError:
                return frames
            more = len(data) == _BATCH
            if self._rest:
                data, self._rest = self._rest + data, b""
            at, end = 0, len(data)
            while at + _HEADER.size <= end:
                tag, size, start, length, release, kind = _HEADER.unpack_from(data, at)
                if kind == WHOLE:
                    body = at + _HEADER.size
                    if length > INLINE:
                        raise RuntimeError(
                            f"a frame from rank {source_of(tag)} says that it has {length} bytes, where {INLINE} fit: "
                            "what came with it is lost"
                        )
                    if body + length > end:
                        break
                    frames.append((tag, size, start, length, release, kind, data[body : body + length]))
                    at = body + length
                else:
                    frames.append((tag, size, start, length, release, kind, b""))
                    at += _HEADER.size
            self._rest = data[at:]
            if not more:
                return frames

    def wake(self) -> None:
        """Let whoever waits for frames look around. A full mailbox needs no more for that, and a closed one nothing."""
        with self._closing, contextlib.suppress(BlockingIOError):
            if self._writer >= 0:
                os.write(self._writer, _WAKE)

    def close(self) -> None:
        """Close both ends."""
        with self._closing:
            os.close(self.fd)
            os.close(self._writer)
            self._writer = -1


class Neighbour:
    """Another rank of this host: its mailbox to write to, its arena to read from, and ``pidfd`` to see it end."""

    def __init__(self, rank: int, mailbox: int, pidfd: int) -> None:
        self.rank = rank
        self.pidfd = pidfd
        self.view: ArenaView
        self.backlog: deque[tuple[bytes, Send | None]] = deque()
        """Frames that found the mailbox full, with the sends that are done when they are written."""
        self.mailbox = mailbox

    @classmethod
    def open(cls, rank: int, address: NearAddress, me: int) -> Neighbour | None:
        """None if the rank is on another host, cannot be reached, or has ended."""
        arena, opened = address.arena, []
        if arena.place != here():  # its process number is another process's here, or nobody's
            return None
        mailbox = f"/proc/{arena.pid}/fd/{address.mailbox}"
        try:
            opened.append(os.open(mailbox, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC))
            opened.append(os.pidfd_open(arena.pid))
        except OSError:
            view = None
        else:
            neighbour = cls(rank, *opened)
            # Weakly: else the two keep each other, and the rank's memory, until the collector comes, if it ever does.
            nudge, known = encode(me, NUDGE), weakref.ref(neighbour)
            view = ArenaView.open(arena, lambda: None if (owner := known()) is None else owner.nudge(nudge))
        if view is None:
            for fd in opened:
                os.close(fd)
            return None
        neighbour.view = view
        return neighbour

    def write(self, frame: bytes) -> bool:
        """Put a frame into the mailbox, unless it is full. A rank that is gone gets nothing, which is as good."""
        try:
            os.write(self.mailbox, frame)
        except BlockingIOError:
            return False
        except BrokenPipeError:
            pass
        return True

    def nudge(self, frame: bytes) -> None:
        """Wake the rank. A full mailbox needs no more for that."""
        if self.mailbox >= 0:
            self.write(frame)

    def close(self) -> None:
        """Forget the rank; what is lent from its arena stays readable."""
        os.close(self.mailbox)
        os.close(self.pidfd)
        self.mailbox = self.pidfd = -1
