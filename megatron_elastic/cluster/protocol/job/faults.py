"""Faults: what is known of losses, hangs and coordinators before, and where recoveries stand."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec
from immutables import Map
from msgspec.structs import replace

from megatron_elastic.cluster.messages import Committed, Failed, Kept, RankReading, Report, VoteResult, Wanted
from megatron_elastic.cluster.protocol.events import News, Said
from megatron_elastic.cluster.protocol.job.members import Rank
from megatron_elastic.cluster.protocol.job.tables import without
from megatron_elastic.cluster.protocol.salvage import Counted
from megatron_elastic.layout import Layout


class Decided(msgspec.Struct, frozen=True):
    """``forward``: everybody finishes ``step`` with ``vote``. ``back``: everybody redoes it. ``resume``: everybody goes
    on with it from what is ``kept``. ``reload``: everybody goes back to the checkpoint of the step before it.
    """

    decision: str
    step: int
    vote: VoteResult | None = None
    kept: tuple[Kept, ...] = ()
    counted: Counted | None = None
    """How much of the step is kept, for people."""


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """From the first fault until a step commits again (``protocol.recovery``)."""

    noticed: float
    """When the coordinator learnt of the first loss."""
    exits: Map[int, float] = Map()
    """Time at which each lost rank was seen to end."""
    causes: tuple[tuple[int, str | None], ...] = ()
    """What ended each, in the order of the losses; None while that is not known."""
    epochs: tuple[int, ...] = ()
    awaited: Map[int, None] = Map()
    """Whose report is missing."""
    reports: Map[int, Report] = Map()
    collecting: bool = False
    """Whether reports are awaited."""
    decided: Decided | None = None
    gather: bool = False
    """Whether parameters have to be sent to everybody again."""
    back_at: float | None = None
    """When a step committed again."""
    reported: float = 0.0
    plan_ms: float = 0.0
    edit_ms: float = 0.0
    state_ms: float = 0.0


class Suspicion(msgspec.Struct, frozen=True, kw_only=True):
    """A rank that has to prove that it lives (``protocol.suspicion``)."""

    reason: str
    accusers: frozenset[int]
    """Who says so; empty if it is not other ranks."""


class Gathering(msgspec.Struct, frozen=True, kw_only=True):
    """What a new coordinator has learnt of a job that another has begun (``protocol.takeover``)."""

    written: int
    """Number of the last step on record."""
    before: str
    """Where the coordinator before listened."""
    limit: float
    """Seconds that nodes have to come, once it is known that some rank lives."""
    long: bool = False
    """Whether nobody who has come within that has a rank that lives, so that others are waited for."""
    needed: bool = False
    """Whether those who had not come within that have longer, because without them state is lost."""
    running: Map[int, Rank] = Map()
    in_force: Map[int, int] = Map()
    """Epoch of the layout that the ranks of each node are in that has come."""
    asked: int | None = None
    """The node that is to tell the newest of these layouts, and has not."""
    epoch: int = -1
    """That layout's."""
    layout: Layout | None = None
    """It, once somebody has told it."""
    missing: Map[int, int] = Map()
    """Its ranks and spares that nobody who has come runs, with the host of each."""
    newest: int = -1
    """The highest id of a rank that anybody has heard of."""
    committed: Map[tuple[int, int, str, str], Committed] = Map()
    """Steps that may not be on record, each once however many tell it: by step, epoch and what is compared of its vote.
    """
    failed: tuple[Failed, ...] = ()
    wanted: Wanted | None = None
    """The newest that anybody was told of what is asked for."""
    since: float | None = None
    """Since when there was no coordinator."""
    resigned: bool = False
    """Whether the one before has said that it is none any more: nothing is wrong with its node."""
    later: Map[int, Said | News] = Map()
    """What agents said meanwhile, numbered in order, to be heard then."""

    def told(self, layout: Layout) -> Gathering:
        """A layout is known that is newer than what was."""
        missing = {rank: layout.host_of(rank) for rank in (*layout.ranks, *layout.spares) if rank not in self.running}
        return replace(self, asked=None, epoch=layout.epoch, layout=layout, missing=Map(missing))

    def came(self, node: int, running: Mapping[int, Rank], in_force: int) -> Gathering:
        """An agent has come that runs these, which are in the layout of epoch ``in_force``."""
        known = replace(self, running=self.running.update(running), missing=without(self.missing, running),
                        in_force=self.in_force.set(node, in_force))
        return known._asking(node) if in_force > self.epoch else known

    def went(self, node: int, ranks: Collection[int]) -> Gathering:
        """The agent that runs these has gone again."""
        layout, missing = self.layout, self.missing
        if layout is not None:
            missing = missing.update({rank: layout.host_of(rank) for rank in ranks
                                      if rank in layout.places or rank in layout.spares})
        known = replace(self, running=without(self.running, ranks), missing=missing,
                        in_force=without(self.in_force, [node]))
        if node != self.asked:
            return known
        known = replace(known, asked=None, epoch=-1)
        newest = max(known.in_force, key=lambda each: (known.in_force[each], -each), default=None)
        return known if newest is None or known.in_force[newest] < 0 else known._asking(newest)

    def _asking(self, node: int) -> Gathering:
        """It is to tell its layout; no older one is of use."""
        return replace(self, asked=node, epoch=self.in_force[node], layout=None, missing=Map())


class Watch(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a step that does not end (``protocol.hang``)."""

    asked: Map[int, None] = Map()
    """Nodes that are to say how far their ranks have come, and have not."""
    readings: Map[int, RankReading] = Map()
    usual: float | None = None
    """Seconds that a step usually takes, as far as anybody knows."""
    stalled: bool = False
    """Whether all of a stage were seen to stand still a while ago. Who does so a little longer has time again."""
    freed: int = 0
    """Step in which all waited for each other last, and were interrupted."""
    circle: frozenset[int] = frozenset()
    """Ranks that were in each circle of waits in that step."""
