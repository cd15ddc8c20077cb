"""Messages: everything that ranks, agents and the coordinator say to each other.

Typed ``msgspec`` structs, encoded as MessagePack and framed by ``cluster.wire``; never pickle.
A message that speaks about a layout carries the layout's epoch.
"""

from __future__ import annotations

import msgspec

from megatron_elastic.layout import UnitShape
from megatron_elastic.plan import Sample


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="type"):
    """Base of all control messages."""


class VoteResult(msgspec.Struct, frozen=True, kw_only=True):
    """What the vote of one step decided; identical on every rank that got past it."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    consumed_samples: int
    tokens: int


# ---- rank -> coordinator -------------------------------------------------------------------


class Hello(Message, frozen=True):
    """First message of a rank: who it is, where its links start, and the layout it derives from its flags."""

    rank: int
    pid: int
    host: str
    address: bytes
    layout: str
    """Layout as JSON; all ranks must propose the same one."""
    start_step: int
    """Steps already done before this job (from a checkpoint); all ranks must agree."""
    train_iters: int
    flags: dict[str, str]
    """The script's flags by name; all ranks must agree."""
    tied: bool
    """Whether the last stage computes with the embedding of the first one."""


class Committed(Message, frozen=True):
    """The reporting rank (the lowest one of the layout) finished a step: voted, applied, parameters gathered.

    The coordinator writes one metrics line for each step, whoever reports it and however often.
    """

    rank: int
    epoch: int
    vote: VoteResult
    time: float
    """``time.time()`` at the end of the step."""


class Report(Message, frozen=True):
    """Answer to ``Interrupt``: where this rank stands. ``epoch`` is the interrupt's."""

    rank: int
    epoch: int
    member: bool
    """Whether it takes part in the step: in the newest layout that it knows it is in a cell."""
    step: int
    """Step in progress: the number of committed steps plus one."""
    vote: VoteResult | None
    """Result of the vote of ``step`` when the rank is past it."""
    last: VoteResult | None
    """Result of the vote of ``step - 1``, so that its record survives its reporter."""
    held: list[tuple[int, int, int]]
    """(unit, slice, tensor-parallel index) of every live state here, as before ``step``, or after it if applied."""
    interrupted_at: float
    """``time.time()`` when the main thread unwound."""
    stale: bool = False
    """Whether its parameters may not be what their owners hold."""
    layout: int = 0
    """Epoch of the layout that it has made true, whole or in part."""
    versions: dict[int, list[tuple[int, int, int]]] = {}
    """Number of steps -> the states that are here after so many, or can be made with the vote of the last of them.

    Told where replicas may be behind their owners, empty otherwise.
    """


class Recovered(Message, frozen=True):
    """A rank made the committed layout true and is back in training; milliseconds of each part."""

    rank: int
    epoch: int
    edit_ms: float
    state_ms: float


class Built(Message, frozen=True):
    """This rank has its part of the model. Who keeps slices of a unit without its modules needs the unit's shape."""

    rank: int
    shapes: dict[int, UnitShape]


class Ready(Message, frozen=True):
    """Answer to ``Invite``: this rank has built what it needs and waits to be let in."""

    rank: int
    epoch: int


class Switched(Message, frozen=True):
    """The lowest rank of a planned layout made it true between two steps; ``step`` is the first one under it."""

    rank: int
    epoch: int
    step: int


class Settled(Message, frozen=True):
    """All copies from and to this rank that the layout asks for are live, and its parameters are up to date."""

    rank: int
    epoch: int


class Profile(Message, frozen=True):
    """What this rank measured of its stage lately."""

    rank: int
    epoch: int
    sample: Sample


class Damage(msgspec.Struct, frozen=True, kw_only=True):
    """A copy of a slice's state, or a rank's weights of a slice, that is not what was written."""

    rank: int
    unit: int
    slice: int
    tp: int
    what: str


class Damaged(Message, frozen=True):
    """Verification has found damage before ``step`` was voted; it is to be healed, and the step redone."""

    rank: int
    epoch: int
    step: int
    found: list[Damage]
    verified: int
    """All slices were sound after this step, as far as verification can tell."""


class Suspect(Message, frozen=True):
    """A link failed or a wait reached its limit: these ranks may be dead."""

    rank: int
    epoch: int
    suspects: list[int]
    reason: str


class Injected(Message, frozen=True):
    """A fault is about to be injected on purpose by the sender."""

    rank: int
    time: float
    spec: str


class Event(Message, frozen=True):
    """One line for ``events.jsonl``; ``fields`` must not contain time, kind or epoch."""

    rank: int
    epoch: int
    kind: str
    fields: dict[str, float | int | str | bool | None | list[int]]


class Failed(Message, frozen=True):
    """The program raised on this rank: an error, not a fault. Ends the job with this traceback."""

    rank: int
    traceback: str


class SliceDigest(msgspec.Struct, frozen=True, kw_only=True):
    """sha256 of one slice's weights and optimizer state on one tensor-parallel index."""

    unit: int
    slice: int
    tp: int
    sha256: str


class Finished(Message, frozen=True):
    """Training is done on this rank; the slices it owns, digested."""

    rank: int
    step: int
    digests: list[SliceDigest]


# ---- coordinator -> rank -------------------------------------------------------------------


class Start(Message, frozen=True):
    """All ranks said hello: connect and train under this layout."""

    layout: str
    addresses: dict[int, bytes]


class Interrupt(Message, frozen=True):
    """Stop what you are doing and send a ``Report`` for this epoch."""

    epoch: int
    lost: list[int]
    """Ranks known to be dead, all of them since the job began."""


class Invite(Message, frozen=True):
    """To a rank in no cell: it is to be in this layout, so it should build its part of the model and say ``Ready``."""

    epoch: int
    layout: str
    addresses: dict[int, bytes]
    shapes: dict[int, UnitShape]


class Plan(Message, frozen=True):
    """The layout to switch to as soon as everybody has this: the vote of a step finds out, and the step's end it is."""

    epoch: int
    layout: str
    addresses: dict[int, bytes]
    """Where the ranks that enter are."""
    held: dict[int, list[tuple[int, int, int]]]
    """Live state of every rank at that time."""
    shapes: dict[int, UnitShape]
    """Of all units."""


class Commit(Message, frozen=True):
    """The new layout. ``forward``: finish ``step`` with ``vote``. ``back``: redo ``step`` from its start.

    ``switch``: it was planned, and ``step`` is the first one under it.
    """

    epoch: int
    layout: str
    decision: str
    step: int
    vote: VoteResult | None
    held: dict[int, list[tuple[int, int, int]]]
    """Live state of every reporting rank, so that all derive the same transfers."""
    shapes: dict[int, UnitShape]
    """Of all units."""
    gather: bool
    """Whether the owners have to send the parameters to everybody again."""
    saved: int
    """Step of the newest complete checkpoint, 0 without one: an interrupted save is complete for all ranks or none."""


class Stop(Message, frozen=True):
    """The job is over. ``ok`` is False when it failed; ``reason`` is for people."""

    ok: bool
    reason: str


# ---- agent <-> coordinator -----------------------------------------------------------------


class AgentHello(Message, frozen=True):
    """An agent of another node introduces itself and the ranks that it would start.

    When it comes while the job runs, its ranks join, under ids that the coordinator gives them.
    """

    node_rank: int
    ranks: list[int]
    host: str
    heartbeat_timeout: float
    """Must be the coordinator's: who sends more rarely than the other expects would seem dead."""


class RankDying(Message, frozen=True):
    """A rank's process has begun to die, by a signal or a crash; ``RankExited`` follows when it is gone."""

    rank: int
    time: float


class RankExited(Message, frozen=True):
    """A rank's process ended. ``returncode`` as in ``subprocess``: negative means by that signal."""

    rank: int
    returncode: int
    time: float


class RankStopped(Message, frozen=True):
    """A rank's process was stopped and does not run, for instance by SIGSTOP; ``how`` is for people."""

    rank: int
    how: str
    time: float


class RankResumed(Message, frozen=True):
    """A stopped rank's process runs again."""

    rank: int
    time: float


class Heartbeat(Message, frozen=True):
    """Both ways: the sender still runs. Sent whatever else is."""


class Launch(Message, frozen=True):
    """Coordinator to agent: start these ranks now."""

    ranks: dict[int, int]
    """Local rank -> rank. Ranks that are started while the job runs have ids that nobody had before."""
    world_size: int
    """Ranks of the job at its start."""
    torch_port: int
    """MASTER_PORT of every rank: free on the first node, for programs that call ``init_process_group`` themselves."""


class Fence(Message, frozen=True):
    """Coordinator to agent: kill this rank; it was suspected and must not come back."""

    rank: int


# ---- a person <-> coordinator ----------------------------------------------------------------


class Scale(Message, frozen=True):
    """Change the number of pipeline stages to ``stages``."""

    stages: int


class Answer(Message, frozen=True):
    """Whether it will be done; ``text`` is for people."""

    ok: bool
    text: str


AnyMessage = (
    Hello | Built | Committed | Report | Recovered | Ready | Switched | Settled | Profile | Damaged | Suspect | Injected
    | Event | Failed | Finished | Start | Interrupt | Invite | Plan | Commit | Stop
    | AgentHello | RankDying | RankExited | RankStopped | RankResumed | Launch | Fence | Heartbeat
    | Scale | Answer
)

any_message: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)

RankNews = RankDying | RankExited | RankStopped | RankResumed
"""What an agent tells about the processes of its ranks."""
