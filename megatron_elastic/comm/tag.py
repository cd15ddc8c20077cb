"""Tag: the 64-bit address of a message, ``epoch:12 | channel:8 | coordinate:28 | source:16``.

Messages are matched by what they are (which grain, which slice, which collective), never by arrival order, so
there is no ordering between peers to deadlock on; the epoch lets a receiver drop what an older layout sent.
"""

from __future__ import annotations

from enum import IntEnum

EPOCH_BITS, CHANNEL_BITS, COORDINATE_BITS, SOURCE_BITS = 12, 8, 28, 16
_EPOCHS = 1 << EPOCH_BITS
_SOURCE_MASK = (1 << SOURCE_BITS) - 1


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
    CHECKPOINT = 9
    RENDEZVOUS = 10
    DIGEST = 11
    REQUEST = 12
    TOKENS = 13


def make_tag(epoch: int, channel: Channel, coordinate: int, source: int) -> int:
    """Pack a tag. Raises ValueError when the coordinate or the source does not fit."""
    if coordinate >> COORDINATE_BITS or source >> SOURCE_BITS:
        raise ValueError(f"coordinate {coordinate} or rank {source} does not fit a message tag")
    head = ((epoch % _EPOCHS) << CHANNEL_BITS) | channel
    return (((head << COORDINATE_BITS) | coordinate) << SOURCE_BITS) | source


def source_of(tag: int) -> int:
    """The rank that sent it."""
    return tag & _SOURCE_MASK


def is_older(tag: int, epoch: int) -> bool:
    """Whether the tag's epoch lies before ``epoch``, comparing modulo the field's width."""
    sent = tag >> (CHANNEL_BITS + COORDINATE_BITS + SOURCE_BITS)
    return 0 < (epoch - sent) % _EPOCHS < _EPOCHS // 2


def pair(first: int, second: int, second_bits: int = 14) -> int:
    """Two small numbers as one coordinate, e.g. (unit, slice) or (grain, stage)."""
    if second >> second_bits or first >> (COORDINATE_BITS - second_bits):
        raise ValueError(f"({first}, {second}) does not fit a message coordinate")
    return (first << second_bits) | second
