"""``megatron.core.pipeline_parallel.schedules``: one grain's forward and backward, by Megatron's own step functions.

Megatron's schedules divide the loss by the micro-batches of the rank and its data-parallel groups divide gradients
by their size; both change when a rank is lost. Here the loss of a grain is not scaled at all, and the reduction
divides by the number of grains of the global batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_elastic.adaptor import linear
from megatron_elastic.adaptor.random import GrainKey

ForwardStep = Callable[[Iterator[Mapping[str, torch.Tensor]], torch.nn.Module], tuple[torch.Tensor, Callable[..., Any]]]
"""Megatron's: (data iterator, model) -> (output, loss function)."""


class GrainModel:
    """A stage's model chunk, run grain by grain. Implements ``pipeline.executor.StageModel``.

    Args:
        batch: the collated batch of a grain.
        last: whether this is the last stage, where the loss is computed.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        config: TransformerConfig,
        forward_step: ForwardStep,
        key: GrainKey,
        last: bool,
        batch: Callable[[int], Mapping[str, torch.Tensor]],
    ) -> None:
        self.losses: dict[int, tuple[float, float]] = {}
        """(loss sum, tokens) of every grain computed since the last ``begin``; last stage only."""
        self._model = model
        self._config = config
        self._forward_step = forward_step
        self._key = key
        self._last = last
        self._batch = batch
        self._due: dict[int, list[linear.WeightGradient]] = {}
        """Weight gradients, by grain, that its backward has left for later."""

    def begin(self, step: int, batch: Callable[[int], Mapping[str, torch.Tensor]]) -> None:
        """Start a step (or an evaluation) whose grains come from ``batch``."""
        self._key.step = step
        self._batch = batch
        self.losses = {}
        self._due = {}

    def forward(self, grain: int, received: torch.Tensor | None) -> torch.Tensor:
        """Output of the stage: [sequence, micro-batch, hidden], or the grain's mean loss on the last stage."""
        self._key.grain = grain
        store: list[Mapping[str, Any]] = []
        output, _ = schedules.forward_step(
            self._forward_step, self._read(grain), self._model, 1, received, store, self._config,
            cp_group_size=1, is_last_stage=self._last,
        )  # fmt: skip
        if self._last:
            total, tokens = store[0]["lm loss"].tolist()
            self.losses[grain] = (total, tokens)
        assert isinstance(output, torch.Tensor)
        return output

    def _read(self, grain: int) -> Iterator[Mapping[str, torch.Tensor]]:
        """The grain's batch, made only if the forward step asks for it: a middle stage does not."""
        yield self._batch(grain)

    def backward(
        self, grain: int, received: torch.Tensor | None, output: torch.Tensor, grad: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Accumulate the grain's gradients; returns the gradient of what was received."""
        self._key.grain = grain
        result: torch.Tensor | None = schedules.backward_step(
            received, output, grad, ModelType.encoder_or_decoder, self._config
        )
        return result

    def backward_input(
        self, grain: int, received: torch.Tensor | None, output: torch.Tensor, grad: torch.Tensor | None
    ) -> torch.Tensor | None:
        """The same without the gradients of linear layers' weights, which ``backward_weight`` adds."""
        with linear.put_off() as self._due[grain]:
            return self.backward(grain, received, output, grad)

    def backward_weight(self, grain: int) -> None:
        """Accumulate what ``backward_input`` has left out."""
        for gradient in self._due.pop(grain):
            gradient.add()
