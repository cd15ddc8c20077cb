"""Keyed random numbers: every draw is a function of logical coordinates, never of rank, stage or history.

The key of a draw is (seed, step, grain, unit); it seeds the default generator of the device that computes when a unit
begins its forward pass. Regions that must differ between tensor-parallel ranks draw from a key of their own: that of
the unit, how many such regions there were before, and the tensor-parallel index. Nothing of it is drawn, so nobody
waits for a device, and all devices on which a seed means the same numbers draw the same.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def key(*coordinates: int | str) -> int:
    """A 63-bit hash of the coordinates, the same on every machine."""
    digest = hashlib.blake2b(digest_size=8)
    for value in coordinates:
        data = value.encode() if isinstance(value, str) else struct.pack("<q", value)
        digest.update(struct.pack("<I", len(data)) + data)
    return int.from_bytes(digest.digest(), "little") >> 1


_generator = torch.default_generator
"""From which draws are that name none."""


def draw_from(generator: torch.Generator) -> None:
    """From now on this is the default generator of the device that computes."""
    global _generator
    _generator = generator


@contextmanager
def drawing_from(generator: torch.Generator) -> Iterator[None]:
    """Meanwhile it is another one."""
    before = _generator
    draw_from(generator)
    try:
        yield
    finally:
        draw_from(before)


def seed_default_generator(*coordinates: int | str) -> int:
    """Make the next draws of the default generator a function of the coordinates; returns their key."""
    seed = key(*coordinates)
    _generator.manual_seed(seed)
    return seed


def dropout(
    input: torch.Tensor, p: float, dim: int, start: int, whole: int, inplace: bool = False
) -> torch.Tensor:
    """Dropout of some of the samples of a micro-batch, with the masks that they have when all of it is there.

    ``input`` has the samples from ``start`` on in dimension ``dim``; all are ``whole``. The result, and what the
    default generator draws next, are those of torch's dropout of the contiguous whole tensor, bit for bit.
    """
    # As torch does it on a CPU.
    if p == 1:  # it draws nothing then
        return input.mul_(0.0) if inplace else input * 0.0
    shape = list(input.shape)
    shape[dim] = whole
    masks = torch.empty(shape, dtype=input.dtype, device=input.device).bernoulli_(1 - p).div_(1 - p)
    mask = masks.narrow(dim, start, input.shape[dim])
    return input.mul_(mask) if inplace else input * mask


@contextmanager
def forked(*coordinates: int | str) -> Iterator[None]:
    """Draw from a stream of these coordinates inside; outside, the default generator goes on as if nothing had been."""
    state = _generator.get_state()
    seed_default_generator(*coordinates)
    try:
        yield
    finally:
        _generator.set_state(state)
