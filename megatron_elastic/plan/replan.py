"""Replan: the layout that the cells there are should work towards, by costs. Units move, cells change their stage.

What ``lose`` and ``admit`` return keeps the job going at once, without moving anything; the layout made here is where
it should go from there. Its slices have to be copied before it can be entered (``layout.transfers`` lists them).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from statistics import mean

from megatron_elastic.layout import Cell, Layout, Stage
from megatron_elastic.plan.costs.cost import Costs, own
from megatron_elastic.plan.errors import NoLayout
from megatron_elastic.plan.graph import Graph, Planner
from megatron_elastic.plan.spread import away
from megatron_elastic.plan.work.dataflow import dealt, shared

WORTH = 0.02
"""A plan that moves more than another must make the step shorter by this fraction."""


def replan(
    layout: Layout,
    costs: Costs,
    epoch: int,
    *,
    lost: Collection[int] = (),
    stages: Collection[int] | None = None,
    tied: bool | None = None,
    cells_stay: bool = False,
    split: bool = False,
    recompute: bool = False,
) -> Layout:
    """The best layout of ``epoch`` for the cells of ``layout`` that have none of the ranks in ``lost``.

    Candidates are, in this order: the graph as it is; other units in stages of the present widths; other widths too;
    and for each number of stages in ``stages`` even widths, then the best ones. A candidate has to shorten the
    estimated step by ``WORTH`` to be taken rather than one before it. The default for ``stages`` is the present number;
    where the memory of a device is known, one less and one more too; and that of the stages that still have cells.
    With ``cells_stay`` only units move, unless another number of stages is asked for or a stage has no cells.
    ``split``: of the job's schedule, as ``Planner`` has it. With ``recompute`` what fits
    with chunks recomputed is taken if nothing does without (``recomputation.recomputing`` says which they are).
    Whether the embedding is ``tied`` to the last stage is what the layout says (``is_tied``).
    Where stages have several chunks, others with as many, placed as they are now, come before those with one, which are
    taken where they are faster by ``WORTH`` nevertheless, or nothing else is possible. Raises NoLayout when the model
    does not fit.
    """
    dead = {*layout.lost, *lost}
    survivors = [[cell for cell in stage.cells if dead.isdisjoint(cell.ranks)] for stage in layout.stages]
    if tied is None:
        tied = layout.is_tied
    present = layout.pipeline_size
    if stages is not None:
        stages = set(stages)
    elif costs.memory_bytes is None or cells_stay:
        stages = {present, sum(map(bool, survivors))}
    else:
        stages = {present - 1, present, present + 1, sum(map(bool, survivors))}
    fixed = cells_stay and all(survivors) and stages == {present}
    try:
        graph = _best(layout, costs, survivors, tied, stages, fixed, split)
    except NoLayout:
        if not recompute:
            raise
        graph = _best(layout, costs, survivors, tied, stages, fixed, split, recompute)
    return fill(layout, costs, graph, epoch, dead)


def fill(
    layout: Layout, costs: Costs, graph: Graph, epoch: int, lost: Collection[int] = (), *, by_host: bool = False
) -> Layout:
    """The layout of ``epoch`` with the stages of ``graph``, made of cells of ``layout`` without ranks in ``lost``.

    Those stay that hold most of what they are to compute; ``by_host``: of those of one host, as long as there are any,
    so that few stages exchange gradients with another one. Ranks of cells that are more than the graph has are spares.
    """
    dead = {*layout.lost, *lost}
    survivors = [[cell for cell in stage.cells if dead.isdisjoint(cell.ranks)] for stage in layout.stages]
    staying = (_by_host if by_host else _staying)(layout, costs, survivors, graph)
    new_stages = tuple(
        Stage(units, dealt(layout, cells, costs.slow)) for units, cells in zip(graph.stage_units, staying, strict=True)
    )
    if _members(new_stages) == _members(layout.stages) and not any(c.shadow for s in layout.stages for c in s.cells):
        new_stages = shared(layout, costs.slow).stages
    waiting = {stage.units: tuple(at for at in stage.waiting if at[0] not in dead) for stage in layout.stages}
    new_stages = tuple(replace(stage, waiting=waiting.get(stage.units, ())) for stage in new_stages)
    owners, replicas = _slices(layout, new_stages)
    members = {rank for stage in new_stages for cell in stage.cells for rank in cell.ranks}
    new = replace(
        layout,
        epoch=epoch,
        stages=new_stages,
        owners=owners,
        replicas=replicas,
        spares=tuple(sorted({*layout.ranks, *layout.spares} - dead - members)),
        lost=tuple(sorted(dead)),
    )
    new.validate()
    return new


# ---- the graph ------------------------------------------------------------------------------


def pace_ms(layout: Layout, costs: Costs, graph: Graph) -> float:
    """Milliseconds that a step of the grains of ``layout`` is estimated to take in the stages of ``graph``, without the
    exchange, and as if no cell was slow.
    """
    grains = [math.ceil(layout.num_grains * layout.samples / width) / layout.samples for width in graph.widths]
    return costs.pace(graph.stage_units, graph.widths, grains).step_ms


def _best(
    layout: Layout,
    costs: Costs,
    survivors: Sequence[Sequence[Cell]],
    tied: bool,
    stages: Collection[int],
    cells_stay: bool,
    split: bool,
    recompute: bool = False,
) -> Graph:
    planner = Planner(layout.units, costs, tied, layout.num_grains, layout.samples, split, recompute)
    best: Graph | None = None
    best_ms = math.inf
    wanted = " or ".join(map(str, sorted(stages)))
    problem = NoLayout(
        f"{wanted} pipeline stages cannot be made of {sum(map(len, survivors))} cells and {planner.blocks} blocks: "
        "ask for another number, or restart the job from its newest checkpoint"
    )
    for make in _candidates(layout, planner, survivors, stages, cells_stay):
        try:
            candidate = make()
        except NoLayout as why:
            problem = why
            continue
        step_ms = pace_ms(layout, costs, candidate)
        if step_ms < best_ms * (1 - WORTH):
            best, best_ms = candidate, step_ms
    if best is None:
        raise problem
    return best


def _candidates(
    layout: Layout, planner: Planner, survivors: Sequence[Sequence[Cell]], stages: Collection[int], cells_stay: bool
) -> Iterator[Callable[[], Graph]]:
    """What makes graphs, those that move least first."""
    units = [stage.units for stage in layout.stages]
    held = [set(stage) for stage in units]
    widths = tuple(map(len, survivors))
    cells, present, several = sum(widths), len(widths), layout.num_chunks > 1
    if present in stages and cells >= present:
        if all(widths):
            yield partial(planner.keep, units, widths)
            if several:
                yield partial(planner.interleave, widths, layout.through(present), held)
            yield partial(planner.split, widths, held)
        if cells_stay:
            return
        if not several:
            yield lambda: planner.split(planner.widen(units, cells), held)
    for count in sorted(stages, key=lambda count: (abs(count - present), count)):
        if 1 <= count <= min(cells, planner.blocks):
            even = [cells // count + (stage < cells % count) for stage in range(count)]
            through = layout.through(count)
            if several and count > 1:
                yield partial(planner.interleave, even, through)
            yield partial(planner.split, even)
            # A stage is not to become very wide: then what its cells exchange among them would count.
            if several and count > 1:
                yield partial(_widened, planner, count, cells, 2 * max(even), through)
            yield partial(_widened, planner, count, cells, 2 * max(even), range(count))


def _widened(planner: Planner, stages: int, cells: int, most: int, through: Sequence[int]) -> Graph:
    return planner.interleave(planner.widths(stages, cells, most), through)


# ---- cells ----------------------------------------------------------------------------------


def _staying(
    layout: Layout, costs: Costs, survivors: Sequence[Sequence[Cell]], graph: Graph
) -> tuple[tuple[Cell, ...], ...]:
    """Cells of each new stage: as many as can stay with units that they hold already, those that share most first."""
    common = _in_common(layout, costs, graph)
    # Cells that work are kept before shadows, which have less to lose.
    left = [sorted(cells, key=lambda cell: cell.shadow) for cells in survivors]
    room = list(graph.widths)
    chosen: list[list[Cell]] = [[] for _ in room]
    for source, target in sorted(common, key=lambda pair: (-common[pair], abs(pair[0] - pair[1]), pair)):
        while left[source] and room[target]:
            chosen[target].append(left[source].pop(0))
            room[target] -= 1
    pool = [cell for cells in left for cell in cells]
    for target, cells in enumerate(chosen):
        while room[target]:
            cells.append(pool.pop(0))
            room[target] -= 1
    return tuple(map(tuple, chosen))


def _by_host(
    layout: Layout, costs: Costs, survivors: Sequence[Sequence[Cell]], graph: Graph
) -> tuple[tuple[Cell, ...], ...]:
    """Likewise, of one host after the other, in the order in which they are along the pipeline now."""
    common = _in_common(layout, costs, graph)
    left: dict[int, list[tuple[int, Cell]]] = {}
    for source, cells in enumerate(survivors):
        for cell in sorted(cells, key=lambda cell: cell.shadow):
            left.setdefault(costs.host_of(layout, cell.leader), []).append((source, cell))
    hosts = sorted(left, key=lambda host: (mean(source for source, _ in left[host]), host))
    chosen: list[tuple[Cell, ...]] = []
    for target, width in enumerate(graph.widths):
        taken = []
        for _ in range(width):
            here = next(left[host] for host in hosts if left[host])
            source, cell = max(here, key=lambda at: common.get((at[0], target), 0))
            here.remove((source, cell))
            taken.append(cell)
        chosen.append(tuple(taken))
    return tuple(chosen)


def _in_common(layout: Layout, costs: Costs, graph: Graph) -> dict[tuple[int, int], int]:
    """[stage of ``layout``, stage of ``graph``] = bytes of state of the units that both have, where there are any."""
    old = [set(own([stage.units for stage in layout.stages], index)) for index in range(layout.pipeline_size)]
    new = [own(graph.stage_units, index) for index in range(len(graph.widths))]
    shared = {
        (source, target): sum(costs.units[unit].optimizer_bytes or 1 for unit in held.intersection(units))
        for source, held in enumerate(old) for target, units in enumerate(new)
    }  # fmt: skip
    return {pair: size for pair, size in shared.items() if size}


def _members(stages: Sequence[Stage]) -> list[tuple[tuple[int, ...], set[int]]]:
    return [(stage.units, {cell.leader for cell in stage.cells}) for stage in stages]


# ---- slices ---------------------------------------------------------------------------------


def _slices(
    layout: Layout, stages: Sequence[Stage]
) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[tuple[int, ...], ...], ...]]:
    """Owners and replicas. Slice k of a unit whose owner is not in its new stage goes to the stage's k-th cell."""
    home: dict[int, Stage] = {}
    for stage in stages:
        for unit in stage.units:
            home.setdefault(unit, stage)
    everywhere = [cell.leader for stage in stages for cell in stage.cells]
    rows = [
        _row(layout, unit, [cell.leader for cell in home[unit].cells], everywhere) for unit in range(len(layout.units))
    ]
    return tuple(owners for owners, _ in rows), tuple(replicas for _, replicas in rows)


def _row(
    layout: Layout, unit: int, leaders: Sequence[int], everywhere: Sequence[int]
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Owners and replicas of a unit at home with ``leaders``.

    If those are too few, or all on one host, other stages hold replicas too.
    """
    here = set(leaders)
    elsewhere = away(layout, leaders, everywhere)
    enough = len(leaders) > layout.num_replicas
    wanted = min(layout.num_replicas, len(everywhere) - 1)
    fit = here.union(elsewhere) if enough else set(everywhere)
    owners, replicas = [], []
    for k, (owner, copies) in enumerate(zip(layout.owners[unit], layout.replicas[unit], strict=True)):
        if owner not in here:
            owner = next((copy for copy in copies if copy in here), leaders[k % len(leaders)])
        kept = [copy for copy in copies if copy in fit and copy != owner][:wanted]
        while len(kept) < wanted:
            taken = (owner, *kept)
            others = elsewhere if here.issuperset(taken) else []
            kept.append(_next_cell(layout, others or (everywhere if here.issubset(taken) else leaders), k, taken))
        owners.append(owner)
        replicas.append(tuple(kept))
    return tuple(owners), tuple(replicas)


def _next_cell(layout: Layout, leaders: Sequence[int], k: int, taken: Sequence[int]) -> int:
    """The first cell after the k-th that is not ``taken``, on a host where none of those is if there is one."""
    hosts = {layout.host_of(leader) for leader in taken}
    others = (leaders[(k + i) % len(leaders)] for i in range(1, len(leaders) + 1))
    first: int | None = None
    for leader in others:
        if leader not in taken:
            if layout.host_of(leader) not in hosts:
                return leader
            first = leader if first is None else first
    assert first is not None, "the stage has more cells than are taken"
    return first
