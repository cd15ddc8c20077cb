"""Reduction: gradients from those who computed them to the owners, replicas by replay, parameters back.

Slice k of a unit is summed at its owner over every cell that computes the unit; the owner sends the reduced gradient
on to the replicas' holders. After the update, owners send the new parameters to all holders.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megatron_elastic.comm.operation import Recv, Send
from megatron_elastic.comm.tag import Channel, pair
from megatron_elastic.comm.transport import Transport
from megatron_elastic.layout import Layout
from megatron_elastic.numerics.exact import Accumulator
from megatron_elastic.state.buffer import UnitBuffer
from megatron_elastic.state.store import StateStore


class Reduction:
    """The data-parallel traffic of one step under one layout, for one rank."""

    def __init__(
        self,
        layout: Layout,
        transport: Transport,
        units: Mapping[int, UnitBuffer],
        store: StateStore,
        accumulator: Accumulator,
    ) -> None:
        self._layout = layout
        self._transport = transport
        self._units = units
        self._store = store
        self._accumulator = accumulator
        self._tp = layout.tp_index(transport.rank)
        cell = layout.cell_of(transport.rank)
        self._computed = () if cell.shadow else layout.stages[layout.stage_of(transport.rank)].units

    def reduce_gradients(self) -> None:
        """Sum every owned slice over all holders into a mean over the grains, kept in the store."""
        sends = [
            self._transport.send(owner, Channel.GRADIENT, pair(unit, k), buffer.slice_of(buffer.sums, k))
            for unit, k, owner, buffer in self._slices()
            if owner != self._transport.rank and unit in self._computed
        ]
        expected = [(unit, k, self._expect_gradient(unit, k)) for unit, k in self._layout.owned(self._transport.rank)]
        for unit, k, recvs in expected:
            buffer = self._units[unit]
            total = buffer.slice_of(buffer.sums, k).clone()
            self._transport.wait(*recvs)
            # In holder order, so that float sums do not depend on arrival either.
            for recv in recvs:
                total.add_(recv.buffer)
                recv.release()
            self._store.set_gradient((unit, k), self._accumulator.mean(total, self._layout.num_grains))
        self._transport.wait(*sends)

    def gather_parameters(self) -> None:
        """Owners write their updated slices into the model, here and at every other holder of the unit."""
        me = self._transport.rank
        operations: list[Send | Recv] = []
        for unit, k, owner, buffer in self._slices():
            target = buffer.slice_of(buffer.params, k)
            if owner == me:
                target.copy_(self._store[unit, k].master)
                operations += [
                    self._transport.send(cell.ranks[self._tp], Channel.PARAMETER, pair(unit, k), target)
                    for cell in self._layout.holders(unit)
                    if cell.ranks[self._tp] != me
                ]
            else:
                operations.append(self._transport.recv(owner, Channel.PARAMETER, pair(unit, k), target))
        self._transport.wait(*operations)

    def _slices(self) -> Iterator[tuple[int, int, int, UnitBuffer]]:
        """(unit, slice, owner, buffer) of every slice of every unit held here."""
        for unit, buffer in self._units.items():
            for k in range(self._layout.num_slices):
                yield unit, k, self._layout.owner(unit, k, self._tp), buffer

    def _expect_gradient(self, unit: int, k: int) -> list[Recv]:
        buffer = self._units[unit]
        return [
            self._transport.borrow(
                rank, Channel.GRADIENT, pair(unit, k), buffer.partition.slice_size, buffer.sums.dtype
            )
            for rank in (cell.ranks[self._tp] for cell in self._layout.contributors(unit))
            if rank != self._transport.rank
        ]
