"""Tag: the 64-bit address of a message, ``epoch:12 | channel:4 | coordinate:28 | source:20``.

Messages are matched by what they are (which grain, which slice, which collective), never by arrival order, so
there is no ordering between peers to deadlock on; the epoch lets a receiver drop what an older layout sent.

Epochs are compared modulo 4096. That is safe however many there are: a rank that lives is told of every one, and reads
what has come before it enters the next, so two that meet are never 2048 apart. Only who has not entered any must not
compare (``Inbox``): a rank that joins, whose first epoch may be any.
"""

from __future__ import annotations

from enum import IntEnum

EPOCH_BITS, CHANNEL_BITS, COORDINATE_BITS, SOURCE_BITS = 12, 4, 28, 20
RANKS = 1 << SOURCE_BITS
"""Ranks are below this, those that are lost too: their numbers are never used again."""
GROUPS, NUMBERS = 1 << 14, 1 << 14
"""Groups, and messages of each that can be told apart at a time."""
UNITS, SLICES, PARTS = 1 << 10, 1 << 16, 1 << 2
"""Units, slices of each, and messages about each slice."""
GRAINS, POSITIONS = 1 << 17, 1 << 11
"""Grains, and the positions (chunks of all stages) that each passes."""
_EPOCHS = 1 << EPOCH_BITS
_SOURCE_MASK = RANKS - 1


class Channel(IntEnum):
    """What a message is for; with its coordinate it names the message within an epoch."""

    COLLECTIVE = 0
    POINT_TO_POINT = 1
    ACTIVATION = 2
    ACTIVATION_GRAD = 3
    GRADIENT = 4
    REPLAY = 5
    VOTE = 6
    PARAMETER = 7
    STATE = 8
    PIECES = 9
    RENDEZVOUS = 10
    DIGEST = 11
    REQUEST = 12
    TOKENS = 13
    STOP = 14


def make_tag(epoch: int, channel: Channel, coordinate: int, source: int) -> int:
    """Pack a tag. Raises ValueError when the coordinate or the source does not fit."""
    if coordinate >> COORDINATE_BITS or source >> SOURCE_BITS:
        raise ValueError(f"coordinate {coordinate} or rank {source} does not fit a message tag")
    head = ((epoch % _EPOCHS) << CHANNEL_BITS) | channel
    return (((head << COORDINATE_BITS) | coordinate) << SOURCE_BITS) | source


def source_of(tag: int) -> int:
    """The rank that sent it."""
    return tag & _SOURCE_MASK


def describe(tag: int) -> tuple[str, str]:
    """The channel of a message, and what it is, in words."""
    channel = Channel((tag >> (COORDINATE_BITS + SOURCE_BITS)) % (1 << CHANNEL_BITS))
    at = (tag >> SOURCE_BITS) % (1 << COORDINATE_BITS)
    name = channel.name.lower().replace("_", " ")
    if channel in (Channel.ACTIVATION, Channel.ACTIVATION_GRAD, Channel.TOKENS):
        return name, f"{name} of grain {at // POSITIONS}, made at position {at % POSITIONS}"
    if channel in (Channel.GRADIENT, Channel.REPLAY, Channel.PARAMETER, Channel.STATE):
        return name, f"{name} of unit {at // PARTS // SLICES}, slice {at // PARTS % SLICES}"
    if channel in (Channel.COLLECTIVE, Channel.POINT_TO_POINT):
        return name, f"{name} {at % NUMBERS} of group {at // NUMBERS}"
    return name, f"{name} {at}"


def is_older(tag: int, epoch: int) -> bool:
    """Whether the tag's epoch lies before ``epoch``, comparing modulo the field's width."""
    sent = tag >> (CHANNEL_BITS + COORDINATE_BITS + SOURCE_BITS)
    return 0 < (epoch - sent) % _EPOCHS < _EPOCHS // 2


def at_group(ident: int, number: int) -> int:
    """Coordinate of a group's message. Raises ValueError when it does not fit, as the two below do."""
    if not (0 <= ident < GROUPS and 0 <= number < NUMBERS):
        raise ValueError(f"message {number} of group {ident}: there can be {GROUPS} groups with {NUMBERS} messages")
    return ident * NUMBERS + number


def at_slice(unit: int, k: int, part: int = 0) -> int:
    """Coordinate of a message about slice ``k`` of a unit."""
    if not (0 <= unit < UNITS and 0 <= k < SLICES and 0 <= part < PARTS):
        raise ValueError(
            f"part {part} of slice {k} of unit {unit}: there can be {UNITS} units of {SLICES} slices of {PARTS} parts"
        )
    return (unit * SLICES + k) * PARTS + part


def at_grain(grain: int, position: int) -> int:
    """Coordinate of a message about a grain at a position of the pipeline."""
    if not (0 <= grain < GRAINS and 0 <= position < POSITIONS):
        raise ValueError(f"grain {grain} at position {position}: there can be {GRAINS} grains, {POSITIONS} positions")
    return grain * POSITIONS + position


def check_sizes(*, units: int, slices: int, grains: int, positions: int) -> None:
    """Raise ValueError, saying what to change, unless messages of a job of these sizes have tags.

    ``positions``: pipeline stages times chunks of each. Ranks are checked one by one, when their transport is made.
    """
    limits = (
        ("units (layers and the like)", units, UNITS, "group layers into fewer units"),
        ("slices of each unit", slices, SLICES, "lower --elastic-slices"),
        ("grains (micro-batches of a step)", grains, GRAINS, "raise --micro-batch-size"),
        ("positions of the pipeline", positions, POSITIONS, "use fewer virtual pipeline stages"),
    )
    for what, size, limit, remedy in limits:
        if size > limit:
            raise ValueError(f"{size} {what} are more than messages can tell apart, {limit}: {remedy}")
