"""On device: kernels in Triton, for tensors on an accelerator. One pass over memory each, and the host does not wait.

Needs Triton, which torch brings along where it is made for an accelerator. They have the bits of ``reference``:
products and sums are not fused (``enable_fp_fusion``), and quotients and roots are the nearest numbers.
"""

from __future__ import annotations

import struct

import torch
import triton
import triton.language as tl
from triton.language import tensor as Tensor

from megatron_elastic.numerics.kernels.reference import SCALE, AdamNumbers

_SIZE = 1024
"""Elements of a program."""


def quantise_add_noting(total: torch.Tensor, value: torch.Tensor, factor: float, largest: torch.Tensor) -> None:
    """See ``reference``."""
    n = value.numel()
    (bits,) = struct.unpack("<q", struct.pack("<d", factor))  # a float would be rounded to float32 on its way
    quantise_add_kernel[_grid(n)](
        total, value, largest.view(torch.int64), n, SCALE * factor, bits, SIZE=_SIZE, enable_fp_fusion=False
    )


def adam(
    weights: torch.Tensor, grad: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, numbers: AdamNumbers
) -> None:
    """See ``reference``."""
    n = weights.numel()
    adam_kernel[_grid(n)](
        weights, grad, exp_avg, exp_avg_sq, n, *numbers, DECAYS=numbers.decay != 0, SIZE=_SIZE, enable_fp_fusion=False
    )


def _grid(n: int) -> tuple[int]:
    return (triton.cdiv(n, _SIZE),)


@triton.jit(do_not_specialize=["factor_bits"])
def quantise_add_kernel(
    total: Tensor, value: Tensor, largest: Tensor, n: Tensor, scale: Tensor, factor_bits: Tensor, SIZE: tl.constexpr
) -> None:
    """``total += value * scale``, truncated; ``largest``: that of all magnitudes times the factor, as int64."""
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = at < n
    number = tl.load(value + at, mask=inside, other=0.0).to(tl.float32)
    # Integers are ordered as the sizes of floats are, nan last.
    sizes = number.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    size = tl.max(sizes, axis=0).to(tl.float32, bitcast=True).to(tl.float64)
    product = size * factor_bits.to(tl.int64).to(tl.float64, bitcast=True)
    tl.atomic_max(largest, product.to(tl.int64, bitcast=True), sem="relaxed")
    fixed = (number * scale).to(tl.int64)
    tl.store(total + at, tl.load(total + at, mask=inside, other=0) + fixed, mask=inside)


@triton.jit
def adam_kernel(
    weights: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, n: Tensor,
    shrink: Tensor, decay: Tensor, keep: Tensor, take: Tensor, keep_sq: Tensor, take_sq: Tensor,
    unbias: Tensor, eps: Tensor, move: Tensor, DECAYS: tl.constexpr, SIZE: tl.constexpr,
) -> None:  # fmt: skip
    """A step of Adam; the numbers are those of ``AdamNumbers``."""
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = at < n
    w = tl.load(weights + at, mask=inside, other=0.0)
    g = tl.load(grad + at, mask=inside, other=0.0)
    m = tl.load(exp_avg + at, mask=inside, other=0.0)
    v = tl.load(exp_avg_sq + at, mask=inside, other=0.0)
    if DECAYS:
        g = g + w * decay
    m = m * keep + g * take
    v = v * keep_sq + g * take_sq * g
    root = tl.math.sqrt_rn(v) * unbias + eps
    tl.store(exp_avg + at, m, mask=inside)
    tl.store(exp_avg_sq + at, v, mask=inside)
    tl.store(weights + at, w * shrink + tl.math.div_rn(m * move, root), mask=inside)
