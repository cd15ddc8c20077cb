"""What the coordinator says to ranks, through their agents. Layouts are encoded as ``layout.encode`` does."""

from __future__ import annotations

from megatron_elastic.cluster.messages.common import Kept, Message, Stop, VoteResult
from megatron_elastic.layout import SlicePart, Transfer, UnitShape


class Start(Message, frozen=True):
    """All ranks said hello: connect and train under the layout that all of them have proposed."""

    addresses: dict[int, bytes]
    """Of the ranks of the same node, which the agent fills in; a rank asks ``Where`` others are when it needs them."""
    key: bytes
    """With which messages between hosts are sealed."""


class Addresses(Message, frozen=True):
    """Answer to ``Where``: where the links of ranks start. Ranks that are not there any more are left out."""

    ask: int
    addresses: dict[int, bytes]


class Interrupt(Message, frozen=True):
    """Stop what you are doing and send a ``Report`` for this epoch."""

    epoch: int
    layout: int
    """Epoch of the newest layout in force. Who has that one and holds just what it asks for need not list it."""
    lost: list[int]
    """Ranks known to be dead, all of them since the job began."""


class Invite(Message, frozen=True):
    """To a rank in no cell: it is to be in this layout, so it should build its part of the model and say ``Ready``."""

    epoch: int
    layout: bytes
    shapes: dict[int, UnitShape]
    key: bytes
    """As in ``Start``."""


class Moves(Message, frozen=True):
    """What a rank has to do with states under the layout of ``epoch``. It comes before the message that has the layout,
    and only to those who have anything to do.
    """

    epoch: int
    moves: list[Transfer]
    """Copies from or to this rank."""
    kept: list[SlicePart] | None
    """What of its states is live; None: all that it has reported."""


class Plan(Message, frozen=True):
    """The layout to switch to as soon as everybody has this: the vote of a step finds out, and the step's end it is."""

    epoch: int
    layout: bytes
    shapes: dict[int, UnitShape]
    """Of all units."""
    program: bytes | None = None
    """In what order cells do their work there, packed; None: in the usual one."""


class Decision(Message, frozen=True, kw_only=True):
    """The new layout, and where training goes on under it."""

    epoch: int
    layout: bytes
    step: int
    shapes: dict[int, UnitShape]
    """Of all units."""
    saved: int
    """Step of the newest complete checkpoint, 0 without one: an interrupted save is complete for all ranks or none."""
    program: bytes | None = None
    """In what order cells do their work from the next whole step on, packed; None: in the usual one."""


class Forward(Decision, frozen=True):
    """Somebody got past the vote of ``step``: everybody finishes it with that ``vote``."""

    vote: VoteResult
    gather: bool
    """Whether the owners have to send the parameters to everybody again."""


class Back(Decision, frozen=True):
    """Nobody got past the vote of ``step``: everybody redoes it from its start."""

    gather: bool


class Resume(Decision, frozen=True):
    """Nobody got past the vote of ``step``: everybody goes on with it from what is ``kept``, cell by cell."""

    gather: bool
    kept: list[Kept]


class Reload(Decision, frozen=True):
    """Some state has no live copy, or none yet: all go back to the checkpoint of ``step - 1``, or to the beginning."""


class Enter(Decision, frozen=True):
    """A planned layout has come into force, and this rank is in it from ``step`` on, or with no part in it any more."""


ToRank = Start | Addresses | Interrupt | Invite | Moves | Plan | Forward | Back | Resume | Reload | Enter | Stop
