"""Stage: units, and the cells that hold them."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_elastic.layout.cell import Cell


@dataclass(frozen=True, slots=True)
class Stage:
    """The units (ascending indices into ``Layout.units``) of one pipeline stage, and the cells that hold them.

    Units that follow one another are a *chunk*. A grain passes chunks in the order of their units, so it may come to a
    stage several times (``layout.way``).

    ``waiting`` are spares that were in cells of this stage, each as (rank, place), ascending. What a spare has built is
    what that place computes, so it keeps it until somebody takes the places that were lost.
    """

    units: tuple[int, ...]
    cells: tuple[Cell, ...]
    waiting: tuple[tuple[int, int], ...] = ()

    @property
    def width(self) -> int:
        """Number of cells."""
        return len(self.cells)
