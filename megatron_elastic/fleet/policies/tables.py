"""Tables: which layouts each system can give an elastic job, and how fast the job is in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache

from megatron_elastic.fleet.job import Job
from megatron_elastic.fleet.simulated.models import GROWTH, Layouts, Model, layouts_of
from megatron_elastic.fleet.speed_table import SpeedTable

Times = Callable[[Layouts], Iterable[tuple[int, float]]]
"""Of all layouts that a system allows: cells, and seconds of a step."""


def _cached(times: Times) -> Callable[[Job], SpeedTable]:
    @cache
    def table(model: Model, devices: int) -> SpeedTable:
        layouts = layouts_of(model, devices)
        best: dict[int, float] = {}
        for cells, seconds in times(layouts):
            best[cells * layouts.cell] = min(seconds, best.get(cells * layouts.cell, seconds))
        return SpeedTable.of(devices, best.__getitem__, best, layouts.even_s(layouts.stages, layouts.width))

    def of(job: Job) -> SpeedTable:
        return SpeedTable.rigid(job.devices) if job.model is None else table(job.model, job.devices)

    return of


def _widths(layouts: Layouts) -> Iterable[tuple[int, float]]:
    for width in range(1, GROWTH * layouts.width + 1):
        yield width * layouts.stages, layouts.even_s(layouts.stages, width)


def _powers(layouts: Layouts) -> Iterable[tuple[int, float]]:
    for width in range(1, GROWTH * layouts.width + 1):
        if width.bit_count() == 1:
            yield width * layouts.stages, layouts.even_s(layouts.stages, width)


def _stages(layouts: Layouts) -> Iterable[tuple[int, float]]:
    for stages in range(layouts.stages, min(layouts.model.units, GROWTH * layouts.stages) + 1):
        yield stages * layouts.width, layouts.even_s(stages, layouts.width)


def _grids(layouts: Layouts) -> Iterable[tuple[int, float]]:
    for stages in range(layouts.stages, min(layouts.model.units, layouts.most_cells) + 1):
        for width in range(1, layouts.most_cells // stages + 1):
            if layouts.model.grains % width == 0:
                yield stages * width, layouts.even_s(stages, width)


def _grids_up(layouts: Layouts) -> Iterable[tuple[int, float]]:
    return ((cells, seconds) for cells, seconds in _grids(layouts) if cells >= layouts.cells)


def _uneven(layouts: Layouts) -> Iterable[tuple[int, float]]:
    for cells in range(layouts.cells, layouts.most_cells + 1):
        yield cells, layouts.uneven_s(cells)


def _sliced(layouts: Layouts) -> Iterable[tuple[int, float]]:
    """Logical workers take turns on the cells of a stage: the cell with most of them says how long a step takes."""
    workers = GROWTH * layouts.width
    for width in range(1, workers + 1):
        rounded = layouts.model.batch * -(-workers // width) / workers
        unsynced = layouts.even_s(layouts.stages, 1, rounded)
        yield width * layouts.stages, unsynced + layouts.model.sync_s(layouts.stages, width, layouts.cell)


data_parallel = _cached(_widths)
"""Other widths of all stages alike."""
powers_of_two = _cached(_powers)
"""Widths that are powers of two."""
pipeline_parallel = _cached(_stages)
"""Other numbers of stages; the width is as submitted."""
both = _cached(_grids_up)
"""Any number of stages, any width that divides the grains; at least the devices submitted."""
plans = _cached(_grids)
"""The same, also with fewer devices."""
uneven = _cached(_uneven)
"""Any number of cells: stages may differ in width, and cells in grains."""
logical_workers = _cached(_sliced)
"""As many logical data-parallel workers as the most cells of a stage, on fewer of them."""
