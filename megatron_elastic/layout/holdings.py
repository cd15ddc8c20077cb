"""Holdings: what state each rank holds, told by a layout and by the ranks that differ from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property

from megatron_elastic.layout.cell import Cell
from megatron_elastic.layout.layout import Layout

SlicePart = tuple[int, int, int]
"""(unit, slice, part): what one rank of a cell keeps of a slice."""
_NOTHING: frozenset[SlicePart] = frozenset()


class Extent(Enum):
    """Which slices it is that a rank in a cell holds its part of."""

    ROLES = "those that its cell owns or replicates"
    STAGE = "all of its stage"
    ALL = "all there are"


@dataclass(frozen=True)
class Holdings:
    """What every live rank holds, spares too.

    Ranks in cells of ``standard`` hold what ``extent`` says, others nothing; but those in ``exceptions`` hold just what
    is said there. Time and room are taken by the ranks that differ, which are few. Made by ``of`` or ``reported``.
    """

    standard: Layout
    exceptions: Mapping[int, Set[SlicePart]] = field(default_factory=dict)
    extent: Extent = Extent.ROLES

    @classmethod
    def of(cls, layout: Layout, extent: Extent = Extent.ROLES) -> Holdings:
        """Everything that ``layout`` asks for is live, or more, as ``extent`` says."""
        return cls(layout, extent=extent)

    @classmethod
    def reported(cls, layout: Layout, held: Mapping[int, Iterable[SlicePart] | None]) -> Holdings:
        """What ranks say, most of which hold what ``layout`` asks for: None. Whoever is not in ``held`` has nothing."""
        asked = cls(layout)
        listed = {rank: frozenset(parts) for rank, parts in held.items() if parts is not None}
        silent = dict.fromkeys(layout.places.keys() - held.keys(), _NOTHING)
        return cls(layout, {rank: parts for rank, parts in (silent | listed).items() if parts != asked.of_rank(rank)})

    def without(self, ranks: Iterable[int]) -> Holdings:
        """These, but ``ranks`` hold nothing."""
        return replace(self, exceptions={**self.exceptions, **dict.fromkeys(ranks, _NOTHING)})

    def replace(self, rank: int, parts: Iterable[SlicePart]) -> Holdings:
        """These, but ``rank`` holds just ``parts``."""
        return replace(self, exceptions={**self.exceptions, rank: frozenset(parts)})

    def of_rank(self, rank: int) -> Set[SlicePart]:
        """All that a rank holds."""
        if rank in self.exceptions:
            return self.exceptions[rank]
        if rank not in self.standard.places:
            return _NOTHING
        layout = self.standard
        stage, cell, place = layout.places[rank]
        slices: Sequence[tuple[int, int]]
        if self.extent is Extent.ROLES:
            slices = (*layout.owned(rank), *layout.replicated(rank))
        else:
            units = layout.stages[stage].units if self.extent is Extent.STAGE else range(len(layout.units))
            every = ((unit, k) for unit in units for k in range(layout.num_slices))
            slices = [(unit, k) for unit, k in every if rank in layout.keepers(cell, unit, k)]
        parts = {unit: place % layout.num_parts(unit) for unit in {unit for unit, _ in slices}}
        return frozenset((unit, k, parts[unit]) for unit, k in slices)

    def holders(self, part: SlicePart) -> tuple[int, ...]:
        """The ranks that hold a part of a slice, ascending."""
        unit, k, index = part
        cells = (self.standard.cells[leader] for leader in self._leaders(unit, k))
        asked = (self.standard.keepers(cell, unit, k)[index] for cell in cells)
        return tuple(sorted([*(rank for rank in asked if rank not in self.exceptions), *self._told.get(part, ())]))

    def complete(
        self, cells: Mapping[int, Cell], slices: Iterable[tuple[int, int]]
    ) -> dict[tuple[int, int], set[int]]:
        """For each (unit, slice) of ``slices`` the leaders of those cells in which all keepers hold their part.

        ``cells``: by their leaders, as in ``Layout.cells``.
        """
        doubtful = self._doubtful(cells)
        found = {
            (unit, k): {at for at in self._leaders(unit, k) if at in cells and at not in doubtful} for unit, k in slices
        }
        for leader in doubtful:
            cell = cells[leader]
            held = {rank: self.of_rank(rank) for rank in cell.ranks}
            for (unit, k), leaders in found.items():
                keepers = self.standard.keepers(cell, unit, k)
                if all((unit, k, part) in held[rank] for part, rank in enumerate(keepers)):
                    leaders.add(leader)
        return found

    def unsure(self, layout: Layout) -> list[tuple[int, int]]:
        """(unit, slice), ascending: of all others the owner and the replicas that ``layout`` names hold every part."""
        doubtful = self._doubtful(layout.cells)
        found = []
        for unit, rows in enumerate(zip(layout.owners, layout.replicas, strict=True)):
            named = list(zip(*rows, strict=True))
            differs = self._differ(unit, named)
            found += [
                (unit, k)
                for k, (owner, copies) in enumerate(named)
                if k in differs or owner in doubtful or not doubtful.isdisjoint(copies)
            ]
        return found

    def _differ(self, unit: int, named: list[tuple[int, tuple[int, ...]]]) -> Set[int]:
        """The slices of a unit for which leaders are ``named`` who, if they differ in nothing, need not hold it."""
        if self.extent is Extent.ROLES:
            asked = list(zip(self.standard.owners[unit], self.standard.replicas[unit], strict=True))
            return {k for k, at in enumerate(named) if at != asked[k]} if named != asked else set()
        holding = self._of_unit[unit]
        return {k for k, (owner, copies) in enumerate(named) if not holding.issuperset((owner, *copies))}

    def _leaders(self, unit: int, slice: int) -> Iterable[int]:
        """Leaders of the cells of ``standard`` that hold the slice, if they differ in nothing."""
        if self.extent is Extent.ROLES:
            return self.standard.owners[unit][slice], *self.standard.replicas[unit][slice]
        return self._of_unit[unit]

    def _doubtful(self, cells: Mapping[int, Cell]) -> Set[int]:
        """Leaders of those that are no cells of ``standard``, or have a rank that differs."""
        known, places = self.standard.cells, self.standard.places
        differing = {places[rank][1].leader for rank in self.exceptions if rank in places}
        if cells is known:
            return differing
        others = {
            leader
            for leader, cell in cells.items()
            if (was := known.get(leader)) is not cell and (was is None or was.ranks != cell.ranks)
        }
        return others.union(differing & cells.keys())

    @cached_property
    def _of_unit(self) -> list[set[int]]:
        """[unit] = leaders of the cells that hold all of its slices, where ranks hold more than their roles."""
        everywhere = set(self.standard.cells)
        if self.extent is Extent.ALL:
            return [everywhere] * len(self.standard.units)
        cells: list[set[int]] = [set() for _ in self.standard.units]
        for stage in self.standard.stages:
            for unit in stage.units:
                cells[unit].update(cell.leader for cell in stage.cells)
        return cells

    @cached_property
    def _told(self) -> dict[SlicePart, list[int]]:
        """Which of the exceptions hold a part."""
        found: dict[SlicePart, list[int]] = {}
        for rank, parts in self.exceptions.items():
            for part in parts:
                found.setdefault(part, []).append(rank)
        return found
