"""Deferred: exact sums and norms on a device that computes on its own, without a wait for it. Whether contributions
were in range is asked once a step.

The sums are those of ``exact``, bit for bit. To look at each contribution would be to wait for the device each time; so
it keeps the size of each, and the largest is read with all that a vote needs. If that was too large, they tell whose.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from megatron_elastic.numerics import kernels
from megatron_elastic.numerics.exact import Accumulator, ExactAccumulator, make_accumulator
from megatron_elastic.numerics.kernels.reference import fold

_ROOM = 1024
"""Contributions whose sizes have room at first."""


class DeferredAccumulator(ExactAccumulator):
    """Adds tensors of a device to int64 totals there; see ``ExactAccumulator``. Does not wait."""

    def __init__(
        self, contributions: int, mean_dtype: torch.dtype = torch.float32, passes: bool = False,
        device: torch.device | None = None,
    ) -> None:  # fmt: skip
        super().__init__(contributions, mean_dtype, passes)
        self._sizes = torch.zeros(_ROOM, dtype=torch.float64, device=device)
        """The largest magnitude of each contribution since ``begin``; nan, if one was."""
        self._contributions: list[tuple[int | None, str]] = []
        """Grain, and whose gradient it was, of each."""

    @property
    def largest(self) -> torch.Tensor:
        """The largest magnitude since ``begin``, on the device; nan, if one was."""
        return self._sizes.amax().view(1)

    def begin(self) -> None:
        """Nothing has been added that counts."""
        self._sizes.zero_()
        self._contributions.clear()

    def add(self, total: torch.Tensor, value: torch.Tensor, plain: bool = False, of: str = "a parameter") -> bool:
        """As ``ExactAccumulator.add``, but true whatever the value; see ``judge``."""
        number = len(self._contributions)
        if number == len(self._sizes):
            self._sizes = torch.cat([self._sizes, torch.zeros_like(self._sizes)])
        self._contributions.append((self.grain, of))
        kernels.quantise_add_noting(total, value, 1.0 if plain else self.factor, self._sizes[number : number + 1])
        return True

    def judge(self, largest: float) -> bool:
        """Whether all that was added is finite, by what ``largest`` holds; if not, the totals mean nothing.

        Raises GradientOverflow when it is beyond the limit, or not finite and that no error.
        """
        if self._passes and not math.isfinite(largest):
            return False
        if not largest < self._limit:
            sizes = zip(self._contributions, self._sizes.tolist(), strict=False)
            grain, of = next(contribution for contribution, size in sizes if not size < self._limit)
            raise self._overflow(f"the largest in this step is {largest:g}", of, grain)
        return True


def make_deferred(
    consistency: str, contributions: int, mean_dtype: torch.dtype, passes: bool, device: torch.device
) -> Accumulator:
    """The accumulator for ``--elastic-consistency`` on a device."""
    if consistency == "bitwise":
        return DeferredAccumulator(contributions, mean_dtype, passes, device)
    return make_accumulator(consistency, contributions, mean_dtype, passes)


def block_squares(pieces: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """As ``kernels.block_squares``, of tensors of a device, and there."""
    parts = [fold(piece.to(torch.float64, copy=True)) for piece in pieces]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64, device=device)
