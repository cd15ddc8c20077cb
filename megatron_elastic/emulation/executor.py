"""Executor: runs a cell's operations as the accelerator would, and lets messages between stages take their time.

The model really computes, some tiny tensors; then the rank sleeps until its device would be done. With an activation
goes the time at which the emulated one arrives, so that who needs it begins by the other's account, too.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import torch

from megatron_elastic.comm.operation import flat_bytes
from megatron_elastic.emulation.accelerator import Accelerator
from megatron_elastic.layout import Part
from megatron_elastic.pipeline.executor import Executor, StageModel
from megatron_elastic.pipeline.program import Op
from megatron_elastic.pipeline.route import Leg
from megatron_elastic.pipeline.work import Work

_STAMP = torch.float64


class EmulatedModel:
    """A stage's model that takes the accelerator's time. Implements ``pipeline.executor.StageModel``."""

    def __init__(self, model: StageModel, accelerator: Accelerator, samples: int) -> None:
        self._model = model
        self._accelerator = accelerator
        self._samples = samples

    def forward(self, op: Op, part: Part, received: torch.Tensor | None) -> torch.Tensor:
        """The model's."""
        fraction = part.size / self._samples
        self._accelerator.keep(op, fraction, whole=torch.is_grad_enabled())
        output = self._model.forward(op, part, received)
        self._accelerator.compute(op, fraction)
        return output

    def tokens(self, grain: int) -> float:
        """The model's."""
        return self._model.tokens(grain)

    def backward(
        self, op: Op, part: Part, received: torch.Tensor | None, output: torch.Tensor, grad: torch.Tensor | None
    ) -> torch.Tensor | None:
        """The model's."""
        result = self._model.backward(op, part, received, output, grad)
        self._accelerator.compute(op, part.size / self._samples)
        if op.kind == "backward":
            self._accelerator.let_go(op)
        else:
            self._accelerator.keep_late(op, part.size / self._samples)
        return result

    def backward_weight(self, op: Op) -> None:
        """The model's."""
        self._model.backward_weight(op)
        self._accelerator.compute(op)
        self._accelerator.let_go(op)


class EmulatedExecutor(Executor):
    """Runs operations of one rank under one layout by the time of its accelerator."""

    def __init__(self, *arguments: Any, accelerator: Accelerator) -> None:
        super().__init__(*arguments)
        self._accelerator = accelerator

    def run(self, legs: Sequence[Leg], model: StageModel, work: Work, again: Sequence[Leg] = ()) -> None:
        """As the executor does."""
        live = {item: made is not None for item, (_, made) in work.live.items()}
        self._accelerator.begin(work.step, live | dict.fromkeys(work.half, True))
        super().run(legs, EmulatedModel(model, self._accelerator, self._layout.samples), work, again)
        self._accelerator.end()

    def run_forward(self, legs: Sequence[Leg], model: StageModel) -> None:
        """As the executor does; nothing is kept."""
        self._accelerator.begin(None, {})
        super().run_forward(legs, EmulatedModel(model, self._accelerator, self._layout.samples))
        self._accelerator.begin(None, {})

    def _room(self, shape: tuple[int, int, int]) -> torch.Tensor:
        return torch.empty(_STAMP.itemsize + math.prod(shape) * self._dtype.itemsize, dtype=torch.uint8)

    def _open(self, message: torch.Tensor, shape: tuple[int, int, int]) -> torch.Tensor:
        stamp, made = message[: _STAMP.itemsize], message[_STAMP.itemsize :]
        self._accelerator.needs(stamp.view(_STAMP).item())
        return made.view(self._dtype).view(shape)

    def _close(self, piece: torch.Tensor, part: Part) -> torch.Tensor:
        arrival = torch.tensor([self._accelerator.arrival(part.size / self._layout.samples)], dtype=_STAMP)
        return torch.cat((flat_bytes(arrival), flat_bytes(piece)))

    def _part_of_loss(self, part: Part, model: StageModel, loss: torch.Tensor) -> torch.Tensor | None:
        share = super()._part_of_loss(part, model, loss)
        if share is not None:
            self._accelerator.needs(time.monotonic())  # the others' tokens came with no time on them
        return share
