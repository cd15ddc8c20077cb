"""Stage: units, and the cells that hold them."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_elastic.layout.cell import Cell


@dataclass(frozen=True, slots=True)
class Stage:
    """The units (ascending indices into ``Layout.units``) of one pipeline stage, and the cells that hold them.

    Units that follow one another are a *chunk*. All stages have as many; a grain passes the first chunk of each stage,
    then the second of each, and so on.
    """

    units: tuple[int, ...]
    cells: tuple[Cell, ...]

    @property
    def width(self) -> int:
        """Number of cells."""
        return len(self.cells)
