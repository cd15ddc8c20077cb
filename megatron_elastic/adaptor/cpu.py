"""CPU, the Megatron side: what ``device.cpu`` cannot answer from outside Megatron's modules.

Changes ``megatron.core.tensor_parallel.random`` (0.16.1), because its state functions reach into the CUDA generators
directly, and its tracker warns whenever the CPU's generator moves, which here *is* the generator.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron_elastic.device import cpu


def apply() -> None:
    """Make Megatron's random streams act on the CPU's generator. Idempotent; does nothing where CUDA is in use."""
    if not cpu.needed():
        return
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = _get_state
    random._set_cuda_rng_state = _set_state
    random.CudaRNGStatesTracker.fork = _fork


def _get_state(device: object = None, clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
    return torch.default_generator.get_state()


def _set_state(new_state: torch.Tensor, device: object = None, graph_safe: bool = False) -> None:
    torch.default_generator.set_state(new_state)


@contextmanager
def _fork(tracker: Any, name: str = "model-parallel-rng") -> Iterator[None]:
    """Draw from the stream ``name`` inside the block. Raises KeyError if the tracker has no such stream."""
    if name not in tracker.states_:
        raise KeyError(f"random stream {name!r} does not exist: call model_parallel_cuda_manual_seed(seed) first")
    outer = torch.default_generator.get_state()
    torch.default_generator.set_state(tracker.states_[name])
    try:
        yield
    finally:
        tracker.states_[name] = torch.default_generator.get_state()
        torch.default_generator.set_state(outer)
