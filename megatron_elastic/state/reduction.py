"""Reduction: gradients from those who computed them to the owners, and parameters back.

Slice k of a unit is summed at its owner over every cell that computes the unit; before that, what the ranks of a cell
computed in parts is added up in the cell. After the update, owners send the new parameters to all holders. Both can go
on while the rank computes: a unit's gradients are sent as soon as the step's last backward has added to them, and its
parameters are waited for when the next step's first forward needs them.

On a device all of it is added up and written there; what goes from rank to rank goes through host memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch

from megatron_elastic.comm.group import Group
from megatron_elastic.comm.operation import Operation, Recv, Steps, Task
from megatron_elastic.comm.tag import GROUPS, Channel, at_slice
from megatron_elastic.comm.transport import Transport
from megatron_elastic.device.copies import to_device
from megatron_elastic.layout import Cell, Layout
from megatron_elastic.numerics.exact import Accumulator
from megatron_elastic.state.buffer import UnitBuffer
from megatron_elastic.state.store import StateStore

_CELL_GROUP = GROUPS - 4
"""Group id of tensor-parallel ranks for unit 0, beyond any that Megatron's groups reach; others lie below it."""


class Reduction:
    """The data-parallel traffic of one step under one layout, for one rank, by messages."""

    ordered = False
    """Whether what is computed afterwards comes after it by itself, so that the host need not wait for parameters."""

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
        # One a unit: ranks of a team may come to their units in different orders, as they may have got them.
        self._teams = {unit: Group(transport, _CELL_GROUP - unit, team) for unit in self._computed}
        self._reducing: dict[int, Task] = {}
        self._gathering: dict[int, Task] = {}

    # ---- gradients --------------------------------------------------------------------------

    def reduce_when_complete(self, grains: int) -> None:
        """Start the reduction of each unit when the backward of the last of the step's ``grains`` has added to it."""
        mine = sum(grain < grains for grain in self._cell.share)
        for unit in self._computed:
            self._units[unit].expect(mine, partial(self._start_reducing, unit, grains))

    def reduce_gradients(self, grains: int) -> None:
        """Sum every owned slice over all holders into a mean over the step's ``grains``, kept in the store."""
        for unit in self._units:
            if unit not in self._reducing:
                self._start_reducing(unit, grains)
        self._transport.wait(*self._reducing.values())
        self._reducing.clear()

    def _start_reducing(self, unit: int, grains: int) -> None:
        self._reducing[unit] = self._transport.start(
            self._reduce(unit, grains * self._layout.batches), "reduce", unit
        )

    def _reduce(self, unit: int, batches: int) -> Steps:
        """This rank's part in the sums of a unit: sends to the owners of its slices, and the sums that it owns."""
        buffer, owned, sends = self._units[unit], [], []
        if unit in self._computed:
            self._transport.meet(owner for _, owner in self._owners(unit))
            yield from self._add_up_in_cell(self._teams[unit], buffer.partial_sums())
        for k, owner in self._owners(unit):
            if owner == self._transport.rank:
                owned.append((k, self._expect_gradient(unit, k)))
            elif unit in self._computed:
                part = buffer.slice_of(buffer.sums, k)
                sends.append(self._transport.send(owner, Channel.GRADIENT, at_slice(unit, k), part))
        for k, recvs in owned:
            yield recvs
            # A unit that is held for what is owned of it has no sums here.
            mine = [buffer.slice_of(buffer.sums, k)] if unit in self._computed else []
            # In holder order, so that float sums do not depend on arrival either.
            there = buffer.sums.device
            theirs = [recv.buffer if buffer.sums.is_cpu else to_device(recv.buffer, there) for recv in recvs]
            mean = self._accumulator.mean([*mine, *theirs], batches)
            for recv in recvs:
                recv.release()
            self._store.set_gradient((unit, k), mean)
        yield sends

    def _add_up_in_cell(self, team: Group, sums: list[torch.Tensor]) -> Steps:
        """Make each of these the sum over the tensor-parallel ranks."""
        if sums:
            total = yield from self._transport.to_host(torch.cat(sums))
            yield from team.all_reduce(total, torch.Tensor.add_)
            for part, whole in zip(sums, total.split([part.numel() for part in sums]), strict=True):
                part.copy_(whole, non_blocking=True)

    def _expect_gradient(self, unit: int, k: int) -> list[Recv]:
        buffer, holders = self._units[unit], self._with_my_part(self._layout.contributors(unit), unit)
        self._transport.meet(holders)
        return [
            self._transport.borrow(
                rank, Channel.GRADIENT, at_slice(unit, k), buffer.partition.slice_size, buffer.sums.dtype
            )
            for rank in holders
        ]

    # ---- parameters -------------------------------------------------------------------------

    def start_gathering(self) -> None:
        """Owners write their updated slices into the model, here and at every other holder of the unit."""
        for unit in self._units:
            self._gathering[unit] = self._transport.start(self._gather(unit), "gather", unit)

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
        arriving: list[tuple[torch.Tensor, torch.Tensor]] = []
        for k, owner in self._owners(unit):
            target = buffer.slice_of(buffer.params, k)
            if owner == me:
                target.copy_(self._store[unit, k].master)
                others = self._with_my_part(self._layout.holders(unit), unit)
                operations += self._transport.send_all(others, Channel.PARAMETER, at_slice(unit, k), target)
            else:
                host = target if target.is_cpu else torch.empty(target.shape, dtype=target.dtype, pin_memory=True)
                operations.append(self._transport.recv(owner, Channel.PARAMETER, at_slice(unit, k), host))
                arriving.append((target, host))
        yield operations
        for target, host in arriving:
            if host is not target:
                target.copy_(host, non_blocking=True)

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
