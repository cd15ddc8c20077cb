"""Choice: what could be made of the cells there are, how fast each way would be, and which is worth its moves.

A step of each way is simulated, because stages of unlike widths wait for each other in ways that no formula knows; it
is estimated where that would take long. What a way gains counts from when all that it moves has arrived, until
something else happens. In a job that sets clocks each way is taken at those that it would get, so that nothing moves
where a clock does as well.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain

from megatron_elastic.layout import Holdings, Layout, SliceLost, transfers
from megatron_elastic.pipeline.search import NotFitting, find, nearly
from megatron_elastic.pipeline.simulate import Step, run, scheduled
from megatron_elastic.plan.costs.cost import Costs
from megatron_elastic.plan.costs.fit import overflow_on_the_way
from megatron_elastic.plan.errors import NoLayout
from megatron_elastic.plan.graph import Graph, Planner
from megatron_elastic.plan.growth import even
from megatron_elastic.plan.migration import duration_ms
from megatron_elastic.plan.replan import fill, pace_ms, replan
from megatron_elastic.plan.work.clock import foreseen, loads, speeds
from megatron_elastic.plan.work.dataflow import dealt_anew, shared

HORIZON_MS = 3_600_000.0
"""Expected time until the next loss or join: at 1,000 devices a few hours, at 16,000 one or two."""
SCHEDULES = ("1f1b", "split")
"""Values of ``--elastic-schedule`` whose order of work is known beforehand."""
SEARCH = "search"
"""Value of ``--elastic-schedule``: the usual order at first, and what is found as soon as costs are known."""
MOST_SIMULATED = 2_000
"""Grains times stages beyond which a step is estimated: a coordinator plans between other things."""
_MOST_TURNED = 5_000
"""Grains times stages, times as many ways to place narrower stages, beyond which they are not all tried."""
_MOST_OTHERS = 6_000
"""Grains times stages, of all graphs together that are simulated of more or fewer stages: some thirty of 16 cells with
32 grains."""
_MOST_GRIDS = 4
"""Regular pipelines of which the exchange is counted where that takes long: half a second each for 10,000 ranks."""
_MOST_DEALT = 3
"""Ways of which another dealing of grains is tried, where cells are slow."""
_MOST_SEARCHED = 8
"""Ways whose order of work is really searched, besides the first."""
WORTH = 1e-3
"""What another way has to gain at least, as a share of what is computed: predictions are not better than that."""


def takes_long(layout: Layout, most: int = MOST_SIMULATED) -> bool:
    """Whether it would take long to simulate a step of ``layout``: for more than ``most`` grains times stages."""
    return layout.num_grains * layout.pipeline_size > most


def splits(schedules: Collection[str]) -> bool:
    """Whether one of ``schedules`` has to be used that has backwards in two, and keeps more activations for that."""
    return "1f1b" not in schedules


@dataclass(frozen=True, slots=True)
class Way:
    """One way to go on.

    Attributes:
        name: 'reroute': all stays as it is; 'deal': grains are dealt out anew, so that stages are in step; 'layers':
            units move; 'cells': cells change their stage, too; 'hosts': only cells do, so that those of a stage are on
            one host; 'stages': there are more or fewer stages;
            'regular': as many cells at every stage, the others wait; 'columns': that, with the units as they are.
        cells: that it uses.
        step_ms: of a step.
        moves_ms: of what has to be copied in the background, before slices are evened out.
        gain: grains until the next event, as a multiple of what 'reroute' computes.
        problem: why the memory of devices is not enough for it, or for what lies between; None if it is.
        clocks: of its cells, by leader, in a job that sets them; 1 for who is not there.
        base_ms, base_gain: what ``step_ms`` and ``gain`` would be with all at the base clock.
    """

    name: str
    layout: Layout
    step_ms: float
    moves_ms: float
    gain: float
    problem: str | None = None
    clocks: Mapping[int, float] = field(default_factory=dict)
    base_ms: float = 0.0
    base_gain: float = 0.0

    @property
    def cells(self) -> int:
        """That it uses."""
        return len(self.layout.cells)


def ways(
    layout: Layout, costs: Costs, tied: bool, schedules: Collection[str] = SCHEDULES, horizon_ms: float = HORIZON_MS,
    *, briefly: bool = False,
) -> tuple[Way, ...]:
    """All ways to go on with the cells of ``layout``, 'reroute' first. All state that it asks for is live.

    ``briefly``: in half of the time, as somebody waits for it: no order is really searched, so that steps are known to
    a hundredth or two, and what cannot be better than what has been found is left out.
    """
    found: list[Way] = []
    split = splits(schedules)
    planner = Planner(layout.units, costs, tied, layout.num_grains, layout.samples, split)

    def weigh(others: Iterable[tuple[str, Layout]]) -> None:
        for name, other in others:
            if any(other.stages == way.layout.stages for way in found):
                continue
            goal = _settled(other, costs)
            # Where memory is short who asks may have to take another than the fastest.
            if briefly and found and found[0].problem is None and (
                _floor_ms(goal, costs) * _most(found) >= found[0].step_ms
            ):
                continue
            moves_ms = math.inf
            with suppress(SliceLost):
                moves_ms = duration_ms(transfers(other, Holdings.of(layout)), other, costs)
            problem = overflow_on_the_way(layout, goal, costs, split)
            way = Way(name, other, 0.0, moves_ms, 1.0, problem, expected_clocks(goal, costs))
            found.append(_timed(way, goal, costs, schedules))
            found[-1] = _weighed(found[0], found[-1], horizon_ms)

    weigh(_eased(_candidates(layout, costs, planner, tied, schedules), costs, planner))
    if costs.slow:
        weigh(_dealt_otherwise(found, costs))
    searches = SEARCH in schedules and not briefly
    return tuple(_with_orders(found, costs, schedules, horizon_ms) if searches else found)


def _dealt_otherwise(found: Collection[Way], costs: Costs) -> list[tuple[str, Layout]]:
    """The best of these, with grains dealt out as if no cell was slow, and as few as can be taken from those that are:
    who waits for whom then no rule foretells, and it may be a tenth of a step.
    """
    best = sorted(found, key=lambda way: -way.gain)[:_MOST_DEALT]
    return [("deal" if way.name == "reroute" else way.name, shared(dealt_anew(way.layout), costs.slow)) for way in best]


def _with_orders(found: list[Way], costs: Costs, schedules: Collection[str], horizon_ms: float) -> list[Way]:
    """With orders of work really searched, of the first way and of the best, until the best is one of those."""
    searched: set[int] = set()
    for _ in range(_MOST_SEARCHED):
        new = {0, found.index(best(found))} - searched
        if not new:
            break
        for at in new:
            found[at] = _timed(found[at], _settled(found[at].layout, costs), costs, schedules, searched=True)
        searched |= new
        found = [_weighed(found[0], way, horizon_ms) for way in found]
    return found


def _timed(
    way: Way, goal: Layout, costs: Costs, schedules: Collection[str], *, searched: bool = False
) -> Way:
    """With the steps that it has when its slices are where they are in ``goal``."""
    base_ms = step(goal, costs, schedules, {}, searched=searched)
    step_ms = step(goal, costs, schedules, way.clocks, searched=searched) if way.clocks else base_ms
    return replace(way, step_ms=step_ms, base_ms=base_ms)


def _weighed(first: Way, way: Way, horizon_ms: float) -> Way:
    """With what it gains over the first."""
    away = min(way.moves_ms / horizon_ms, 1.0)
    times = first.step_ms / way.step_ms, first.base_ms / way.base_ms
    gain, base_gain = (away + (1 - away) * each for each in times)
    return replace(way, gain=gain, base_gain=base_gain)


def _most(found: Collection[Way]) -> float:
    """What any of these gains for which memory is enough; 1 if nothing more."""
    return max((way.gain for way in found if way.problem is None), default=1.0)


def _floor_ms(layout: Layout, costs: Costs) -> float:
    """Milliseconds that a step takes at least, without simulating it: those of the cell that takes longest, as if it
    never waited for others; 0 where that would take long to tell, or depends on clocks.
    """
    if takes_long(layout) or costs.clocking is not None:
        return 0.0
    phases, least = costs.cell_phases(layout), 0.0
    for leader, load in loads(layout, costs).items():
        exchange = phases[leader].spread_ms + phases[leader].reduce_ms if phases else 0.0
        least = max(least, load.at(1.0) + exchange)
    return least + costs.overhead_ms


def best(found: Collection[Way], clocked: bool = True) -> Way:
    """The way that computes most until the next event; one that comes earlier if they are about the same.

    Those for which memory is not enough only where there are no others. Without ``clocked``: if all cells were to run
    at the base clock.
    """
    chosen, *others = [way for way in found if way.problem is None] or found
    for way in others:
        gain, least = (way.gain, chosen.gain) if clocked else (way.base_gain, chosen.base_gain)
        if gain > least * (1 + WORTH):
            chosen = way
    return chosen


def step(
    layout: Layout, costs: Costs, schedules: Collection[str] = SCHEDULES, clocks: Mapping[int, float] | None = None, *,
    searched: bool = False,
) -> float:
    """Milliseconds of a step under the fastest of ``schedules``.

    ``clocks``: of cells, by leader, 1 if not there; None: those that they would get. An order is not searched for each
    layout that could be, as that takes too long, but only nearly so, unless it is to be ``searched``.
    """
    clocks = expected_clocks(layout, costs) if clocks is None else clocks
    if takes_long(layout):
        usual = max(load.at(1.0) for load in loads(layout, replace(costs, slow={})).values())
        slowest = max(load.at(clocks.get(leader, 1.0)) for leader, load in loads(layout, costs).items())
        return costs.pace_of(layout).step_ms * (slowest / usual if usual else 1.0)
    free = SEARCH in schedules and not any(cell.parts for cell in layout.cells.values())
    if free and searched:
        with suppress(NotFitting):
            order = find(layout, costs, speeds(layout, costs, clocks)).program
            return Step.of(order, layout, costs, clocks).ms
    programs, phases = (scheduled(each, layout) for each in schedules if each != SEARCH), costs.cell_phases(layout)
    known_ms, known = min(((Step.of(each, layout, costs, clocks, phases).ms, each) for each in programs),
                          key=lambda by: by[0])
    if searched or not free:
        return known_ms
    passes = run(known, layout, costs, clocks).makespan
    return known_ms - passes + min(passes, nearly(layout, costs, speeds(layout, costs, clocks)))


def expected_clocks(layout: Layout, costs: Costs) -> Mapping[int, float]:
    """By which a step of ``layout`` is to be predicted, by leader; none in a job that sets no clocks."""
    return {} if costs.clocking is None else foreseen(layout, costs)


def _settled(layout: Layout, costs: Costs) -> Layout:
    """With slices where they will be in the end, if it is known what that makes different, and simulated."""
    matters = costs.exchange is not None or costs.memory_bytes is not None
    if not matters or takes_long(layout):
        return layout
    return even(layout, layout.epoch, costs.slow)


def _candidates(
    layout: Layout, costs: Costs, planner: Planner, tied: bool, schedules: Collection[str]
) -> Iterator[tuple[str, Layout]]:
    """Those that move least first."""
    yield "reroute", shared(layout, costs.slow)
    yield "deal", dealt_anew(layout, costs.slow)
    present, split = {layout.pipeline_size}, splits(schedules)
    for name, stays in (("layers", True), ("cells", False)):
        with suppress(NoLayout):
            yield name, replan(layout, costs, layout.epoch, stages=present, tied=tied, cells_stay=stays, split=split)
    for graph in _turned(layout, planner):
        yield "cells", fill(layout, costs, graph, layout.epoch)
    if costs.exchange is not None and len({costs.host_of(layout, rank) for rank in layout.ranks}) > 1:
        yield "hosts", fill(layout, costs, Graph.of(layout), layout.epoch, by_host=True)
    for graph in _of_other_depths(layout, costs, planner):
        name = "stages" if sum(graph.widths) == len(layout.cells) else "regular"
        yield name, fill(layout, costs, graph, layout.epoch, by_host=True)
    for name, graph in _regular(layout, len(layout.cells), costs, tied, schedules):
        yield name, fill(layout, costs, graph, layout.epoch)


def _eased(
    candidates: Iterator[tuple[str, Layout]], costs: Costs, planner: Planner
) -> Iterator[tuple[str, Layout]]:
    """Each of them, and where cells are slow, the same with fewer units at their stages."""
    for name, layout in candidates:
        yield name, layout
        if costs.slow.keys().isdisjoint(layout.cells):
            continue
        samples = [
            layout.samples * max(layout.load(cell) * costs.slow.get(cell.leader, 1.0) for cell in stage.cells)
            for stage in layout.stages
        ]
        with suppress(NoLayout):
            graph = planner.interleave(
                [stage.width for stage in layout.stages], [position.stage for position in layout.way],
                [set(stage.units) for stage in layout.stages], samples,
            )
            yield ("layers" if name in ("reroute", "deal") else name), fill(layout, costs, graph, layout.epoch)


def _turned(layout: Layout, planner: Planner) -> Iterator[Graph]:
    """Graphs of the present number of stages, of widths that are as even as can be: where the narrower ones are makes a
    difference.
    """
    if len(layout.cells) % layout.pipeline_size:
        yield from _of_depth(layout, layout.pipeline_size, planner)


def _of_other_depths(layout: Layout, costs: Costs, planner: Planner) -> Iterator[Graph]:
    """Likewise with more or fewer stages, where it is known what fits, and those of as many cells at every stage: first
    those that are estimated to be fastest, of these the shortest.
    """
    cells = len(layout.cells)
    depths = [] if costs.memory_bytes is None else range(1, min(cells, planner.blocks) + 1)
    found = chain.from_iterable(
        chain(_even(layout, stages, planner), _of_depth(layout, stages, planner) if cells % stages else ())
        for stages in depths if stages != layout.pipeline_size
    )  # fmt: skip
    simulated = 0
    # What differs by less is the same, summed in another order.
    for graph in sorted(found, key=lambda graph: round(pace_ms(layout, costs, graph), 6)):
        simulated += layout.num_grains * len(graph.widths) * (2 if costs.slow else 1)  # each is eased, too
        if simulated > _MOST_OTHERS:
            return
        yield graph


def _of_depth(layout: Layout, stages: int, planner: Planner) -> Iterator[Graph]:
    """Graphs of so many stages, of all cells, as evenly as can be, with the narrower stages here or there."""
    low, extra = divmod(len(layout.cells), stages)
    if not low or layout.num_chunks > 1 or layout.num_grains * stages**2 > _MOST_TURNED:
        return
    widths = [low + (stage < extra) for stage in range(stages)]
    for turn in sorted(range(stages), key=lambda turn: abs(turn - extra // 2)):  # in the middle first
        with suppress(NoLayout):
            yield planner.split(widths[turn:] + widths[:turn])


def _even(layout: Layout, stages: int, planner: Planner) -> Iterator[Graph]:
    """The graph of so many stages of as many cells each, of which none is without grains; the others wait."""
    width = _even_width(layout, len(layout.cells), stages)
    if width and layout.num_chunks == 1 and layout.num_grains * stages <= _MOST_TURNED:
        with suppress(NoLayout):
            yield planner.split([width] * stages)


def _regular(
    layout: Layout, cells: int, costs: Costs, tied: bool, schedules: Collection[str]
) -> Iterator[tuple[str, Graph]]:
    """Graphs of as many cells at every stage."""
    replicas = whole_replicas(layout, cells)
    if replicas.widths[0]:
        yield "columns", replicas
    with suppress(NoLayout):
        yield "regular", fastest_grid(layout, cells, costs, tied, schedules)


def whole_replicas(layout: Layout, cells: int) -> Graph:
    """As many cells at every stage as so many make, with the units as they are; none if they are too few."""
    width = _even_width(layout, cells, layout.pipeline_size)
    return Graph.of(layout, (width,) * layout.pipeline_size)


def _even_width(layout: Layout, cells: int, stages: int) -> int:
    """How many of so many cells each stage has if all have as many, and none is without grains."""
    return min(cells // stages, layout.num_grains)


def _grid_of(layout: Layout, graph: Graph) -> Layout:
    """What cells as in ``layout`` are like in the stages of a regular graph, from rank 0 on."""
    most = max(len(layout.hosts[host]) for host in {layout.host_of(rank) for rank in layout.ranks})
    return Layout.grid(
        tp=layout.tp, cp=layout.cp, ep=layout.ep, pp=len(graph.widths), dp=graph.widths[0],
        stage_units=graph.stage_units, units=layout.units, num_grains=layout.num_grains, samples=layout.samples,
        num_slices=layout.num_slices, replicas=layout.num_replicas, ranks_per_host=most,
    )  # fmt: skip


def fastest_grid(
    layout: Layout, cells: int, costs: Costs, tied: bool, schedules: Collection[str] = SCHEDULES
) -> Graph:
    """The graph of the fastest regular pipeline of at most so many cells.

    Where the memory of a device is known it may have any number of stages, else only the present one is known to fit.
    Raises NoLayout.
    """
    planner = Planner(layout.units, costs, tied, layout.num_grains, layout.samples, splits(schedules))
    present = layout.pipeline_size
    counts = [present] if costs.memory_bytes is None else range(1, min(cells, planner.blocks) + 1)
    made: list[tuple[float, int, Graph]] = []
    problem = NoLayout(f"{present} pipeline stages cannot be made of {cells} cells")
    for stages in counts:
        width = _even_width(layout, cells, stages)
        if width < 1:
            continue
        widths = [width] * stages
        try:
            graph = planner.interleave(widths, layout.through(stages))
        except NoLayout as why:
            problem = why
            continue
        made.append((pace_ms(layout, costs, graph), stages, graph))
    if not made:
        raise problem
    if costs.exchange is None:
        return min(made)[2]
    best_ms, found = math.inf, made[0][2]
    most = _MOST_GRIDS if takes_long(layout) else len(made)
    for passes_ms, _, graph in sorted(made)[:most]:  # the exchange comes on top of that
        if passes_ms >= best_ms:
            break
        step_ms = costs.pace_of(_grid_of(layout, graph)).step_ms
        if step_ms < best_ms:
            best_ms, found = step_ms, graph
    return found
