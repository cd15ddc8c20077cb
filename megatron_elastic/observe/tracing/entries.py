"""Entries: what a rank writes of traced steps, one JSON array a line.

Times are of the host's ``time.monotonic_ns()``.
"""

from __future__ import annotations

import msgspec

MAIN = 0
"""The lane of what the rank itself does; others are tasks that go on beside it."""


class Origin(msgspec.Struct, tag="rank", array_like=True, frozen=True):
    """The beginning of a file: who writes it, and two clocks read at once."""

    rank: int
    host: str
    pid: int
    monotonic_ns: int
    time_ns: int
    clock: str = ""
    """Which monotonic clock that is: of which boot of which kernel, in which namespace. Hosts may have one name."""


class Phase(msgspec.Struct, tag="phase", array_like=True, frozen=True, gc=False):
    """The rank begins with something, and ends what it did before. An operation of the program has a stage."""

    at: int
    name: str
    step: int
    grain: int | None = None
    chunk: int = 0
    stage: int | None = None


class Wait(msgspec.Struct, tag="wait", array_like=True, frozen=True):
    """A wait in a lane, for messages (by their tags) and for other lanes; what was there already took no time.

    One that was interrupted names only whom it had waited for.
    """

    begun: int
    ended: int
    lane: int
    tags: list[int]
    lanes: list[int]
    whom: list[int]
    """The ranks that were missing last, or ``faults.odometer.COORDINATOR`` or ``DISK``; empty if none was."""
    last_tags: list[int]
    last_lanes: list[int]


class Sent(msgspec.Struct, tag="sent", array_like=True, frozen=True, gc=False):
    """A message to another rank is on its way."""

    at: int
    lane: int
    peer: int
    tag: int


class Begun(msgspec.Struct, tag="begun", array_like=True, frozen=True, gc=False):
    """A lane begins, out of another one."""

    at: int
    lane: int
    out_of: int
    name: str
    unit: int | None


class Ended(msgspec.Struct, tag="ended", array_like=True, frozen=True, gc=False):
    """A lane has ended."""

    at: int
    lane: int


class Commit(msgspec.Struct, tag="commit", array_like=True, frozen=True, gc=False):
    """The rank commits a step."""

    at: int
    step: int


class Stopped(msgspec.Struct, tag="stopped", array_like=True, frozen=True, gc=False):
    """The rank traces no more, for now."""

    at: int


class Message(msgspec.Struct, tag="message", array_like=True, frozen=True):
    """What a tag stands for; before it is used for the first time in a file, or after."""

    tag: int
    channel: str
    text: str


Entry = Origin | Phase | Wait | Sent | Begun | Ended | Commit | Stopped | Message
