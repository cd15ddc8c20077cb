"""Keyed random numbers: every draw is a function of logical coordinates, never of rank, stage or history.

The key of a draw is (seed, step, grain, unit); it seeds torch's default generator when a unit begins its forward
pass. Regions that must differ between tensor-parallel ranks fork from the default generator: one draw of it, equal
on all ranks of the cell, is hashed with the tensor-parallel index. So recomputation, which restores the default
generator, repeats the forks as well.
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


def seed_default_generator(*coordinates: int | str) -> None:
    """Make the next draws of torch's default CPU generator a function of the coordinates."""
    torch.default_generator.manual_seed(key(*coordinates))


def dropout(
    input: torch.Tensor, p: float, dim: int, start: int, whole: int, inplace: bool = False
) -> torch.Tensor:
    """Dropout of some of the samples of a micro-batch, with the masks that they have when all of it is there.

    ``input`` has the samples from ``start`` on in dimension ``dim``; all are ``whole``. The result, and what the
    default generator draws next, are those of torch's dropout of the contiguous whole tensor, bit for bit.
    """
    shape = list(input.shape)
    shape[dim] = whole
    # As torch does it on a CPU.
    masks = torch.empty(shape, dtype=input.dtype, device=input.device).bernoulli_(1 - p).div_(1 - p)
    mask = masks.narrow(dim, start, input.shape[dim])
    return input.mul_(mask) if inplace else input * mask


@contextmanager
def forked(name: str, index: int) -> Iterator[None]:
    """Draw from a stream of its own inside; outside, the default generator has advanced by exactly one draw.

    Args:
        name: which kind of region this is.
        index: what makes the stream differ between ranks of a cell (the tensor-parallel index).
    """
    draw = int(torch.randint(0, 2**62, ()).item())
    state = torch.get_rng_state()
    seed_default_generator(draw, name, index)
    try:
        yield
    finally:
        torch.set_rng_state(state)
