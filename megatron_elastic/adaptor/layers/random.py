"""``megatron.core.tensor_parallel.random``: dropout and initialisation draw from keyed generators.

Megatron keeps one stream for each tensor-parallel rank and advances it draw by draw, so what a layer draws depends
on everything its rank computed before. Here each unit begins its forward pass, and its construction, with a key of
its own, and forks have theirs from that one (``numerics.keyed``). The tracker keeps it, whose states recomputation
restores. Where grains can be cut, dropout draws the masks of a whole grain in any case, so that a sample gets the same
one in whichever part it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import get_expert_parallel_rng_tracker_name

from megatron_elastic.adaptor import targets
from megatron_elastic.adaptor.layers import experts
from megatron_elastic.adaptor.layers.place import begin, next_region
from megatron_elastic.adaptor.layers.transformer import layer_index
from megatron_elastic.layout import MTP, Part
from megatron_elastic.numerics import keyed

_plain_dropout = torch.nn.functional.dropout


@contextmanager
def _keyed_fork(_: Any, name: str = "model-parallel-rng") -> Iterator[None]:
    """In place of ``CudaRNGStatesTracker.fork``. Experts are cut as other layers are (``support``)."""
    key, forks = next_region()
    index = parallel_state.get_tensor_model_parallel_rank()
    if name == get_expert_parallel_rng_tracker_name() and not experts.numbered():
        tensor_parallel = parallel_state.get_tensor_model_parallel_world_size()
        index += tensor_parallel * parallel_state.get_expert_model_parallel_rank()
    with keyed.forked(key, forks, name, index):
        yield


def install(seed: int) -> None:
    """Make the tracker's forks keyed, and the initial weights of each unit a function of (seed, unit)."""
    targets.FORK.replace(_keyed_fork)
    targets.LAYER.wrap(_keyed(seed, lambda kwargs: f"layer.{layer_index(**kwargs)}"))
    targets.MTP_LAYER.wrap(_keyed(seed, lambda kwargs: f"{MTP}.{kwargs['layer_number'] - 1}"))
    targets.EMBEDDING.wrap(_keyed(seed, lambda _: "embedding"))


def name_streams(seed: int) -> None:
    """Give Megatron's tracker the streams that its modules ask for by name. Needs Megatron's groups."""
    targets.SEED.find()(seed)


def _keyed(seed: int, unit: Callable[[dict[str, Any]], str]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a constructor seed the default generator when it begins."""

    def wrap(original: Callable[..., None]) -> Callable[..., None]:
        def construct(self: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
            begin("init", seed, unit(kwargs))
            original(self, *args, **kwargs)

        return construct

    return wrap


class GrainKey:
    """Seeds the default generator when a unit begins its forward pass; holds the step and part that it belongs to.

    Recomputation runs a unit's forward again inside the backward of the same part, and draws the same.

    Args:
        samples: of a grain, as in ``Layout``.
        batches, batch: the micro-batches of a grain, and which of them is this rank's.
        sequence: with context or sequence parallelism, which part of the sequence this rank has: parts draw different
            numbers.
    """

    def __init__(self, seed: int, samples: int, batches: int = 1, batch: int = 0, sequence: int | None = None) -> None:
        self._seed = seed
        self._samples = samples
        self._batches = batches
        self._batch = batch
        self._sequence = () if sequence is None else (sequence,)
        self.step = 0
        self.part = Part(0, 0, samples)
        if samples > 1:
            torch.nn.functional.dropout = self._dropout

    def seed(self, unit: str) -> None:
        """Let the default generator draw what a unit draws in the part that is computed now."""
        number = self.part.grain * self._batches + self._batch
        begin(self._seed, self.step, number, unit, *self._sequence)

    def _dropout(
        self, input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> torch.Tensor:
        """In place of ``torch.nn.functional.dropout``: the masks that the samples have in the whole grain.

        Megatron has samples in the second dimension of three, or in the first of four (attention).
        """
        if not training or p == 0 or self.part.size == self._samples:
            return _plain_dropout(input, p, training, inplace)
        dim = {3: 1, 4: 0}[input.dim()]
        piece = input.shape[dim] // self.part.size
        return keyed.dropout(input, p, dim, piece * self.part.start, piece * self._samples, inplace)


def leave_checkpointing() -> None:
    """Reset the flag that an interrupted recomputation leaves behind."""
    targets.UNSET_CHECKPOINTING.find()()
