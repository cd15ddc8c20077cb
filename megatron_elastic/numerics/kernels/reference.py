"""Reference: what each kernel computes, in operations of torch that are rounded once each. The others have its bits.

Nothing here lets torch multiply and add in one operation (``alpha``, ``addcmul``, fused optimizers), which it rounds in
one way or the other, by the processor and by where an element lies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

SCALE = 2.0**40
"""What a float is multiplied by to become a fixed-point number."""
BLOCK = 32
"""Elements of a block of a norm; pieces are cut between blocks only."""
_CHUNK = 131072
"""Elements converted at a time, so that the intermediate values stay in cache (measured)."""
_SQUARED = 1 << 16
"""Elements squared at a time: few enough to stay in cache, and many small pieces are squared together."""


class AdamNumbers(NamedTuple):
    """What a step of Adam multiplies by, in the order of the operations; each is rounded to float32."""

    shrink: float
    """The weights are: 1 - learning rate x weight decay, where that is decoupled."""
    decay: float
    """The weights are, and added to the gradient, unless this is 0."""
    keep: float
    """The first moment is."""
    take: float
    """The gradient is, for the first moment."""
    keep_sq: float
    """The second moment is."""
    take_sq: float
    """The squared gradient is, for the second moment."""
    unbias: float
    """The root of the second moment is."""
    eps: float
    """Is added to that."""
    move: float
    """The first moment is, before it is divided by that: minus the learning rate, without the bias of the beginning."""


def quantise_add(total: torch.Tensor, value: torch.Tensor, factor: float, limit: float) -> bool:
    """``total += value * factor`` in fixed point: times ``SCALE * factor`` in float32, truncated.

    Both are flat; total int64, value of any float dtype. False if a product is not between ``-limit`` and ``limit``, or
    no number: then the total is as it was.
    """
    if not value.numel():
        return True
    low, high = (factor * bound.item() for bound in torch.aminmax(value))
    if not (low > -limit and high < limit):
        return False
    room = min(_CHUNK, value.numel())
    scaled_room = torch.empty(room, device=value.device)
    integers_room = torch.empty(room, dtype=torch.int64, device=value.device)
    for part, sink in zip(value.split(_CHUNK), total.split(_CHUNK), strict=True):
        n = part.numel()
        scaled, integers = scaled_room[:n], integers_room[:n]
        scaled.copy_(part).mul_(SCALE * factor)
        integers.copy_(scaled)
        sink.add_(integers)
    return True


def quantise_add_noting(total: torch.Tensor, value: torch.Tensor, factor: float, largest: torch.Tensor) -> None:
    """The same without looking whether products are within a limit: ``largest`` becomes that of their magnitudes.

    ``largest`` is one float64; nan where a product is none. Where that is beyond the limit the total means nothing.
    """
    if not value.numel():
        return
    low, high = torch.aminmax(value)
    torch.maximum(largest, torch.maximum(high.double(), low.double().neg_()).mul_(factor), out=largest)
    total.add_(value.float().mul(SCALE * factor).to(torch.int64))


def mean(parts: Sequence[torch.Tensor], by: float) -> torch.Tensor:
    """The sum of some int64 tensors, times ``by`` in float64, as float32. Leaves the parts as they are."""
    total = parts[0]
    if len(parts) > 1:
        total = total.clone()
        for part in parts[1:]:
            total.add_(part)
    return total.to(torch.float64).mul_(by).to(torch.float32)


def block_squares(pieces: Iterable[torch.Tensor]) -> npt.NDArray[np.float64]:
    """The sum of squares of each block of some flat tensors, of any float type and multiples of ``BLOCK`` long.

    In float64, in which the square of a float32 has room; within a block halves are added to each other.
    """
    chunk, filled = torch.empty(_SQUARED, dtype=torch.float64), 0
    sums = [np.zeros(0)]
    for piece in pieces:
        for part in piece.split(_SQUARED):
            if filled + len(part) > _SQUARED:
                sums.append(fold(chunk[:filled]).numpy())
                filled = 0
            chunk[filled : filled + len(part)] = part
            filled += len(part)
    return np.concatenate([*sums, fold(chunk[:filled]).numpy()])


def fold(values: torch.Tensor) -> torch.Tensor:
    """The sum of squares of each block of some float64 values, which are overwritten; where they are."""
    rows = values.square_().view(-1, BLOCK)
    while rows.shape[1] > 1:
        half = rows.shape[1] // 2
        rows = rows[:, :half] + rows[:, half:]
    return rows.view(-1)


def adam(
    weights: torch.Tensor, grad: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, numbers: AdamNumbers
) -> None:
    """A step of Adam on the weights and both moments, in place. All are flat, float32 and of one size."""
    for w, g, m, v in zip(*(each.split(_CHUNK) for each in (weights, grad, exp_avg, exp_avg_sq)), strict=True):
        if numbers.decay != 0:
            g = g + w * numbers.decay
        m.mul_(numbers.keep).add_(g * numbers.take)
        v.mul_(numbers.keep_sq).add_((g * numbers.take_sq).mul_(g))
        # torch's root of a float32 is not always the nearest; float64 has so many more digits that it may be off, too.
        root = v.double().sqrt_().float().mul_(numbers.unbias).add_(numbers.eps)
        w.mul_(numbers.shrink).add_((m * numbers.move).div_(root))
