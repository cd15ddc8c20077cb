"""Loss: the layout after ranks died. A dead rank takes its data-parallel column out; the rest is re-routed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from megatron_elastic.layout import Cell, Layout, LayoutError, Stage

Held = Mapping[int, Collection[tuple[int, int]]]
"""For every live rank, the (unit, slice) whose state it holds."""

ADVICE = "restart the job from its newest checkpoint"


class NoLayout(Exception):
    """No layout can go on after what happened. The message says why, and what to do."""


def lose(layout: Layout, lost: Collection[int], held: Held, epoch: int) -> Layout:
    """The layout of ``epoch``, after the ranks in ``lost`` died under ``layout``.

    A column is the cells of one index in every stage. Columns with a dead rank leave: their live ranks become spares,
    and their grains go to the other columns, balanced to within one. Slices stay with their owner where its cell
    stays, else their replica is promoted, else another cell takes over; replicas of theirs that went are placed anew.
    ``lost`` may name spares, and ranks already known to be dead. Raises NoLayout when no column is left or when nobody
    alive holds some part of a slice, LayoutError when ``lost`` names a rank that never was in the layout.
    """
    known = {*layout.ranks, *layout.spares, *layout.lost}
    if unknown := set(lost) - known:
        raise LayoutError(
            f"ranks {sorted(unknown)} are said to be lost, but the layout of epoch {layout.epoch} never had them"
        )
    dead = {*lost, *layout.lost}
    stays = _staying_columns(layout, dead)
    stages = tuple(_reroute(stage, stays) for stage in layout.stages)
    in_cells = {rank for stage in stages for cell in stage.cells for rank in cell.ranks}
    owners, replicas = _assign(
        layout, stages, {rank: set(pairs) for rank, pairs in held.items() if rank not in dead}, dead
    )
    new = replace(
        layout,
        epoch=epoch,
        stages=stages,
        owners=owners,
        replicas=replicas,
        spares=tuple(sorted(known - dead - in_cells)),
        lost=tuple(sorted(dead)),
    )
    new.validate()
    return new


def _staying_columns(layout: Layout, dead: Collection[int]) -> list[int]:
    widths = {stage.width for stage in layout.stages}
    if len(widths) != 1:
        raise LayoutError(f"stages of widths {sorted(widths)} have no columns to take out")
    columns = range(widths.pop())
    stays = [
        column
        for column in columns
        if not any(rank in dead for stage in layout.stages for rank in stage.cells[column].ranks)
    ]
    if not stays:
        raise NoLayout(
            f"every data-parallel column has lost a rank (dead: {_list(dead)}), so no pipeline is complete: {ADVICE}"
        )
    return stays


def _reroute(stage: Stage, stays: Sequence[int]) -> Stage:
    """The stage with only the columns that stay, all its grains spread over them. A grain moves only where it must."""
    cells = [stage.cells[column] for column in stays]
    low, extra = divmod(sum(len(cell.grains) for cell in stage.cells), len(cells))
    # The fullest cells may keep one more than the others: then as few grains as possible move.
    order = sorted(range(len(cells)), key=lambda index: (-len(cells[index].grains), index))
    room = {index: low + (place < extra) for place, index in enumerate(order)}
    kept = [list(cell.grains[: room[index]]) for index, cell in enumerate(cells)]
    homeless = sorted({grain for cell in stage.cells for grain in cell.grains}.difference(*kept))
    for grain in homeless:
        index = min((i for i in room if len(kept[i]) < room[i]), key=lambda i: (len(kept[i]), i))
        kept[index].append(grain)
    return Stage(
        units=stage.units,
        cells=tuple(
            Cell(ranks=cell.ranks, grains=tuple(sorted(grains))) for cell, grains in zip(cells, kept, strict=True)
        ),
    )


def _assign(
    layout: Layout, stages: Sequence[Stage], held: Mapping[int, set[tuple[int, int]]], dead: Collection[int]
) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int | None, ...], ...]]:
    """Owners and replicas of every slice, as leaders of cells of ``stages``."""
    _check_alive(layout, held, dead)
    owners = [list(row) for row in layout.owners]
    replicas = [list(row) for row in layout.replicas]
    homes = [{cell.leader: cell for cell in stages[layout.home(unit)].cells} for unit in range(len(layout.units))]

    owning = Counter(owner for unit, row in enumerate(owners) for owner in row if owner in homes[unit])
    copying = Counter(copy for unit, row in enumerate(replicas) for copy in row if copy in homes[unit])
    for unit, home in enumerate(homes):
        for k in range(layout.num_slices):
            holds = _holds(home, held, (unit, k))
            if owners[unit][k] not in home:
                replica = replicas[unit][k]
                if replica is not None and replica in holds:
                    owners[unit][k] = replica
                else:
                    owners[unit][k] = min(holds or home, key=_by_load(owning))
                owning[owners[unit][k]] += 1
            replica = replicas[unit][k]
            if replica is not None and (replica not in home or replica == owners[unit][k]):
                copying[replica] -= 1
                others = [leader for leader in home if leader != owners[unit][k]]
                # A cell that happens to hold the state already needs no transfer.
                replicas[unit][k] = placed = min(
                    [leader for leader in others if leader in holds] or others, key=_by_load(copying), default=None
                )
                if placed is not None:
                    copying[placed] += 1
    return tuple(map(tuple, owners)), tuple(map(tuple, replicas))


def _holds(home: Mapping[int, Cell], held: Mapping[int, set[tuple[int, int]]], pair: tuple[int, int]) -> list[int]:
    """Leaders of the cells all of whose ranks hold their part of the slice."""
    return [leader for leader, cell in home.items() if all(pair in held.get(rank, ()) for rank in cell.ranks)]


def _by_load(load: Counter[int]) -> Callable[[int], tuple[int, int]]:
    return lambda leader: (load[leader], leader)


def _check_alive(layout: Layout, held: Mapping[int, set[tuple[int, int]]], dead: Collection[int]) -> None:
    """Raise NoLayout unless every part of every slice is held by a live rank."""
    alive = {(unit, k, layout.tp_index(rank)) for rank, pairs in held.items() for unit, k in pairs}
    for unit, name in enumerate(layout.units):
        for k in range(layout.num_slices):
            for tp in range(layout.cell_size):
                if (unit, k, tp) not in alive:
                    raise NoLayout(
                        f"slice {k} of unit {name} (tensor-parallel index {tp}) is held by no live rank: its owner and "
                        f"every copy of it are dead (dead: {_list(dead)}). {ADVICE.capitalize()}"
                    )


def _list(ranks: Collection[int]) -> str:
    return ", ".join(f"rank {rank}" for rank in sorted(ranks))
