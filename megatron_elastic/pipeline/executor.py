"""Executor: runs one cell's program, moving activations between stages by (grain, stage).

A peer is whoever computes the same grain in the neighbouring stage, so re-routed grains and stages of different
widths need no special case. Sends do not block; receives do, and unwind when interrupted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Protocol

import torch

from megatron_elastic.comm.operation import Send
from megatron_elastic.comm.tag import Channel, pair
from megatron_elastic.comm.transport import Transport
from megatron_elastic.faults.hooks import Hooks
from megatron_elastic.layout import Layout
from megatron_elastic.pipeline.profiler import Profiler
from megatron_elastic.pipeline.program import Op


class StageModel(Protocol):
    """One stage's computation, as the adaptor offers it."""

    def forward(self, grain: int, received: torch.Tensor | None) -> torch.Tensor:
        """Output of the stage for a grain: an activation, or the scaled loss on the last stage."""

    def backward(
        self, grain: int, received: torch.Tensor | None, output: torch.Tensor, grad: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Add the grain's gradients; returns the gradient of ``received`` (None on the first stage)."""

    def backward_input(
        self, grain: int, received: torch.Tensor | None, output: torch.Tensor, grad: torch.Tensor | None
    ) -> torch.Tensor | None:
        """The same, but some gradients of weights may be left to ``backward_weight``."""

    def backward_weight(self, grain: int) -> None:
        """Add the gradients that ``backward_input`` of the grain has left."""


_PROBES = 5


class Executor:
    """Runs programs of one rank under one layout.

    Args:
        layout: says who computes which grain in the neighbouring stages.
        shape, dtype: of the activation between stages ([sequence, micro-batch, hidden]).
        profiler: is told of passes.
    """

    def __init__(
        self,
        layout: Layout,
        transport: Transport,
        hooks: Hooks,
        shape: Sequence[int],
        dtype: torch.dtype,
        profiler: Profiler,
    ) -> None:
        self._layout = layout
        self._transport = transport
        self._hooks = hooks
        self._shape = tuple(shape)
        self._dtype = dtype
        self._stage = layout.stage_of(transport.rank)
        self._tp = layout.tp_index(transport.rank)
        self._first = self._stage == 0
        self._last = self._stage == layout.pipeline_size - 1
        self._profiler = profiler

    @property
    def activation_bytes(self) -> int:
        """Of what a grain takes from stage to stage."""
        return math.prod(self._shape) * self._dtype.itemsize

    def run(self, program: Sequence[Op], model: StageModel) -> None:
        """Execute the operations in order. Interruptions leave nothing behind but unfinished gradients."""
        inputs: dict[int, torch.Tensor | None] = {}
        outputs: dict[int, torch.Tensor] = {}
        sends: list[Send] = []
        for op in program:
            self._hooks.at("backward" if op.kind == "backward_input" else op.kind, op.grain)
            if op.kind == "forward":
                received = None if self._first else self._receive(op.grain, self._stage - 1, Channel.ACTIVATION)
                inputs[op.grain] = received if received is None else received.requires_grad_()
                with self._profiler.forward():
                    outputs[op.grain] = output = model.forward(op.grain, received)
                if not self._last:
                    sends.append(self._send(op.grain, self._stage + 1, Channel.ACTIVATION, output))
            elif op.kind == "backward_weight":
                with self._profiler.backward_weight():
                    model.backward_weight(op.grain)
            else:
                backward = model.backward if op.kind == "backward" else model.backward_input
                grad = None if self._last else self._receive(op.grain, self._stage + 1, Channel.ACTIVATION_GRAD)
                with self._profiler.backward():
                    input_grad = backward(op.grain, inputs.pop(op.grain), outputs.pop(op.grain), grad)
                if input_grad is not None:
                    sends.append(self._send(op.grain, self._stage - 1, Channel.ACTIVATION_GRAD, input_grad))
            sends = [send for send in sends if not send.done]
        self._transport.wait(*sends)

    def measure_boundary(self) -> float | None:
        """Milliseconds that an activation takes to the next stage; None in the last. All ranks must call it."""
        stages = self._layout.stages
        mine = self._layout.cell_of(self._transport.rank)
        if not self._first:
            for grain in (cell.grains[0] for cell in stages[self._stage - 1].cells if cell.grains):
                for _ in range(_PROBES if grain in mine.grains else 0):
                    received = self._receive(grain, self._stage - 1, Channel.ACTIVATION)
                    self._transport.wait(self._send(grain, self._stage - 1, Channel.ACTIVATION_GRAD, received))
        if self._last or not mine.grains:
            return None
        activation, times = torch.zeros(self._shape, dtype=self._dtype), []
        for _ in range(_PROBES):
            begun = time.perf_counter()
            there = self._send(mine.grains[0], self._stage + 1, Channel.ACTIVATION, activation)
            self._receive(mine.grains[0], self._stage + 1, Channel.ACTIVATION_GRAD)
            self._transport.wait(there)
            times.append(time.perf_counter() - begun)
        return 1e3 * min(times) / 2  # the first ones include that the other is not there yet

    def run_forward(self, grains: Sequence[int], model: StageModel) -> None:
        """Forward only, for evaluation."""
        with torch.no_grad():
            for grain in grains:
                received = None if self._first else self._receive(grain, self._stage - 1, Channel.ACTIVATION)
                output = model.forward(grain, received)
                if not self._last:
                    self._transport.wait(self._send(grain, self._stage + 1, Channel.ACTIVATION, output))

    def _receive(self, grain: int, stage: int, channel: Channel) -> torch.Tensor:
        buffer = torch.empty(self._shape, dtype=self._dtype)
        peer = self._layout.cell_for(stage, grain).ranks[self._tp]
        self._transport.wait(self._transport.recv(peer, channel, pair(grain, stage), buffer))
        return buffer

    def _send(self, grain: int, stage: int, channel: Channel, tensor: torch.Tensor) -> Send:
        peer = self._layout.cell_for(stage, grain).ranks[self._tp]
        return self._transport.send(peer, channel, pair(grain, self._stage), tensor.detach().contiguous())
