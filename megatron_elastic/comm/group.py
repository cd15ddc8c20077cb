"""Group: an ordered list of ranks as a view over links, and the collectives on it.

Editing a group edits the list; no link is touched. All members must run the same operations in the same order
between two edits. Every floating-point sum is taken in member order, so a result depends on the member list and
never on timing.

A collective is a generator (``Steps``): it can be run at once or be started and waited for later. Its place in the
order of operations is taken when it is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from megatron_elastic.comm.operation import Operation, Recv, Send, Steps
from megatron_elastic.comm.tag import Channel, pair
from megatron_elastic.comm.transport import Transport

_SMALL = 16 * 1024
"""Below this many bytes a star through the first member beats exchanging chunks."""
_FEW = 3
"""Up to this many members, small messages go from each to each: one hop instead of two."""
_PHASES = 2
_SEQUENCES = (1 << 14) // _PHASES
_TAGS = 1 << 14

Combine = Callable[[torch.Tensor, torch.Tensor], object]
"""In-place reduction of the second tensor into the first."""


class Group:
    """An ordered list of global ranks that run collectives over one transport.

    Args:
        transport: carries the messages; one per process.
        ident: small number, the same on every member and different from all other groups of this rank.
        ranks: members in order.
    """

    def __init__(self, transport: Transport, ident: int, ranks: Sequence[int]) -> None:
        self.transport = transport
        self.ident = ident
        self.ranks: tuple[int, ...] = ()
        self.index = -1
        """This rank's position among the members, -1 if it is none."""
        self._epoch = -1
        self._sequence = 0
        self.edit(ranks)

    def edit(self, ranks: Sequence[int]) -> None:
        """Make ``ranks`` the members, in this order: fewer, more, others or reordered. Idempotent.

        Takes effect for operations made afterwards; all members edit between the same two epochs. A rank that is no
        longer a member cannot use the group. Raises ValueError if a rank is named twice.
        """
        if len(set(ranks)) != len(ranks):
            raise ValueError(f"group {self.ident}: a rank is named twice in {list(ranks)}")
        me = self.transport.rank
        self.ranks = tuple(ranks)
        self.index = self.ranks.index(me) if me in self.ranks else -1

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)

    # ---- point to point ---------------------------------------------------------------------

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> Send:
        """Start sending a contiguous tensor to member ``to``."""
        return self.transport.send(self.ranks[to], Channel.POINT_TO_POINT, pair(self.ident, tag % _TAGS), tensor)

    def recv(self, tensor: torch.Tensor, source: int, tag: int) -> Recv:
        """Expect a message from member ``source`` in a contiguous tensor."""
        return self.transport.recv(self.ranks[source], Channel.POINT_TO_POINT, pair(self.ident, tag % _TAGS), tensor)

    def recv_any(self, tensor: torch.Tensor, tag: int) -> int:
        """Receive from whichever member's message is here first; returns its index."""
        coordinate = pair(self.ident, tag % _TAGS)
        source = self.transport.first_of(self.ranks, Channel.POINT_TO_POINT, coordinate)
        self.transport.wait(self.transport.recv(source, Channel.POINT_TO_POINT, coordinate, tensor))
        return self.ranks.index(source)

    # ---- collectives ------------------------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor, combine: Combine) -> Steps:
        """Reduce a contiguous tensor over all members, in place, in member order; the same bits on every member."""
        if self.size == 1 or not tensor.numel():
            return _nothing()
        at = self._next()
        if self.size <= _FEW and tensor.nbytes <= _SMALL:
            return self._exchange_and_reduce(at, tensor, combine)
        if tensor.nbytes <= _SMALL or tensor.numel() < self.size:
            return _both(self._reduce(at, tensor, combine, 0), self._broadcast(at + 1, tensor, 0))
        chunks = list(tensor.view(-1).tensor_split(self.size))
        mine = chunks[self.index]
        return _both(self._reduce_scatter(at, mine, chunks, combine), self._all_gather(at + 1, chunks, mine))

    def reduce(self, tensor: torch.Tensor, combine: Combine, to: int) -> Steps:
        """Reduce into member ``to``, in member order; other members' tensors keep their values."""
        return self._reduce(self._next(), tensor, combine, to)

    def reduce_scatter(self, output: torch.Tensor, chunks: Sequence[torch.Tensor], combine: Combine) -> Steps:
        """Reduce chunk i over all members into member i's output, in member order. Chunk sizes may differ."""
        return self._reduce_scatter(self._next(), output, chunks, combine)

    def broadcast(self, tensor: torch.Tensor, source: int) -> Steps:
        """Copy member ``source``'s contiguous tensor into everybody's."""
        return self._broadcast(self._next(), tensor, source)

    def all_gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> Steps:
        """Everybody gets member i's tensor in outputs[i] (contiguous; sizes may differ between members)."""
        return self._all_gather(self._next(), outputs, tensor)

    def gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, to: int) -> Steps:
        """Member ``to`` gets member i's tensor in outputs[i]; elsewhere outputs is not looked at."""
        if self.index != to:
            return self._swap(self._next(), {to: tensor}, {})
        outputs[to].copy_(tensor.view_as(outputs[to]))
        return self._swap(self._next(), {}, {i: outputs[i] for i in self._others()})

    def scatter(self, output: torch.Tensor, chunks: Sequence[torch.Tensor], source: int) -> Steps:
        """Member i gets member ``source``'s chunks[i]; elsewhere chunks is not looked at."""
        if self.index != source:
            return self._swap(self._next(), {}, {source: output})
        output.copy_(chunks[source].view_as(output))
        return self._swap(self._next(), {i: chunks[i] for i in self._others()}, {})

    def all_to_all(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Steps:
        """Member i's inputs[j] arrives in member j's outputs[i]."""
        outputs[self.index].copy_(inputs[self.index].view_as(outputs[self.index]))
        others = self._others()
        return self._swap(self._next(), {i: inputs[i] for i in others}, {i: outputs[i] for i in others})

    def barrier(self) -> Steps:
        """End when every member has entered."""
        return self.all_reduce(torch.zeros(1, dtype=torch.uint8), torch.Tensor.add_)

    # ---- inside -----------------------------------------------------------------------------

    def _others(self) -> list[int]:
        return [i for i in range(self.size) if i != self.index]

    def _next(self) -> int:
        """Place of the next operation among the group's; it may use ``_PHASES`` consecutive ones."""
        # Members are interrupted at different points, so the count restarts with each epoch.
        if self._epoch != self.transport.epoch:
            self._epoch, self._sequence = self.transport.epoch, 0
        self._sequence = (self._sequence + 1) % _SEQUENCES
        return self._sequence * _PHASES

    def _exchange(self, at: int, sends: dict[int, torch.Tensor], recvs: dict[int, torch.Tensor]) -> list[Operation]:
        """Start sending to and receiving from members by index. Tensors are contiguous; empty ones move nothing."""
        coordinate, transport = pair(self.ident, at), self.transport
        started: list[Operation] = []
        for i, tensor in recvs.items():
            if tensor.numel():
                started.append(transport.recv(self.ranks[i], Channel.COLLECTIVE, coordinate, tensor))
        for i, tensor in sends.items():
            if tensor.numel():
                started.append(transport.send(self.ranks[i], Channel.COLLECTIVE, coordinate, tensor))
        return started

    def _swap(self, at: int, sends: dict[int, torch.Tensor], recvs: dict[int, torch.Tensor]) -> Steps:
        yield self._exchange(at, sends, recvs)

    def _tell(self, at: int, tensor: torch.Tensor) -> Sequence[Operation]:
        """Start sending a contiguous tensor to every other member."""
        others = [rank for i, rank in enumerate(self.ranks) if i != self.index]
        if not others or not tensor.numel():
            return []
        return self.transport.send_all(others, Channel.COLLECTIVE, pair(self.ident, at), tensor)

    def _tell_all(self, at: int, tensor: torch.Tensor) -> Steps:
        yield self._tell(at, tensor)

    def _reduce(self, at: int, tensor: torch.Tensor, combine: Combine, to: int) -> Steps:
        if self.index != to:
            yield self._exchange(at, {to: tensor}, {})
            return
        parts = self._borrow(at, tensor)
        yield list(parts.values())
        self._combine_in_order(tensor, parts, combine)

    def _exchange_and_reduce(self, at: int, tensor: torch.Tensor, combine: Combine) -> Steps:
        parts = self._borrow(at, tensor)
        yield [*parts.values(), *self._tell(at, tensor)]
        self._combine_in_order(tensor, parts, combine)

    def _broadcast(self, at: int, tensor: torch.Tensor, source: int) -> Steps:
        if self.index == source:
            return self._tell_all(at, tensor)
        return self._swap(at, {}, {source: tensor})

    def _all_gather(self, at: int, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> Steps:
        own = outputs[self.index]
        if own.data_ptr() != tensor.data_ptr():
            own.copy_(tensor.view_as(own))
        yield [*self._exchange(at, {}, {i: outputs[i] for i in self._others()}), *self._tell(at, tensor)]

    def _reduce_scatter(
        self, at: int, output: torch.Tensor, chunks: Sequence[torch.Tensor], combine: Combine
    ) -> Steps:
        mine = chunks[self.index]
        parts = self._borrow(at, mine)
        yield [*parts.values(), *self._exchange(at, {i: chunks[i] for i in self._others()}, {})]
        if output.data_ptr() != mine.data_ptr():
            output.copy_(mine.view_as(output))
        self._combine_in_order(output, parts, combine)

    def _borrow(self, at: int, like: torch.Tensor) -> dict[int, Recv]:
        """Expect every other member's tensor, to be read once."""
        coordinate = pair(self.ident, at)
        return {
            i: self.transport.borrow(self.ranks[i], Channel.COLLECTIVE, coordinate, like.numel(), like.dtype)
            for i in self._others()
            if like.numel()
        }

    def _combine_in_order(self, own: torch.Tensor, parts: dict[int, Recv], combine: Combine) -> None:
        """``own`` becomes ((part 0 + part 1) + part 2) + ..., with itself in its place."""
        if not parts:
            return
        flat, me = own.view(-1), self.index
        if me <= 1:
            # Every reduction is commutative, so beginning with one's own is the same for the first two.
            combine(flat, parts[1 - me].buffer)
            order = range(2, self.size)
        else:
            mine = flat.clone()
            flat.copy_(parts[0].buffer)
            order = range(1, self.size)
        for i in order:
            combine(flat, mine if i == me else parts[i].buffer)
        for recv in parts.values():
            recv.release()


def _nothing() -> Steps:
    yield []


def _both(first: Steps, second: Steps) -> Steps:
    yield from first
    yield from second
