"""Job: all that the coordinator knows, as one immutable value.

Tables are persistent maps (``immutables.Map``): a new job shares with the old one all that has not changed, so an event
costs what it touches, whatever the number of ranks. A map to None is a set.
"""

from __future__ import annotations

import dataclasses

import msgspec
from immutables import Map

from megatron_elastic.cluster.messages import Finished, Hello, Where
from megatron_elastic.cluster.protocol.job.changes import Arrangement, Change, Ordering, Pace
from megatron_elastic.cluster.protocol.job.faults import Gathering, Recovery, Suspicion, Watch
from megatron_elastic.cluster.protocol.job.members import Node, Raised, Rank
from megatron_elastic.cluster.protocol.job.settings import Settings
from megatron_elastic.cluster.protocol.job.steps import Ledger, Trust
from megatron_elastic.layout import Layout, UnitShape
from megatron_elastic.observe.progress import Progress
from megatron_elastic.plan import Costs
from megatron_elastic.plan.policies import POLICIES, Policy


class Outcome(msgspec.Struct, frozen=True):
    """How a job ended; ``reason`` is for people, ``code`` what the launchers end with if it failed."""

    ok: bool
    reason: str
    code: int = 1


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """All that the coordinator knows."""

    settings: Settings
    world_size: int
    """Ranks that the job begins with."""
    torch_port: int = 0
    key: bytes = b""
    """With which messages between hosts are sealed."""
    outcome: Outcome | None = None
    term: int = 0
    """In which this coordinator leads; 0: there is no store to say so, and nobody to fail over to."""
    gathering: Gathering | None = None
    """Until a new coordinator knows the job."""
    name: str = ""
    """What the job is called in the store."""
    seats: int = 0
    """How many members an embedded store begins with."""
    members: tuple[str, ...] = ()
    """Members of an embedded store, once training has begun."""
    recorded: int = 0
    """Highest epoch that a later coordinator would know of: what was decided in higher ones is not sent yet."""
    errors: tuple[Raised, ...] = ()
    """Of the last steps, on ranks that have left because of that."""
    watch: Watch = Watch()
    timers: Map[str, int] = Map()
    """Those that run, with the serial each was set with."""
    serial: int = 0
    nodes: Map[int, Node] = Map()
    """Those whose agents are there."""
    here: int = 0
    """The node whose process this coordinator is in; 0: none."""
    leaving: frozenset[int] = frozenset()
    """Those whose ranks are to leave (``protocol.drain``)."""
    early: tuple[tuple[int, int], ...] = ()
    """Nodes that are to join and came before training began, with the ranks of each."""
    unplaced: int = 0
    """Ranks of the beginning that have no node yet."""
    launched: bool = False
    """Whether every rank of the beginning has a node."""
    hosts: int = 0
    """Failure domains that there ever were."""
    ranks: Map[int, Rank] = Map()
    """All that there ever were; ids are given in order and never reused."""
    questions: Map[int, Map[int, Where]] = Map()
    """By rank that does not listen for other hosts yet: who of them has asked where it is, and what."""
    silent: int = 0
    """Ranks of the beginning that have not said hello."""
    first: Hello | None = None
    """What rank 0 said; all others must agree with it."""
    layout: Layout | None = None
    """The newest one that is in force; None until all ranks came up."""
    since: Map[int, int] = Map()
    """Ranks of the layout, each with the epoch of the first of the layouts that it has been in without a gap."""
    epoch: int = 0
    """The one that was begun last; the layout's, or that of a recovery which has none yet."""
    newest_epoch: int = 0
    """The highest one ever given to a layout; ``epoch`` stays behind it while a change is planned."""
    interrupted: int = 0
    """Epoch of the newest interrupt."""
    shapes: Map[int, UnitShape] = Map()
    """Of the units that some rank has built."""
    ledger: Ledger | None = None
    """None until all ranks came up."""
    trust: Trust = Trust()
    suspicions: Map[int, Suspicion] = Map()
    injected: Map[int, float] = Map()
    """When ranks announced their own end."""
    recovery: Recovery | None = None
    change: Change | None = None
    goal: Layout | None = None
    """What the present layout is to lead to, if something is under way."""
    told: bool = True
    """Whether people know that the layout has become as good as it can be."""
    unsettled: Map[int, None] = Map()
    """Ranks of the layout where something that it asks for is not live yet."""
    settled: Map[int, int] = Map()
    """Newest epoch for which all is live at a rank."""
    arrangement: Arrangement = Arrangement()
    ordering: Ordering = Ordering()
    pace: Pace = Pace()
    copies: Map[int, tuple[int, int, int]] = Map()
    """Of ranks that get copies in the background: epoch of the layout that asks for them, bytes that are there, all."""
    progress: Progress = Progress()
    """With what takes long besides training."""
    finished: Map[int, Finished] = Map()
    unfinished: Map[int, None] = Map()
    """Ranks of the layout that have not finished, once one has."""

    @classmethod
    def new(cls, settings: Settings, world_size: int) -> Job:
        """A job of so many ranks that has not begun."""
        return cls(settings=settings, world_size=world_size, unplaced=world_size, silent=world_size,
                   ranks=Map({rank: Rank() for rank in range(world_size)}))

    @property
    def policy(self) -> Policy:
        """What is made of losses and joins (``--elastic-policy``)."""
        return POLICIES[self.settings.policy]

    @property
    def slow(self) -> dict[int, float]:
        """How many times as long as usual a grain takes in the present cells where that is not once, by leader."""
        there = {} if self.layout is None else self.layout.cells
        return {rank: times for rank, times in self.pace.believed.items() if rank in there}

    @property
    def costs(self) -> Costs | None:
        """What units cost, and which cells are slow; None: it is not known."""
        return None if self.arrangement.costs is None else dataclasses.replace(self.arrangement.costs, slow=self.slow)

    @property
    def alive(self) -> tuple[int, ...]:
        """Ranks that have a part in the job, ascending."""
        return tuple(sorted(rank for rank, each in self.ranks.items() if not each.lost and not each.standby))

    @property
    def lost(self) -> tuple[int, ...]:
        """Ranks that are dead, ascending."""
        return tuple(sorted(rank for rank, each in self.ranks.items() if each.lost))

    @property
    def collecting(self) -> bool:
        """Whether reports are awaited."""
        return self.recovery is not None and self.recovery.collecting

    @property
    def idle(self) -> bool:
        """Whether nothing is going on that changes the layout."""
        return self.outcome is None and self.recovery is None and self.change is None
