"""Loss: the layout after ranks died. A dead rank takes its cell out, and the stage's other cells share its work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from megatron_elastic.layout import Cell, Held, Layout, LayoutError, Stage
from megatron_elastic.plan.cost import Costs
from megatron_elastic.plan.dataflow import share
from megatron_elastic.plan.errors import ADVICE, NoLayout, StateLost
from megatron_elastic.plan.replan import replan


def lose(layout: Layout, lost: Collection[int], held: Held, epoch: int) -> Layout:
    """The layout of ``epoch``, after the ranks in ``lost`` died under ``layout``.

    Cells with a dead rank leave: their live ranks become spares, and their grains go to the other cells of the stage,
    balanced as ``dataflow`` says. Slices stay with their owner where its cell stays and holds them, else a replica is
    promoted, else another cell takes over; replicas that went are placed anew. Shadows stay shadows, and units that
    were about to move stay. A stage that has no working cell left is dissolved: its units go to the others. ``lost``
    may name spares, and ranks already known to be dead. Raises NoLayout when no working cell is left or the others
    cannot take the units, StateLost when nobody alive holds some part of a slice, LayoutError when ``lost`` names a
    rank that never was in the layout.
    """
    known = {*layout.ranks, *layout.spares, *layout.lost}
    if unknown := set(lost) - known:
        raise LayoutError(
            f"ranks {sorted(unknown)} are said to be lost, but the layout of epoch {layout.epoch} never had them"
        )
    dead = {*lost, *layout.lost}
    live = {rank: set(parts) for rank, parts in held.items() if rank not in dead}
    _check_alive(layout, live, dead)
    if not all(_working(stage, dead) for stage in layout.stages):
        return _dissolve(layout, dead, epoch)
    stages = tuple(_without(layout, index, dead) for index in range(layout.pipeline_size))
    in_cells = {rank for stage in stages for cell in stage.cells for rank in cell.ranks}
    owners, replicas = _assign(layout, stages, live)
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


def everything(layout: Layout) -> Held:
    """What would be held if every rank held the state of every slice of its stage: as after loading a checkpoint."""
    return {
        rank: {(unit, k, tp) for unit in stage.units for k in range(layout.num_slices)}
        for stage in layout.stages
        for cell in stage.cells
        for tp, rank in enumerate(cell.ranks)
    }


def readable(layout: Layout) -> Held:
    """What could be held: every rank can read any slice from a checkpoint."""
    return {
        rank: {(unit, k, layout.tp_index(rank)) for unit in range(len(layout.units)) for k in range(layout.num_slices)}
        for rank in layout.ranks
    }


def _without(layout: Layout, index: int, dead: Collection[int]) -> Stage:
    """A stage without the cells that have a dead rank, all grains spread over those that work and stay."""
    stage = layout.stages[index]
    stay = [cell for cell in stage.cells if not any(rank in dead for rank in cell.ranks)]
    given = {cell.leader: cell for cell in share(layout, _working(stage, dead))}
    return Stage(stage.units, tuple(given.get(cell.leader, Cell(cell.ranks, ())) for cell in stay))


def _working(stage: Stage, dead: Collection[int]) -> list[Cell]:
    """Cells that compute something and have no dead rank. Shadows may not have caught up."""
    return [cell for cell in stage.cells if not cell.shadow and not any(rank in dead for rank in cell.ranks)]


def _dissolve(layout: Layout, dead: set[int], epoch: int) -> Layout:
    """The layout after a stage has lost all its cells: the working ones that are left hold all units."""
    stages = tuple(Stage(stage.units, tuple(_working(stage, dead))) for stage in layout.stages)
    if not any(stage.cells for stage in stages):
        raise NoLayout(f"no working cell is left (dead: {_list(dead)}): {ADVICE}")
    # Live ranks of broken cells can begin anew; so can shadows, whose parameters may be of no step.
    members = {rank for stage in stages for cell in stage.cells for rank in cell.ranks}
    spares = {*layout.ranks, *layout.spares} - dead - members
    bare = replace(layout, stages=stages, spares=tuple(sorted(spares)))
    return replan(bare, Costs.assumed(layout.units), epoch, lost=dead)


def _assign(
    layout: Layout, stages: Sequence[Stage], held: Mapping[int, set[tuple[int, int, int]]]
) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[tuple[int, ...], ...], ...]]:
    """Owners and replicas of every slice, as leaders of cells of ``stages``."""
    homes = [{cell.leader: cell for cell in stages[layout.home(unit)].cells} for unit in range(len(layout.units))]
    everywhere = {cell.leader: cell for stage in stages for cell in stage.cells}
    owning = Counter(owner for unit, row in enumerate(layout.owners) for owner in row if owner in homes[unit])
    copying = Counter(
        copy for row in layout.replicas for copies in row for copy in copies if copy in everywhere
    )
    owners = [list(row) for row in layout.owners]
    replicas = [list(row) for row in layout.replicas]
    complete = _complete(stages, held)
    for unit, home in enumerate(homes):
        for k in range(layout.num_slices):
            holds = complete.get((unit, k), [])
            owner, copies = owners[unit][k], replicas[unit][k]
            # An owner may have been chosen in a layout that not everybody had made true.
            fit = [leader for leader in holds if leader in home]
            if owner not in home or (owner not in fit and fit):
                replacements = [copy for copy in copies if copy in fit] or fit
                replacements = replacements or [leader for leader, cell in home.items() if not cell.shadow]
                owner = min(replacements, key=lambda leader: (owning[leader], leader))
                owning[owner] += 1
            stay = [copy for copy in copies if copy in everywhere and copy != owner]
            kept = [copy for copy in stay if copy in holds] or stay[: layout.num_replicas]
            copying.subtract(copy for copy in copies if copy in everywhere and copy not in kept)
            while len(kept) < min(layout.num_replicas, len(everywhere) - 1):
                taken = {layout.host_of(owner), *(layout.host_of(copy) for copy in kept)}
                others = [leader for leader in home if leader != owner and leader not in kept] or [
                    leader for leader in everywhere if leader != owner and leader not in kept
                ]
                kept.append(
                    min(
                        others,
                        # A cell that happens to hold the state already needs no transfer.
                        key=lambda leader: (
                            leader not in holds,
                            everywhere[leader].shadow,
                            layout.host_of(leader) in taken,
                            copying[leader],
                            leader,
                        ),
                    )
                )
                copying[kept[-1]] += 1
            owners[unit][k], replicas[unit][k] = owner, tuple(kept)
    return tuple(map(tuple, owners)), tuple(map(tuple, replicas))


def _complete(
    stages: Sequence[Stage], held: Mapping[int, set[tuple[int, int, int]]]
) -> dict[tuple[int, int], list[int]]:
    """For each slice, the leaders of the cells all of whose ranks hold their part of it, in the order of ``stages``."""
    result: dict[tuple[int, int], list[int]] = {}
    for stage in stages:
        for cell in stage.cells:
            parts = (
                {(unit, k) for unit, k, part in held.get(rank, ()) if part == tp} for tp, rank in enumerate(cell.ranks)
            )
            for at in set.intersection(*parts):
                result.setdefault(at, []).append(cell.leader)
    return result


def _check_alive(layout: Layout, held: Mapping[int, set[tuple[int, int, int]]], dead: Collection[int]) -> None:
    """Raise StateLost unless every part of every slice is held by a live rank."""
    alive = {part for parts in held.values() for part in parts}
    for unit, name in enumerate(layout.units):
        for k in range(layout.num_slices):
            for tp in range(layout.cell_size):
                if (unit, k, tp) not in alive:
                    raise StateLost(
                        f"slice {k} of unit {name} (tensor-parallel index {tp}) is held by no live rank: its owner and "
                        f"every copy of it are dead (dead: {_list(dead)}). {ADVICE.capitalize()}"
                    )


def _list(ranks: Collection[int]) -> str:
    return ", ".join(f"rank {rank}" for rank in sorted(ranks))
