"""Executor: runs one cell's operations, moving activations between stages by (grain, position).

With whom it exchanges what, the legs say (``route``). Sends do not block; receives do, and unwind when interrupted. So
does a forward. What changes the sums of gradients is finished first.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import torch

from megatron_elastic.comm.operation import Recv, Sending
from megatron_elastic.comm.tag import Channel, at_grain
from megatron_elastic.comm.transport import Transport
from megatron_elastic.device.cpu import Cpu
from megatron_elastic.device.device import Device
from megatron_elastic.faults.hooks import Hooks
from megatron_elastic.layout import Cell, Layout, Part
from megatron_elastic.pipeline.lockstep import Lockstep
from megatron_elastic.pipeline.meter import Meter
from megatron_elastic.pipeline.program import Op
from megatron_elastic.pipeline.route import Leg, Neighbours
from megatron_elastic.pipeline.work import Work


class StageModel(Protocol):
    """One stage's computation, as the adaptor offers it."""

    def forward(self, op: Op, part: Part, received: torch.Tensor | None) -> torch.Tensor:
        """Output of a chunk for part of a grain: an activation, or the mean loss of its tokens at the model's end."""

    def tokens(self, grain: int) -> float:
        """Over how many tokens the loss is the mean, after the last forward of a part of ``grain`` at the model's end.
        """

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
    """Runs operations of one rank under one layout.

    Args:
        layout: says which ranks the cells have.
        shape, dtype: of a grain's activation between stages ([sequence, micro-batch, hidden]).
        meter: is told of passes.
        sums: losses are sums over tokens, so that parts of a grain need not know of each other.
        device: where the model computes.
    """

    def __init__(
        self,
        layout: Layout,
        transport: Transport,
        hooks: Hooks,
        shape: Sequence[int],
        dtype: torch.dtype,
        meter: Meter,
        sums: bool = False,
        device: Device | None = None,
    ) -> None:
        self._layout = layout
        self._sums = sums
        self._transport = transport
        self._hooks = hooks
        self._sequence, size, self._hidden = shape
        self._piece = size // layout.samples
        """Samples between two neighbouring places where a grain can be cut."""
        self._dtype = dtype
        self._device = device or Cpu()
        self._rank = transport.rank
        self._stage = layout.stage_of(self._rank)
        self._place = layout.place_of(self._rank)
        self._end = len(layout.way) - 1
        """Position of the end of the model."""
        self._meter = meter
        self._lockstep = Lockstep(transport, layout.cell_of(self._rank).ranks)

    @property
    def activation_bytes(self) -> int:
        """Of what a grain takes from stage to stage."""
        return self._sequence * self._layout.samples * self._piece * self._hidden * self._dtype.itemsize

    def run(self, legs: Sequence[Leg], model: StageModel, work: Work, again: Sequence[Leg] = ()) -> None:
        """Execute the operations in order. ``work`` knows at any time what of them is done.

        ``again``: operations that ``work`` has in its log, whose results are given to their targets first.
        """
        tracer = self._transport.tracer
        with self._lockstep.step():
            sends = [send for leg in again for send in self._give(leg, work.logged(leg.op))]
            for leg in legs:
                op = leg.op
                self._hooks.at("backward" if op.kind == "backward_input" else op.kind, op.grain)
                if tracer.on:
                    tracer.operation(op.kind, self._hooks.step, op.grain, op.chunk, self._stage)
                self._transport.look()
                sends = [send for send in (*sends, *self._do(leg, model, work)) if not send.done]
                self._lockstep.next()
            with self._meter.waiting():
                self._transport.wait(*sends)

    def _do(self, leg: Leg, model: StageModel, work: Work) -> list[Sending]:
        """Execute an operation; returns what is sent of its result."""
        op, part = leg.op, leg.part
        fraction = part.size / self._layout.samples
        here, at_end = (op.grain, op.chunk), self._position(op) == self._end
        if op.kind == "forward":
            received = self._take(leg)
            if received is not None:
                received.requires_grad_()
            if self._layout.recomputes(self._stage, op.chunk):
                with torch.no_grad():  # it is measured when it is made again
                    output = model.forward(op, part, received)
                work.live[here] = received, None
            else:
                with self._meter.forward(fraction, op.chunk):
                    output = model.forward(op, part, received)
                work.live[here] = received, output
            if at_end:
                return self._tell_tokens(part, model)
            work.log(op, output.detach())
            return self._give(leg, output)
        if op.kind == "backward_weight":
            with self._meter.backward_weight(), work.adding(), self._lockstep.whole():
                work.half.remove(here)
                model.backward_weight(op)
                work.added.add(here)
            return []
        grad = None if at_end else self._take(leg)
        received, made = work.live[here]
        if made is None:
            with self._meter.forward(fraction, op.chunk):
                made = model.forward(Op("forward", *here), part, received)
        if at_end:
            grad = self._part_of_loss(part, model, made)
        with self._meter.backward(fraction), work.adding(), self._lockstep.whole():
            del work.live[here]
            halves = op.kind == "backward" and self._meter.asks_for_halves(op.chunk)
            first = op._replace(kind="backward_input") if halves else op
            input_grad = model.backward(first, part, received, made, grad)
            if first.kind == "backward_input":
                self._meter.keep(fraction, op.chunk, work.due.get(here, ()))
            if halves:
                model.backward_weight(op._replace(kind="backward_weight"))
            (work.added if op.kind == "backward" else work.half).add(here)
        if input_grad is None:
            return []
        work.log(op, input_grad)
        return self._give(leg, input_grad)

    def measure_boundary(self) -> float | None:
        """Milliseconds that an activation takes to the next stage; None in the last. All ranks must call it."""
        mine, at = self._layout.cell_of(self._rank), self._stage
        if at > 0:
            for sender in self._layout.stages[at - 1].cells:
                self._answer(sender, mine)
        if at == self._layout.pipeline_size - 1 or mine.shadow:
            return None
        part = self._probe(mine)
        shape = (self._sequence, part.size * self._piece, self._hidden)
        activation = torch.zeros(shape, dtype=self._dtype, device=self._device.torch)
        others = self._neighbours(at + 1, part)
        times = []
        for _ in range(_PROBES):
            begun = time.perf_counter()
            there = self._send(others, part, at, Channel.ACTIVATION, activation)
            self._receive(others, at + 1, Channel.ACTIVATION_GRAD)
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
            others = self._neighbours(at - 1, common)
            received = self._receive(others, at - 1, Channel.ACTIVATION)
            self._transport.wait(*self._send(others, common, at, Channel.ACTIVATION_GRAD, received))

    def _neighbours(self, stage: int, part: Part) -> Neighbours:
        return tuple((cell.leader, common) for cell, common in self._layout.common(stage, part))

    def run_forward(self, legs: Sequence[Leg], model: StageModel) -> None:
        """Execute the forwards only, for evaluation."""
        sends: list[Sending] = []
        with torch.no_grad():
            for leg in legs:
                if leg.op.kind == "forward":
                    self._hooks.at("evaluate", leg.op.grain)
                    output = model.forward(leg.op, leg.part, self._take(leg))
                    sends += self._give(leg, output)
                    sends = [send for send in sends if not send.done]
        self._transport.wait(*sends)

    # ---- activations ------------------------------------------------------------------------

    def _position(self, op: Op) -> int:
        return self._layout.position(self._stage, op.chunk)

    def _take(self, leg: Leg) -> torch.Tensor | None:
        """What an operation needs of others, as one tensor; None at the beginning of the model."""
        if not leg.sources:
            return None
        at = self._position(leg.op)
        if leg.op.kind == "forward":
            return self._receive(leg.sources, at - 1, Channel.ACTIVATION)
        return self._receive(leg.sources, at + 1, Channel.ACTIVATION_GRAD)

    def _give(self, leg: Leg, made: torch.Tensor) -> list[Sending]:
        """Send an operation's result to who needs it."""
        channel = Channel.ACTIVATION if leg.op.kind == "forward" else Channel.ACTIVATION_GRAD
        return self._send(leg.targets, leg.part, self._position(leg.op), channel, made)

    def _receive(self, sources: Neighbours, position: int, channel: Channel) -> torch.Tensor:
        """What was made at a position."""
        shapes = [(self._sequence, common.size * self._piece, self._hidden) for _, common in sources]
        recvs: list[Recv] = []
        for (leader, common), shape in zip(sources, shapes, strict=True):
            where = at_grain(common.grain, position)
            recvs.append(self._transport.recv(self._rank_in(leader), channel, where, self._room(shape)))
        with self._meter.waiting():
            self._transport.wait(*recvs)
        there = [self._open(recv.buffer, shape) for recv, shape in zip(recvs, shapes, strict=True)]
        return there[0] if len(there) == 1 else torch.cat(there, dim=1)

    def _send(
        self, targets: Neighbours, part: Part, position: int, channel: Channel, tensor: torch.Tensor
    ) -> list[Sending]:
        """Send what was made of a part at a position, to each its samples."""
        sends = []
        for leader, common in targets:
            first = (common.start - part.start) * self._piece
            piece = tensor.detach()[:, first : first + common.size * self._piece].contiguous()
            sealed = self._close(piece, part)
            sends.append(self._transport.send(self._rank_in(leader), channel, at_grain(part.grain, position), sealed))
        return sends

    def _room(self, shape: tuple[int, int, int]) -> torch.Tensor:
        """Room for a message with an activation of this shape."""
        return self._device.room_on_host(shape, self._dtype)

    def _open(self, message: torch.Tensor, shape: tuple[int, int, int]) -> torch.Tensor:
        """The activation of a message that has come."""
        return self._device.from_host(message)

    def _close(self, piece: torch.Tensor, part: Part) -> torch.Tensor:
        """The message with an activation of samples of ``part``."""
        return piece

    def _rank_in(self, leader: int) -> int:
        """The rank of a cell that has this one's place."""
        return self._layout.cells[leader].ranks[self._place]

    # ---- losses of grains that are shared ---------------------------------------------------

    def _tell_tokens(self, part: Part, model: StageModel) -> list[Sending]:
        """Tell those that share the grain over how many tokens this cell's loss is the mean."""
        sharers = self._sharers(part)
        if not sharers:
            return []
        tokens = torch.tensor([model.tokens(part.grain)], dtype=torch.float64)
        where = at_grain(part.grain, self._stage)
        return [self._transport.send(rank, Channel.TOKENS, where, tokens) for rank in sharers]

    def _part_of_loss(self, part: Part, model: StageModel, loss: torch.Tensor) -> torch.Tensor | None:
        """How much this cell's mean loss is of that of the grain, in which all tokens count alike; None: all of it."""
        where = at_grain(part.grain, self._stage)
        recvs = [
            self._transport.recv(rank, Channel.TOKENS, where, torch.empty(1, dtype=torch.float64))
            for rank in self._sharers(part)
        ]
        if not recvs:
            return None
        with self._meter.waiting():
            self._transport.wait(*recvs)
        own = model.tokens(part.grain)
        total = own + sum(recv.buffer.item() for recv in recvs)
        # A mean over no tokens is taken over one.
        return torch.full_like(loss, max(own, 1.0) / max(total, 1.0))

    def _sharers(self, part: Part) -> list[int]:
        """The ranks that share the grain with this one, in this stage and at its place in the cell."""
        if self._sums or part.size == self._layout.samples:
            return []  # whoever has it in the layout: a step that is resumed may have it done elsewhere
        cells = (cell for cell, _ in self._layout.sharers(self._stage, part.grain))
        return [rank for rank in (cell.ranks[self._place] for cell in cells) if rank != self._rank]
