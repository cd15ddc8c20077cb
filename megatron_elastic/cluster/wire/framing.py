"""Framing: a message is a 4-byte big-endian length and that many bytes of MessagePack. Only this module knows it."""

from __future__ import annotations

import asyncio
from typing import Protocol, TypeVar

import msgspec

FRAME_LIMIT = 64 << 20
"""Bytes of the longest message; the layout of a job of ten thousand ranks stays well below."""
_HEADER = 4

_encoder = msgspec.msgpack.Encoder()

T = TypeVar("T")


class Stream(Protocol):
    """What can be read like a blocking socket."""

    def recv(self, size: int, /) -> bytes:
        """Up to ``size`` bytes; none at the end."""


class WireError(Exception):
    """The other end is none of this job's, or what it sent is no message."""


class Unsendable(WireError):
    """A message cannot be a frame: it is too long, or holds what MessagePack cannot. Its receiver has no part in it."""


def frame(payload: bytes, what: str = "payload", limit: int = FRAME_LIMIT) -> bytes:
    """Put the length in front of ``payload``. Raises Unsendable if it is longer than ``limit`` bytes."""
    if len(payload) > limit:
        raise Unsendable(f"a {what} of {len(payload)} bytes is longer than a message may be ({limit} bytes)")
    return len(payload).to_bytes(_HEADER, "big") + payload


def encode(message: msgspec.Struct, limit: int = FRAME_LIMIT) -> bytes:
    """Return ``message`` as one frame. Raises Unsendable with its type, size and limit."""
    return frame(pack(message), type(message).__name__, limit)


def pack(message: msgspec.Struct) -> bytes:
    """Return ``message`` as the payload of a frame. Raises Unsendable with its type if MessagePack cannot hold it."""
    try:
        return _encoder.encode(message)
    except (TypeError, ValueError, OverflowError) as error:  # for instance text that is no Unicode
        raise Unsendable(f"a {type(message).__name__} cannot be encoded: {error}") from None


def decode(payload: bytes, decoder: msgspec.msgpack.Decoder[T]) -> T:
    """Return the message of one frame's payload. Raises WireError if it is none that ``decoder`` knows."""
    try:
        return decoder.decode(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise WireError(f"received {len(payload)} bytes that are no message: {error}") from None


def receive_frame(sock: Stream, limit: int = FRAME_LIMIT) -> bytes | None:
    """Read one frame's payload; None at the end of the stream.

    Raises WireError if it is longer than ``limit`` bytes, OSError as sockets do.
    """
    header = _receive_exactly(sock, _HEADER)
    return None if header is None else _receive_exactly(sock, _length(header, limit))


async def read_frame(reader: asyncio.StreamReader, limit: int = FRAME_LIMIT) -> bytes | None:
    """Read one frame's payload; None when the stream ended or broke. Raises WireError if it is too long."""
    try:
        return await reader.readexactly(_length(await reader.readexactly(_HEADER), limit))
    except (asyncio.IncompleteReadError, OSError):
        return None


def _length(header: bytes, limit: int) -> int:
    size = int.from_bytes(header, "big")
    if size > limit:
        raise WireError(f"received a frame of {size} bytes where at most {limit} are allowed")
    return size


def _receive_exactly(sock: Stream, size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        piece = sock.recv(size - len(parts))
        if not piece:
            return None
        parts += piece
    return bytes(parts)
