"""Order: in what order cells should do their work, as costs have it, in place of the usual one.

It is searched while training goes on, and decided upon like a layout: all cells change over at the end of a step. If
chunks may be placed on other stages, it may turn out that they should be; then layers move there first.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from megatron_elastic.layout import Layout
from megatron_elastic.pipeline.program import Program, pack, unpack_all
from megatron_elastic.pipeline.search import NotFitting, find, fits
from megatron_elastic.pipeline.simulate import Step, run, scheduled
from megatron_elastic.plan.choice import SCHEDULES, SEARCH, expected_clocks, takes_long
from megatron_elastic.plan.costs.cost import Costs
from megatron_elastic.plan.costs.fit import device_bytes
from megatron_elastic.plan.work.clock import speeds as speeds_of
from megatron_elastic.plan.work.placing import elsewhere

WORTH = 0.01
"""What another order has to gain at least, as a share of the passes of a step."""
_CHANGED = 0.2
"""Times of stages that differ by less are taken to be the same: what is measured is not better than that."""


@dataclass(frozen=True, slots=True)
class Order:
    """What was found.

    Attributes:
        program: packed, of all cells.
        name: the known schedule that it is, or ``search``.
        ms: that the passes of a step take with it.
        present_ms: with the order that there is.
        bound_ms: that no order is below.
        stage_units: of each stage, if chunks should be placed otherwise; None: as they are.
        placed_ms: that the passes take in the best order that was found for that.
        recomputed: the units whose chunks are recomputed, as chunks are placed now.
        present_fits: whether devices have memory enough for the order that there is.
    """

    program: bytes
    name: str
    ms: float
    present_ms: float
    bound_ms: float
    stage_units: tuple[tuple[int, ...], ...] | None = None
    placed_ms: float | None = None
    recomputed: tuple[int, ...] = ()
    present_fits: bool = True


def search(layout: Layout, costs: Costs, present: bytes | None, tied: bool | None = None) -> Order | None:
    """The best order that is found for a layout at the clocks that it will get; None where none is known that fits, or
    grains are cut.

    ``present``: the packed program that cells have now; None: the usual one. ``tied``: whether the end of the model
    needs the embedding, if chunks may be placed otherwise; None: they stay where they are.
    """
    if any(cell.parts for cell in layout.cells.values()):
        return None
    clocks = expected_clocks(layout, costs)
    speeds = speeds_of(layout, costs, clocks)
    try:
        found = find(layout, costs, speeds)
    except NotFitting:
        return None
    now = scheduled(SCHEDULES[0], layout) if present is None else unpacked(present, layout)
    # The usual order has been looked at already, but with nothing recomputed.
    looked_at = present is None and not layout.recomputed
    present_ms = found.usual_ms if looked_at else run(now, layout, costs, clocks).makespan
    placed = None
    if tied is not None and layout.pipeline_size > 1:
        placed = elsewhere(layout, costs, speeds, tied, found.room, found.ms)
    return Order(
        pack(found.program), "+".join(found.names), found.ms, present_ms, found.bound_ms,
        None if placed is None else tuple(stage.units for stage in placed[0].stages),
        None if placed is None else placed[1].ms, found.recomputed, fits(now, layout, costs),
    )


def known(layout: Layout, costs: Costs) -> bytes | None:
    """The program, packed, of the known schedule that cells do best to begin with in a layout for which no order has
    been searched; None: the usual one, as nothing that fits is faster, or it would take long to find out.
    """
    if takes_long(layout) or any(cell.parts for cell in layout.cells.values()):
        return None
    clocks, usual = expected_clocks(layout, costs), scheduled(SCHEDULES[0], layout)
    best, best_ms = usual, run(usual, layout, costs, clocks).makespan * (1 - WORTH)
    for schedule in SCHEDULES[1:]:
        program = scheduled(schedule, layout)
        ms = run(program, layout, costs, clocks).makespan
        if ms < best_ms and fits(program, layout, costs):
            best, best_ms = program, ms
    return None if best is usual else pack(best)


def unpacked(program: bytes, layout: Layout) -> Program:
    """What all cells of a layout do in the order that ``search`` found; who only follows does nothing."""
    cells = unpack_all(program)
    return Program({leader: () if cell.shadow else cells[leader] for leader, cell in layout.cells.items()})


def fits_beside(program: bytes, found_for: Layout, layout: Layout, costs: Costs) -> bool:
    """Whether the memory of devices is enough for a packed program, which fits the layout that it was found for, in one
    in which cells do the same, but may hold more: what is on its way to them. Where it would take long to tell: no.
    """
    if costs.memory_bytes is None:
        return True
    at_work = [rank for cell in layout.cells.values() if not cell.shadow for rank in cell.ranks]
    if all(device_bytes(layout, rank, costs) <= device_bytes(found_for, rank, costs) for rank in at_work):
        return True
    return not takes_long(layout) and fits(unpacked(program, layout), layout, costs)


def step_ms(program: Program, layout: Layout, costs: Costs, clocks: Mapping[int, float]) -> float:
    """Milliseconds of a step in the order that ``search`` found, at other clocks maybe."""
    return Step.of(program, layout, costs, clocks).ms


def alike(layout: Layout, costs: Costs, others: Costs) -> bool:
    """Whether stages take about as long by either costs, and the same cells are as slow."""
    stages = ((costs.stage_ms(layout, stage), others.stage_ms(layout, stage)) for stage in range(layout.pipeline_size))
    return costs.slow == others.slow and all(abs(a - b) <= _CHANGED * max(a, b) for a, b in stages)


def foreseen(schedule: str) -> Collection[str]:
    """The schedules by which steps of layouts are predicted under ``--elastic-schedule``: a search is no slower than
    the known ones.
    """
    return (*SCHEDULES, SEARCH) if schedule == SEARCH else (schedule,)
