"""Codec: layouts as bytes, for the wire. Short, and read without being checked for more than types and shape."""

from __future__ import annotations

import msgspec

from megatron_elastic.layout.cell import Cell
from megatron_elastic.layout.errors import LayoutError
from megatron_elastic.layout.layout import Layout
from megatron_elastic.layout.part import Part
from megatron_elastic.layout.stage import Stage

_Ints = tuple[int, ...]


class PlainCell(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A cell on the wire."""

    ranks: _Ints
    grains: _Ints
    incoming: _Ints = ()
    parts: tuple[Part, ...] = ()

    @classmethod
    def of(cls, cell: Cell) -> PlainCell:
        """As it is sent."""
        return cls(cell.ranks, cell.grains, cell.incoming, cell.parts)

    @property
    def cell(self) -> Cell:
        """As it is used."""
        return Cell(self.ranks, self.grains, self.incoming, self.parts)


class _Stage(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    units: _Ints
    cells: tuple[PlainCell, ...]
    waiting: tuple[tuple[int, int], ...] = ()


class _Layout(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    epoch: int
    num_slices: int
    num_replicas: int
    num_grains: int
    units: tuple[str, ...]
    stages: tuple[_Stage, ...]
    owners: tuple[_Ints, ...]
    replicas: tuple[tuple[_Ints, ...], ...]
    spares: _Ints
    lost: _Ints
    hosts: tuple[_Ints, ...]
    samples: int
    cp: int
    ep: int
    most_cells: int | None
    tied: bool | None
    recomputed: _Ints


_DECODER = msgspec.msgpack.Decoder(_Layout)


def encode(layout: Layout) -> bytes:
    """A layout as MessagePack: the same bytes for equal layouts."""
    return msgspec.msgpack.encode(
        _Layout(
            epoch=layout.epoch,
            num_slices=layout.num_slices,
            num_replicas=layout.num_replicas,
            num_grains=layout.num_grains,
            units=layout.units,
            stages=tuple(
                _Stage(stage.units, tuple(PlainCell.of(cell) for cell in stage.cells), stage.waiting)
                for stage in layout.stages
            ),
            owners=layout.owners,
            replicas=layout.replicas,
            spares=layout.spares,
            lost=layout.lost,
            hosts=layout.hosts,
            samples=layout.samples,
            cp=layout.cp,
            ep=layout.ep,
            most_cells=layout.most_cells,
            tied=layout.tied,
            recomputed=layout.recomputed,
        )
    )


def decode(data: bytes) -> Layout:
    """Read what ``encode`` wrote. Raises LayoutError for what is no layout.

    Types are checked, and that each table has its rows and each cell its ranks. Who made the layout has validated it.
    """
    try:
        read = _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise LayoutError(f"this is no layout in MessagePack: {error}") from None
    sizes = {len(cell.ranks) for stage in read.stages for cell in stage.cells}
    shaped = len(sizes) == 1 and 0 not in sizes and min(read.cp, read.ep) >= 1
    shaped = shaped and all(size % max(read.cp, read.ep) == 0 for size in sizes)
    if not read.stages or not all(stage.cells for stage in read.stages) or not shaped:
        raise LayoutError("this is no layout in MessagePack: a stage has no cells, or a cell more ranks than another")
    for table in (read.owners, read.replicas):
        if len(table) != len(read.units) or any(len(row) != read.num_slices for row in table):
            raise LayoutError(
                f"this is no layout in MessagePack: owners and replicas must be {len(read.units)} rows of "
                f"{read.num_slices} slices"
            )
    return Layout(
        epoch=read.epoch,
        num_slices=read.num_slices,
        num_replicas=read.num_replicas,
        num_grains=read.num_grains,
        units=read.units,
        stages=tuple(
            Stage(stage.units, tuple(cell.cell for cell in stage.cells), stage.waiting) for stage in read.stages
        ),
        owners=read.owners,
        replicas=read.replicas,
        spares=read.spares,
        lost=read.lost,
        hosts=read.hosts,
        samples=read.samples,
        cp=read.cp,
        ep=read.ep,
        most_cells=read.most_cells,
        tied=read.tied,
        recomputed=read.recomputed,
    )
