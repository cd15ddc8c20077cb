"""Lookup: maps derived from the tables of a layout."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property

from megatron_elastic.layout.cell import Cell
from megatron_elastic.layout.part import Part
from megatron_elastic.layout.stage import Stage
from megatron_elastic.layout.way import Placement, Position, placement_of, positions

_Pairs = dict[int, tuple[tuple[int, int], ...]]


class Lookup:
    """Maps of one layout, because a step asks thousands of times. Each is made when it is first asked for.

    ``owners``, ``replicas``, ``hosts`` and ``keepers`` are those of the layout; None: all ranks of a cell keep.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        owners: Sequence[Sequence[int]],
        replicas: Sequence[Sequence[Sequence[int]]],
        hosts: Sequence[Sequence[int]],
        keepers: Callable[[Cell, int, int], Sequence[int]] | None,
    ) -> None:
        self._stages = stages
        self._owners = owners
        self._replicas = replicas
        self._hosts = hosts
        self._keepers = keepers

    @cached_property
    def places(self) -> dict[int, tuple[int, Cell, int]]:
        """[rank] = its stage, its cell, and its place in that."""
        return {
            rank: (index, cell, place)
            for index, stage in enumerate(self._stages)
            for cell in stage.cells
            for place, rank in enumerate(cell.ranks)
        }

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """All that are in cells, ascending."""
        return tuple(sorted(self.places))

    @cached_property
    def cells(self) -> dict[int, Cell]:
        """By their leaders."""
        return {cell.leader: cell for stage in self._stages for cell in stage.cells}

    @cached_property
    def hosts(self) -> dict[int, int]:
        """[rank] = index of its failure domain."""
        return {rank: index for index, host in enumerate(self._hosts) for rank in host}

    @cached_property
    def whole(self) -> list[dict[int, Cell]]:
        """[stage][grain] = the cell that computes all of it."""
        return [{grain: cell for cell in stage.cells for grain in cell.grains} for stage in self._stages]

    @cached_property
    def cut(self) -> list[dict[int, tuple[tuple[Cell, Part], ...]]]:
        """[stage][grain] = the cells that share it, in the order of its samples."""
        return [_cut(stage) for stage in self._stages]

    @cached_property
    def homes(self) -> dict[int, int]:
        """[unit] = the first stage that holds it."""
        found: dict[int, int] = {}
        for index, stage in enumerate(self._stages):
            for unit in stage.units:
                found.setdefault(unit, index)
        return found

    @cached_property
    def at_home(self) -> list[tuple[int, ...]]:
        """[stage] = the units that have their home there."""
        return [tuple(unit for unit in stage.units if self.homes[unit] == index)
                for index, stage in enumerate(self._stages)]  # fmt: skip

    @cached_property
    def chunks(self) -> list[tuple[tuple[int, ...], ...]]:
        """[stage] = the units of each of its chunks."""
        found: list[list[tuple[int, ...]]] = [[] for _ in self._stages]
        for position in self.way:
            found[position.stage].append(position.units)
        return [self._with_others(index, own or [()]) for index, own in enumerate(found)]

    @cached_property
    def way(self) -> tuple[Position, ...]:
        """The chunks that a grain passes, forward."""
        return positions([stage.units for stage in self._stages])

    @cached_property
    def placement(self) -> tuple[Placement, int] | None:
        """How chunks are placed on the stages (``way.placement_of``)."""
        return placement_of([position.stage for position in self.way])

    @cached_property
    def numbers(self) -> dict[tuple[int, int], int]:
        """[stage, chunk] = its place on the way."""
        return {(at.stage, at.chunk): number for number, at in enumerate(self.way)}

    @cached_property
    def holders(self) -> dict[int, tuple[Cell, ...]]:
        """[unit] = the cells of its stages, then those that it moves to."""
        found: dict[int, list[Cell]] = {}
        for stage in self._stages:
            for unit in stage.units:
                found.setdefault(unit, []).extend(stage.cells)
        for stage in self._stages:
            for cell in stage.cells:
                for unit in cell.incoming:
                    found.setdefault(unit, []).append(cell)
        return {unit: tuple(cells) for unit, cells in found.items()}

    @cached_property
    def contributors(self) -> dict[int, tuple[Cell, ...]]:
        """[unit] = the cells that compute it for some grains."""
        found: dict[int, list[Cell]] = {}
        for stage in self._stages:
            working = [cell for cell in stage.cells if not cell.shadow]
            for unit in stage.units:
                found.setdefault(unit, []).extend(working)
        return {unit: tuple(cells) for unit, cells in found.items()}

    @cached_property
    def owned(self) -> _Pairs:
        """[rank] = (unit, slice) of all that it owns."""
        by_leader: dict[int, list[tuple[int, int]]] = {}
        for unit, row in enumerate(self._owners):
            for k, owner in enumerate(row):
                by_leader.setdefault(owner, []).append((unit, k))
        return self._of_ranks(by_leader)

    @cached_property
    def replicated(self) -> _Pairs:
        """[rank] = (unit, slice) of all that it keeps live copies of."""
        by_leader: dict[int, list[tuple[int, int]]] = {}
        for unit, row in enumerate(self._replicas):
            for k, copies in enumerate(row):
                for copy in copies:
                    by_leader.setdefault(copy, []).append((unit, k))
        return self._of_ranks(by_leader)

    def _of_ranks(self, by_leader: dict[int, list[tuple[int, int]]]) -> _Pairs:
        found: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        here = ((self.cells[leader], tuple(pairs)) for leader, pairs in by_leader.items() if leader in self.cells)
        if self._keepers is None:
            return {rank: pairs for cell, pairs in here for rank in cell.ranks}
        for cell, pairs in here:
            for unit, k in pairs:
                for rank in self._keepers(cell, unit, k):
                    found[rank].append((unit, k))
        return {rank: tuple(pairs) for rank, pairs in found.items()}

    def _with_others(self, index: int, own: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
        """Chunks of a stage with the units that are at home elsewhere, which the last one gets."""
        also = [unit for unit in self._stages[index].units if self.homes[unit] != index]
        return (*own[:-1], (*also, *own[-1]))


def runs(ascending: Iterable[int]) -> list[list[int]]:
    """Ascending units or ranks as runs of those that follow one another."""
    found: list[list[int]] = []
    for each in ascending:
        if found and each == found[-1][-1] + 1:
            found[-1].append(each)
        else:
            found.append([each])
    return found


def spans(ascending: Iterable[int]) -> list[str]:
    """The same as text: ``3`` and ``5-8``."""
    return [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs(ascending)]


def _cut(stage: Stage) -> dict[int, tuple[tuple[Cell, Part], ...]]:
    shared: dict[int, list[tuple[Cell, Part]]] = {}
    for cell in stage.cells:
        for part in cell.parts:
            shared.setdefault(part.grain, []).append((cell, part))
    return {grain: tuple(sorted(parts, key=lambda at: at[1])) for grain, parts in shared.items()}
