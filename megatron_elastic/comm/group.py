"""Group: an ordered list of ranks as a view over links, and the collectives on it.

Editing a group edits the list; no link is touched. All members must run the same operations in the same order
between two edits. Every floating-point sum is taken in member order, so a result depends on the member list and
never on timing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from megatron_elastic.comm.tag import Channel, pair
from megatron_elastic.comm.transport import Recv, Send, Transport

_SMALL = 16 * 1024
"""Below this many bytes a star through the first member beats exchanging chunks."""
_SEQUENCES = 1 << 14

Combine = Callable[[torch.Tensor, torch.Tensor], object]
"""In-place reduction of the second tensor into the first."""


class Group:
    """An ordered list of global ranks that run collectives over one transport.

    Args:
        transport: carries the messages; one per process.
        ident: small number, the same on every member and different from all other groups of this rank.
        ranks: members in order; must contain this rank.
    """

    def __init__(self, transport: Transport, ident: int, ranks: Sequence[int]) -> None:
        self.transport = transport
        self.ident = ident
        self.ranks: tuple[int, ...] = ()
        self._epoch = -1
        self._sequence = 0
        self.edit(ranks)

    def edit(self, ranks: Sequence[int]) -> None:
        """Make ``ranks`` the members, in this order. A rank that is no longer a member cannot use the group."""
        self.ranks = tuple(ranks)

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)

    @property
    def index(self) -> int:
        """This rank's position among the members, -1 if it is none."""
        me = self.transport.rank
        return self.ranks.index(me) if me in self.ranks else -1

    # ---- point to point ---------------------------------------------------------------------

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> Callable[[], None]:
        """Start sending to member ``to``; the result waits for completion."""
        coordinate = pair(self.ident, tag)
        operation = self.transport.send(self.ranks[to], Channel.POINT_TO_POINT, coordinate, tensor.contiguous())
        return lambda: self.transport.wait(operation)

    def recv(self, tensor: torch.Tensor, source: int, tag: int) -> Callable[[], None]:
        """Expect a message from member ``source``; the result waits for it and fills ``tensor``."""
        buffer = tensor if tensor.is_contiguous() else torch.empty_like(tensor, memory_format=torch.contiguous_format)
        operation = self.transport.recv(self.ranks[source], Channel.POINT_TO_POINT, pair(self.ident, tag), buffer)

        def finish() -> None:
            self.transport.wait(operation)
            if buffer is not tensor:
                tensor.copy_(buffer)

        return finish

    # ---- collectives ------------------------------------------------------------------------

    def exchange(self, sends: dict[int, torch.Tensor], recvs: dict[int, torch.Tensor]) -> None:
        """Send to and receive from members by index, all at once. Tensors are contiguous; empty ones move nothing."""
        coordinate = self._next()
        channel, transport = Channel.COLLECTIVE, self.transport
        started: list[Send | Recv] = []
        started += [transport.recv(self.ranks[i], channel, coordinate, t) for i, t in recvs.items() if t.numel()]
        started += [transport.send(self.ranks[i], channel, coordinate, t) for i, t in sends.items() if t.numel()]
        transport.wait(*started)

    def all_reduce(self, tensor: torch.Tensor, combine: Combine) -> None:
        """Reduce a contiguous tensor over all members, in place, in member order; the same bits on every member."""
        if self.size == 1 or not tensor.numel():
            return
        if tensor.nbytes <= _SMALL or tensor.numel() < self.size:
            self.reduce(tensor, combine, to=0)
            self.broadcast(tensor, source=0)
            return
        flat = tensor.view(-1)
        chunks = list(flat.tensor_split(self.size))
        self._reduce_chunks(chunks, chunks[self.index], combine)
        self.all_gather(chunks, chunks[self.index])

    def reduce(self, tensor: torch.Tensor, combine: Combine, to: int) -> None:
        """Reduce into member ``to``, in member order; other members' tensors keep their values."""
        if self.index != to:
            self.exchange({to: tensor}, {})
            return
        parts = {i: torch.empty_like(tensor) for i in self._others()}
        self.exchange({}, parts)
        self._combine_in_order(tensor, parts, combine)

    def reduce_scatter(self, output: torch.Tensor, chunks: Sequence[torch.Tensor], combine: Combine) -> None:
        """Reduce chunk i over all members into member i's output, in member order. Chunk sizes may differ."""
        self._reduce_chunks(chunks, output, combine)

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Copy member ``source``'s contiguous tensor into everybody's."""
        if self.index == source:
            self.exchange(dict.fromkeys(self._others(), tensor), {})
        else:
            self.exchange({}, {source: tensor})

    def all_gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
        """Everybody gets member i's tensor in outputs[i] (contiguous; sizes may differ between members)."""
        own = outputs[self.index]
        if own.data_ptr() != tensor.data_ptr():
            own.copy_(tensor.view_as(own))
        self.exchange(dict.fromkeys(self._others(), tensor), {i: outputs[i] for i in self._others()})

    def gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, to: int) -> None:
        """Member ``to`` gets member i's tensor in outputs[i]; elsewhere outputs is not looked at."""
        if self.index != to:
            self.exchange({to: tensor}, {})
            return
        outputs[to].copy_(tensor)
        self.exchange({}, {i: outputs[i] for i in self._others()})

    def scatter(self, output: torch.Tensor, chunks: Sequence[torch.Tensor], source: int) -> None:
        """Member i gets member ``source``'s chunks[i]; elsewhere chunks is not looked at."""
        if self.index != source:
            self.exchange({}, {source: output})
            return
        output.copy_(chunks[source])
        self.exchange({i: chunks[i] for i in self._others()}, {})

    def all_to_all(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        """Member i's inputs[j] arrives in member j's outputs[i]."""
        outputs[self.index].copy_(inputs[self.index].view_as(outputs[self.index]))
        others = self._others()
        self.exchange({i: inputs[i] for i in others}, {i: outputs[i] for i in others})

    def barrier(self) -> None:
        """Return when every member has entered."""
        self.all_reduce(torch.zeros(1, dtype=torch.uint8), torch.Tensor.add_)

    # ---- inside -----------------------------------------------------------------------------

    def _others(self) -> list[int]:
        return [i for i in range(self.size) if i != self.index]

    def _next(self) -> int:
        # Members are interrupted at different points, so the count restarts with each epoch.
        if self._epoch != self.transport.epoch:
            self._epoch, self._sequence = self.transport.epoch, 0
        self._sequence = (self._sequence + 1) % _SEQUENCES
        return pair(self.ident, self._sequence)

    def _reduce_chunks(self, chunks: Sequence[torch.Tensor], output: torch.Tensor, combine: Combine) -> None:
        me = self.index
        mine = chunks[me]
        parts = {i: torch.empty_like(mine) for i in self._others()}
        self.exchange({i: chunks[i] for i in self._others()}, parts)
        if output.data_ptr() != mine.data_ptr():
            output.copy_(mine)
        self._combine_in_order(output, parts, combine)

    def _combine_in_order(self, own: torch.Tensor, parts: dict[int, torch.Tensor], combine: Combine) -> None:
        me = self.index
        if me == 0:
            for i in range(1, self.size):
                combine(own, parts[i])
            return
        total = parts[0]
        for i in range(1, self.size):
            combine(total, own if i == me else parts[i])
        own.copy_(total)
