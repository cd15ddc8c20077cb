"""What all messages share, and the values that several of them carry."""

from __future__ import annotations

import msgspec

Part = tuple[int, int, int]
"""(unit, slice, tensor-parallel index)"""


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


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """What of a step a cell keeps when the step is resumed, and goes on with.

    Numbers are grain * chunks + chunk. ``added``: their gradients are in its sums; ``live``: they are between forward
    and backward; ``half``: of their backward the weights' gradients are due yet.
    """

    leader: int
    added: list[int]
    live: list[int]
    half: list[int]


class Stop(Message, frozen=True):
    """The job is over. ``ok`` is False when it failed; ``reason`` is for people."""

    ok: bool
    reason: str
