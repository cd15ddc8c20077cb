"""Paused: what elastic comes to, at once. Training waits until all that moves has been copied."""

from __future__ import annotations

from collections.abc import Collection

from megatron_elastic.layout import Holdings, Layout
from megatron_elastic.plan.choice import SCHEDULES, best, ways
from megatron_elastic.plan.costs.cost import Costs
from megatron_elastic.plan.growth import even
from megatron_elastic.plan.policies.elastic import Elastic
from megatron_elastic.plan.policies.policy import Policy, without_shadows


class Paused(Elastic):
    """To tell what it gives that layers and cells move in the background."""

    name = "elastic-paused"
    idea = "as elastic, but training waits until units and cells have moved"

    def lose(
        self, layout: Layout, lost: Collection[int], held: Holdings, epoch: int, costs: Costs | None,
        schedules: Collection[str] = SCHEDULES,
    ) -> Layout:
        """The best way of all; what it needs is copied before training goes on."""
        stay = Policy.lose(self, layout, lost, held, epoch, costs, schedules)  # not as elastic, which weighs ways, too
        if costs is None:
            return stay
        left = without_shadows(stay)
        return even(best(ways(left, costs, left.is_tied, schedules)).layout, epoch)
