"""Door: pysyncobj's transport, hardened against strangers, and against members that were cut off.

pysyncobj authenticates every message (Fernet, under a key from the job's token) before it unpickles it, and ties it to
its connection by random keys of both ends. What it does not do is bound what a stranger costs before that: idle
connections are kept for ever, a failed ``accept`` closes the listening socket for good, and up to 2 GB are read for a
message that then turns out to be none. Here they are few and small.

A member that hears nobody would stand for election again and again, each time in a higher term, and depose the leader
with that when it is back. Here it asks first, as the pre-vote of Raft does (Ongaro's thesis, 9.6): all tell each other,
all the time, whether they hear a leader.
"""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable, Iterable
from typing import Any

from pysyncobj.node import Node
from pysyncobj.poller import POLL_EVENT_TYPE
from pysyncobj.tcp_connection import TcpConnection
from pysyncobj.transport import TCPTransport

from megatron_elastic.cluster import wire

_STRANGERS = 64
"""Connections whose other ends have not said who they are; the oldest makes room. Introducing oneself takes
milliseconds."""
_INTRODUCTION = 4096
"""Bytes that may come before that; it takes some hundred."""
_BACKLOG = 128
_KEEPALIVE = (1, 1, 3)
_ALIVE = "alive"
"""A type of message that pysyncobj does not know."""
_FRESH = 4
"""Periods of the leader's heartbeats for which it holds what a member has said of itself."""


def reserve(interface: str = "0.0.0.0") -> socket.socket:
    """Listen on a free port, on all interfaces (``::``: of IPv6, too), before there is anybody to talk to."""
    return wire.listen(interface, 0, _BACKLOG)


class _Caller(socket.socket):
    """An accepted connection from which little is read until its other end is known."""

    _left: int | None = _INTRODUCTION

    def known(self) -> None:
        self._left = None

    def recv(self, size: int, flags: int = 0) -> bytes:
        if self._left is None:
            return super().recv(size, flags)
        if self._left < 0:
            raise ConnectionResetError(errno.ECONNRESET, "it sends much and does not say who it is")
        if self._left == 0:
            self._left = -1  # what has come is looked at first; it may be the introduction and more
            raise BlockingIOError(errno.EAGAIN, "enough for now")
        data = super().recv(min(size, self._left), flags)
        self._left -= len(data)
        return data


class Door:
    """Accepts connections on a listening socket, in the place of ``pysyncobj.tcp_server.TcpServer``."""

    def __init__(self, listening: socket.socket, poller: Any, connection_timeout: float, buffer: int,
                 enter: Callable[[TcpConnection, _Caller], None]) -> None:
        self._listening = listening
        self._poller = poller
        self._timeout = connection_timeout
        self._buffer = buffer
        self._enter = enter

    def bind(self) -> None:
        self._poller.subscribe(self._listening.fileno(), self._accept, POLL_EVENT_TYPE.READ)

    def unbind(self) -> None:
        if self._listening.fileno() >= 0:
            self._poller.unsubscribe(self._listening.fileno())
            self._listening.close()

    def _accept(self, descriptor: int, event: int) -> None:
        try:
            accepted, _ = self._listening.accept()
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EWOULDBLOCK):
                time.sleep(0.01)  # no more files, probably: the connection stays in the queue, and the poller wakes
            return
        caller = _Caller(accepted.family, accepted.type, accepted.proto, fileno=accepted.detach())
        caller.setblocking(False)
        caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._enter(TcpConnection(poller=self._poller, socket=caller, timeout=self._timeout, keepalive=_KEEPALIVE,
                                  sendBufferSize=self._buffer, recvBufferSize=self._buffer), caller)


class Transport(TCPTransport):
    """pysyncobj's TCP transport behind a ``Door``. All connections carry something often enough to be known alive:
    pysyncobj gives up those that were silent, also where, as between two followers, there was nothing to say. What they
    carry is whether the sender hears a leader.
    """

    def __init__(self, listening: socket.socket, raft: Any, me: Node, others: Iterable[Node]) -> None:
        self._listening = listening
        self._callers: dict[TcpConnection, _Caller] = {}
        self._alive_every = raft.conf.appendEntriesPeriod
        self._alive_next = 0.0
        self._led_until = 0.0
        """When this member has heard no leader for so long that one would count as deposed."""
        self._leaderless: dict[Node, float] = {}
        """Until when it holds that a member has said that it hears none."""
        super().__init__(raft, me, others)

    def may_stand(self) -> bool:
        """Whether a majority, this member included, hears no leader now."""
        others, now = self._syncObj.otherNodes, time.monotonic()
        leaderless = sum(self._leaderless.get(node, 0.0) > now for node in others)
        return 2 * (1 + leaderless) > 1 + len(others)

    def _createServer(self) -> None:
        conf = self._syncObj.conf
        self._server = Door(self._listening, self._syncObj._poller, conf.connectionTimeout, conf.recvBufferSize,
                            self._entered)

    def _entered(self, connection: TcpConnection, caller: _Caller) -> None:
        while len(self._callers) >= _STRANGERS:
            oldest = next(iter(self._callers))
            del self._callers[oldest]
            oldest.disconnect()
        self._callers[connection] = caller
        self._onNewIncomingConnection(connection)

    def _onIncomingMessageReceived(self, conn: TcpConnection, message: Any) -> None:
        node = self._nodeAddrToNode.get(message) if isinstance(message, str) else None
        former = self._connections.get(node)
        super()._onIncomingMessageReceived(conn, message)
        if former is not None and self._connections.get(node) is conn:
            former.disconnect()  # what is left in it must not be read after what comes by the new one
        if conn not in self._unknownConnections and conn in self._callers:
            self._callers.pop(conn).known()

    def _onDisconnected(self, conn: TcpConnection) -> None:
        self._callers.pop(conn, None)
        super()._onDisconnected(conn)

    def _onMessageReceived(self, node: Node, message: Any) -> None:
        now = time.monotonic()
        if message["type"] == _ALIVE:
            self._leaderless[node] = 0.0 if message["led"] else now + _FRESH * self._alive_every
        elif message["type"] == "append_entries" and message["term"] >= self._syncObj.raftCurrentTerm:
            self._led_until = now + self._syncObj.conf.leaderFallbackTimeout
        super()._onMessageReceived(node, message)

    def _onTick(self) -> None:
        super()._onTick()
        now = time.monotonic()
        if now > self._alive_next:
            self._alive_next = now + self._alive_every
            led = self._syncObj._isLeader() or self._led_until > now
            for node in filter(self._syncObj.isNodeConnected, self._nodes):
                self.send(node, {"type": _ALIVE, "led": led})

    def destroy(self) -> None:
        super().destroy()
        for connection in list(self._callers):
            connection.disconnect()
