"""Exact sums: gradients accumulated as fixed-point int64, where addition is associative.

A contribution is scaled by 2^40 (and by what undoes the scale of its loss, if that had one) and truncated to an integer
(below 1e-12 it is zero); integers then add up to the same total in any order and on any rank. Contributions are checked
on the way in: with G of them in a sum, ones below 2^23 / G cannot overflow it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from megatron_elastic.numerics import kernels
from megatron_elastic.numerics.kernels import SCALE

_RANGE = 2.0**23


class Diverged(ArithmeticError):
    """A number of training is none that it can go on with, whoever computes it.

    Attributes:
        grain: in which it was found; None if it is not known.
    """

    grain: int | None = None


class GradientOverflow(Diverged):
    """A gradient is not finite, or too large for the fixed-point sum."""


class ExactAccumulator:
    """Adds floating-point tensors to int64 totals.

    Args:
        contributions: the largest number of tensors that one total will ever get.
        mean_dtype: of the means.
        passes: that a contribution is not finite is told, and no error.
    """

    dtype = torch.int64

    def __init__(
        self, contributions: int, mean_dtype: torch.dtype = torch.float32, passes: bool = False
    ) -> None:
        self.mean_dtype = mean_dtype
        self.factor = 1.0
        """What contributions are multiplied by."""
        self.grain: int | None = None
        """That contributions are of, as far as it is known."""
        self._passes = passes
        self._limit = _RANGE / contributions

    def add(self, total: torch.Tensor, value: torch.Tensor, plain: bool = False, of: str = "a parameter") -> bool:
        """``total += value * factor``, rounded once; ``plain``: as it is. Both flat; total int64, value of any float
        dtype, the gradient ``of`` something. Returns whether it is finite: if it is not, the total means nothing.

        Raises GradientOverflow when a product is beyond the limit, or the value not finite and that no error.
        """
        factor = 1.0 if plain else self.factor
        if kernels.quantise_add(total, value, factor, self._limit):
            return True
        low, high = (factor * bound.item() for bound in torch.aminmax(value))
        if self._passes and not (math.isfinite(low) and math.isfinite(high)):
            return False
        raise self._overflow(f"smallest {low:g}, largest {high:g}", of, self.grain)

    def _overflow(self, found: str, of: str, grain: int | None) -> GradientOverflow:
        error = GradientOverflow(
            f"the gradient of {of} lies outside ±{self._limit:g} ({found}); the run has diverged, or needs "
            "--elastic-consistency fast"
        )
        error.grain = grain
        return error

    def mean(self, parts: Sequence[torch.Tensor], count: int) -> torch.Tensor:
        """The sum of some totals, divided by ``count`` and rounded once; the same wherever it is computed."""
        return kernels.mean(parts, 1.0 / (SCALE * count)).to(self.mean_dtype)


class FloatAccumulator:
    """The usual float32 accumulation: same sums, but the order of additions shows in the last bits."""

    dtype = torch.float32

    def __init__(self, mean_dtype: torch.dtype = torch.float32) -> None:
        self.mean_dtype = mean_dtype
        self.factor = 1.0
        """What contributions are multiplied by."""
        self.grain: int | None = None
        """That contributions are of, as far as it is known."""

    def add(self, total: torch.Tensor, value: torch.Tensor, plain: bool = False, of: str = "a parameter") -> bool:
        """``total += value * factor``; ``plain``: as it is. Both flat, total float32. What is not finite shows there:
        always true.
        """
        total.add_(value, alpha=1.0 if plain else self.factor)
        return True

    def mean(self, parts: Sequence[torch.Tensor], count: int) -> torch.Tensor:
        """The sum of some totals, in their order, divided by ``count``."""
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return (total / count).to(self.mean_dtype)


Accumulator = ExactAccumulator | FloatAccumulator


def make_accumulator(
    consistency: str, contributions: int, mean_dtype: torch.dtype = torch.float32, passes: bool = False
) -> Accumulator:
    """The accumulator for ``--elastic-consistency``. ``FloatAccumulator`` passes on whatever it gets."""
    if consistency == "bitwise":
        return ExactAccumulator(contributions, mean_dtype, passes)
    return FloatAccumulator(mean_dtype)
