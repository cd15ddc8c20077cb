"""Lookup: maps derived from a layout."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from megatron_elastic.layout.part import Part

if TYPE_CHECKING:
    from megatron_elastic.layout.layout import Cell, Layout, Stage


class Lookup:
    """Maps of one layout. A layout makes them when it is first asked, because a step asks thousands of times."""

    __slots__ = (
        "cells", "chunks", "contributors", "cut", "holders", "homes", "hosts", "owned", "places", "ranks", "replicated",
        "whole",
    )  # fmt: skip

    def __init__(self, layout: Layout) -> None:
        self.places: dict[int, tuple[int, Cell, int]] = {}
        self.cells: dict[int, Cell] = {}
        self.whole: dict[int, dict[int, Cell]] = {}
        """[stage][grain] = the cell that computes all of it."""
        self.cut: dict[int, dict[int, tuple[tuple[Cell, Part], ...]]] = {}
        """[stage][grain] = the cells that share it, in the order of its samples."""
        self.homes: dict[int, int] = {}
        for index, stage in enumerate(layout.stages):
            for unit in stage.units:
                self.homes.setdefault(unit, index)
            self.whole[index] = {grain: cell for cell in stage.cells for grain in cell.grains}
            self.cut[index] = _cut(stage)
            for cell in stage.cells:
                self.cells[cell.leader] = cell
                self.places.update((rank, (index, cell, tp)) for tp, rank in enumerate(cell.ranks))
        self.chunks = [self._chunks(index, stage) for index, stage in enumerate(layout.stages)]
        self.ranks = tuple(sorted(self.places))
        guests: dict[int, list[Cell]] = {}
        for cell in (cell for stage in layout.stages for cell in stage.cells):
            for unit in cell.incoming:
                guests.setdefault(unit, []).append(cell)
        self.holders: dict[int, tuple[Cell, ...]] = {}
        self.contributors: dict[int, tuple[Cell, ...]] = {}
        for unit in range(len(layout.units)):
            at_home = [cell for stage in layout.stages if unit in stage.units for cell in stage.cells]
            self.holders[unit] = (*at_home, *guests.get(unit, ()))
            self.contributors[unit] = tuple(cell for cell in at_home if not cell.shadow)
        self.hosts = {rank: index for index, host in enumerate(layout.hosts) for rank in host}
        self.owned = self._by_rank([[(owner,) for owner in row] for row in layout.owners])
        self.replicated = self._by_rank(layout.replicas)

    def _chunks(self, index: int, stage: Stage) -> tuple[tuple[int, ...], ...]:
        *others, last = runs(unit for unit in stage.units if self.homes[unit] == index) or [[]]
        also = [unit for unit in stage.units if self.homes[unit] != index]
        return (*map(tuple, others), (*also, *last))

    def _by_rank(self, table: Iterable[Iterable[Iterable[int]]]) -> dict[int, tuple[tuple[int, int], ...]]:
        by_leader: dict[int, list[tuple[int, int]]] = {}
        for unit, row in enumerate(table):
            for k, leaders in enumerate(row):
                for leader in leaders:
                    by_leader.setdefault(leader, []).append((unit, k))
        return {
            rank: tuple(pairs)
            for leader, pairs in by_leader.items()
            if leader in self.cells
            for rank in self.cells[leader].ranks
        }


def runs(units: Iterable[int]) -> list[list[int]]:
    """Ascending units as runs of those that follow one another."""
    found: list[list[int]] = []
    for unit in units:
        if found and unit == found[-1][-1] + 1:
            found[-1].append(unit)
        else:
            found.append([unit])
    return found


def _cut(stage: Stage) -> dict[int, tuple[tuple[Cell, Part], ...]]:
    shared: dict[int, list[tuple[Cell, Part]]] = {}
    for cell in stage.cells:
        for part in cell.parts:
            shared.setdefault(part.grain, []).append((cell, part))
    return {grain: tuple(sorted(parts, key=lambda at: at[1])) for grain, parts in shared.items()}
