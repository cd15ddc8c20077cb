"""``megatron.core.pipeline_parallel.schedules``: one grain's forward and backward, by Megatron's own step functions.

Megatron's schedules divide the loss by the micro-batches of the rank and its data-parallel groups divide gradients
by their size; both change when a rank is lost. Here the loss of a grain is not scaled at all, and the reduction
divides by the number of grains of the global batch. The loss of a part of a grain is the mean over its own tokens; the
gradient that its backward pass begins with makes a share of the grain's mean of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_elastic.adaptor import targets
from megatron_elastic.adaptor.layers import context, documents, linear, measures
from megatron_elastic.adaptor.layers.random import GrainKey
from megatron_elastic.layout import Part
from megatron_elastic.numerics.exact import Accumulator, Diverged
from megatron_elastic.pipeline.program import Op
from megatron_elastic.pipeline.work import Work

ForwardStep = Callable[[Iterator[Mapping[str, torch.Tensor]], torch.nn.Module], tuple[torch.Tensor, Callable[..., Any]]]
"""Megatron's: (data iterator, model) -> (output, loss function)."""
Batch = Callable[[int, Part], Mapping[str, torch.Tensor]]
"""(chunk, part of a grain) -> the collated batch, where the model is."""


class GrainModel:
    """A stage's model, run grain by grain, or by parts of grains. Implements ``pipeline.executor.StageModel``.

    Args:
        chunks: the stage's models, in the order in which a grain passes them.
        last: whether the model ends in this stage, whose last chunk computes the loss then.
        apart: whether tokens look at those of their own document only (``documents``).
        accumulator: what sums gradients; it is told of which grain they are.

    Attributes:
        asking: the chunks that have asked for samples: usually those at the ends of the model.
    """

    def __init__(
        self,
        chunks: Sequence[MegatronModule],
        config: TransformerConfig,
        forward_step: ForwardStep,
        key: GrainKey,
        last: bool,
        apart: bool,
        accumulator: Accumulator,
    ) -> None:
        self._chunks = chunks
        self._config = config
        self._forward_step = forward_step
        self._key = key
        self._last = last
        self._apart = apart
        self._accumulator = accumulator
        self.asking: set[int] = set()
        self._batch: Batch
        self._work: Work

    def begin(self, work: Work, batch: Batch) -> None:
        """Start a step (or an evaluation), or go on with it. ``work`` gets losses and gradients that are due; grains
        come from ``batch``. What layers keep of what they have made of their weights, they make anew.
        """
        self._key.step = work.step
        self._work = work
        self._batch = batch
        for chunk in self._chunks:
            chunk.set_is_first_microbatch()

    def forward(self, op: Op, part: Part, received: torch.Tensor | None) -> torch.Tensor:
        """Output of a chunk: [sequence, samples, hidden], or the mean loss at the end of the model."""
        self._key.part = part
        last = self._ends(op)
        store: list[Mapping[str, Any]] = []
        with self._computing(op.grain), measures.noted(self._work.measures[op.grain, op.chunk]):
            output, _ = schedules.forward_step(
                self._step, self._read(op.chunk, part), self._chunks[op.chunk], 1, received, store, self._config,
                cp_group_size=1, is_last_stage=last,
            )  # fmt: skip
        if last:
            self._work.losses[part.grain] = store[0]["lm loss"].detach()
        assert isinstance(output, torch.Tensor)
        return output

    def _step(self, data: Iterator[Mapping[str, torch.Tensor]], model: torch.nn.Module) -> Any:
        if self._apart:
            batch = next(data)
            with documents.looked_at(getattr(model, "module", model), batch):
                output, loss_function = self._forward_step(iter([batch]), model)
        else:
            output, loss_function = self._forward_step(data, model)
        return output, context.over_all_tokens(loss_function)

    def _read(self, chunk: int, part: Part) -> Iterator[Mapping[str, torch.Tensor]]:
        """The part's batch, made only if somebody asks for it: usually a middle stage does not."""
        self.asking.add(chunk)
        yield self._batch(chunk, part)

    def tokens(self, grain: int) -> float:
        """Over how many tokens the loss of what was computed of a grain is the mean."""
        return context.add_up(self._work.losses[grain][1]).item()

    def backward(
        self, op: Op, part: Part, received: torch.Tensor | None, output: torch.Tensor, grad: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Accumulate the part's gradients; returns the gradient of what was received.

        Linear layers' weights get theirs in ``backward_weight``, if this is a ``backward_input``.
        """
        self._key.part = part
        if grad is not None and self._ends(op) and self._config.grad_scale_func is not None:
            output = self._config.grad_scale_func(output)  # as Megatron does where the loss is that of a whole grain
        step = partial(schedules.backward_step, received, output, grad, *_model_type(), self._config)
        result: torch.Tensor | None
        # Where layers are computed again, they measure again.
        with self._computing(op.grain), measures.noted(self._work.measures[op.grain, op.chunk]):
            if op.kind == "backward_input":
                with linear.put_off() as self._work.due[op.grain, op.chunk]:
                    result = step()
            else:
                result = step()
        return result

    def _ends(self, op: Op) -> bool:
        """Whether a pass is through the end of the model."""
        return self._last and op.chunk == len(self._chunks) - 1

    def backward_weight(self, op: Op) -> None:
        """Accumulate what a ``backward_input`` has left out."""
        with self._computing(op.grain):
            for gradient in self._work.due.pop((op.grain, op.chunk)):
                gradient.add()

    @contextmanager
    def _computing(self, grain: int) -> Iterator[None]:
        """Let what is no number that training can go on with, say of which grain it is."""
        self._accumulator.grain = grain
        try:
            yield
        except Diverged as error:
            error.grain = grain
            raise


def _model_type() -> tuple[ModelType, ...]:
    """What ``backward_step`` is told of the model, if it wants to know."""
    return (ModelType.encoder_or_decoder,) if targets.BACKWARD.takes("model_type") else ()
