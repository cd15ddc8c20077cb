"""Tenure: what one layout makes of a member. It is made with the layout and dropped with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_elastic.cluster.messages import Plan
from megatron_elastic.layout import Layout
from megatron_elastic.pipeline.program import Op
from tests.simulation.ranks.store import Store
from tests.simulation.ranks.training.recutting import Preparation


@dataclass(slots=True, eq=False)
class Tenure:
    """What a rank knows only while ``layout`` holds."""

    layout: Layout
    store: Store
    """Outlives the layout; here because a member has one."""
    remainder: Sequence[Op] | None = None
    """What it does of the step in progress, if that is resumed."""
    program: bytes | None = None
    """In what order cells do their work, packed, if not in the usual one."""
    plan: Plan | None = None
    """The layout to switch to that it was told of last."""
    preparation: Preparation | None = None
    """What it gets for that one while training goes on, if cells get another shape."""
    settled: bool = False
    """Whether the coordinator knows that everything the layout asks for is live here."""
