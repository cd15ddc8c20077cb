"""Steps: those that are committed, and what can be trusted of them."""

from __future__ import annotations

import msgspec
from immutables import Map

from megatron_elastic.cluster.messages import Damage, VoteResult
from megatron_elastic.layout import SlicePart


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
    """When the one before that was done, as who told it has the time of day."""
    previous_seconds: float = 1e-6
    """That it took."""
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
