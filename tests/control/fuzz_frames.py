"""Frames that are almost right: every message there is, mutated, and read as from a socket.

``python -m tests.control.fuzz_frames [COUNT] [SEED]`` reads COUNT of them and prints one JSON object with what came of
them. Nothing but a message, the end of the stream or a WireError may; anything else ends it with the frame that did it.
"""

from __future__ import annotations

import json
import random
import sys
import time
import types
import typing
from collections import Counter
from collections.abc import Iterator, Mapping

import msgspec

from megatron_elastic.cluster import wire
from tests.control.any_message import any_message

LIMIT = 1 << 20
_NASTY = (
    b"\xc1", b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xc9\xff\xff\xff\xff\x00",
    b"\xdb\xff\xff\xff\xff", b"\xcf\xff\xff\xff\xff\xff\xff\xff\xff", b"\xd3\x80\x00\x00\x00\x00\x00\x00\x00",
    b"\xcb\x7f\xf8\x00\x00\x00\x00\x00\x01", b"\x91" * 5000 + b"\xc0", b"\x81\xa1x" * 5000 + b"\xc0", b"\xa1\xff",
    b"\xd7\xff\xff\xff\xff\xff\xff\xff\xff\xff", b"\x82\xa4type\xa9Heartbeat\xa1x",
)  # fmt: skip


class Bytes:
    """What ``receive_frame`` reads: bytes, then the end."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def recv(self, size: int, /) -> bytes:
        piece, self._data = self._data[:size], self._data[size:]
        return piece


def example(kind: typing.Any, draw: random.Random) -> typing.Any:
    """Some value of an annotated type."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return example(draw.choice(inner), draw)
    if origin is list or (origin is tuple and inner[-1] is Ellipsis):
        return origin(example(inner[0], draw) for _ in range(draw.randrange(4)))
    if origin is tuple:
        return tuple(example(part, draw) for part in inner)
    if origin in (dict, Mapping):
        return {example(inner[0], draw): example(inner[1], draw) for _ in range(draw.randrange(4))}
    simple = {int: draw.randrange(-5, 1 << 17), float: draw.random(), bool: draw.random() < 0.5,
              str: "x\N{GREEK SMALL LETTER BETA}" * draw.randrange(20), bytes: draw.randbytes(draw.randrange(40)),
              type(None): None}
    if kind in simple:
        return simple[kind]
    return kind(**{name: example(hint, draw) for name, hint in typing.get_type_hints(kind).items()})  # a struct


def mutate(frame: bytes, other: bytes, draw: random.Random) -> bytes:
    """``frame`` with one to four changes; the length in front is put right again in nine cases of ten."""
    payload = bytearray(frame[4:])
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        at, to = sorted(draw.randrange(len(payload) + 1) for _ in range(2))
        match draw.choice((0, 0, 0, 1, 2, 3, 4, 5)):
            case 0 if at < len(payload):
                payload[at] ^= 1 << draw.randrange(8)
            case 1:
                payload[at:at] = draw.choice(_NASTY)
            case 2:
                payload[at : at + 1] = draw.choice(_NASTY)
            case 3:
                del payload[at:to]
            case 4:
                payload[at:at] = payload[at:to]
            case _:
                payload[at:to] = other[4:][at:to]
    size = len(payload) if draw.random() < 0.9 else draw.getrandbits(draw.randrange(33))
    return size.to_bytes(4, "big") + payload


def frames(decoder: msgspec.msgpack.Decoder[typing.Any], seed: int) -> Iterator[bytes]:
    """Mutated frames of the messages that ``decoder`` knows, without end; the same for the same seed."""
    draw = random.Random(seed)
    kinds = typing.get_args(decoder.type)
    while True:
        batch = [wire.encode(example(kind, draw)) for kind in kinds]
        for frame in batch:
            for _ in range(40):
                yield mutate(frame, draw.choice(batch), draw)


def read_all(decoder: msgspec.msgpack.Decoder[typing.Any], count: int, seed: int) -> Counter[str]:
    """Read ``count`` frames; how many were a message, an end, or refused."""
    found: Counter[str] = Counter()
    for frame, _ in zip(frames(decoder, seed), range(count), strict=False):
        try:
            payload = wire.receive_frame(Bytes(frame), LIMIT)
            if payload is not None:
                wire.decode(payload, decoder)
            found["ends" if payload is None else "messages"] += 1
        except wire.WireError:
            found["refused"] += 1
        except BaseException:
            print(f"frame of seed {seed}: {frame!r}", file=sys.stderr)
            raise
    return found


def main(count: int = 1_000_000, seed: int = 0) -> None:
    began = time.perf_counter()
    found = read_all(any_message, count, seed)
    print(json.dumps({"frames": count, "seed": seed, "seconds": round(time.perf_counter() - began, 1), **found}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
