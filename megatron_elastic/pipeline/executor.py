"""Executor: runs one cell's program, moving activations between stages by (grain, position).

Chunk c of stage s of P has position c * P + s: a grain passes them in this order. Peers are those who compute the same
samples at the neighbouring position, so re-routed grains, cut ones and stages of different widths need no special case.
Sends do not block; receives do, and unwind when interrupted.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from megatron_elastic.comm.operation import Recv, Send
from megatron_elastic.comm.tag import Channel, at_grain
from megatron_elastic.comm.transport import Transport
from megatron_elastic.faults.hooks import Hooks
from megatron_elastic.layout import Cell, Layout, Part
from megatron_elastic.pipeline.meter import Meter
from megatron_elastic.pipeline.program import Op


class StageModel(Protocol):
    """One stage's computation, as the adaptor offers it."""

    def forward(self, op: Op, part: Part, received: torch.Tensor | None) -> torch.Tensor:
        """Output of a chunk for part of a grain: an activation, or the mean loss of its tokens at the model's end."""

    def tokens(self, grain: int) -> float:
        """Over how many tokens the loss is the mean, after the last forward of a part of ``grain``; last stage only."""

    def backward(
        self, op: Op, part: Part, received: torch.Tensor | None, output: torch.Tensor, grad: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Add the part's gradients; returns the gradient of ``received`` (None at the beginning of the model).

        ``grad`` is that of the output; None: the output is the loss of a whole grain. A ``backward_input`` may leave
        some gradients of weights to ``backward_weight``.
        """

    def backward_weight(self, op: Op) -> None:
        """Add the gradients that the ``backward_input`` of the same grain and chunk has left."""


_PROBES = 5


class Executor:
    """Runs programs of one rank under one layout.

    Args:
        layout: says who computes which samples in the neighbouring stages.
        shape, dtype: of a grain's activation between stages ([sequence, micro-batch, hidden]).
        meter: is told of passes.
    """

    def __init__(
        self,
        layout: Layout,
        transport: Transport,
        hooks: Hooks,
        shape: Sequence[int],
        dtype: torch.dtype,
        meter: Meter,
    ) -> None:
        self._layout = layout
        self._transport = transport
        self._hooks = hooks
        self._sequence, size, self._hidden = shape
        self._piece = size // layout.samples
        """Samples between two neighbouring places where a grain can be cut."""
        self._dtype = dtype
        self._rank = transport.rank
        self._stage = layout.stage_of(self._rank)
        self._tp = layout.tp_index(self._rank)
        self._end = layout.pipeline_size * layout.num_chunks - 1
        """Position of the end of the model."""
        self._meter = meter

    @property
    def activation_bytes(self) -> int:
        """Of what a grain takes from stage to stage."""
        return self._sequence * self._layout.samples * self._piece * self._hidden * self._dtype.itemsize

    def run(self, program: Sequence[Op], model: StageModel) -> None:
        """Execute the operations in order. Interruptions leave nothing behind but unfinished gradients."""
        inputs: dict[tuple[int, int], torch.Tensor | None] = {}
        outputs: dict[tuple[int, int], torch.Tensor] = {}
        sends: list[Send] = []
        for op in program:
            self._hooks.at("backward" if op.kind == "backward_input" else op.kind, op.grain)
            part = self._layout.part(self._rank, op.grain)
            fraction = part.size / self._layout.samples
            here, at = (op.grain, op.chunk), self._position(op)
            if op.kind == "forward":
                received = None if at == 0 else self._receive(part, at - 1, Channel.ACTIVATION)
                inputs[here] = received if received is None else received.requires_grad_()
                with self._meter.forward(fraction):
                    outputs[here] = output = model.forward(op, part, received)
                if at == self._end:
                    sends += self._tell_tokens(part, model)
                else:
                    sends += self._send(part, at, at + 1, Channel.ACTIVATION, output)
            elif op.kind == "backward_weight":
                with self._meter.backward_weight():
                    model.backward_weight(op)
            else:
                if at == self._end:
                    grad = self._part_of_loss(part, model, outputs[here])
                else:
                    grad = self._receive(part, at + 1, Channel.ACTIVATION_GRAD)
                with self._meter.backward(fraction):
                    input_grad = model.backward(op, part, inputs.pop(here), outputs.pop(here), grad)
                if input_grad is not None:
                    sends += self._send(part, at, at - 1, Channel.ACTIVATION_GRAD, input_grad)
            sends = [send for send in sends if not send.done]
        self._transport.wait(*sends)

    def measure_boundary(self) -> float | None:
        """Milliseconds that an activation takes to the next stage; None in the last. All ranks must call it."""
        mine, at = self._layout.cell_of(self._rank), self._stage
        if at > 0:
            for sender in self._layout.stages[at - 1].cells:
                self._answer(sender, mine)
        if at == self._layout.pipeline_size - 1 or mine.shadow:
            return None
        part = self._probe(mine)
        activation = torch.zeros((self._sequence, part.size * self._piece, self._hidden), dtype=self._dtype)
        times = []
        for _ in range(_PROBES):
            begun = time.perf_counter()
            there = self._send(part, at, at + 1, Channel.ACTIVATION, activation)
            self._receive(part, at + 1, Channel.ACTIVATION_GRAD)
            self._transport.wait(*there)
            times.append(time.perf_counter() - begun)
        return 1e3 * min(times) / 2  # the first ones include that the other is not there yet

    def _probe(self, cell: Cell) -> Part:
        """What a cell measures with: a whole grain, if it has one."""
        return self._layout.part(cell.leader, (*cell.grains, *cell.share)[0])

    def _answer(self, sender: Cell, mine: Cell) -> None:
        """Send back what a cell of the stage before measures with, if it comes here."""
        probe = None if sender.shadow else self._probe(sender)
        if probe is None or probe.grain not in mine.share:
            return
        at, common = self._stage, probe.common(self._layout.part(self._rank, probe.grain))
        for _ in range(0 if common is None else _PROBES):
            assert common is not None
            received = self._receive(common, at - 1, Channel.ACTIVATION)
            self._transport.wait(*self._send(common, at, at - 1, Channel.ACTIVATION_GRAD, received))

    def run_forward(self, program: Sequence[Op], model: StageModel) -> None:
        """Execute the program's forwards only, for evaluation."""
        sends: list[Send] = []
        with torch.no_grad():
            for op in program:
                if op.kind == "forward":
                    part, at = self._layout.part(self._rank, op.grain), self._position(op)
                    received = None if at == 0 else self._receive(part, at - 1, Channel.ACTIVATION)
                    output = model.forward(op, part, received)
                    if at < self._end:
                        sends += self._send(part, at, at + 1, Channel.ACTIVATION, output)
                    sends = [send for send in sends if not send.done]
        self._transport.wait(*sends)

    # ---- activations ------------------------------------------------------------------------

    def _position(self, op: Op) -> int:
        return op.chunk * self._layout.pipeline_size + self._stage

    def _peers(self, position: int, part: Part) -> Iterator[tuple[int, Part]]:
        """The ranks, in this one's tensor-parallel place, that compute samples of ``part`` there, and which."""
        for cell, common in self._layout.common(position % self._layout.pipeline_size, part):
            yield cell.ranks[self._tp], common

    def _receive(self, part: Part, source: int, channel: Channel) -> torch.Tensor:
        """What a neighbouring position makes of ``part``, as one tensor."""
        buffers: list[torch.Tensor] = []
        recvs: list[Recv] = []
        for rank, common in self._peers(source, part):
            buffers.append(torch.empty((self._sequence, common.size * self._piece, self._hidden), dtype=self._dtype))
            recvs.append(self._transport.recv(rank, channel, at_grain(part.grain, source), buffers[-1]))
        self._transport.wait(*recvs)
        return buffers[0] if len(buffers) == 1 else torch.cat(buffers, dim=1)

    def _send(self, part: Part, source: int, target: int, channel: Channel, tensor: torch.Tensor) -> list[Send]:
        """Send a tensor of ``part``'s samples from a position to whoever computes them at a neighbouring one."""
        sends = []
        for rank, common in self._peers(target, part):
            first = (common.start - part.start) * self._piece
            piece = tensor.detach()[:, first : first + common.size * self._piece].contiguous()
            sends.append(self._transport.send(rank, channel, at_grain(part.grain, source), piece))
        return sends

    # ---- losses of grains that are shared ---------------------------------------------------

    def _tell_tokens(self, part: Part, model: StageModel) -> list[Send]:
        """Tell those that share the grain over how many tokens this cell's loss is the mean."""
        tokens = torch.tensor([model.tokens(part.grain)], dtype=torch.float64)
        where = at_grain(part.grain, self._stage)
        return [self._transport.send(rank, Channel.TOKENS, where, tokens) for rank in self._sharers(part)]

    def _part_of_loss(self, part: Part, model: StageModel, loss: torch.Tensor) -> torch.Tensor | None:
        """How much this cell's mean loss is of that of the grain, in which all tokens count alike; None: all of it."""
        where = at_grain(part.grain, self._stage)
        recvs = [
            self._transport.recv(rank, Channel.TOKENS, where, torch.empty(1, dtype=torch.float64))
            for rank in self._sharers(part)
        ]
        if not recvs:
            return None
        self._transport.wait(*recvs)
        own = model.tokens(part.grain)
        total = own + sum(recv.buffer.item() for recv in recvs)
        # A mean over no tokens is taken over one.
        return torch.full_like(loss, max(own, 1.0) / max(total, 1.0))

    def _sharers(self, part: Part) -> list[int]:
        """The ranks that share the grain with this one, in this stage and of its tensor-parallel index."""
        cells = (cell for cell, _ in self._layout.sharers(self._stage, part.grain))
        return [rank for rank in (cell.ranks[self._tp] for cell in cells) if rank != self._rank]
