"""Tenure: what one layout makes of a member. It is made with the layout and dropped with it, and all that is in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_elastic.adaptor.model.grains import GrainModel
from megatron_elastic.adaptor.training.recutting import Preparation
from megatron_elastic.cluster.messages import Plan
from megatron_elastic.comm.group import Group
from megatron_elastic.layout import Layout
from megatron_elastic.pipeline.executor import Executor
from megatron_elastic.pipeline.resumption import Remainder
from megatron_elastic.pipeline.route import Leg, first_of
from megatron_elastic.state.reduction import Reduction
from megatron_elastic.state.replay import Replay
from megatron_elastic.state.store import StateStore
from megatron_elastic.state.verification import Verification


@dataclass(slots=True, eq=False)
class Tenure:
    """What a rank computes, sends and receives in the steps of ``layout``, and what it knows only while that holds.

    Where it stands in the layout, as far as the coordinator or other ranks have to know, is in its ``Standing``.
    """

    layout: Layout
    since: int
    """Epoch since which it has done with a grain what it does here."""
    store: StateStore
    """Outlives the layout; here because a member has one."""
    reduction: Reduction
    replay: Replay
    verification: Verification | None
    legs: tuple[Leg, ...]
    """What it does in a step with a full batch."""
    grains: GrainModel
    executor: Executor
    vote_group: Group
    speaker: int
    """The lowest rank of the layout on this host: it tells the agent of each step."""
    level: bool = False
    """Whether all of its ranks have what some had not (``step.level``)."""
    remainder: Remainder | None = None
    """What it does of the step in progress instead, if that is resumed."""
    plan: Plan | None = None
    """The layout to switch to that it was told of last."""
    preparation: Preparation | None = None
    """What it gets for that one while training goes on, if cells get another shape."""
    copying: bool = False
    """Whether copies had to be made for the layout, to or from this rank."""
    settled: bool = False
    """Whether the coordinator knows that everything the layout asks for is live here."""
    boundary_ms: float | None = None
    """Time of an activation to the next stage, when last measured."""

    def legs_of(self, grains: int) -> tuple[Leg, ...]:
        """What it does in a step of the first ``grains`` grains, which may be nothing."""
        return self.legs if grains == self.layout.num_grains else first_of(self.legs, grains)

    def await_units(self, units: Sequence[str]) -> None:
        """Return when the parameters of these units are here."""
        for name in units:
            self.reduction.await_parameters(self.layout.units.index(name))
