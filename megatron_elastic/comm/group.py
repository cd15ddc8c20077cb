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

from megatron_elastic.comm.operation import Operation, Recv, Sending, Steps
from megatron_elastic.comm.tag import NUMBERS, Channel, at_group
from megatron_elastic.comm.transport import Transport

_STAR = 256 * 1024
"""Up to this many bytes a star through the first member beats exchanging chunks: 2 n messages, not n squared."""
_FEW = 3
"""Up to this many members, small messages go from each to each: one hop instead of two."""
_PART = 512 * 1024
"""Bytes of a chunk that is reduced at once: while it is read, the next ones are written, and it stays in the cache."""
_FAN = 8
"""Members of a tree that are combined at once."""
_PHASES = 2
_SEQUENCES = NUMBERS // _PHASES

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

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> Sending:
        """Start sending a contiguous tensor to member ``to``."""
        coordinate = at_group(self.ident, tag % NUMBERS)
        return self.transport.send(self.ranks[to], Channel.POINT_TO_POINT, coordinate, tensor)

    def recv(self, tensor: torch.Tensor, source: int, tag: int) -> Recv:
        """Expect a message from member ``source`` in a contiguous tensor."""
        coordinate = at_group(self.ident, tag % NUMBERS)
        return self.transport.recv(self.ranks[source], Channel.POINT_TO_POINT, coordinate, tensor)

    def recv_any(self, tensor: torch.Tensor, tag: int) -> int:
        """Receive from whichever member's message is here first; returns its index."""
        coordinate = at_group(self.ident, tag % NUMBERS)
        source = self.transport.first_of(self.ranks, Channel.POINT_TO_POINT, coordinate)
        self.transport.wait(self.transport.recv(source, Channel.POINT_TO_POINT, coordinate, tensor))
        return self.ranks.index(source)

    # ---- collectives ------------------------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor, combine: Combine) -> Steps:
        """Reduce a contiguous tensor over all members, in place, in member order; the same bits on every member."""
        if self.size == 1 or not tensor.numel():
            return _nothing()
        at = self._next()
        if tensor.nbytes > _STAR and tensor.numel() >= self.size:
            return self._all_reduce(at, tensor, combine)
        if self.size <= _FEW:
            return self._exchange_and_reduce(at, tensor, combine)
        return _both(self._reduce(at, tensor, combine, 0), self._broadcast(at + 1, tensor, 0))

    def reduce_exact(self, tensor: torch.Tensor, combine: Combine) -> Steps:
        """Reduce a contiguous tensor into the first member's, in a tree, so that nobody talks to many.

        For a reduction whose order does not matter. Others' tensors become sums of parts.
        """
        return self._reduce_in_tree(self._next(), tensor, combine)

    def broadcast_from_root(self, tensor: torch.Tensor) -> Steps:
        """Copy the first member's contiguous tensor into everybody's, in the same tree."""
        return self._broadcast_in_tree(self._next(), tensor)

    def reduce(self, tensor: torch.Tensor, combine: Combine, to: int) -> Steps:
        """Reduce into member ``to``, in member order; other members' tensors keep their values."""
        return self._reduce(self._next(), tensor, combine, to)

    def reduce_scatter(self, output: torch.Tensor, chunks: Sequence[torch.Tensor], combine: Combine) -> Steps:
        """Reduce chunk i over all members into member i's output, in member order. Chunk sizes may differ."""
        if self.size > _FEW and sum(chunk.nbytes for chunk in chunks) <= _STAR:
            return self._reduce_scatter_star(self._next(), output, chunks, combine)
        return self._reduce_scatter(self._next(), output, chunks, combine)

    def broadcast(self, tensor: torch.Tensor, source: int) -> Steps:
        """Copy member ``source``'s contiguous tensor into everybody's."""
        return self._broadcast(self._next(), tensor, source)

    def all_gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> Steps:
        """Everybody gets member i's tensor in outputs[i] (contiguous; sizes may differ between members)."""
        if self.size > _FEW and sum(output.nbytes for output in outputs) <= _STAR:
            return self._all_gather_star(self._next(), outputs, tensor)
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
        token = torch.zeros(1, dtype=torch.uint8)
        return _both(self.reduce_exact(token, torch.Tensor.add_), self.broadcast_from_root(token))

    # ---- inside -----------------------------------------------------------------------------

    def _others(self) -> list[int]:
        return [i for i in range(self.size) if i != self.index]

    def _next(self) -> int:
        """Place of the next operation among the group's; it may use ``_PHASES`` consecutive ones."""
        # Members are interrupted at different points, so the count restarts with each epoch.
        if self._epoch != self.transport.epoch:
            self._epoch, self._sequence = self.transport.epoch, 0
            self.transport.watch(self.ranks)
        self._sequence = (self._sequence + 1) % _SEQUENCES
        return self._sequence * _PHASES

    def _exchange(self, at: int, sends: dict[int, torch.Tensor], recvs: dict[int, torch.Tensor]) -> list[Operation]:
        """Start sending to and receiving from members by index. Tensors are contiguous; empty ones move nothing."""
        ranks = self.ranks
        return self.transport.exchange(
            Channel.COLLECTIVE,
            at_group(self.ident, at),
            [(ranks[i], tensor) for i, tensor in sends.items() if tensor.numel()],
            [(ranks[i], tensor) for i, tensor in recvs.items() if tensor.numel()],
        )

    def _swap(self, at: int, sends: dict[int, torch.Tensor], recvs: dict[int, torch.Tensor]) -> Steps:
        yield self._exchange(at, sends, recvs)

    def _tell(self, at: int, tensor: torch.Tensor) -> Sequence[Operation]:
        """Start sending a contiguous tensor to every other member."""
        others = [rank for i, rank in enumerate(self.ranks) if i != self.index]
        if not others or not tensor.numel():
            return []
        return self.transport.send_all(others, Channel.COLLECTIVE, at_group(self.ident, at), tensor)

    def _tell_all(self, at: int, tensor: torch.Tensor) -> Steps:
        yield self._tell(at, tensor)

    def _reduce(self, at: int, tensor: torch.Tensor, combine: Combine, to: int) -> Steps:
        if self.index != to:
            yield self._exchange(at, {to: tensor}, {})
            return
        parts = self._borrow(at, tensor)
        yield list(parts.values())
        self._combine_in_order(tensor, parts, combine)

    def _reduce_in_tree(self, at: int, tensor: torch.Tensor, combine: Combine) -> Steps:
        parent, children = place_in_tree(self.index, self.size)
        coordinate, flat = at_group(self.ident, at), tensor.view(-1)
        parts = [
            self.transport.borrow(self.ranks[i], Channel.COLLECTIVE, coordinate, flat.numel(), flat.dtype)
            for i in children
        ]
        yield parts
        for part in parts:
            combine(flat, part.buffer)
            part.release()
        if parent is not None:
            yield self._exchange(at, {parent: tensor}, {})

    def _broadcast_in_tree(self, at: int, tensor: torch.Tensor) -> Steps:
        parent, children = place_in_tree(self.index, self.size)
        if parent is not None:
            yield self._exchange(at, {}, {parent: tensor})
        if children:
            below = [self.ranks[i] for i in children]
            yield self.transport.send_all(below, Channel.COLLECTIVE, at_group(self.ident, at), tensor)

    def _exchange_and_reduce(self, at: int, tensor: torch.Tensor, combine: Combine) -> Steps:
        parts = self._borrow(at, tensor)
        yield [*parts.values(), *self._tell(at, tensor)]
        self._combine_in_order(tensor, parts, combine)

    def _broadcast(self, at: int, tensor: torch.Tensor, source: int) -> Steps:
        if self.index == source:
            return self._tell_all(at, tensor)
        return self._swap(at, {}, {source: tensor})

    def _all_reduce(self, at: int, tensor: torch.Tensor, combine: Combine) -> Steps:
        """In segments: everybody reduces a chunk of each and tells it. The next segment is sent meanwhile."""
        segments = tensor.view(-1).split(_PART // tensor.element_size() * self.size)
        telling: list[Operation] = []
        ahead = self._begin(at, segments[0].tensor_split(self.size))
        for following in (*segments[1:], None):
            chunks, parts, started = ahead
            if following is not None:
                ahead = self._begin(at, following.tensor_split(self.size))
            yield [*started, *telling]
            self._combine_in_order(chunks[self.index], parts, combine)
            telling = self._tell_and_hear(at + 1, chunks)
        yield telling

    def _reduce_scatter(
        self, at: int, output: torch.Tensor, chunks: Sequence[torch.Tensor], combine: Combine
    ) -> Steps:
        """Everybody reduces a chunk, part by part. The next parts are sent meanwhile."""
        own, flat = output.view(-1), [chunk.view(-1) for chunk in chunks]
        size = _PART // output.element_size()
        rounds = max(1, -(-max(chunk.numel() for chunk in chunks) // size))
        ahead = self._begin(at, [chunk[:size] for chunk in flat])
        for i in range(1, rounds + 1):
            parted, parts, started = ahead
            if i < rounds:
                ahead = self._begin(at, [chunk[i * size : (i + 1) * size] for chunk in flat])
            yield started
            mine = own[(i - 1) * size : i * size]
            if mine.data_ptr() != parted[self.index].data_ptr():
                mine.copy_(parted[self.index])
            self._combine_in_order(mine, parts, combine)

    def _reduce_scatter_star(
        self, at: int, output: torch.Tensor, chunks: Sequence[torch.Tensor], combine: Combine
    ) -> Steps:
        whole = _joined(chunks)
        if self.index:
            yield self._exchange(at, {0: whole}, {})
            yield self._exchange(at + 1, {}, {0: output})
            return
        total = whole.clone()
        yield from self._reduce(at, total, combine, 0)
        reduced = total.split([chunk.numel() for chunk in chunks])
        output.copy_(reduced[0].view_as(output))
        yield self._exchange(at + 1, {i: reduced[i] for i in self._others()}, {})

    def _all_gather(self, at: int, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> Steps:
        _put(outputs[self.index], tensor)
        yield self._tell_and_hear(at, outputs)

    def _all_gather_star(self, at: int, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> Steps:
        _put(outputs[self.index], tensor)
        if self.index:
            yield self._exchange(at, {0: tensor}, {})
        else:
            yield self._exchange(at, {}, {i: outputs[i] for i in self._others()})
        whole = _joined(outputs)
        yield from self._broadcast(at + 1, whole, 0)
        if self.index:
            for output, part in zip(outputs, whole.split([output.numel() for output in outputs]), strict=True):
                _put(output, part)

    def _begin(
        self, at: int, chunks: Sequence[torch.Tensor]
    ) -> tuple[Sequence[torch.Tensor], dict[int, Recv], list[Operation]]:
        """Send every member its chunk, and expect everybody's of this member's chunk."""
        parts = self._borrow(at, chunks[self.index])
        return chunks, parts, [*parts.values(), *self._exchange(at, {i: chunks[i] for i in self._others()}, {})]

    def _tell_and_hear(self, at: int, tensors: Sequence[torch.Tensor]) -> list[Operation]:
        """Tell everybody this member's tensor, and hear the others'."""
        return [*self._exchange(at, {}, {i: tensors[i] for i in self._others()}), *self._tell(at, tensors[self.index])]

    def _borrow(self, at: int, like: torch.Tensor) -> dict[int, Recv]:
        """Expect every other member's tensor, to be read once."""
        coordinate = at_group(self.ident, at)
        if like.numel():
            self.transport.meet(self.ranks[i] for i in self._others())
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


def place_in_tree(index: int, size: int) -> tuple[int | None, list[int]]:
    """A member's parent (None: it is the root) and its children in a tree over so many, those with most below first.

    The first of every ``_FAN`` consecutive members is the parent of the others, then so among these first ones, and so
    on: neighbours are combined first, and who is first of many has ``_FAN - 1`` children for each level.
    """
    children: list[int] = []
    stride = 1
    while stride < size:
        block = stride * _FAN
        if index % block:
            return index - index % block, children
        children[:0] = range(index + stride, min(index + block, size), stride)
        stride = block
    return None, children


def _put(target: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy, unless it is the same memory."""
    if target.data_ptr() != tensor.data_ptr():
        target.copy_(tensor.view_as(target))


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Contiguous tensors as one flat tensor: the same memory if they lie in a row, else a copy."""
    first, storage = tensors[0], tensors[0].untyped_storage().data_ptr()
    at = first.data_ptr()
    for tensor in tensors:
        if tensor.data_ptr() != at or tensor.untyped_storage().data_ptr() != storage:
            return torch.cat([each.view(-1) for each in tensors])
        at += tensor.nbytes
    return first.as_strided((sum(tensor.numel() for tensor in tensors),), (1,))


def _nothing() -> Steps:
    yield []


def _both(first: Steps, second: Steps) -> Steps:
    yield from first
    yield from second
