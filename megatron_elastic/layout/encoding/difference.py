"""Difference: a layout told by another one that the receiver has. A loss changes little, whatever the size of a job."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from megatron_elastic.layout.cell import Cell
from megatron_elastic.layout.encoding.codec import PlainCell
from megatron_elastic.layout.errors import LayoutError
from megatron_elastic.layout.layout import Layout
from megatron_elastic.layout.stage import Stage

_Ints = tuple[int, ...]


class _Stage(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """What is different in a stage. Cells that stay keep their order, and new ones come after them."""

    units: _Ints
    gone: _Ints
    """Leaders of the cells that are not there any more."""
    cells: tuple[PlainCell, ...]
    """Those that are new or different."""
    waiting: tuple[tuple[int, int], ...] = ()


class _Difference(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    base: int
    """Epoch of the other layout."""
    epoch: int
    stages: dict[int, _Stage]
    owners: tuple[tuple[int, int, int], ...]
    """(unit, slice, owner)"""
    replicas: tuple[tuple[int, int, _Ints], ...]
    """(unit, slice, replicas)"""
    spares: _Ints
    lost: _Ints
    hosts: dict[int, _Ints]
    most_cells: int | None


_DECODER = msgspec.msgpack.Decoder(_Difference)


def difference(old: Layout, new: Layout) -> bytes | None:
    """What has to be known of ``new`` by who has ``old``; None if that cannot be said briefly."""
    if (
        (old.num_slices, old.num_replicas, old.num_grains, old.units, old.samples, old.cp, old.ep, old.recomputed)
        != (new.num_slices, new.num_replicas, new.num_grains, new.units, new.samples, new.cp, new.ep, new.recomputed)
        or len(old.stages) != len(new.stages)
        or len(old.hosts) > len(new.hosts)
    ):
        return None
    stages = {}
    for index, (before, after) in enumerate(zip(old.stages, new.stages, strict=True)):
        if before != after:
            stages[index] = found = _stage(before, after)
            if _changed_stage(before, found) != after:
                return None
    owners = [
        (unit, k, is_)
        for unit, (before, after) in enumerate(zip(old.owners, new.owners, strict=True))
        if before != after
        for k, (was, is_) in enumerate(zip(before, after, strict=True))
        if was != is_
    ]
    replicas = [
        (unit, k, are)
        for unit, (before, after) in enumerate(zip(old.replicas, new.replicas, strict=True))
        if before != after
        for k, (were, are) in enumerate(zip(before, after, strict=True))
        if were != are
    ]
    known = dict(enumerate(old.hosts))
    hosts = {index: host for index, host in enumerate(new.hosts) if known.get(index) != host}
    return msgspec.msgpack.encode(
        _Difference(
            old.epoch, new.epoch, stages, tuple(owners), tuple(replicas), new.spares, new.lost, hosts, new.most_cells
        )
    )


def changed(old: Layout, data: bytes) -> Layout:
    """The layout that ``difference`` told. Raises LayoutError if ``data`` is no difference, or from another layout."""
    try:
        told = _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise LayoutError(f"this is no difference between layouts in MessagePack: {error}") from None
    if told.base != old.epoch:
        raise LayoutError(f"this is a difference from the layout of epoch {told.base}, not from that of {old.epoch}")
    owners, replicas = [list(row) for row in old.owners], [list(row) for row in old.replicas]
    stages, hosts = list(old.stages), list(old.hosts)
    try:
        for index, stage in told.stages.items():
            stages[index] = _changed_stage(stages[index], stage)
        for unit, k, owner in told.owners:
            owners[unit][k] = owner
        for unit, k, copies in told.replicas:
            replicas[unit][k] = copies
    except IndexError:
        raise LayoutError(f"this is a difference from a larger layout than that of epoch {old.epoch}") from None
    for index, host in sorted(told.hosts.items()):
        hosts[index : index + 1] = [host]
    return replace(
        old,
        epoch=told.epoch,
        stages=tuple(stages),
        owners=tuple(map(tuple, owners)),
        replicas=tuple(map(tuple, replicas)),
        spares=told.spares,
        lost=told.lost,
        hosts=tuple(hosts),
        most_cells=told.most_cells,
    )


def _stage(before: Stage, after: Stage) -> _Stage:
    known, stay = {cell.leader: cell for cell in before.cells}, {cell.leader for cell in after.cells}
    different = [cell for cell in after.cells if known.get(cell.leader) != cell]
    return _Stage(after.units, tuple(known.keys() - stay), tuple(map(PlainCell.of, different)), after.waiting)


def _changed_stage(before: Stage, told: _Stage) -> Stage:
    cells: dict[int, Cell] = {cell.leader: cell for cell in before.cells}
    for leader in told.gone:
        cells.pop(leader, None)
    cells.update((cell.ranks[0], cell.cell) for cell in told.cells if cell.ranks)
    return Stage(told.units, tuple(cells.values()), told.waiting)
