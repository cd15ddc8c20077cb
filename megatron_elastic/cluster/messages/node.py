"""What agents and the coordinator say to each other; most of it is from or to a rank."""

from __future__ import annotations

import msgspec

from megatron_elastic.cluster.messages.common import Kept, Message, Stop
from megatron_elastic.cluster.messages.from_rank import Committed, Failed, FromRank, Hello
from megatron_elastic.layout import UnitShape
from megatron_elastic.observe.dials import Figures


class Running(msgspec.Struct, frozen=True, kw_only=True):
    """A rank of a node that is running already when the agent introduces itself to a coordinator."""

    rank: int
    local_rank: int
    hello: Hello | None
    """What it said first, if it has."""


class Wanted(Message, frozen=True):
    """What somebody has asked for with ``megatron-elastic scale``, for agents to keep: a later coordinator is to know.

    What is None was not asked for, or is there already.
    """

    number: int
    """One more whenever this changes: the highest is the newest."""
    stages: int | None
    """Of the pipeline."""
    ranks: int | None
    """As many as the cells that were asked for have."""
    shape: tuple[int, int, int] | None
    """Tensor-, context- and expert-parallel size."""


class Past(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent knows of a job whose coordinator is gone, for the next one."""

    in_force: int
    """Epoch of the newest layout that its ranks have been in, which has one layout; -1 if there is none. Who is asked
    for it (``TellLayout``) tells it: it is long, and most agents have the same one.
    """
    told: bool
    """Whether no other was sent there since: what comes after it can be told as the difference."""
    epoch: int
    """The highest one that was begun, as far as its ranks have been told."""
    newest: int
    """The highest id of a rank, as far as it or its ranks have been told."""
    torch_port: int
    key: bytes
    """That of ``Start``."""
    shapes: dict[int, UnitShape]
    recorded: int
    """Steps up to this one are on record, as it was told."""
    committed: list[Committed]
    """Later steps."""
    alone_since: float
    """Since when it has no coordinator."""
    resigned: bool = False
    """Whether the last one said so itself: nothing is wrong with its node."""
    failed: list[Failed] = msgspec.field(default_factory=list)
    """What its ranks have raised lately, in steps."""
    wanted: Wanted | None = None
    """What it was told last that somebody has asked for."""


class AgentHello(Message, frozen=True):
    """An agent introduces itself and the ranks that it would start, or has started for another coordinator.

    When it comes while the job runs, the ranks that it would start join, under ids that the coordinator gives them.
    """

    session: str
    """Names this agent's dealings with one coordinator. Who says it again has lost the connection, and goes on."""
    node_rank: int
    slots: int
    """Ranks that it can run."""
    host: str
    heartbeat_timeout: float
    """Must be the coordinator's: who sends more rarely than the other expects would seem dead."""
    address: str = ""
    """Where it listens when it coordinates, ``host:port``; empty if it cannot."""
    member: str = ""
    """Where it listens as a member of an embedded store."""
    running: list[Running] = msgspec.field(default_factory=list)
    past: Past | None = None
    """What it knows of the job, if it has ranks already."""
    leaving: bool = False
    """Whether it has said before that its ranks are to leave."""
    here: bool = False
    """Whether the coordinator is in its process."""
    broken: list[int] = msgspec.field(default_factory=list)
    """Local ranks whose devices have failed: nothing is to be started there any more."""


class Said(Message, frozen=True):
    """What a rank said."""

    message: FromRank
    also: list[int] = msgspec.field(default_factory=list)
    """Other ranks of the node that have said the same, each of itself."""


class RankDying(Message, frozen=True):
    """A rank's process has begun to die, by a signal or a crash; ``RankExited`` follows when it is gone."""

    rank: int
    time: float


class RankExited(Message, frozen=True):
    """A rank's process ended. ``returncode`` as in ``subprocess``: negative means by that signal."""

    rank: int
    returncode: int
    time: float
    cause: str = ""
    """Why, for people, if ``returncode`` does not say: it could not be started, or what starts ranks has ended."""


class RankStopped(Message, frozen=True):
    """A rank's process was stopped and does not run, for instance by SIGSTOP; ``how`` is for people."""

    rank: int
    how: str
    time: float


class RankResumed(Message, frozen=True):
    """A stopped rank's process runs again."""

    rank: int
    time: float


class RankClosed(Message, frozen=True):
    """A rank has closed its line to the agent although its process has not ended: nothing more will come from it."""

    rank: int
    time: float


class Inspect(Message, frozen=True):
    """How far have this node's ranks come? The answer is ``Inspected``."""


class TellLayout(Message, frozen=True):
    """Which layout are this node's ranks in? The answer is ``LayoutTold``."""


class LayoutTold(Message, frozen=True):
    """Answer to ``TellLayout``."""

    layout: bytes
    """The newest one that its ranks have been in, encoded; empty if there is none."""


class RankReading(msgspec.Struct, frozen=True, kw_only=True):
    """How far a rank has come, as its agent sees it without asking (``faults.odometer``)."""

    rank: int
    stood: float
    """Seconds since it has come any further; those in which it did not get a processor do not count."""
    at: str
    """The hook point that it has passed last; empty before the first."""
    step: int
    grain: int | None
    waits: int | None
    """The rank that it waits for, ``odometer.COORDINATOR`` or ``odometer.DISK``; None if it does not wait."""
    patient: bool
    """Whether what it does may take long: it begins, or builds."""


class Inspected(Message, frozen=True):
    """Answer to ``Inspect``."""

    readings: list[RankReading]
    usual: float | None
    """Seconds that a step usually takes, if that is known on this node."""


class Paced(Message, frozen=True):
    """What a grain takes on ranks of this node, if that is new."""

    epoch: int
    """Of the layout in which it was measured."""
    paces: dict[int, float]
    """Rank -> milliseconds in which it does not wait, forward and backward together."""


class Metered(Message, frozen=True):
    """What the dials of this node's ranks show: every few seconds, and when there is news of copies."""

    figures: dict[int, Figures]


class Leaving(Message, frozen=True):
    """This node's ranks are to leave: its machine is about to be taken away. ``Stop`` says that they have."""


class Leave(Message, frozen=True):
    """This node's ranks are to leave, because somebody has asked for it: a later coordinator is to know that, too."""


class Heartbeat(Message, frozen=True):
    """Both ways: the sender still runs. Sent whatever else is."""

    recorded: int = 0
    """From the coordinator: steps up to this one are on record and need not be kept."""


class Launch(Message, frozen=True):
    """Start these ranks now."""

    ranks: dict[int, int]
    """Local rank -> rank. Ranks that are started while the job runs have ids that nobody had before."""
    world_size: int
    """Ranks of the job at its start."""
    first_host: int
    """Those of them that were on the first host; 0 if the job has not begun, and all nodes are alike."""
    torch_port: int
    """MASTER_PORT of every rank: free on the first node, for programs that call ``init_process_group`` themselves."""


class Given(Message, frozen=True):
    """Ranks have ids up to this one: whoever coordinates later must not give one of them again."""

    newest: int


class Fence(Message, frozen=True):
    """Kill this rank; it was suspected and must not come back."""

    rank: int
    stack: bool = False
    """Write down first what it is doing, if that can be seen."""
    device: bool = False
    """Its device is out of use: no rank is to be started there."""


class SetClocks(Message, frozen=True):
    """Let these ranks' devices run at these clocks, as multiples of the base clock, and draw no more than these watts,
    where they can be told so; and all others as they did before any was set.
    """

    clocks: dict[int, float]
    watts: dict[int, float]


class ClocksRefused(Message, frozen=True):
    """The clocks of this node's devices cannot be set, or not be set back."""

    reason: str


class Throttled(Message, frozen=True):
    """Devices of these ranks run at lower clocks than were set: at these."""

    clocks: dict[int, float]


class Recall(Message, frozen=True):
    """Tell again which steps were committed ``after`` this one, as far as they are kept."""

    after: int


class Members(Message, frozen=True):
    """Training has begun: who coordinates is from now on said by a store."""

    addresses: list[str]
    """Members of an embedded one."""
    name: str
    """What the job is called in another."""
    term: int
    """The sender's; 0 if it was not elected."""


class Seat(Message, frozen=True):
    """This node is a member of the embedded store from now on, in the place of one that is lost."""

    addresses: list[str]
    """All members, this one included."""


class Resigned(Message, frozen=True):
    """The sender coordinates no longer, because its store is away or lets another lead; its node goes on."""


class Welcome(Message, frozen=True):
    """The first answer to ``AgentHello``."""

    received: int
    """Number of the last message of this session that is here; -1 if the session is not known."""


class Relay(Message, frozen=True):
    """Pass ``message``, which is an encoded ``ToRank``, on to these of the node's ranks."""

    ranks: list[int]
    message: msgspec.Raw
    differs: bool = False
    """Whether its layout is told as the difference (``layout.encoding.difference``) from the one that was sent here
    last; from the one that the ranks have proposed if none was.
    """
    kept: list[Kept] = msgspec.field(default_factory=list)
    """What of that of ``Resume`` these ranks need, which is left out of ``message``."""


RankNews = RankDying | RankExited | RankStopped | RankResumed | RankClosed
"""What an agent tells about the processes of its ranks."""
FromAgent = (
    AgentHello | Said | RankNews | Inspected | LayoutTold | Paced | Metered | ClocksRefused | Throttled
    | Leaving | Heartbeat
)
Order = Launch | Leave | Given | Fence | Inspect | TellLayout | Wanted | SetClocks | Recall | Members | Seat | Stop
"""What the protocol tells an agent itself."""
ToAgent = Relay | Order | Welcome | Resigned | Heartbeat
