"""Loss: the layout after ranks died. A dead rank takes its cell out, and the stage's other cells share its work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import replace
from itertools import chain

from megatron_elastic.layout import Cell, Extent, Holdings, Layout, LayoutError, Stage
from megatron_elastic.layout.lookup import runs, spans
from megatron_elastic.plan.costs.cost import Costs
from megatron_elastic.plan.errors import ADVICE, NoLayout, StateLost
from megatron_elastic.plan.replan import replan
from megatron_elastic.plan.spread import Spread
from megatron_elastic.plan.work.dataflow import share

_MOST_TOLD = 16
"""Runs of ranks that a message names."""


def lose(
    layout: Layout, lost: Collection[int], held: Holdings, epoch: int, leaving: Collection[int] = (),
    slow: Mapping[int, float] | None = None,
) -> Layout:
    """The layout of ``epoch``, after the ranks in ``lost`` died under ``layout``.

    Cells with a dead rank leave: their live ranks become spares, and their grains go to the other cells of the stage,
    balanced as ``dataflow`` says. Slices stay with their owner where its cell stays and holds them, else a replica is
    promoted, else another cell takes over; replicas that went are placed anew. Shadows stay shadows, and units that
    were about to move stay. A stage that has no working cell left is dissolved: its units go to the others. ``lost``
    may name spares, and ranks already known to be dead. Cells with ranks that are ``leaving`` go as well, and those
    ranks are spares; but they stay if a stage would have no working cell without them. ``slow``: as ``Costs`` has it;
    who is slow gets less of what the lost ones had. Raises NoLayout when no working
    cell is left or the others cannot take the units, StateLost when nobody alive holds some part of a slice,
    LayoutError when ``lost`` names a rank that never was in the layout.
    """
    known = {*layout.ranks, *layout.spares, *layout.lost}
    if unknown := set(lost) - known:
        raise LayoutError(
            f"ranks {sorted(unknown)} are said to be lost, but the layout of epoch {layout.epoch} never had them"
        )
    dead = {*lost, *layout.lost}
    live = held.without(dead)
    unsure = live.unsure(layout)
    _check_alive(layout, unsure, live, dead)
    if not all(_working(stage, dead) for stage in layout.stages):
        return _dissolve(layout, dead, epoch)
    gone = dead.union(leaving)
    if not all(_working(stage, gone) for stage in layout.stages):
        gone = dead
    stages = tuple(_without(layout, index, gone, dead, slow) for index in range(layout.pipeline_size))
    in_cells = {rank for stage in stages for cell in stage.cells for rank in cell.ranks}
    if leaving:
        unsure = live.without(set(layout.ranks) - in_cells).unsure(layout)
    owners, replicas = _assign(layout, stages, unsure, live)
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


def release(layout: Layout, leaving: Collection[int], epoch: int) -> Layout:
    """The layout of ``epoch`` in which cells with ``leaving`` ranks have no part any more; their ranks are spares.

    The others share their work, and all is where it needs to be to go on without them. Nobody is dead: they can give
    what only they hold. Raises NoLayout if a stage would have no working cell left.
    """
    stages, gone = [], set(leaving)
    for index, stage in enumerate(layout.stages):
        if not _working(stage, gone):
            raise NoLayout(f"stage {index} has no other working cells than those of ranks {sorted(gone)}, which are to "
                           "leave")
        stages.append(_without(layout, index, gone, set(layout.lost)))
    in_cells = {rank for stage in stages for cell in stage.cells for rank in cell.ranks}
    owners, replicas = _assign(layout, stages, *_held(layout, set(layout.ranks) - in_cells))
    spares = {*layout.ranks, *layout.spares} - in_cells
    new = replace(layout, epoch=epoch, stages=tuple(stages), owners=owners, replicas=replicas,
                  spares=tuple(sorted(spares)))
    new.validate()
    return new


def _held(layout: Layout, without: Collection[int]) -> tuple[Collection[tuple[int, int]], Holdings]:
    """The slices that these ranks own or replicate, and what the others hold."""
    held = Holdings.of(layout).without(without)
    return held.unsure(layout), held


def everything(layout: Layout) -> Holdings:
    """What would be held if every rank held the state of every slice of its stage: as after loading a checkpoint."""
    return Holdings.of(layout, Extent.STAGE)


def readable(layout: Layout) -> Holdings:
    """What could be held: every rank can read any slice from a checkpoint."""
    return Holdings.of(layout, Extent.ALL)


def at_home(layout: Layout) -> Layout:
    """The same layout without the copies that stages keep for each other."""
    homes = [{cell.leader for cell in stage.cells} for stage in layout.stages]
    return replace(layout, replicas=tuple(
        tuple(tuple(copy for copy in copies if copy in homes[layout.home(unit)]) for copies in row)
        for unit, row in enumerate(layout.replicas)
    ))  # fmt: skip


def _without(
    layout: Layout, index: int, gone: Set[int], dead: Set[int], slow: Mapping[int, float] | None = None
) -> Stage:
    """A stage without the cells that have a rank that is ``gone``, all grains spread over those that work and stay.

    Ranks of the others wait with the places that they had, but for the ``dead``.
    """
    stage = layout.stages[index]
    stay = [cell for cell in stage.cells if gone.isdisjoint(cell.ranks)]
    given = {cell.leader: cell for cell in share(layout, _working(stage, gone), slow)}
    left = [
        (rank, place)
        for cell in stage.cells
        if not gone.isdisjoint(cell.ranks)
        for place, rank in enumerate(cell.ranks)
    ]
    waiting = sorted(at for at in (*stage.waiting, *left) if at[0] not in dead)
    return Stage(
        stage.units, tuple(given.get(cell.leader, Cell(cell.ranks, ())) for cell in stay), tuple(waiting)
    )


def _working(stage: Stage, dead: Set[int]) -> list[Cell]:
    """Cells that compute something and have no dead rank. Shadows may not have caught up."""
    return [cell for cell in stage.cells if not cell.shadow and dead.isdisjoint(cell.ranks)]


def _dissolve(layout: Layout, dead: Set[int], epoch: int) -> Layout:
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
    layout: Layout, stages: Sequence[Stage], unsure: Collection[tuple[int, int]], held: Holdings
) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[tuple[int, ...], ...], ...]]:
    """Owners and replicas of every slice, as leaders of cells of ``stages``.

    Slices stay as they are but for those that are ``unsure``, and those that have too few replicas.
    """
    homes = [{cell.leader: cell for cell in stage.cells} for stage in stages]
    everywhere = dict(chain.from_iterable(home.items() for home in homes))
    wanted = min(layout.num_replicas, len(everywhere) - 1)
    few = {(unit, k) for unit, row in enumerate(layout.replicas) for k, at in enumerate(row) if len(at) < wanted}
    concerned = sorted(few.union(unsure))
    complete = held.complete(everywhere, concerned)
    owning = Counter(chain.from_iterable(layout.owners))
    spread = Spread(layout, homes, Counter(chain.from_iterable(chain.from_iterable(layout.replicas))))
    owners = [list(row) for row in layout.owners]
    replicas = [list(row) for row in layout.replicas]
    for unit, k in concerned:
        stage = layout.home(unit)
        home, holds = homes[stage], complete[unit, k]
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
        for copy in everywhere.keys() & set(copies).difference(kept):
            spread.change(copy, -1)
        while len(kept) < wanted:
            kept.append(spread.next(stage, (owner, *kept), holds))
            spread.change(kept[-1], 1)
        owners[unit][k], replicas[unit][k] = owner, tuple(kept)
    return tuple(map(tuple, owners)), tuple(map(tuple, replicas))


def _check_alive(
    layout: Layout, unsure: Collection[tuple[int, int]], held: Holdings, dead: Collection[int]
) -> None:
    """Raise StateLost unless every part of every slice is held by a live rank."""
    for unit, k in unsure:
        for part in range(layout.num_parts(unit)):
            if not held.holders((unit, k, part)):
                raise StateLost(
                    f"slice {k} of unit {layout.units[unit]} (part {part}) is held by no live rank: its "
                    f"owner and every copy of it are dead (dead: {_list(dead)}). {ADVICE.capitalize()}"
                )


def _list(ranks: Collection[int]) -> str:
    """As people read it: all that a long job has lost may be thousands."""
    told = runs(sorted(ranks))[:_MOST_TOLD]
    more = len(ranks) - sum(map(len, told))
    names = [*spans(chain.from_iterable(told)), *([f"and {more} others"] if more else [])]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(names)}"
