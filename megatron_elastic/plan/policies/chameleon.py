"""Chameleon (arXiv 2508.21613): for each loss the policy that computes most until the next one."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress

from megatron_elastic.layout import Holdings, Layout
from megatron_elastic.plan.choice import HORIZON_MS, SCHEDULES, step
from megatron_elastic.plan.costs.cost import Costs
from megatron_elastic.plan.errors import NoLayout
from megatron_elastic.plan.migration import pause_ms
from megatron_elastic.plan.policies.grid import Grid
from megatron_elastic.plan.policies.policy import Policy
from megatron_elastic.plan.policies.recycle import Recycle


class Chameleon(Policy):
    """Re-routing, which goes on at once and is slower for good, or new regular pipelines, which training waits for.

    Each is weighed by a step and by what has to be copied before. Where it is not known what units cost, micro-batches
    are re-routed.
    """

    name = "chameleon"
    idea = "re-routed or new pipelines, whichever computes more until the next loss (Chameleon, arXiv 2508.21613)"

    def lose(
        self, layout: Layout, lost: Collection[int], held: Holdings, epoch: int, costs: Costs | None,
        schedules: Collection[str] = SCHEDULES,
    ) -> Layout:
        """The better one."""
        routed = Recycle().lose(layout, lost, held, epoch, costs, schedules)
        if costs is None:
            return routed
        with suppress(NoLayout):
            renewed = Grid().lose(layout, lost, held, epoch, costs, schedules)
            if _computes(renewed, held, costs, schedules) > _computes(routed, held, costs, schedules):
                return renewed
        return routed

    def uses_all(self, costs: Costs | None) -> bool:
        """Where nothing is weighed."""
        return costs is None

    def cells(
        self, layout: Layout, there: int, costs: Costs | None, schedules: Collection[str] = SCHEDULES
    ) -> int:
        """Others come in if new pipelines of all are faster."""
        now = len(layout.cells)
        if costs is None or there <= now:
            return there
        return max(now, Grid().cells(layout, there, costs, schedules))

    def arranges(self, costs: Costs | None) -> bool:
        """Where more cells may make other pipelines."""
        return costs is not None

    def arrange(
        self, layout: Layout, costs: Costs | None, tied: bool, schedules: Collection[str] = SCHEDULES
    ) -> Layout:
        """New pipelines where they are faster than the present ones."""
        if costs is None:
            return layout
        renewed = Grid().arrange(layout, costs, tied, schedules)
        return renewed if step(renewed, costs, schedules) < step(layout, costs, schedules) else layout


def _computes(layout: Layout, held: Holdings, costs: Costs, schedules: Collection[str]) -> float:
    """Steps until the next loss, after what ``layout`` needs has been copied."""
    return max(0.0, HORIZON_MS - pause_ms(layout, held, costs)) / step(layout, costs, schedules)
