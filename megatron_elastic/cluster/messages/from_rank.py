"""What a rank says. Its agent passes it on to the coordinator, in order, and before it tells of the rank's end."""

from __future__ import annotations

import msgspec

from megatron_elastic.cluster.messages.common import Done, Message, VoteResult
from megatron_elastic.layout import SlicePart, UnitShape
from megatron_elastic.plan import Sample


class Hello(Message, frozen=True):
    """First message of a rank: who it is, where its links start, and the layout it derives from its flags.

    What is the same on all ranks is compared by ``likeness``, and told only where it is needed: of ranks other
    than 0 an agent empties ``layout``, ``flags`` and ``versions`` if ``likeness`` is that of its first rank.
    """

    rank: int
    pid: int
    host: str
    address: bytes
    linked: bool
    """Whether ``address`` says how to reach it from other hosts."""
    layout: bytes
    """The encoded layout that all ranks must propose."""
    start_step: int
    """Steps already done before this job (from a checkpoint); all ranks must agree."""
    train_iters: int
    flags: dict[str, str]
    """The script's flags by name; all ranks must agree."""
    likeness: bytes
    """sha256 of what all ranks must agree on: ``layout``, ``train_iters``, ``flags`` and ``versions``."""
    tied: bool
    """Whether the last stage computes with the embedding of the first one."""
    device: str = "cpu"
    """What it computes on, by the name that torch has for it."""
    flops_per_token: float | None = None
    """What a token costs the whole model, forward and backward; None where computing is emulated."""
    versions: dict[str, str] = msgspec.field(default_factory=dict)
    """Of the programs that compute; all ranks must have the same ones."""
    processor: str = ""
    """Its host's: another kind may compute other bits."""
    kernels: str = "torch"
    """Which ones compute exact sums and Adam on its device; they all have the same bits."""


class Where(Message, frozen=True):
    """Where are these ranks? The answer is ``Addresses``."""

    rank: int
    ask: int
    """Number of the question."""
    ranks: list[int]


class Reachable(Message, frozen=True):
    """This rank listens for other hosts from now on; told before it votes that it knows of the layout that has them."""

    rank: int
    address: bytes
    """In place of that of its ``Hello``."""


class Committed(Message, frozen=True):
    """This rank finished a step: voted, applied, parameters on their way.

    The lowest rank of each node tells its agent, which keeps the newest ones until they are on record. One metrics line
    is written for each step, whoever tells it and however often.
    """

    rank: int
    epoch: int
    vote: VoteResult
    time: float
    """``time.time()`` at the end of the step."""
    first: bool = True
    """Whether this is the lowest rank of the layout: its agent passes it on at once, others when they are asked."""


class WorkDone(Done, frozen=True):
    """What a rank has done of ``step``, which has so many ``grains``: the first ones."""

    step: int
    grains: int

    @classmethod
    def none(cls, step: int, grains: int) -> WorkDone:
        """Nothing yet."""
        return cls(step=step, grains=grains, added=[], live=[], half=[])


class Damage(msgspec.Struct, frozen=True, kw_only=True):
    """A copy of a slice's state, or a rank's weights of a slice, that is not what was written."""

    rank: int
    unit: int
    slice: int
    part: int
    what: str


class Damaged(Message, frozen=True):
    """Verification has found damage before ``step`` was voted; it is to be healed, and the step redone."""

    rank: int
    epoch: int
    step: int
    found: list[Damage]
    verified: int
    """All slices were sound after this step, as far as verification can tell."""


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
    held: list[SlicePart] | None
    """Every live state here, as before ``step``, or after it if applied; None: just what the layout asks for here that
    the interrupt names.
    """
    interrupted_at: float
    """``time.time()`` when the main thread unwound."""
    built: bool = True
    """Whether it has its part of the model; who has not holds nothing."""
    stale: bool = False
    """Whether its parameters may not be what their owners hold."""
    layout: int = 0
    """Epoch of the layout that it has made true, whole or in part."""
    reloading: bool = False
    """Whether that layout came with going back to a checkpoint, and no step of it has committed here."""
    saved: int = 0
    """Step of the newest complete checkpoint that it knows of; 0 without one."""
    versions: dict[int, list[SlicePart]] = msgspec.field(default_factory=dict)
    """Number of steps -> the states that are here after so many, or can be made with the vote of the last of them.

    Told where replicas may be behind their owners, empty otherwise.
    """
    work: WorkDone | None = None
    """What it has done of ``step``, perhaps nothing yet; None if it could not go on from that."""
    damaged: Damaged | None = None
    """Damage that it has found in the layout that it is in: who was told may be gone."""


class Recovered(Message, frozen=True):
    """A rank made the decided layout true and is back in training; milliseconds of each part."""

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


class Recut(Message, frozen=True):
    """This rank has what it is to have under a planned layout with cells of another shape, as before ``step``, besides
    what it has under the present one. It waits for ``Enter``.
    """

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
    deadly: bool = True
    """Whether the sender does not go on after it."""


class Event(Message, frozen=True):
    """One line for ``events.jsonl``; ``fields`` must not contain time, kind or epoch."""

    rank: int
    epoch: int
    kind: str
    fields: dict[str, float | int | str | bool | None | list[int]]


class Failed(Message, frozen=True):
    """The program raised on this rank, which ends."""

    rank: int
    traceback: str
    epoch: int = 0
    """Of the layout that it has made true."""
    step: int | None = None
    """In which it raised; None: not in a step, or it would come again on any rank (bad flags)."""
    device: str = ""
    """What has failed, for people, if it was its device and not the program."""
    short: str = ""
    """Of what memory was short, for people, if that is why it raised."""
    code: int = 0
    """What the program ended itself with, if it did not raise; ``traceback`` says so then. ``config.USAGE``: what was
    asked of it cannot work.
    """


class SliceDigest(msgspec.Struct, frozen=True, kw_only=True):
    """sha256 of one slice's weights and optimizer state on one tensor-parallel index."""

    unit: int
    slice: int
    part: int
    sha256: str


class Finished(Message, frozen=True):
    """Training is done on this rank; the slices it owns, digested."""

    rank: int
    step: int
    digests: list[SliceDigest]


FromRank = (
    Hello | Where | Reachable | Built | Committed | Report | Recovered | Ready | Switched | Recut | Settled | Profile
    | Damaged | Suspect | Injected | Event | Failed | Finished
)
