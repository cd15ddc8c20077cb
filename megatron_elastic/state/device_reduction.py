"""DeviceReduction: the reduction by the collectives of devices, from memory of one to that of the other.

Of each unit there are two circles: who has a part in its sums, and who needs its weights. Usually they are one, each
member owns one slice, and units are summed and spread whole. Else slices are reduced to their owners, and spread by
them, one by one. Integers add up to the same whatever order a backend takes them in.

The host waits for no sum and no weight: what is computed with them comes after them in the device's order. It waits for
its device and then for the others, though, before sums begin that nobody has begun early. So who holds the others up,
or is lost, is known by name and leaves no collective behind that has to be given up; what is on the devices goes on to
count.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions

from megatron_elastic.comm.device.communicators import Communicators, Members
from megatron_elastic.comm.device.device_group import DeviceGroup, DeviceWork
from megatron_elastic.comm.tag import GROUPS, UNITS
from megatron_elastic.comm.transport import Transport
from megatron_elastic.device.copies import Landing
from megatron_elastic.layout import Cell, Layout
from megatron_elastic.numerics.exact import Accumulator
from megatron_elastic.state.buffer import UnitBuffer
from megatron_elastic.state.reduction import Reduction
from megatron_elastic.state.store import StateStore

_TEAM_GROUP = GROUPS - 4 - UNITS
"""Group id of tensor-parallel ranks, below those of ``Reduction``; those of the units' circles lie below it."""


@dataclass(frozen=True, slots=True)
class _Circle:
    """Ranks that hold the same part of a unit. ``owners``: of its slices, in order; they are among the ``members``."""

    members: Members
    owners: Members

    @classmethod
    def of(cls, owners: Sequence[int], others: Iterable[int]) -> _Circle:
        """Members are in the order of their slices if they have one each, else in that of their numbers."""
        members = {*owners, *others}
        even = len(members) == len(owners) == len(set(owners))
        return cls((*owners,) if even else (*sorted(members),), (*owners,))

    @property
    def even(self) -> bool:
        """Whether slice k is that of member k, and everybody has one."""
        return self.members == self.owners


class _Summing(NamedTuple):
    """A unit's sums under way: ``totals`` of the slices that are owned here, when the ``works`` are done."""

    works: Sequence[DeviceWork]
    totals: Mapping[int, torch.Tensor]


class DeviceReduction(Reduction):
    """See ``Reduction``. ``communicators`` outlive it."""

    ordered = True

    def __init__(
        self, layout: Layout, transport: Transport, units: Mapping[int, UnitBuffer], store: StateStore,
        accumulator: Accumulator, communicators: Communicators,
    ) -> None:  # fmt: skip
        super().__init__(layout, transport, units, store, accumulator)
        summing = {unit: self._circle(unit, layout.contributors(unit)) for unit in units}
        # Who only follows, or is to have a unit later, has weights and no sums.
        self._summing = {unit: circle for unit, circle in summing.items() if transport.rank in circle.members}
        self._spreading = {unit: self._circle(unit, layout.holders(unit)) for unit in units}
        self._team = self._teams[self._computed[0]].ranks if any(units[unit].divided for unit in self._computed) else ()
        self._groups = communicators.arrange(self._numbered())
        self._connected = False
        self._due: deque[int] | None = None
        """Units whose sums are to begin in this step, in an order that all have; None before it."""
        self._ready: set[int] = set()
        """Those of them to which the last gradient has been added."""
        self._begun: dict[int, _Summing] = {}
        self._arriving: dict[int, list[DeviceWork]] = {}
        """By unit, weights that are not waited for in the device's order."""
        self._landing: Landing | None = None
        """Tells when those of the last update are here, if the host has not seen that."""

    def _circle(self, unit: int, cells: Sequence[Cell]) -> _Circle:
        part = self._layout.part_of(unit, self._transport.rank)
        sharing = [rank for cell in cells for rank in self._layout.sharing(cell, unit, part)]
        return _Circle.of([owner for _, owner in self._owners(unit)], sharing)

    def _numbered(self) -> dict[int, Members]:
        """The members of each group by a number that they all give it: by the first unit that it is for."""
        wanted = {_TEAM_GROUP: self._team}
        for unit in sorted(self._units):
            if unit in self._summing:
                wanted[_TEAM_GROUP - 1 - 2 * unit] = self._summing[unit].members
            wanted[_TEAM_GROUP - 2 - 2 * unit] = self._spreading[unit].members
        first: dict[Members, int] = {}
        for ident, members in wanted.items():
            if len(members) > 1:
                first.setdefault(members, ident)
        return {ident: members for members, ident in first.items()}

    def _connect(self) -> None:
        """Be ready to begin without a wait. All ranks come here, with their groups in one order.

        Whose device stands still does not get to the others, who then know whom they wait for.
        """
        if not self._connected:
            self._land(Landing())
            for _, group in self._groups.values():
                group.connect()
            self._connected = True

    # ---- gradients --------------------------------------------------------------------------

    def reduce_when_complete(self, grains: int) -> None:
        """As the reduction does; but in the same order everywhere."""
        self._connect()
        self._begin()
        mine = sum(grain < grains for grain in self._cell.share)
        for unit in self._computed:
            self._units[unit].expect(mine, partial(self._completed, unit))

    def reduce_gradients(self, grains: int) -> None:
        """As the reduction does."""
        self._connect()
        self._meet()
        if self._due is None:
            self._begin()
        assert self._due is not None
        batches = grains * self._layout.batches
        while self._due:
            self._sum(self._due.popleft())
            self._finish(1, batches)
        self._finish(0, batches)
        self._due = None

    def _finish(self, under_way: int, batches: int) -> None:
        """Let the device make means of what was begun first, until so many units are left: totals take room."""
        for unit in list(self._begun)[: len(self._begun) - under_way]:
            summing = self._begun.pop(unit)
            for work in summing.works:
                work.wait()
            for k, total in summing.totals.items():
                self._store.set_gradient((unit, k), self._accumulator.mean([total], batches))

    def _meet(self) -> None:
        """Return when this rank's gradients are there, and those of all whom it adds them up with."""
        self._land(Landing())
        circles = dict.fromkeys(circle.members for circle in self._summing.values() if len(circle.members) > 1)
        barriers = [self._groups[members][0].barrier() for members in circles]
        self._transport.wait(*[self._transport.start(barrier, "reduce") for barrier in barriers])

    def _land(self, landing: Landing) -> None:
        """Return when the device has got there. Raises Interrupted if it has given up something on its way."""
        self._transport.wait(self._transport.aside(self._transport.rank, landing.wait, "landings"))
        self._transport.check_devices()

    def _begin(self) -> None:
        """A step's sums are to begin. The last units come first, as in a backward."""
        self._due = deque(sorted(self._summing, reverse=True))
        self._ready = set(self._summing) - set(self._computed)

    def _completed(self, unit: int) -> None:
        """The last gradient of a unit has been added: begin its sums, unless others come before them."""
        self._ready.add(unit)
        assert self._due is not None
        while self._due and self._due[0] in self._ready:
            self._sum(self._due.popleft())

    def _sum(self, unit: int) -> None:
        """Begin this rank's part in the sums of a unit. Its own sums stay as they are."""
        buffer, circle, me = self._units[unit], self._summing[unit], self._transport.rank
        if unit in self._computed:
            self._add_up_in_team(buffer.partial_sums())
        # A unit that is held for what is owned of it has no sums here.
        sums = buffer.sums if unit in self._computed else torch.zeros_like(buffer.sums)
        works: list[DeviceWork] = []
        if len(circle.members) == 1:
            totals = {k: buffer.slice_of(sums, k) for k in range(len(circle.owners))}
        elif circle.even:
            total = sums.new_empty(buffer.partition.slice_size)
            options = dist.ReduceScatterOptions()
            options.asyncOp = True
            works.append(self._group(circle).issue("reduce_scatter_single", total, sums, options))
            totals = {circle.owners.index(me): total}
        else:
            totals = {}
            for k, owner in enumerate(circle.owners):
                slice_ = buffer.slice_of(sums, k)
                if owner == me:
                    slice_ = totals[k] = slice_.clone()
                to = dist.ReduceOptions()
                to.rootRank, to.asyncOp = circle.members.index(owner), True
                works.append(self._group(circle).issue("reduce", [slice_], to))
        self._begun[unit] = _Summing(works, totals)

    def _add_up_in_team(self, sums: list[torch.Tensor]) -> None:
        """Make each of these the sum over the tensor-parallel ranks."""
        if sums and self._team:
            total = torch.cat(sums)
            self._groups[self._team][1].issue("allreduce", [total], dist.AllreduceOptions()).wait()
            for part, whole in zip(sums, total.split([part.numel() for part in sums]), strict=True):
                part.copy_(whole)

    # ---- parameters -------------------------------------------------------------------------

    def start_gathering(self) -> None:
        """As the reduction does, but nobody is waited for."""
        self._connect()
        for unit in sorted(self._units):
            self._arriving[unit] = self._spread(unit)
        works = [work for arriving in self._arriving.values() for work in arriving]
        self._landing = Landing([work.wait for work in works])

    def await_parameters(self, unit: int) -> None:
        """What the device is told from now on comes after the unit's parameters."""
        for work in self._arriving.pop(unit, ()):
            work.wait()

    def finish_gathering(self) -> None:
        """Return when all parameters are here, and known to be those that were sent."""
        for unit in list(self._arriving):
            self.await_parameters(unit)
        if self._landing is not None:
            self._land(self._landing)
            self._landing = None

    def _spread(self, unit: int) -> list[DeviceWork]:
        """Write the slices that are owned here into the model, and begin to tell and hear of the others."""
        buffer, circle, me = self._units[unit], self._spreading[unit], self._transport.rank
        slices = [buffer.slice_of(buffer.params, k) for k in range(len(circle.owners))]
        for k, owner in enumerate(circle.owners):
            if owner == me:
                slices[k].copy_(self._store[unit, k].master)
        if len(circle.members) == 1:
            return []
        if circle.even:
            options = AllgatherOptions()
            options.asyncOp = True
            own = slices[circle.owners.index(me)]
            return [self._group(circle).issue("all_gather_single", buffer.params, own, options)]
        works = []
        for slice_, owner in zip(slices, circle.owners, strict=True):
            source = dist.BroadcastOptions()
            source.rootRank, source.asyncOp = circle.members.index(owner), True
            works.append(self._group(circle).issue("broadcast", [slice_], source))
        return works

    def _group(self, circle: _Circle) -> DeviceGroup:
        return self._groups[circle.members][1]
