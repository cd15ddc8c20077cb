"""Reduction: gradients from those who computed them to the owners, and parameters back.

Slice k of a unit is summed at its owner over every cell that computes the unit; before that, what the ranks of a cell
computed in parts is added up in the cell. After the update, owners send the new parameters to all holders. Both can go
on while the rank computes: a unit's gradients are sent as soon as the step's last backward has added to them, and its
parameters are waited for when the next step's first forward needs them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch

from megatron_elastic.comm.group import Group
from megatron_elastic.comm.operation import Operation, Recv, Steps, Task
from megatron_elastic.comm.tag import GROUPS, Channel, at_slice
from megatron_elastic.comm.transport import Transport
from megatron_elastic.layout import Cell, Layout
from megatron_elastic.numerics.exact import Accumulator
from megatron_elastic.state.buffer import UnitBuffer
from megatron_elastic.state.store import StateStore

_CELL_GROUP = GROUPS - 2
"""Group id of tensor-parallel ranks, beyond any that Megatron's groups reach."""


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
        self._cell = layout.cell_of(transport.rank)
        self._computed = () if self._cell.shadow else layout.stages[layout.stage_of(transport.rank)].units
        me = transport.rank
        team = [rank for rank in self._cell.ranks if layout.team_of(rank) == layout.team_of(me)]
        self._cell_group = Group(transport, _CELL_GROUP, team)
        self._reducing: dict[int, Task] = {}
        self._gathering: dict[int, Task] = {}

    # ---- gradients --------------------------------------------------------------------------

    def reduce_when_complete(self) -> None:
        """Start the reduction of each unit when the backward of the step's last grain has added its gradients."""
        for unit in self._computed:
            self._units[unit].expect(len(self._cell.share), partial(self._start_reducing, unit))

    def reduce_gradients(self) -> None:
        """Sum every owned slice over all holders into a mean over the grains, kept in the store."""
        for unit in self._units:
            if unit not in self._reducing:
                self._start_reducing(unit)
        self._transport.wait(*self._reducing.values())
        self._reducing.clear()

    def _start_reducing(self, unit: int) -> None:
        self._reducing[unit] = self._transport.start(self._reduce(unit))

    def _reduce(self, unit: int) -> Steps:
        """This rank's part in the sums of a unit: sends to the owners of its slices, and the sums that it owns."""
        buffer, owned, sends = self._units[unit], [], []
        if unit in self._computed:
            yield from self._add_up_in_cell(buffer.partial_sums())
        for k, owner in self._owners(unit):
            if owner == self._transport.rank:
                owned.append((k, self._expect_gradient(unit, k)))
            elif unit in self._computed:
                part = buffer.slice_of(buffer.sums, k)
                sends.append(self._transport.send(owner, Channel.GRADIENT, at_slice(unit, k), part))
        for k, recvs in owned:
            if unit in self._computed:
                total = buffer.slice_of(buffer.sums, k).clone()
            else:  # it holds the unit for what it owns, and has no sums of its own
                total = torch.zeros(buffer.partition.slice_size, dtype=buffer.sums.dtype)
            yield recvs
            # In holder order, so that float sums do not depend on arrival either.
            for recv in recvs:
                total.add_(recv.buffer)
                recv.release()
            self._store.set_gradient((unit, k), self._accumulator.mean(total, self._layout.num_batches))
        yield sends

    def _add_up_in_cell(self, sums: list[torch.Tensor]) -> Steps:
        """Make each of these the sum over the tensor-parallel ranks, who complete their units in the same order."""
        if sums:
            total = torch.cat(sums)
            yield from self._cell_group.all_reduce(total, torch.Tensor.add_)
            for part, whole in zip(sums, total.split([part.numel() for part in sums]), strict=True):
                part.copy_(whole)

    def _expect_gradient(self, unit: int, k: int) -> list[Recv]:
        buffer = self._units[unit]
        return [
            self._transport.borrow(
                rank, Channel.GRADIENT, at_slice(unit, k), buffer.partition.slice_size, buffer.sums.dtype
            )
            for rank in self._with_my_part(self._layout.contributors(unit), unit)
        ]

    # ---- parameters -------------------------------------------------------------------------

    def start_gathering(self) -> None:
        """Owners write their updated slices into the model, here and at every other holder of the unit."""
        for unit in self._units:
            self._gathering[unit] = self._transport.start(self._gather(unit))

    def await_parameters(self, unit: int) -> None:
        """Return when the unit's parameters are here."""
        task = self._gathering.pop(unit, None)
        if task is not None:
            self._transport.wait(task)

    def finish_gathering(self) -> None:
        """Return when all parameters are here, and those of others are on their way."""
        for unit in list(self._gathering):
            self.await_parameters(unit)

    def gather_parameters(self) -> None:
        """``start_gathering`` and ``finish_gathering``."""
        self.start_gathering()
        self.finish_gathering()

    def _gather(self, unit: int) -> Steps:
        buffer, me = self._units[unit], self._transport.rank
        operations: list[Operation] = []
        for k, owner in self._owners(unit):
            target = buffer.slice_of(buffer.params, k)
            if owner == me:
                target.copy_(self._store[unit, k].master)
                others = self._with_my_part(self._layout.holders(unit), unit)
                operations += self._transport.send_all(others, Channel.PARAMETER, at_slice(unit, k), target)
            else:
                operations.append(self._transport.recv(owner, Channel.PARAMETER, at_slice(unit, k), target))
        yield operations

    def _owners(self, unit: int) -> Iterator[tuple[int, int]]:
        """(slice, owner) of every slice of a unit."""
        part = self._layout.part_of(unit, self._transport.rank)
        for k in range(self._layout.num_slices):
            yield k, self._layout.owner(unit, k, part)

    def _with_my_part(self, cells: Sequence[Cell], unit: int) -> list[int]:
        """The other ranks of these cells that hold the part of the unit that this one holds."""
        me = self._transport.rank
        part = self._layout.part_of(unit, me)
        return [rank for cell in cells for rank in self._layout.sharing(cell, unit, part) if rank != me]
