"""Events: what can happen to a job. Each says when, by the coordinator's clock (``time.time()``)."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from megatron_elastic.cluster.messages import AgentHello, Drain, FromRank, RankNews, RankReading, Scale
from megatron_elastic.observe.dials import Figures
from megatron_elastic.plan import Costs
from megatron_elastic.plan.work.order import Order


class Happened(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all events."""

    now: float


class Begun(Happened, frozen=True):
    """Nodes may come from now on."""

    torch_port: int
    """MASTER_PORT of the ranks."""
    key: bytes
    """What ranks of different hosts prove to each other with that they are of this job; 32 random bytes."""
    name: str = ""
    """What the job is called in a store."""
    seats: int = 0
    """Members of an embedded store, which are so many of the first nodes."""


class NodeCame(Happened, frozen=True):
    """An agent has introduced itself; ``node`` is how it is called from now on, a number that no agent had before."""

    node: int
    hello: AgentHello


class NodeAbsent(Happened, frozen=True):
    """The connection to the agent of a node has broken. It may be made again."""

    node: int


class NodeBack(Happened, frozen=True):
    """It was made again, and nothing is lost."""

    node: int


class NodeLost(Happened, frozen=True):
    """The agent of a node is gone, or has been silent, since ``since``."""

    node: int
    cause: str
    since: float


class NodesLost(Happened, frozen=True):
    """Several are, and it was noticed at one moment: it is one fault."""

    lost: tuple[NodeLost, ...]


class Said(Happened, frozen=True):
    """A rank of this node said something, and the ranks of ``also`` the same, each of itself."""

    node: int
    message: FromRank
    also: tuple[int, ...] = ()


class News(Happened, frozen=True):
    """The agent of a node tells what became of the process of one of its ranks."""

    node: int
    news: RankNews


class Inspected(Happened, frozen=True):
    """The agent of a node tells how far its ranks have come."""

    node: int
    readings: tuple[RankReading, ...]
    usual: float | None
    """Seconds that a step usually takes, if that is known there."""


class LayoutTold(Happened, frozen=True):
    """The agent of a node tells the newest layout that its ranks have been in."""

    node: int
    layout: bytes
    """Encoded; empty if there is none."""


class Paced(Happened, frozen=True):
    """The agent of a node tells how fast its ranks are, as far as that is new."""

    node: int
    epoch: int
    paces: dict[int, float]
    """Milliseconds that a grain takes, in the layout of ``epoch``."""


class Metered(Happened, frozen=True):
    """The agent of a node tells what the dials of its ranks show."""

    node: int
    figures: Mapping[int, Figures]


class Asked(Happened, frozen=True):
    """A person asks for something; ``person`` is whom the answer is for."""

    person: int
    request: Scale | Drain


class Leaves(Happened, frozen=True):
    """The agent of a node says that its ranks are to leave."""

    node: int


class Expired(Happened, frozen=True):
    """A timer has run out. ``serial`` is the one that it was set with."""

    name: str
    serial: int


class Costed(Happened, frozen=True):
    """The file of ``--elastic-profile`` has been read, or cannot be."""

    costs: Costs | None
    problem: str


class Clocked(Happened, frozen=True):
    """Clocks for the layout of ``epoch`` are planned: of cells by leader, but for those at the base clock."""

    epoch: int
    clocks: dict[int, float]
    step_ms: float
    base_ms: float
    """Of a step with all at the base clock."""


class ClocksRefused(Happened, frozen=True):
    """The agent of a node cannot set the clocks of its devices."""

    node: int
    reason: str


class Throttled(Happened, frozen=True):
    """Devices of some ranks of a node run at lower clocks than were set: at these."""

    node: int
    clocks: dict[int, float]


class Found(Happened, frozen=True):
    """An order of work has been looked for, for the layout of ``epoch``."""

    epoch: int
    order: Order | None
    """None if there is none, or ``problem`` says why nothing is known of it."""
    seconds: float
    problem: str = ""


class Recorded(Happened, frozen=True):
    """A later coordinator will know that this epoch was begun."""

    epoch: int


class Led(Happened, frozen=True):
    """This coordinator leads, in this term, by word of a store that others can ask if it dies."""

    term: int


class TookOver(Happened, frozen=True):
    """This process coordinates a job that another has begun."""

    term: int
    address: str
    """Where it listens."""
    epoch: int
    """The highest one that was begun, as the store knows."""
    written: int
    """Number of the last step on record; -1 if there are no records here."""
    before: str
    """Where the coordinator before it listened; empty if that is not known."""
    limit: float
    """Seconds that agents have to come."""
    name: str = ""
    """What the job is called in a store."""
    members: tuple[str, ...] = ()
    """Of an embedded store."""


class Seated(Happened, frozen=True):
    """A node is a member of the embedded store from now on."""

    node: int
    members: tuple[str, ...]
    """All there are."""


class Sent(Happened, frozen=True):
    """The decision of this epoch is on its way to the ranks."""

    epoch: int


class Troubled(Happened, frozen=True):
    """An effect could not be carried out. ``fatal``: the job cannot go on without it."""

    what: str
    fatal: bool


class Ended(Happened, frozen=True):
    """Somebody or something outside ends the job."""

    ok: bool
    reason: str


class Unheard(Happened, frozen=True):
    """What happened could not be worked into the job, which is as it was before."""

    event: Happened
    traceback: str


Event = (
    Begun | NodeCame | NodeAbsent | NodeBack | NodeLost | NodesLost | Said | News | Inspected | LayoutTold | Paced
    | Metered | Leaves | Asked | Expired | Costed | Clocked | ClocksRefused | Throttled | Found | Recorded | Led
    | TookOver | Seated | Sent | Troubled | Ended | Unheard
)
