"""``megatron.core.pipeline_parallel.schedules``: one grain's forward and backward, by Megatron's own step functions.

Megatron's schedules divide the loss by the micro-batches of the rank and its data-parallel groups divide gradients
by their size; both change when a rank is lost. Here the loss of a grain is not scaled at all, and the reduction
divides by the number of grains of the global batch. The loss of a part of a grain is the mean over its own tokens; the
gradient that its backward pass begins with makes a share of the grain's mean of it.
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
from megatron_elastic.layout import Part

ForwardStep = Callable[[Iterator[Mapping[str, torch.Tensor]], torch.nn.Module], tuple[torch.Tensor, Callable[..., Any]]]
"""Megatron's: (data iterator, model) -> (output, loss function)."""


class GrainModel:
    """A stage's model chunk, run grain by grain, or by parts of grains. Implements ``pipeline.executor.StageModel``.

    Args:
        batch: the collated batch of part of a grain.
        last: whether this is the last stage, where the loss is computed.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        config: TransformerConfig,
        forward_step: ForwardStep,
        key: GrainKey,
        last: bool,
        batch: Callable[[Part], Mapping[str, torch.Tensor]],
    ) -> None:
        self.losses: dict[int, tuple[float, float]] = {}
        """(loss sum, tokens) of what was computed of each grain since the last ``begin``; last stage only."""
        self._model = model
        self._config = config
        self._forward_step = forward_step
        self._key = key
        self._last = last
        self._batch = batch
        self._due: dict[int, list[linear.WeightGradient]] = {}
        """Weight gradients, by grain, that its backward has left for later."""

    def begin(self, step: int, batch: Callable[[Part], Mapping[str, torch.Tensor]]) -> None:
        """Start a step (or an evaluation) whose grains come from ``batch``."""
        self._key.step = step
        self._batch = batch
        self.losses = {}
        self._due = {}

    @property
    def part(self) -> Part:
        """What is computed now."""
        return self._key.part

    def forward(self, part: Part, received: torch.Tensor | None) -> torch.Tensor:
        """Output of the stage: [sequence, samples, hidden], or the mean loss on the last stage."""
        self._key.part = part
        store: list[Mapping[str, Any]] = []
        output, _ = schedules.forward_step(
            self._forward_step, self._read(part), self._model, 1, received, store, self._config,
            cp_group_size=1, is_last_stage=self._last,
        )  # fmt: skip
        if self._last:
            total, tokens = store[0]["lm loss"].tolist()
            self.losses[part.grain] = (total, tokens)
        assert isinstance(output, torch.Tensor)
        return output

    def _read(self, part: Part) -> Iterator[Mapping[str, torch.Tensor]]:
        """The part's batch, made only if the forward step asks for it: a middle stage does not."""
        yield self._batch(part)

    def tokens(self, grain: int) -> float:
        """Over how many tokens the loss of what was computed of a grain is the mean."""
        return self.losses[grain][1]

    def backward(
        self, part: Part, received: torch.Tensor | None, output: torch.Tensor, grad: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Accumulate the part's gradients; returns the gradient of what was received."""
        self._key.part = part
        result: torch.Tensor | None = schedules.backward_step(
            received, output, grad, ModelType.encoder_or_decoder, self._config
        )
        return result

    def backward_input(
        self, part: Part, received: torch.Tensor | None, output: torch.Tensor, grad: torch.Tensor | None
    ) -> torch.Tensor | None:
        """The same without the gradients of linear layers' weights, which ``backward_weight`` adds."""
        with linear.put_off() as self._due[part.grain]:
            return self.backward(part, received, output, grad)

    def backward_weight(self, part: Part) -> None:
        """Accumulate what ``backward_input`` has left out."""
        for gradient in self._due.pop(part.grain):
            gradient.add()
