"""Wire: length-framed MessagePack over TCP, opened by a mutual proof that both ends know the job token.

A frame is a 4-byte big-endian length and that many bytes. The first frame each way proves knowledge of the token
(HMAC-SHA256 over fresh nonces of both sides); the token itself never travels. After that every frame is one
message (``cluster.messages``). There is a blocking version for ranks, an asyncio one for agents and the coordinator.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import os
import socket
from typing import TypeVar

import msgspec

TOKEN_VARIABLE = "MEGATRON_ELASTIC_TOKEN"
FRAME_LIMIT = 64 << 20
"""Bytes of the longest frame; the layout of a job of ten thousand ranks stays well below."""
_HANDSHAKE_LIMIT = 128
_NONCE = 32
_PROOF = 32

T = TypeVar("T")
_encoder = msgspec.msgpack.Encoder()


class WireError(Exception):
    """The other end does not know the job token, or what it sent is no message."""


def frame(payload: bytes) -> bytes:
    """Put the length in front of ``payload``. Raises WireError if it is too long."""
    if len(payload) > FRAME_LIMIT:
        raise WireError(f"a message of {len(payload)} bytes is longer than the limit of {FRAME_LIMIT}")
    return len(payload).to_bytes(4, "big") + payload


def encode(message: msgspec.Struct) -> bytes:
    """Return ``message`` as one frame."""
    return frame(_encoder.encode(message))


def decode(payload: bytes, decoder: msgspec.msgpack.Decoder[T]) -> T:
    """Return the message of one frame's payload. Raises WireError if it is none."""
    try:
        return decoder.decode(payload)
    except msgspec.MsgspecError as error:
        raise WireError(f"received {len(payload)} bytes that are no message: {error}") from None


def _length(header: bytes, limit: int) -> int:
    size = int.from_bytes(header, "big")
    if size > limit:
        raise WireError(f"received a frame of {size} bytes where at most {limit} are allowed")
    return size


def _proof(token: str, role: bytes, first: bytes, second: bytes) -> bytes:
    # The role keeps one side's proof from being played back as the other's.
    return hmac.new(token.encode(), role + first + second, hashlib.sha256).digest()


def _check(received: bytes, expected: bytes, who: str) -> None:
    if not hmac.compare_digest(received, expected):
        raise WireError(f"the {who} does not know the job token ({TOKEN_VARIABLE}); is this another job's port?")


def tune(sock: socket.socket, silence: float) -> None:
    """Send small messages at once, and let the connection break after ``silence`` seconds without its other machine.

    A machine that vanished, or was cut off, closes nothing. If something is on its way to it, TCP_USER_TIMEOUT bounds
    how long it may stay unacknowledged; if nothing is, the keepalive probes are what stays unacknowledged, under the
    same bound (they go out every quarter of it, in whole seconds as the kernel has it). Both are answered by the other
    machine's kernel: a process that is merely stopped does not break its connections.
    """
    probe = max(1, int(silence / 4))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, probe)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, probe)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(silence * 1e3))


# ---- blocking sockets ----------------------------------------------------------------------


def receive_frame(sock: socket.socket, limit: int = FRAME_LIMIT) -> bytes | None:
    """Read one frame; None at the end of the stream. Raises WireError if it is too long, OSError as sockets do."""
    header = _receive_exactly(sock, 4)
    return None if header is None else _receive_exactly(sock, _length(header, limit))


def _receive_exactly(sock: socket.socket, size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        piece = sock.recv(size - len(parts))
        if not piece:
            return None
        parts += piece
    return bytes(parts)


def connect(host: str, port: int, token: str, timeout: float, silence: float) -> socket.socket:
    """Connect to the coordinator and prove each other the token; the socket comes back without a timeout.

    It breaks when the coordinator's machine is gone for ``silence`` seconds.
    Raises WireError if the other end does not know the token, OSError if it cannot be reached in ``timeout`` seconds.
    """
    sock = socket.create_connection((host, port), timeout=timeout)
    try:
        tune(sock, silence)
        nonce = os.urandom(_NONCE)
        sock.sendall(frame(nonce))
        answer = receive_frame(sock, _HANDSHAKE_LIMIT)
        sock.sendall(frame(_answer_coordinator(answer, nonce, token)))
        sock.settimeout(None)
    except BaseException:
        sock.close()
        raise
    return sock


def _answer_coordinator(answer: bytes | None, nonce: bytes, token: str) -> bytes:
    if answer is None or len(answer) != _NONCE + _PROOF:
        raise WireError("the port does not answer like a coordinator of megatron_elastic")
    theirs = answer[:_NONCE]
    _check(answer[_NONCE:], _proof(token, b"coordinator", nonce, theirs), "coordinator")
    return _proof(token, b"client", nonce, theirs)


# ---- asyncio -------------------------------------------------------------------------------


class AsyncWire:
    """One authenticated connection in an event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def connect(cls, host: str, port: int, token: str, silence: float) -> AsyncWire:
        """As ``connect``, without a limit of its own."""
        reader, writer = await asyncio.open_connection(host, port)
        wire = cls(reader, writer)
        try:
            tune(writer.get_extra_info("socket"), silence)
            nonce = os.urandom(_NONCE)
            writer.write(frame(nonce))
            answer = await wire.receive_frame(_HANDSHAKE_LIMIT)
            writer.write(frame(_answer_coordinator(answer, nonce, token)))
        except BaseException:
            wire.close()
            raise
        return wire

    @classmethod
    async def accept(cls, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: str,
                     silence: float) -> AsyncWire:
        """The coordinator's side of ``connect``. Raises WireError; the caller closes ``writer`` then."""
        tune(writer.get_extra_info("socket"), silence)
        wire = cls(reader, writer)
        theirs = await wire.receive_frame(_HANDSHAKE_LIMIT)
        if theirs is None or len(theirs) != _NONCE:
            raise WireError("it does not speak the protocol of megatron_elastic")
        nonce = os.urandom(_NONCE)
        writer.write(frame(nonce + _proof(token, b"coordinator", theirs, nonce)))
        proof = await wire.receive_frame(_HANDSHAKE_LIMIT)
        _check(proof or b"", _proof(token, b"client", theirs, nonce), "client")
        return wire

    async def receive_frame(self, limit: int = FRAME_LIMIT) -> bytes | None:
        """Read one frame; None when the stream ended or broke. Raises WireError if it is too long."""
        try:
            size = _length(await self._reader.readexactly(4), limit)
            return await self._reader.readexactly(size)
        except (asyncio.IncompleteReadError, OSError):
            return None

    async def receive(self, decoder: msgspec.msgpack.Decoder[T]) -> T | None:
        """The next message; None when the stream ended or broke. Raises WireError if what came is no message."""
        payload = await self.receive_frame()
        return None if payload is None else decode(payload, decoder)

    def send(self, message: msgspec.Struct) -> None:
        """Send now if the socket takes it, else as soon as it does. Nothing happens on a broken connection."""
        if not self._writer.is_closing():
            self._writer.write(encode(message))

    def close(self) -> None:
        """Close after what was sent has left. Closing twice is fine."""
        with contextlib.suppress(RuntimeError):  # the loop may be closed already
            self._writer.close()

    def abort(self) -> None:
        """Cut the connection: nothing is sent any more, and ``receive`` returns None."""
        self._writer.transport.abort()
