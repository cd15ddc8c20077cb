"""Loss: the layout after ranks died. A dead rank takes its cell out, and the stage's other cells share its work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from megatron_elastic.layout import Cell, Held, Layout, LayoutError, Stage
from megatron_elastic.plan.reroute import reroute

ADVICE = "restart the job from its newest checkpoint"


class NoLayout(Exception):
    """No layout can go on after what happened. The message says why, and what to do."""


class StateLost(NoLayout):
    """The ranks that are left could go on, but some part of a slice is held by none of them."""


def lose(layout: Layout, lost: Collection[int], held: Held, epoch: int) -> Layout:
    """The layout of ``epoch``, after the ranks in ``lost`` died under ``layout``.

    Cells with a dead rank leave: their live ranks become spares, and their grains go to the other cells of the stage,
    balanced to within one. Slices stay with their owner where its cell stays and holds them, else a replica is
    promoted, else another cell takes over; replicas that went are placed anew. Shadows stay shadows. ``lost`` may name
    spares, and ranks already known to be dead. Raises NoLayout when a stage has no working cell left, StateLost when
    nobody alive holds some part of a slice, LayoutError when ``lost`` names a rank that never was in the layout.
    """
    known = {*layout.ranks, *layout.spares, *layout.lost}
    if unknown := set(lost) - known:
        raise LayoutError(
            f"ranks {sorted(unknown)} are said to be lost, but the layout of epoch {layout.epoch} never had them"
        )
    dead = {*lost, *layout.lost}
    stages = tuple(_without(layout, index, dead) for index in range(layout.pipeline_size))
    in_cells = {rank for stage in stages for cell in stage.cells for rank in cell.ranks}
    owners, replicas = _assign(
        layout, stages, {rank: set(parts) for rank, parts in held.items() if rank not in dead}, dead
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


def everything(layout: Layout) -> Held:
    """What would be held if every rank held the state of every slice of its stage: as after loading a checkpoint."""
    return {
        rank: {(unit, k, tp) for unit in stage.units for k in range(layout.num_slices)}
        for stage in layout.stages
        for cell in stage.cells
        for tp, rank in enumerate(cell.ranks)
    }


def _without(layout: Layout, index: int, dead: Collection[int]) -> Stage:
    """A stage without the cells that have a dead rank, all grains spread over those that work and stay."""
    stage = layout.stages[index]
    stay = [cell for cell in stage.cells if not any(rank in dead for rank in cell.ranks)]
    working = [cell for cell in stay if not cell.shadow]
    if not working:
        raise NoLayout(f"pipeline stage {index} has lost all its cells (dead: {_list(dead)}): {ADVICE}")
    grains = reroute([cell.grains for cell in working], layout.num_grains)
    given = {cell.leader: share for cell, share in zip(working, grains, strict=True)}
    return Stage(stage.units, tuple(Cell(cell.ranks, given.get(cell.leader, ())) for cell in stay))


def _assign(
    layout: Layout, stages: Sequence[Stage], held: Mapping[int, set[tuple[int, int, int]]], dead: Collection[int]
) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[tuple[int, ...], ...], ...]]:
    """Owners and replicas of every slice, as leaders of cells of ``stages``."""
    _check_alive(layout, held, dead)
    homes = [{cell.leader: cell for cell in stages[layout.home(unit)].cells} for unit in range(len(layout.units))]
    owning = Counter(owner for unit, row in enumerate(layout.owners) for owner in row if owner in homes[unit])
    copying = Counter(
        copy for unit, row in enumerate(layout.replicas) for copies in row for copy in copies if copy in homes[unit]
    )
    owners = [list(row) for row in layout.owners]
    replicas = [list(row) for row in layout.replicas]
    for unit, home in enumerate(homes):
        for k in range(layout.num_slices):
            holds = [
                leader
                for leader, cell in home.items()
                if all((unit, k, tp) in held.get(rank, ()) for tp, rank in enumerate(cell.ranks))
            ]
            owner, copies = owners[unit][k], replicas[unit][k]
            # An owner may have been chosen in a layout that not everybody had made true.
            if owner not in home or (owner not in holds and holds):
                replacements = [copy for copy in copies if copy in holds] or holds
                replacements = replacements or [leader for leader, cell in home.items() if not cell.shadow]
                owner = min(replacements, key=lambda leader: (owning[leader], leader))
                owning[owner] += 1
            stay = [copy for copy in copies if copy in home and copy != owner]
            kept = [copy for copy in stay if copy in holds] or stay[: layout.num_replicas]
            copying.subtract(copy for copy in copies if copy in home and copy not in kept)
            while len(kept) < min(layout.num_replicas, len(home) - 1):
                taken = {layout.host_of(owner), *(layout.host_of(copy) for copy in kept)}
                kept.append(
                    min(
                        (leader for leader in home if leader != owner and leader not in kept),
                        # A cell that happens to hold the state already needs no transfer.
                        key=lambda leader: (
                            leader not in holds,
                            home[leader].shadow,
                            layout.host_of(leader) in taken,
                            copying[leader],
                            leader,
                        ),
                    )
                )
                copying[kept[-1]] += 1
            owners[unit][k], replicas[unit][k] = owner, tuple(kept)
    return tuple(map(tuple, owners)), tuple(map(tuple, replicas))


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
