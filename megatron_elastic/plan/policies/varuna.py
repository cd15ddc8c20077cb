"""Varuna (EuroSys'22): job morphing. The best regular pipeline for what is left, entered through a checkpoint."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from megatron_elastic.layout import Layout
from megatron_elastic.plan.choice import SCHEDULES
from megatron_elastic.plan.costs.cost import Costs
from megatron_elastic.plan.policies.grid import Grid
from megatron_elastic.plan.policies.policy import Outcome

START_MS = 60_000.0
"""Assumed for ending all processes and starting others, until they read their checkpoint."""
CHECKPOINT_MS = 600_000.0
"""Assumed from one checkpoint to the next; half of it is computed again."""


class Varuna(Grid):
    """Where a job runs under it, the layout changes in place, as for others; what is foreseen has a restart's time."""

    name = "varuna"
    idea = "all restart from a checkpoint as the best regular pipeline for what is left (Varuna, EuroSys'22)"

    def foresee(
        self, layout: Layout, lost: Collection[int], costs: Costs, schedules: Collection[str] = SCHEDULES
    ) -> Outcome:
        """The regular pipeline, after processes have started, read their state, and computed again what is lost."""
        return restarted(super().foresee(layout, lost, costs, schedules), costs)


def restarted(found: Outcome, costs: Costs) -> Outcome:
    """The same, entered by processes that start, read their state of a checkpoint, and compute again what is lost."""
    layout = found.layouts[0]
    widths = {unit: stage.width for stage in layout.stages for unit in stage.units}
    read = max(
        sum(costs.units[unit].parameter_bytes + costs.units[unit].optimizer_bytes / widths[unit]
            for unit in stage.units)
        for stage in layout.stages
    )  # fmt: skip
    pause_ms = START_MS + costs.transfer_ms(read) + CHECKPOINT_MS / 2
    return replace(found, interim=None, pause_ms=pause_ms, background_ms=0.0)
