"""Recutting: what a rank is to have in cells of another shape, made while it keeps what it has in the present ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from megatron_elastic.adaptor.model.stage import partition_of
from megatron_elastic.cluster.messages import Plan
from megatron_elastic.comm.operation import Aside
from megatron_elastic.comm.transport import Transport
from megatron_elastic.layout import Layout, decode
from megatron_elastic.numerics.exact import Accumulator
from megatron_elastic.observe.dials import Dials
from megatron_elastic.state.buffer import UnitBuffer
from megatron_elastic.state.following import Following
from megatron_elastic.state.partition import Partition
from megatron_elastic.state.store import StateStore


@dataclass(frozen=True, slots=True)
class Room:
    """Where the units will be that the rank holds, and what sums their gradients."""

    accumulator: Accumulator
    units: dict[int, UnitBuffer]


@dataclass(frozen=True, slots=True)
class Recutting:
    """One rank's part in the planned ``layout``; ``step`` is the first one under it.

    Attributes:
        partitions: of all units.
        store: None if the rank is in no cell any more.
        room: if that was made beforehand.
    """

    plan: Plan
    layout: Layout
    step: int
    partitions: dict[int, Partition]
    store: StateStore | None
    room: Room | None


class Preparation:
    """What becomes one rank's part in a planned layout, while all ranks of the ``present`` one prepare it.

    ``held``: its states, which stay. ``begins`` is called before each unit.
    """

    def __init__(
        self, transport: Transport, present: Layout, held: StateStore, plan: Plan, dials: Dials,
        make_store: Callable[[dict[int, Partition]], StateStore], begins: Callable[[], None],
    ) -> None:  # fmt: skip
        rank, layout = transport.rank, decode(plan.layout)
        self._transport, self._plan, self._layout = transport, plan, layout
        self._partitions: dict[int, Partition] = {}
        if rank in layout.places:
            self._partitions = {unit: partition_of(shape, layout, unit, rank) for unit, shape in plan.shapes.items()}
        self._store = make_store(self._partitions)
        self._room: Room | None = None
        self._making_room: Aside[None] | None = None
        self.following = Following(
            present, layout, plan.shapes, held, self._partitions, transport, self._store.rate, dials, begins
        )

    def make_room(self, make: Callable[[Layout, dict[int, Partition]], Room]) -> None:
        """Get the memory of the units, in another thread: the first touch of it takes its time."""
        if self._partitions:
            self._room, transport = make(self._layout, self._partitions), self._transport
            self._making_room = transport.aside(transport.rank, partial(_touch, self._room), thread="room")

    def end(self, step: int) -> Recutting:
        """What has become of it before ``step``, or is made now, while nothing changes the states that are held."""
        following = self.following
        if self._making_room is not None:
            self._transport.wait(self._making_room)
        self._store.take(following.finish() if following.complete else following.whole(step - 1))
        store = self._store if self._partitions else None
        return Recutting(self._plan, self._layout, step, self._partitions, store, self._room)


def _touch(room: Room) -> None:
    for buffer in room.units.values():
        buffer.params.zero_()
        buffer.sums.zero_()
