"""Bamboo (NSDI'23): every cell also computes what the next one computes, so that it can take its place."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from megatron_elastic.layout import Cell, Layout
from megatron_elastic.plan.choice import SCHEDULES
from megatron_elastic.plan.costs.cost import Costs
from megatron_elastic.plan.errors import ADVICE, NoLayout
from megatron_elastic.plan.policies.column import columns
from megatron_elastic.plan.policies.policy import Outcome, Policy, apart
from megatron_elastic.plan.work.quotas import quotas


class Bamboo(Policy):
    """The predecessor of a lost cell has its successor's weights and computes both stages from then on.

    Forwards of the successor's layers are computed in bubbles as long as nothing is lost, and cost time where they do
    not fit. A pipeline that loses two cells in a row cannot go on: the others take over its micro-batches.
    """

    name = "bamboo"
    idea = "cells compute their successor's forwards redundantly, and take its place (Bamboo, NSDI'23)"
    refusal = (
        "a cell computes one stage here, and nothing twice: neither redundant forwards nor a cell that stands for two "
        "stages of one pipeline is a layout"
    )

    def foresee(
        self, layout: Layout, lost: Collection[int], costs: Costs, schedules: Collection[str] = SCHEDULES
    ) -> Outcome:
        """Each replica is a pipeline of its own, in which the lost cells' stages are their predecessors'."""
        dead = {*lost, *layout.lost}
        pipelines = [
            merged for column in columns(layout) if (merged := _merged(layout, column, dead)) is not None
        ]
        if not pipelines:
            raise NoLayout(f"each pipeline has lost two cells in a row: {ADVICE}")
        given = quotas(layout.num_grains, [1.0] * len(pipelines), [0] * len(pipelines))
        return Outcome(
            tuple(apart(layout, stages, grains) for stages, grains in zip(pipelines, given, strict=True) if grains),
            redundant=True,
        )


def _merged(layout: Layout, column: Sequence[Cell], dead: Collection[int]) -> list[tuple[int, ...]] | None:
    """The units of each cell that a pipeline has left; None if two in a row are lost. The first follows the last."""
    lost = [not set(dead).isdisjoint(cell.ranks) for cell in column]
    if all(lost) or any(lost[at] and lost[at - 1] for at in range(len(lost)) if len(lost) > 1):
        return None
    stages: list[tuple[int, ...]] = []
    first: tuple[int, ...] = ()
    for index, (stage, gone) in enumerate(zip(layout.stages, lost, strict=True)):
        if not gone:
            stages.append(stage.units)
        elif index:
            stages[-1] = tuple(sorted({*stages[-1], *stage.units}))
        else:
            first = stage.units
    if first:  # the last cell's successor is the first; which cell it is that computes two stages makes no difference
        stages[0] = tuple(sorted({*first, *stages[0]}))
    return stages

