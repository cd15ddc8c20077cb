"""Kernels: the passes over memory that exact sums, norms and Adam consist of, compiled where that can be had.

``reference`` is the truth, in torch, and runs anywhere. ``compiled`` has its bits in one pass over memory each, for
tensors on the CPU, and ``on_device`` for those on a GPU. Which one runs shows in the time only.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Iterable, Sequence
from types import ModuleType

import numpy as np
import numpy.typing as npt
import torch

from megatron_elastic.numerics.kernels import reference
from megatron_elastic.numerics.kernels.compiled import Kernels, kernels
from megatron_elastic.numerics.kernels.reference import BLOCK, SCALE, AdamNumbers

__all__ = [
    "BLOCK", "SCALE", "AdamNumbers", "adam", "block_squares", "mean", "quantise_add", "quantise_add_noting", "which",
]  # fmt: skip


def _compiled(*tensors: torch.Tensor) -> Kernels | None:
    return kernels() if Kernels.takes(*tensors) else None


@functools.cache
def _on_device() -> ModuleType | None:
    """The kernels in Triton, where it is installed."""
    if importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module("megatron_elastic.numerics.kernels.on_device")


def which(device: torch.device) -> str:
    """Which kernels there are for tensors on a device: ``compiled``, ``triton``, or ``torch``, the reference."""
    if device.type == "cuda":
        return "torch" if _on_device() is None else "triton"
    return "compiled" if device.type == "cpu" and kernels() is not None else "torch"


def quantise_add(total: torch.Tensor, value: torch.Tensor, factor: float, limit: float) -> bool:
    """See ``reference.quantise_add``."""
    fast = _compiled(total, value)
    return (fast or reference).quantise_add(total, value, factor, limit)


def quantise_add_noting(total: torch.Tensor, value: torch.Tensor, factor: float, largest: torch.Tensor) -> None:
    """See ``reference.quantise_add_noting``."""
    fast = _on_device() if value.is_cuda else None
    (fast or reference).quantise_add_noting(total, value, factor, largest)


def mean(parts: Sequence[torch.Tensor], by: float) -> torch.Tensor:
    """See ``reference.mean``."""
    fast = _compiled(*parts)
    return (fast or reference).mean(parts, by)


def block_squares(pieces: Iterable[torch.Tensor]) -> npt.NDArray[np.float64]:
    """See ``reference.block_squares``."""
    pieces = list(pieces)
    fast = _compiled(*pieces)
    return (fast or reference).block_squares(pieces)


def adam(
    weights: torch.Tensor, grad: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, numbers: AdamNumbers
) -> None:
    """See ``reference.adam``."""
    fast = _on_device() if weights.is_cuda else _compiled(weights, grad, exp_avg, exp_avg_sq)
    (fast or reference).adam(weights, grad, exp_avg, exp_avg_sq, numbers)
