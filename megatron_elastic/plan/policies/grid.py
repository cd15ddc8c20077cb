"""Grid: regular pipelines, of as many cells at every stage, for whatever number of cells is left."""

from __future__ import annotations

from collections.abc import Collection

from megatron_elastic.layout import Holdings, Layout
from megatron_elastic.plan.choice import SCHEDULES, fastest_grid
from megatron_elastic.plan.costs.cost import Costs
from megatron_elastic.plan.loss import lose
from megatron_elastic.plan.policies.policy import Policy, without_shadows
from megatron_elastic.plan.replan import fill


class Grid(Policy):
    """The fastest regular pipeline that the cells make at all times; those that are left over wait."""

    def uses_all(self, costs: Costs | None) -> bool:
        """Not those that are left over."""
        return False

    def lose(
        self, layout: Layout, lost: Collection[int], held: Holdings, epoch: int, costs: Costs | None,
        schedules: Collection[str] = SCHEDULES,
    ) -> Layout:
        """The regular pipeline at once: what it needs is copied before training goes on."""
        left = without_shadows(lose(layout, lost, held, epoch))
        known = costs or Costs.assumed(left.units)
        graph = fastest_grid(left, len(left.cells), known, left.is_tied, schedules)
        return fill(left, known, graph, epoch)

    def cells(
        self, layout: Layout, there: int, costs: Costs | None, schedules: Collection[str] = SCHEDULES
    ) -> int:
        """Those of the fastest one."""
        known = costs or Costs.assumed(layout.units)
        return sum(fastest_grid(layout, there, known, layout.is_tied, schedules).widths)

    def arranges(self, costs: Costs | None) -> bool:
        """Always: more cells may make another one."""
        return True

    def arrange(
        self, layout: Layout, costs: Costs | None, tied: bool, schedules: Collection[str] = SCHEDULES
    ) -> Layout:
        """The fastest one."""
        known = costs or Costs.assumed(layout.units)
        return fill(layout, known, fastest_grid(layout, len(layout.cells), known, tied, schedules), layout.epoch)

