"""What all messages share, and the values that several of them carry."""

from __future__ import annotations

import math

import msgspec


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="type"):
    """Base of all control messages."""


class Scaling(msgspec.Struct, frozen=True, kw_only=True):
    """By what a step multiplies its losses, and what else that of later steps follows from, in Megatron's terms."""

    scale: float
    growth: int = 0
    """Growth tracker."""
    hysteresis: int = 0
    """Hysteresis tracker."""
    skipped: int = 0
    """Steps before this one that were skipped: neither the learning rate nor the optimizer counts them."""
    samples: int = 0
    """Of those steps."""


UNSCALED = Scaling(scale=1.0)
"""What all steps have if losses are not scaled."""


class VoteResult(msgspec.Struct, frozen=True, kw_only=True):
    """What the vote of one step decided; identical on every rank that got past it."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    consumed_samples: int
    tokens: int
    measures: dict[str, float] = {}
    """What else was measured: means over the grains, summed over the layers; and how many gradients are 0."""
    counted: int = 0
    """Samples before this step that the learning rate counts."""
    skips: int = 0
    """Steps before this one that the optimizer does not count. Below 0 if it has counted more."""
    scaling: Scaling = UNSCALED
    """Of this step."""

    @property
    def skipped(self) -> bool:
        """Whether some gradient was not finite, so that the step changes nothing."""
        return not math.isfinite(self.grad_norm)


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """What has been done of a step. Numbers are grain * chunks + chunk."""

    added: list[int]
    """Their gradients are in the sums."""
    live: list[int]
    """They are between forward and backward."""
    half: list[int]
    """Of their backward the weights' gradients are due yet."""

    @property
    def numbers(self) -> list[int]:
        """All that has been begun."""
        return [*self.added, *self.live, *self.half]


class Kept(Done, frozen=True):
    """What a cell keeps of a step that is resumed, and goes on with."""

    leader: int


class Stop(Message, frozen=True):
    """The job is over. ``ok`` is False when it failed; ``reason`` is for people."""

    ok: bool
    reason: str
    code: int = 1
    """What the launchers end with if it failed."""
    again: bool = False
    """Whether it goes on without this node, which may come again, with new ranks."""
