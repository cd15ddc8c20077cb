"""Growth: how ranks join, slices spread and units move, in layouts that each cost no more than an ordinary step.

Ranks join in whole cells. One that has lost ranks is repaired: the others take the places that they had, and spares or
newcomers those that were lost.

First whoever is to compute a unit receives its parameters after every step, and what it is to own is copied to it in
the background, as a replica: ``approach``. When all of that is live, the goal is entered: replicas are promoted,
shadows get grains, units change their stage, and copies that are too many are dropped. Nothing bulky moves between two
steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, takewhile

from megatron_elastic.layout import Cell, Layout, Stage
from megatron_elastic.plan.loss import release
from megatron_elastic.plan.spread import away
from megatron_elastic.plan.work.dataflow import shared


def admit(layout: Layout, newcomers: Mapping[int, int], epoch: int, leaving: Collection[int] = ()) -> Layout:
    """The layout of ``epoch`` with the cells that ``newcomers`` and the spares that are not ``leaving`` can form, as
    shadows.

    ``newcomers`` maps ranks that were never in the layout to the host each is on: an index into ``layout.hosts``, or
    the next free one. The narrowest stage gets the next cell; of several that one for whose places ranks are waiting.
    They take them again, and others the places that are lost. A cell of which nobody is left is made of ranks of one
    host where that is possible; ranks that are left over, or more than ``most_cells`` need, stay spares.
    """
    hosts = [list(host) for host in layout.hosts]
    for rank, host in sorted(newcomers.items()):
        hosts.extend([] for _ in range(len(hosts), host + 1))
        hosts[host].append(rank)
    host_of = {rank: index for index, host in enumerate(hosts) for rank in host}
    free = _free(layout, hosts, {*newcomers, *layout.spares}.difference(leaving))
    stages = list(layout.stages)
    missing = len(free) if layout.most_cells is None else layout.most_cells - len(layout.cells)
    for _ in range(min(missing, len(free) // layout.cell_size)):
        _, _, index = min((stage.width, not _waiting(stage, free), i) for i, stage in enumerate(stages))
        cell = Cell(_whole(layout.cell_size, _waiting(stages[index], free), free, host_of), ())
        stages[index] = replace(stages[index], cells=(*stages[index].cells, cell))
    used = {rank for stage in stages for cell in stage.cells for rank in cell.ranks}
    new = replace(
        layout,
        epoch=epoch,
        stages=tuple(
            replace(stage, waiting=tuple(at for at in stage.waiting if at[0] not in used)) for stage in stages
        ),
        spares=tuple(sorted({*newcomers, *layout.spares} - used)),
        # Ranks of one host join in the order they get ready in: that must not show.
        hosts=tuple(tuple(sorted(host)) for host in hosts),
    )
    new.validate()
    return new


def _free(layout: Layout, hosts: Sequence[Sequence[int]], ranks: Collection[int]) -> dict[int, bool]:
    """``ranks`` in the order in which cells are made of them, and whether each is waiting with a place.

    As many of a host as are whole cells come together. Those that are waiting come last: they take other places only
    where nobody else is left.
    """
    waiting = {rank for stage in layout.stages for rank, _ in stage.waiting}.intersection(ranks)
    together: list[int] = []
    rest: list[int] = []
    for host in hosts:
        here = sorted(set(ranks).intersection(host) - waiting)
        whole = len(here) // layout.cell_size * layout.cell_size
        together += here[:whole]
        rest += here[whole:]
    return dict.fromkeys((*together, *rest), False) | dict.fromkeys(sorted(waiting), True)


def _waiting(stage: Stage, free: Collection[int]) -> dict[int, int]:
    """[place] = one of the ``free`` ranks that are waiting with it, of those places of the stage that have any."""
    return {place: rank for rank, place in reversed(stage.waiting) if rank in free}


def _whole(size: int, there: Mapping[int, int], free: dict[int, bool], host_of: Mapping[int, int]) -> tuple[int, ...]:
    """The ranks of a cell: those that are ``there`` at their places, and at the others the first that are ``free``, of
    the same hosts if such are not waiting elsewhere. They are not free any more.
    """
    places = dict(there)
    for rank in there.values():
        del free[rank]
    hosts = {host_of[rank] for rank in there.values()}
    for place in range(size):
        if place not in places:
            near = (rank for rank, waits in free.items() if not waits and host_of[rank] in hosts) if hosts else ()
            places[place] = next(chain(near, free))
            del free[places[place]]
    return tuple(places[place] for place in range(size))


def even(layout: Layout, epoch: int, slow: Mapping[int, float] | None = None) -> Layout:
    """The layout of ``epoch`` in which the cells share the grains and slices of their stage evenly, shadows too; grains
    by ``slow``, as ``dataflow.share`` has them.

    A replica is in another cell of its unit's home stage, or of any stage where that one has too few, or all of its
    cells are on one host and others are not: then one replica of each slice is on another. Few things move; what is
    even stays as it is.
    """
    goal = _goal(layout)
    new = replace(shared(layout, slow), epoch=epoch, owners=goal.owners, replicas=goal.replicas)
    new.validate()
    return new


def approach(layout: Layout, goal: Layout, epoch: int) -> Layout:
    """The layout of ``epoch`` that works like ``layout``, while what ``goal`` needs is on its way to where it needs it.

    Every cell of ``goal`` is to be one of ``layout``. It receives the parameters of the units that it is to hold, and
    becomes a replica of the slices that it is to own or replicate.
    """
    units = {cell.leader: stage.units for stage in goal.stages for cell in stage.cells}
    stages = tuple(
        replace(
            stage,
            cells=tuple(
                replace(cell, incoming=tuple(sorted(set(units.get(cell.leader, ())).difference(stage.units))))
                for cell in stage.cells
            ),
        )
        for stage in layout.stages
    )
    replicas = tuple(
        tuple(
            (*copies, *(at for at in (owner, *wanted) if at not in copies and at != layout.owners[unit][k]))
            for k, (copies, owner, wanted) in enumerate(
                zip(layout.replicas[unit], goal.owners[unit], goal.replicas[unit], strict=True)
            )
        )
        for unit in range(len(layout.units))
    )
    new = replace(layout, epoch=epoch, stages=stages, replicas=replicas)
    new.validate()
    return new


def improve(
    layout: Layout,
    newcomers: Mapping[int, int],
    epoch: int,
    goal: Layout | None = None,
    rearrange: Callable[[Layout], Layout] | None = None,
    leaving: Collection[int] = (),
    slow: Mapping[int, float] | None = None,
    most_cells: int | None = None,
) -> tuple[Layout, Layout | None] | None:
    """The layout of ``epoch`` that is next on the way to a good one over all ranks there are; None if this one is.

    All that ``layout`` asks for must be live. The second result is the goal if it is not reached with the first: it has
    to be given back the next time. ``rearrange`` chooses stages; without it they stay. Newcomers that cannot form a
    cell wait for more. Ranks that are ``leaving`` go first, and are not let in again; so do those of cells that are
    more than ``most_cells``, which may come again: None is as many as so far. ``slow`` as in ``even``. Raises NoLayout
    if they cannot, and if stages cannot be as they are to be.
    """
    present = layout
    if most_cells is not None:
        layout = replace(layout, most_cells=most_cells)
    going = {*leaving, *_surplus(layout, leaving)}
    if goal is None and not going.isdisjoint(layout.ranks):
        goal = release(layout, going, epoch)
        on_the_way = approach(layout, goal, epoch)
        if _differs(on_the_way, present):
            return on_the_way, goal
    if goal is None:
        grown = admit(layout, newcomers, epoch, leaving)
        if grown.ranks != layout.ranks:
            layout = grown
        goal = even(layout if rearrange is None else rearrange(layout), epoch, slow)
        on_the_way = approach(layout, goal, epoch)
        if layout is grown or _differs(on_the_way, present):
            return on_the_way, goal if _differs(goal, on_the_way) else None
    if _differs(goal, present):
        return replace(goal, epoch=epoch), None
    return None


def _surplus(layout: Layout, leaving: Collection[int]) -> set[int]:
    """Ranks of the cells that are more than ``most_cells``, besides those that are ``leaving``: of the widest stages
    the last ones, shadows first. Each stage keeps one.
    """
    stay = [
        sorted((cell for cell in stage.cells if set(leaving).isdisjoint(cell.ranks)), key=lambda cell: cell.shadow)
        for stage in layout.stages
    ]
    going: set[int] = set()
    while layout.most_cells is not None and sum(map(len, stay)) > max(layout.most_cells, len(stay)):
        going.update(max(stay, key=len).pop().ranks)
    return going


def _differs(one: Layout, other: Layout) -> bool:
    return (one.stages, one.owners, one.replicas, one.most_cells) != (
        other.stages, other.owners, other.replicas, other.most_cells
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Goal:
    owners: tuple[tuple[int, ...], ...]
    replicas: tuple[tuple[tuple[int, ...], ...], ...]


def _goal(layout: Layout) -> _Goal:
    """Owners and replicas evened out, moving few. Does not depend on replicas beyond those that are wanted."""
    owners = [list(row) for row in layout.owners]
    replicas = [[list(copies[: layout.num_replicas]) for copies in row] for row in layout.replicas]
    for index, stage in enumerate(layout.stages):
        slices = [(unit, k) for unit in layout.at_home(index) for k in range(layout.num_slices)]
        leaders = [cell.leader for cell in stage.cells]
        if len(leaders) > layout.num_replicas:
            fit = {*leaders, *away(layout, leaders, layout.cells)}
            for unit, k in slices:
                replicas[unit][k] = [at for at in replicas[unit][k] if at in fit]
        _even_owners(slices, leaders, owners, replicas)
        _fill(layout, slices, leaders, owners, replicas)
        _separate(layout, slices, leaders, owners, replicas)
        _even_replicas(layout, slices, leaders, owners, replicas)
    return _Goal(tuple(map(tuple, owners)), tuple(tuple(map(tuple, row)) for row in replicas))


def _even_owners(
    slices: Sequence[tuple[int, int]],
    leaders: Sequence[int],
    owners: list[list[int]],
    replicas: list[list[list[int]]],
) -> None:
    """Move slices from the cell that owns most to the one that owns least, until all own the same to within one."""
    owned: dict[int, list[tuple[int, int]]] = {leader: [] for leader in leaders}
    for unit, k in slices:
        if owners[unit][k] in owned:
            owned[owners[unit][k]].append((unit, k))
    while True:
        most = max(leaders, key=lambda leader: (len(owned[leader]), -leader))
        least = min(leaders, key=lambda leader: (len(owned[leader]), leader))
        if len(owned[most]) - len(owned[least]) <= 1:
            return
        per_unit = Counter(unit for unit, _ in owned[most])
        # One that is there already, else one of the unit that the cell owns most of.
        unit, k = min(owned[most], key=lambda at: (least not in replicas[at[0]][at[1]], -per_unit[at[0]], at))
        owned[most].remove((unit, k))
        owned[least].append((unit, k))
        owners[unit][k] = least
        copies = replicas[unit][k]
        if least in copies:
            copies[copies.index(least)] = most
        elif copies:
            copies[-1] = most  # it has the state


def _fill(
    layout: Layout,
    slices: Sequence[tuple[int, int]],
    leaders: Sequence[int],
    owners: Sequence[Sequence[int]],
    replicas: list[list[list[int]]],
) -> None:
    """Give every slice as many replicas as are wanted and possible, in other stages if this one has too few cells."""
    everywhere = list(layout.cells)
    wanted = min(layout.num_replicas, len(everywhere) - 1)
    few = [(unit, k) for unit, k in slices if len(replicas[unit][k]) < wanted]
    load = Counter(copy for row in replicas for copies in row for copy in copies) if few else Counter()
    for unit, k in few:
        copies = replicas[unit][k]
        while len(copies) < wanted:
            taken = (owners[unit][k], *copies)
            hosts = {layout.host_of(at) for at in taken}
            others = [leader for leader in leaders if leader not in taken] or [
                leader for leader in everywhere if leader not in taken
            ]
            copies.append(min(others, key=lambda leader: (layout.host_of(leader) in hosts, load[leader], leader)))
            load[copies[-1]] += 1


def _separate(
    layout: Layout,
    slices: Sequence[tuple[int, int]],
    leaders: Sequence[int],
    owners: Sequence[Sequence[int]],
    replicas: list[list[list[int]]],
) -> None:
    """Move replicas that share a host with the owner or with another replica to hosts that have none of them yet.

    They stay in the stage, if it is not the only way to have one on another host.
    """
    load = Counter(copy for unit, k in slices for copy in replicas[unit][k])
    elsewhere = away(layout, leaders, layout.cells)
    for unit, k in slices:
        copies = replicas[unit][k]
        for i in reversed(range(len(copies))):
            taken = {layout.host_of(at) for at in (owners[unit][k], *copies[:i], *copies[i + 1 :])}
            if layout.host_of(copies[i]) not in taken:
                continue
            free = [leader for leader in leaders if layout.host_of(leader) not in taken]
            if free := free or (elsewhere if len(taken) == 1 else []):
                load[copies[i]] -= 1
                copies[i] = min(free, key=lambda leader: (load[leader], leader))
                load[copies[i]] += 1


def _even_replicas(
    layout: Layout,
    slices: Sequence[tuple[int, int]],
    leaders: Sequence[int],
    owners: Sequence[Sequence[int]],
    replicas: list[list[list[int]]],
) -> None:
    """Move replicas between cells until they hold the same to within one, or host separation forbids it."""
    kept: dict[int, list[tuple[int, int]]] = {leader: [] for leader in leaders}
    for unit, k in slices:
        for copy in replicas[unit][k]:
            if copy in kept:
                kept[copy].append((unit, k))

    def hosts(at: tuple[int, int], without: int) -> set[int]:
        return {layout.host_of(x) for x in (owners[at[0]][at[1]], *replicas[at[0]][at[1]]) if x != without}

    def may_move(at: tuple[int, int], source: int, target: int) -> bool:
        if target == owners[at[0]][at[1]] or target in replicas[at[0]][at[1]]:
            return False
        others = hosts(at, source)
        return layout.host_of(target) not in others or layout.host_of(source) in others

    def fuller(by_load: Sequence[int], target: int) -> Iterator[int]:
        """Cells that hold more than one replica more than ``target``, the fullest first."""
        return takewhile(lambda source: len(kept[source]) - len(kept[target]) > 1, reversed(by_load))

    while True:
        by_load = sorted(leaders, key=lambda leader: (len(kept[leader]), leader))
        moves = (
            (source, target, at)
            for target in by_load
            for source in fuller(by_load, target)
            for at in kept[source]
            if may_move(at, source, target)
        )
        move = next(moves, None)
        if move is None:
            return
        source, target, at = move
        kept[source].remove(at)
        kept[target].append(at)
        copies = replicas[at[0]][at[1]]
        copies[copies.index(source)] = target
