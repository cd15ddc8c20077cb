"""ResiHP (arXiv 2605.06374): who is slow is known by what its work should take, and gets less of it."""

from __future__ import annotations

from megatron_elastic.layout import Layout
from megatron_elastic.plan.costs.cost import Costs
from megatron_elastic.plan.policies.policy import Policy


class Resihp(Policy):
    """A rank's time is held against what its units cost, and not against that of other ranks: a stage that is slow as a
    whole is seen, too. Micro-batches are shared by speed. After a loss, the others of the stage take over.
    """

    name = "resihp"
    idea = "ranks are slow by a predicted time, and get less; a lost one's micro-batches are re-routed (ResiHP, 2026)"

    def usual_ms(self, layout: Layout, stage: int, costs: Costs | None) -> float | None:
        """By costs, if they are known."""
        return None if costs is None else costs.stage_ms(layout, stage)
