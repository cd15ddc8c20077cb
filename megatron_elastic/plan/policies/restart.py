"""Restart (torchrun): all go back to the newest checkpoint, with as many whole replicas of the pipeline as are left."""

from __future__ import annotations

from collections.abc import Collection

from megatron_elastic.layout import Holdings, Layout
from megatron_elastic.plan.choice import SCHEDULES, whole_replicas
from megatron_elastic.plan.costs.cost import Costs
from megatron_elastic.plan.loss import lose
from megatron_elastic.plan.policies.column import Column
from megatron_elastic.plan.policies.policy import Outcome, without_shadows
from megatron_elastic.plan.policies.varuna import restarted
from megatron_elastic.plan.replan import fill


class Restart(Column):
    """Any cells make replicas, as state comes from the checkpoint; the others wait. Stages hold the same units.

    In a job processes stay, so what starting them takes is foreseen and not run. Where there is no checkpoint yet, it
    goes on in place.
    """

    name = "restart"
    idea = "all go back to the newest checkpoint, with the whole replicas that can be made (torchrun)"
    restarts = True

    def lose(
        self, layout: Layout, lost: Collection[int], held: Holdings, epoch: int, costs: Costs | None,
        schedules: Collection[str] = SCHEDULES,
    ) -> Layout:
        """As many cells at every stage."""
        left = without_shadows(lose(layout, lost, held, epoch))
        return fill(left, costs or Costs.assumed(left.units), whole_replicas(left, len(left.cells)), epoch)

    def cells(
        self, layout: Layout, there: int, costs: Costs | None, schedules: Collection[str] = SCHEDULES
    ) -> int:
        """Of whole replicas."""
        return layout.pipeline_size * max(there // layout.pipeline_size, 1)

    def foresee(
        self, layout: Layout, lost: Collection[int], costs: Costs, schedules: Collection[str] = SCHEDULES
    ) -> Outcome:
        """With the time until processes have started, read their state, and computed again what is lost."""
        return restarted(super().foresee(layout, lost, costs, schedules), costs)
