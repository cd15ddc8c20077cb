"""Outlook: the scale table of a job that runs, by its present layout and what its units cost."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from megatron_elastic.layout import Layout
from megatron_elastic.plan.costs.cost import Costs
from megatron_elastic.plan.predict.case import Case
from megatron_elastic.plan.predict.foresight import by_model, by_profile, stand_in
from megatron_elastic.plan.predict.likeness import likened
from megatron_elastic.plan.predict.past import Past, corrected
from megatron_elastic.plan.predict.scale_table import ScaleTable, divisions, scale_table

_COUNTS = 32
"""How many numbers of devices are looked at."""


def outlook(
    layout: Layout, costs: Costs, tokens: int, counts: Iterable[int], sizes: Case | None = None,
    seen: Past | None = None,
) -> ScaleTable:  # fmt: skip
    """The best layout for each of these numbers of devices, as costs have it. ``tokens``: of a step.

    ``seen``: what steps took in layouts that the job has had; it corrects what is predicted of them and their kin.

    ``sizes``: the present layout with those of the model, where they are known. Then the model, on a device like those
    of the job, has its say, too.
    """
    present = stand_in(layout, tokens) if sizes is None else sizes
    predictor = None if sizes is None else likened(sizes, layout, costs)
    tied = layout.is_tied
    profile = corrected(by_profile(costs, layout.units, tied, present), seen or {}, present)
    table = scale_table(
        counts, lambda count: divisions(count, present, [present.tp], [present.chunks]), profile, present=present,
        memory_bytes=costs.memory_bytes, uneven=True,
        second=None if predictor is None else corrected(by_model(predictor), seen or {}, present),
    )  # fmt: skip
    return replace(table, present=sizes)


def around(layout: Layout) -> list[int]:
    """Numbers of devices to look at: whole cells, up to twice as many as there are, evenly spread if those are many."""
    cells = len(layout.cells)
    most = 2 * cells
    some = {max(1, most * each // _COUNTS) for each in range(1, _COUNTS + 1)} if most > _COUNTS else range(1, most + 1)
    return [count * layout.cell_size for count in sorted({*some, cells})]
