"""Line: an agent's connections with the ranks of its node.

A rank finds its agent's address in its environment: a Unix socket in the abstract namespace, which leaves no file, and
which every user of the machine can connect to. Who is at the other end the kernel says, so there is nothing to prove:
only processes of the agent's user that it has started are let in, each as the rank that it is. What a rank has written
is here, even if the rank is dead by now: reading it before the rank's death is told keeps the two in order.
"""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import socket
import struct
from collections import deque
from collections.abc import Callable

import msgspec

from megatron_elastic.cluster import wire
from megatron_elastic.cluster.messages import FromRank

AGENT_VARIABLE = "MEGATRON_ELASTIC_AGENT"
"""Environment variable with the name of the agent's socket."""
FIRST_HOST_VARIABLE = "MEGATRON_ELASTIC_FIRST_HOST"
"""Environment variable with the number of ranks that the job began with on its first host. A node that comes later may
have another number, and its ranks must know what the first layout was."""
_CREDENTIALS = struct.Struct("iII")
_STRANGERS = 1024
"""Connections of processes that are not known."""
_STRANGERS_LIMIT = 30.0
"""Seconds that they are kept: the word that a rank was started takes milliseconds."""
_PAUSE = 0.1
"""Seconds until the next connection is accepted when this process can open nothing more."""
_BATCH = 1 << 18
_BACKLOG = 64 << 20
"""Bytes that may wait for a rank that does not read."""

_decoder: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)


def peer(sock: socket.socket) -> tuple[int, int]:
    """The process at the other end of a Unix socket when it connected or began to listen, and its user."""
    pid, user, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, user


class Lines:
    """The connections of one node's ranks.

    Args:
        heard: told what a rank says: (rank, message).
        closed: told when a rank has closed its last connection.
        limit: seconds that a connection of a process is kept that is not known yet.
    """

    def __init__(self, heard: Callable[[int, FromRank], None], closed: Callable[[int], None],
                 limit: float = _STRANGERS_LIMIT) -> None:
        self.name = f"megatron-elastic-{secrets.token_hex(8)}"
        self._heard = heard
        self._closed = closed
        self._limit = limit
        self._loop = asyncio.get_running_loop()
        self._pids: dict[int, int] = {}
        """Rank of each process that the agent has started."""
        self._strangers: dict[int, list[socket.socket]] = {}
        """Connections of processes that are not known yet: a rank may be faster than the word that it was started."""
        self._lines: dict[int, list[_Line]] = {}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        self._listener.bind(f"\0{self.name}")
        self._listener.listen(1024)
        self._loop.add_reader(self._listener, self._accept)

    def expect(self, rank: int, pid: int) -> None:
        """This process is this rank."""
        self._pids[pid] = rank
        for sock in self._strangers.pop(pid, ()):
            self._let_in(rank, sock)

    def forget(self, rank: int) -> None:
        """A rank's process has ended: read what it has said last, and close its connections."""
        self.drain(rank)
        for pid in [pid for pid, each in self._pids.items() if each == rank]:
            del self._pids[pid]
        for line in self._lines.pop(rank, ()):
            line.close()

    def drain(self, rank: int) -> None:
        """Read all that a rank has written so far."""
        for line in list(self._lines.get(rank, ())):  # one that has ended leaves them
            line.read()

    def send(self, rank: int, frame: bytes) -> None:
        """Send a frame to a rank, over its first connection. Nothing happens if there is none."""
        for line in self._lines.get(rank, ())[:1]:
            line.write(frame)

    def close(self) -> None:
        """Close everything."""
        self._loop.remove_reader(self._listener)
        self._listener.close()
        for lines in self._lines.values():
            for line in lines:
                line.close()
        for socks in self._strangers.values():
            for sock in socks:
                sock.close()
        self._lines.clear()
        self._strangers.clear()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.ECONNABORTED):  # no more files, probably: it would ask for ever
                self._loop.remove_reader(self._listener)
                self._loop.call_later(_PAUSE, self._accept_again)
            return
        pid, user = peer(sock)
        if user != os.geteuid():
            sock.close()
        elif pid in self._pids:
            self._let_in(self._pids[pid], sock)
        elif sum(map(len, self._strangers.values())) < _STRANGERS:
            self._strangers.setdefault(pid, []).append(sock)
            self._loop.call_later(self._limit, self._send_away, pid, sock)
        else:
            sock.close()

    def _accept_again(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener, self._accept)

    def _send_away(self, pid: int, sock: socket.socket) -> None:
        """A stranger's time is over. Its pid may become a rank's, which must not be taken for it."""
        socks = self._strangers.get(pid, [])
        if sock in socks:
            sock.close()
            socks.remove(sock)
            if not socks:
                del self._strangers[pid]

    def _let_in(self, rank: int, sock: socket.socket) -> None:
        def heard(payload: bytes) -> bool:
            try:
                message = _decoder.decode(payload)
            except msgspec.MsgspecError:
                return False
            if message.rank == rank:
                self._heard(rank, message)
            return message.rank == rank

        def ended() -> None:
            lines = self._lines.get(rank, [])
            if line in lines:
                lines.remove(line)
                if not lines:
                    self._closed(rank)

        line = _Line(sock, heard, ended)
        self._lines.setdefault(rank, []).append(line)
        line.read()


class _Line:
    """One connection. ``heard`` takes the payload of a frame and says whether it makes sense."""

    def __init__(self, sock: socket.socket, heard: Callable[[bytes], bool], ended: Callable[[], None]) -> None:
        self._sock = sock
        self._heard = heard
        self._ended = ended
        self._received = bytearray()
        self._waiting: deque[bytes] = deque()
        self._backlog = 0
        self._loop = asyncio.get_running_loop()
        sock.setblocking(False)
        self._loop.add_reader(sock, self.read)

    def read(self) -> None:
        """Take what is here."""
        while self._sock.fileno() >= 0:
            try:
                data = self._sock.recv(_BATCH)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            self._received += data
            if not data or not self._take_frames():
                self.close()
                self._ended()

    def _take_frames(self) -> bool:
        at, received = 0, self._received
        while len(received) - at >= 4:
            size = int.from_bytes(received[at : at + 4], "big")
            if size > wire.FRAME_LIMIT:
                return False
            if len(received) - at < 4 + size:
                break
            payload = bytes(received[at + 4 : at + 4 + size])
            at += 4 + size
            if not self._heard(payload):
                return False
        del received[:at]
        return True

    def write(self, frame: bytes) -> None:
        """Send now if the socket takes it, else as soon as it does. Who lets too much wait is cut off."""
        if self._sock.fileno() < 0:
            return
        self._waiting.append(frame)
        self._backlog += len(frame)
        if len(self._waiting) == 1:
            self._flush()
        elif self._backlog > _BACKLOG:
            self.close()
            self._ended()

    def _flush(self) -> None:
        try:
            while self._waiting:
                sent = self._sock.send(self._waiting[0])
                self._backlog -= sent
                if sent < len(self._waiting[0]):
                    self._waiting[0] = self._waiting[0][sent:]
                else:
                    self._waiting.popleft()
        except BlockingIOError:
            self._loop.add_writer(self._sock, self._flush)
            return
        except OSError:  # it is gone; reading will tell
            self._waiting.clear()
        self._loop.remove_writer(self._sock)

    def close(self) -> None:
        """Close the connection."""
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock)
            self._loop.remove_writer(self._sock)
            self._sock.close()
