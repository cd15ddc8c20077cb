"""Job: all that the coordinator knows, as one immutable value.

Tables are persistent maps (``immutables.Map``): a new job shares with the old one all that has not changed, so an event
costs what it touches, whatever the number of ranks. A map to None is a set.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import TypeVar

import msgspec
from immutables import Map
from msgspec.structs import replace

from megatron_elastic.cluster.messages import (
    Committed,
    Damage,
    Failed,
    Finished,
    Hello,
    Kept,
    RankReading,
    Report,
    VoteResult,
    Wanted,
    Where,
)
from megatron_elastic.cluster.protocol.events import News, Said
from megatron_elastic.cluster.protocol.salvage import Counted
from megatron_elastic.layout import Layout, SlicePart, UnitShape
from megatron_elastic.observe.progress import Progress
from megatron_elastic.plan import Costs, Sample
from megatron_elastic.plan.costs.cost import UnitCost
from megatron_elastic.plan.policies import POLICIES, Policy
from megatron_elastic.plan.work.order import Order

K = TypeVar("K")
V = TypeVar("V")


def without(table: Map[K, V], keys: Iterable[K]) -> Map[K, V]:
    """A map without some keys, whether they were there or not."""
    left = table.mutate()
    for key in keys:
        left.pop(key, None)
    return left.finish()


class Outcome(msgspec.Struct, frozen=True):
    """How a job ended; ``reason`` is for people, ``code`` what the launchers end with if it failed."""

    ok: bool
    reason: str
    code: int = 1


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What of ``config.ElasticConfig`` the protocol looks at; times in seconds."""

    elastic: bool
    respawn: bool
    replay: str
    profile: str | None
    start_timeout: float
    suspect_timeout: float
    report_timeout: float
    wait_timeout: float
    heartbeat_timeout: float
    hang_timeout: float = 5.0
    redo: str = "lost"
    on_error: str = "recover"
    slow: str = "share"
    spares: int = 0
    policy: str = "elastic"
    schedule: str = "1f1b"
    places: bool = False
    """Whether a search of orders may place chunks otherwise."""
    dvfs: str | None = None


class Rank(msgspec.Struct, frozen=True, kw_only=True):
    """One rank, alive or not."""

    node: int | None = None
    """Whose agent runs it; None until one has come."""
    local_rank: int = 0
    host: int = 0
    """Its failure domain: the node's number, counting nodes that came later on."""
    joined: bool = True
    """It has had a part in training, if only as a spare."""
    starts: int = 1
    """How often it was started, all but the last time to no avail, before training began."""
    spawned: float | None = None
    """When it was started, if training had begun by then."""
    standby: bool = False
    """It has no part in training and holds nothing that others need: it is not interrupted when somebody dies."""
    hello: Hello | None = None
    returncode: int | None = None
    lost: bool = False
    dying: float | None = None
    """Since when it is being taken down by the kernel, while what killed it is not known yet."""
    stopped: float | None = None
    """Since when its process is there but does not run."""
    how: str = ""
    """What stopped it, for people."""
    fenced: str | None = None
    """Why it was killed, in a word, if it was."""
    accused: bool = False
    """Whether some rank could not reach it, and waits for the interrupt that follows."""


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """An agent that is there."""

    node_rank: int
    host: str
    slots: int
    address: str = ""
    """Where it listens when it coordinates."""
    member: str = ""
    """Where it listens as a member of an embedded store."""
    ranks: tuple[int, ...] = ()
    """What it has been asked to start, ever."""
    launched: bool = False
    """Whether it was asked to start ranks of the beginning."""
    absent: float | None = None
    """Since when there is no connection."""
    strikes: int = 0
    """How many ranks in a row died here soon after they were started to join."""
    broken: tuple[int, ...] = ()
    """Local ranks whose devices have failed, and are out of use."""


class Raised(msgspec.Struct, frozen=True):
    """What the program raised on a rank, in a step, in the layout of ``epoch``; or that it hung there."""

    rank: int
    step: int
    epoch: int
    traceback: str
    hung_at: tuple[str, int | None] | None = None
    """Hook point and grain where it hung; None if it raised."""
    short: str = ""
    """The device whose memory was short, if that is why."""
    unheard: bool = False
    """It raised nothing: what it said could not be worked into the job."""

    @property
    def summary(self) -> str:
        """Its last line."""
        return self.traceback.rstrip().rpartition("\n")[2]

    def __str__(self) -> str:
        text = self.traceback.rstrip()
        if self.unheard:
            return f"what rank {self.rank} said could not be heard: {text}"
        separator = "\n" if "\n" in text else " "
        how = "raised" if self.hung_at is None else "hung"
        what = f"memory of {self.short} was short" if self.short else f"the program {how}"
        return f"{what} on rank {self.rank}:{separator}{text}"


class Entry(msgspec.Struct, frozen=True):
    """A committed step that waits for its predecessor."""

    vote: VoteResult
    epoch: int
    world_size: int
    time: float


class Told(msgspec.Struct, frozen=True):
    """The vote of a step, as somebody told it who was in the layout of ``epoch``."""

    vote: VoteResult
    epoch: int
    cast: int
    """Epoch of the layout whose members have voted; the later ones only finished the step, as far as is known."""


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    """The committed steps, and the votes of the latest ones (``protocol.ledger``)."""

    written: int
    """Number of the last step whose line was written."""
    total: int
    previous_time: float
    votes: Map[int, Told] = Map()
    pending: Map[int, Entry] = Map()
    recalled: int = -1
    """``written`` when agents were asked for the next step that is missing."""


class Trust(msgspec.Struct, frozen=True, kw_only=True):
    """Which copies and which checkpoints training may go on from (``protocol.damage``)."""

    saves: tuple[int, ...] = ()
    """Steps of the complete checkpoints, ascending."""
    doubtful: Map[int, int] = Map()
    """Step whose checkpoint may have damage in it -> epoch of the layout in which that was found."""
    found: Map[Damage, int] = Map()
    """Damage since which no step has committed -> epoch of the layout in which it was found last."""
    damaged: Map[tuple[int, SlicePart], None] = Map()
    """(rank, part of a slice) of copies that have not been replaced yet."""
    verified: int | None = None
    """Step of the newest state that can be trusted, if damage says that the present one cannot."""

    @property
    def healing(self) -> bool:
        """Whether the weights of some rank are not to be trusted."""
        return bool(self.found)

    @property
    def newest_save(self) -> int:
        """Step of the newest complete checkpoint; 0 without one."""
        return self.saves[-1] if self.saves else 0


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


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A layout that is planned, until it is true or a loss overtakes it (``protocol.change``)."""

    layout: Layout
    goal: Layout | None
    """What ``layout`` is to lead to, if that is another one."""
    entrants: frozenset[int]
    """Ranks that are in no cell yet."""
    missing: frozenset[int]
    """Entrants that are still building; if it reshapes cells, once announced, the ranks that have not all they need."""
    reshapes: bool = False
    """Whether its cells have another shape: then it comes into force when all ranks have what they need for it."""
    program: bytes | None = None
    """In what order cells do their work there, packed, if not in the usual one."""
    announced: bool = False
    """Whether the ranks that train have been told; from then on they may switch at the end of any step."""


class Arrangement(msgspec.Struct, frozen=True, kw_only=True):
    """Which units each stage should hold, as somebody asked for it or as costs suggest (``protocol.arrangement``)."""

    stages: int | None = None
    """Number of pipeline stages that somebody has asked for."""
    placed: tuple[tuple[int, ...], ...] | None = None
    """Units of each stage, if a search of orders has found that chunks should be placed so, until they are."""
    cells: int | None = None
    """Number of cells that somebody has asked for: ``Layout.most_cells``, as soon as a layout says so."""
    shape: tuple[int, int, int] | None = None
    """Tensor-, context- and expert-parallel size that somebody has asked for, until cells have them."""
    costs: Costs | None = None
    samples: Map[int, Sample] = Map()
    """What each rank measured last under the present layout."""
    at_clocks: Map[tuple[int, float], UnitCost] = Map()
    """What was measured last of each unit at each clock, in a job that sets clocks."""
    fitted: bool = True
    """Whether ``costs`` are of that."""
    tabulated: tuple[int, Costs] | None = None
    """The epoch and the costs by which the scale table was made last."""
    fits: bool = False
    """Whether units have been where they cost least since ranks last came or went."""
    weighed: tuple[int, ...] = ()
    """The ranks for which it was last written down what else there could be."""
    number: int = 0
    """How often what somebody has asked for has changed (``Wanted``)."""


class Ordering(msgspec.Struct, frozen=True, kw_only=True):
    """In what order cells do their work (``protocol.ordering``)."""

    epoch: int = -1
    """Of the layout that was begun in the order of ``program``; all others were in the usual one."""
    program: bytes | None = None
    """Packed; None: the usual one."""
    sought: Layout | None = None
    """The layout for which an order was looked for last; what cells do in it counts, not its epoch."""
    costs: Costs | None = None
    """By which."""
    before: bytes | None = None
    """The order that cells had, or would have there."""
    searching: bool = False
    """Whether it is being looked for."""
    better: Order | None = None
    """What was found, if it is better than that."""


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


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """How fast cells are (``protocol.pace``). Cells are named by their leaders."""

    clocks: Map[int, float] = Map()
    """At which ranks run that were told to run at another than the base clock."""
    measured: Map[int, float] = Map()
    """Milliseconds that a grain takes on each rank, in the present layout and at these clocks."""
    told: Map[int, None] = Map()
    """Ranks that were measured since cells were compared last."""
    settled: Map[int, None] = Map()
    """Ranks that have told of their units since clocks were set: what comes next is of these clocks alone."""
    believed: Map[int, float] = Map()
    """How many times as long as usual a grain takes at the same clock, in cells where that is not once."""
    fixed: frozenset[int] = frozenset()
    """Nodes that cannot set clocks."""
    better: Map[int, int] = Map()
    """Cells that have been faster than was believed, since which step."""
    strikes: Map[int, int] = Map()
    """How often each has become slow."""
    lasts_at: int | None = None
    """Step at which layers are to be weighed by what is believed now, if that has not been done."""
    evicted: Map[int, int] = Map()
    """Ranks that were taken out because they are slow, with the cell of each."""


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
