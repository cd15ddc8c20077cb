"""Following: slices that are cut anew are made while training goes on in the old cut, and follow it step by step.

Between two updates all ranks begin with the same units: what each is to have of them is put together from pieces
(``state.recut``) of the states as they are then, which are packed in another thread and fetched in the background. From
the next step on the gradients of these pieces, reduced in the old cut, are cut anew, too, and what is made does the
same updates, as an update is elementwise. So it is what a new cut of the newest states would be, as soon as it is here.

Where states cannot follow all is made at once, while nothing changes them (``whole``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from megatron_elastic.comm.operation import Aside, Operation, Steps, Task
from megatron_elastic.comm.tag import Channel, at_slice
from megatron_elastic.comm.transport import Transport
from megatron_elastic.layout import Layout, UnitShape
from megatron_elastic.observe.dials import Dials
from megatron_elastic.state.copying import Rate, SliceId, fetch, serve
from megatron_elastic.state.optimizer import Update
from megatron_elastic.state.partition import Partition
from megatron_elastic.state.recut import Piece, deliveries
from megatron_elastic.state.slice import SliceState
from megatron_elastic.state.store import StateStore

_ROUND = 64 << 20
"""Bytes of states for each rank that are begun together at least, as long as there are so many."""
_ROUNDS = 32
"""How many times there is something begun, about, at most."""

_Grads = dict[int, torch.Tensor]
"""Of slices of a unit, cut anew."""


@dataclass(slots=True)
class _Share:
    """What this rank gives, gets and makes of one unit.

    ``kept``: slices that are what they were. ``own``: pieces of its own for what it makes; ``given``, ``got``: those to
    and from other ranks. ``live``: ``made`` is what it has to be; until then ``missed`` is what has to be replayed on
    it.
    """

    makes: tuple[int, ...]
    kept: tuple[int, ...]
    own: list[Piece] = field(default_factory=list)
    given: dict[int, list[Piece]] = field(default_factory=dict)
    got: dict[int, list[Piece]] = field(default_factory=dict)
    made: dict[int, SliceState] = field(default_factory=dict)
    grads: _Grads = field(default_factory=dict)
    missed: list[tuple[Update, _Grads]] = field(default_factory=list)
    live: bool = False


class Following:
    """One rank's part in making the slices of ``new`` while ``old`` trains. All ranks of ``old`` have one.

    Args:
        held: what the rank has; everything that ``old`` asks for is live.
        partitions: its parts of all units in ``new``; none if it is in no cell there.
        rate: at which others are asked for theirs.
        dials: show how far copies are.
        begins: called before each unit.
    """

    def __init__(
        self, old: Layout, new: Layout, shapes: Mapping[int, UnitShape], held: StateStore,
        partitions: Mapping[int, Partition], transport: Transport, rate: Rate, dials: Dials,
        begins: Callable[[], None],
    ) -> None:  # fmt: skip
        self._held = held
        self._partitions = partitions
        self._transport = transport
        self._rate = rate
        self._dials = dials
        self._begins = begins
        self._kinds = 1 + len(held.optimizer.moments)
        me = transport.rank
        self._to_come = {unit: _share(unit, shape, old, new, me) for unit, shape in sorted(shapes.items())}
        each = {unit: _elements(shape) * 4 * self._kinds / len(old.ranks) for unit, shape in sorted(shapes.items())}
        self._rounds = _rounds(each)
        self._shares: dict[int, _Share] = {}
        """Of the units that are begun."""
        self.steps = 0
        """How many steps have been done since it began."""
        self._snapshot: Aside[None] | None = None
        self._loading: Task | None = None
        self._copying: list[Task] = []
        dials.expect(old.epoch, sum(
            4 * self._kinds * _size(some) for share in self._to_come.values() for some in share.got.values()
        ))

    @property
    def complete(self) -> bool:
        """Whether every unit is begun."""
        return not self._rounds

    @property
    def up_to_date(self) -> bool:
        """Whether all that is begun is here, and has done the updates since."""
        return self._loading is None

    def begin(self, step: int) -> None:
        """Begin with some more units, of states after ``step`` steps. All ranks do so between the same two updates,
        when what was begun before is here everywhere.
        """
        begun = {unit: self._to_come.pop(unit) for unit in self._rounds.pop(0)}
        for _ in begun:
            self._begins()
        self._shares |= begun
        me, packed = self._transport.rank, dict[tuple[int, int], torch.Tensor]()
        self._snapshot = self._transport.aside(me, partial(self._copy, begun, step, packed))

        def taken(peer: int, at: SliceId) -> tuple[int, list[torch.Tensor]]:
            return step, [packed.pop((peer, at[0]))]  # in the same thread, after that

        for peer in sorted({peer for share in begun.values() for peer in share.given}):
            wanted = [(unit, 0) for unit, share in begun.items() if peer in share.given]
            serving = serve(self._transport, peer, wanted, partial(taken, peer))
            self._copying.append(self._transport.start(serving, "copy"))
        self._loading = self._transport.start(self._load(begun), "copy")

    def before_vote(self) -> None:
        """Get the gradients of the step. Returns when they are here, and nothing is copied any more of the states as
        they were, which are about to change. ``held`` has the gradients of all that the rank keeps in the old cut.
        """
        if self._snapshot is not None:
            self._transport.wait(self._snapshot)
            self._snapshot = None
        self._catch_up()
        operations: list[Operation] = []
        sent, received = [], []
        for unit, share in self._shares.items():
            out = [(peer, self._packed_gradients(unit, some)) for peer, some in share.given.items()]
            into = [(peer, torch.empty(_size(some))) for peer, some in share.got.items()]
            operations += self._transport.exchange(Channel.PIECES, at_slice(unit, 0), out, into)
            sent.append(out)
            received.append(into)
        self._transport.wait(*operations)
        for (unit, share), into in zip(self._shares.items(), received, strict=True):
            for k in share.makes:
                if k not in share.grads:
                    share.grads[k] = torch.zeros(self._partitions[unit].slice_size)
            for piece in share.own:
                grad = self._held[unit, piece.source[0]].grad
                assert grad is not None
                piece.there.of(share.grads[piece.target[0]]).copy_(piece.here.of(grad))
            for peer, buffer in into:
                _put(share.got[peer], buffer, {k: [grad] for k, grad in share.grads.items()})

    def apply(self, update: Update) -> None:
        """Do what the vote says on all that is here, and keep it for the rest."""
        self.steps += 1
        for unit, share in self._shares.items():
            if share.live:
                self._apply(unit, share, update, share.grads)
            else:
                share.missed.append((update, share.grads))
                share.grads = {}

    def finish(self) -> dict[SliceId, SliceState]:
        """All that the rank is to have in the new cut, after as many steps as the states have done: when everything is
        up to date. What stays as it was is not copied. Returns when nothing is on its way from here.
        """
        self._transport.wait(*self._copying)
        self._dials.complete()
        every = {unit: (share.made, share.kept) for unit, share in self._shares.items()}
        return {
            **{(unit, k): state for unit, (made, _) in every.items() for k, state in made.items()},
            **{(unit, k): self._held[unit, k] for unit, (_, kept) in every.items() for k in kept},
        }

    def whole(self, step: int) -> dict[SliceId, SliceState]:
        """All at once: states after ``step`` steps, which do not change meanwhile."""
        while not self.complete:
            self.begin(step)
            assert self._loading is not None
            self._transport.wait(self._loading)
            self._catch_up()
        return self.finish()

    # ---- copying -----------------------------------------------------------------------------

    def _copy(self, begun: Mapping[int, _Share], step: int, packed: dict[tuple[int, int], torch.Tensor]) -> None:
        """In another thread: what is in the states as they are now, of what is made here, and for others."""
        for unit, share in begun.items():
            for k in share.makes:
                share.made[k] = SliceState(torch.zeros(self._partitions[unit].slice_size), self._held.optimizer)
                share.made[k].step = step
            for piece in share.own:
                own, made = self._held[unit, piece.source[0]], share.made[piece.target[0]]
                for source, target in zip(own.tensors, made.tensors, strict=True):
                    piece.there.of(target).copy_(piece.here.of(source))
            for peer, some in share.given.items():
                packed[peer, unit] = torch.cat([
                    piece.here.of(tensor).flatten().cpu()
                    for piece in some
                    for tensor in self._held[unit, piece.source[0]].tensors
                ])

    def _load(self, begun: Mapping[int, _Share]) -> Steps:
        """Get what others give, and put it where it belongs."""
        buffers: dict[tuple[int, int], torch.Tensor] = {}

        def begin(source: int, at: SliceId) -> list[torch.Tensor]:
            self._dials.fetch(at[0], source)
            buffers[source, at[0]] = torch.empty(self._kinds * _size(begun[at[0]].got[source]))
            return [buffers[source, at[0]]]

        wanted = [(source, (unit, 0)) for unit, share in begun.items() for source in sorted(share.got)]
        yield from fetch(
            self._transport, wanted, begin, lambda _, size: self._dials.copied(size), lambda *_: None, self._rate
        )
        yield [self._transport.aside(self._transport.rank, partial(self._unpack, begun, buffers))]

    def _unpack(self, begun: Mapping[int, _Share], buffers: Mapping[tuple[int, int], torch.Tensor]) -> None:
        for (source, unit), buffer in buffers.items():
            _put(begun[unit].got[source], buffer, {k: state.tensors for k, state in begun[unit].made.items()})

    def _catch_up(self) -> None:
        """Let what has arrived do the updates that it has missed."""
        if self._loading is None or not self._loading.done:
            return
        self._loading = None
        for unit, share in self._shares.items():
            for update, grads in share.missed:
                self._apply(unit, share, update, grads)
            share.missed.clear()
            share.live = True

    def _apply(self, unit: int, share: _Share, update: Update, grads: _Grads) -> None:
        for k, state in share.made.items():
            self._transport.look()
            state.grad = grads[k]
            state.apply(update, self._partitions[unit].segments(k))

    def _packed_gradients(self, unit: int, some: Iterable[Piece]) -> torch.Tensor:
        found = []
        for piece in some:
            grad = self._held[unit, piece.source[0]].grad
            assert grad is not None
            found.append(piece.here.of(grad).flatten().float().cpu())
        return torch.cat(found)


def _share(unit: int, shape: UnitShape, old: Layout, new: Layout, rank: int) -> _Share:
    """A rank's. Where a unit is not cut anew a slice that the rank has already stays what it is."""
    had, needed = _keeps(old, rank, unit), _keeps(new, rank, unit)
    if not had and not needed:  # as most units of a deep pipeline: to look at their pieces would take seconds
        return _Share((), ())
    every = [each for each in deliveries(unit, shape, old, new) if rank in (each.src, each.dst)]
    same = (old.tp, old.num_parts(unit)) == (new.tp, new.num_parts(unit))
    kept = {each.piece.target[0] for each in every if same and each.src == each.dst}
    share = _Share(tuple(sorted(needed - kept)), tuple(sorted(kept)))
    for piece, src, dst in every:
        if src != rank:
            share.got.setdefault(src, []).append(piece)
        elif dst != rank:
            share.given.setdefault(dst, []).append(piece)
        elif piece.target[0] not in kept:
            share.own.append(piece)
    return share


def _keeps(layout: Layout, rank: int, unit: int) -> set[int]:
    """The slices of a unit that a rank owns or replicates."""
    return {k for of, k in (*layout.owned(rank), *layout.replicated(rank)) if of == unit}


def _put(some: Iterable[Piece], buffer: torch.Tensor, into: Mapping[int, Sequence[torch.Tensor]]) -> None:
    """Pieces as they came, one after the other, of all tensors of each. ``into``: those of a slice."""
    start = 0
    for piece in some:
        for tensor in into[piece.target[0]]:
            piece.there.of(tensor).copy_(buffer[start : start + piece.size].view(-1, piece.there.size))
            start += piece.size


def _size(some: Iterable[Piece]) -> int:
    """Elements."""
    return sum(piece.size for piece in some)


def _elements(shape: UnitShape) -> int:
    return sum(member.size for member in shape.members) * max(shape.experts, 1)


def _rounds(each: Mapping[int, float]) -> list[list[int]]:
    """Which units are begun together; ``each``: bytes for a rank of them. The same on all ranks."""
    limit, room = max(_ROUND, sum(each.values()) / _ROUNDS), 0.0
    found: list[list[int]] = []
    for unit, size in each.items():
        if not found or size > room:
            found.append([])
            room = limit
        found[-1].append(unit)
        room -= size
    return found
