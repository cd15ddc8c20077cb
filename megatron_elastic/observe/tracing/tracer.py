"""Tracer: a rank's own. It keeps in memory what the rank does in the steps that are traced, and writes it after them.

While it is off nothing calls it: whoever could looks at ``on`` first.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from megatron_elastic.observe.records import append, open_lines
from megatron_elastic.observe.tracing.entries import (
    MAIN,
    Begun,
    Commit,
    Ended,
    Entry,
    Message,
    Origin,
    Phase,
    Sent,
    Stopped,
    Wait,
)

FOLDER = "traces"
"""In the run directory."""
BEGIN, BETWEEN = "begin", "between"
"""Phases that are no hook points: a rank comes to a step that it has not traced before, or has committed one."""
_MANY = 50_000
"""Entries that are kept until they are written between two traced steps."""
_PROGRAM = frozenset({"forward", "backward", "backward_weight"})
"""Hook points that the executor tells more of than the point."""

Steps = Generator[Sequence[Any], None, None]


class Window(NamedTuple):
    """The steps that are traced."""

    ranges: tuple[tuple[int, int], ...]
    """From the first to the last of each."""

    @classmethod
    def parse(cls, text: str) -> Window:
        """``10``, ``10-12``, or several of these with commas. Raises ValueError that does not say where it was."""
        return cls(tuple(_range(part, text) for part in text.split(",")))

    def has(self, step: int) -> bool:
        """Whether a step is traced."""
        return any(first <= step <= last for first, last in self.ranges)


def _range(part: str, text: str) -> tuple[int, int]:
    first, dash, last = part.partition("-")
    if not first.isdecimal() or (dash and not last.isdecimal()):
        raise ValueError(f"expected steps, or the first and the last of some, as 10, 10-12 or 10,20-22, got {text!r}")
    steps = int(first), int(last if dash else first)
    if not 1 <= steps[0] <= steps[1]:
        raise ValueError(f"steps count from 1, and the last is not before the first, got {text!r}")
    return steps


class Tracer:
    """One rank's.

    Args:
        rank: this rank.
        window: what is traced; None: nothing.
        folder: where the file goes, which is made when there is something to write.
        describe: channel and text of a message's tag.
    """

    def __init__(
        self, rank: int, window: Window | None, folder: Path, describe: Callable[[int], tuple[str, str]]
    ) -> None:
        self.on = False
        self._rank = rank
        self._window = window
        self._path = folder / f"rank{rank}.jsonl"
        self._describe = describe
        self._entries: list[Entry] = []
        self._named: set[int] = set()
        self._lane = MAIN
        """In which messages are sent now."""
        self._lanes = MAIN
        self._waiting = False

    @classmethod
    def of_nothing(cls) -> Tracer:
        """One that is never on."""
        return cls(0, None, Path(), lambda tag: ("", str(tag)))

    # ---- steps ------------------------------------------------------------------------------

    def enter(self, step: int) -> None:
        """The rank is about to take a step, or takes it again. What is kept of others is written, if it is time."""
        if self._window is None:
            return
        more = self._window.has(step)
        if self._entries and (not more or len(self._entries) > _MANY):
            self.write()
        if more and not self.on:
            self.on = True
            self._entries.append(Phase(time.monotonic_ns(), BEGIN, step))

    def commit(self, step: int) -> None:
        """The rank commits a step: what comes is of the next one."""
        if self._window is None:
            return
        now, more = time.monotonic_ns(), self._window.has(step + 1)
        if self.on or more:
            self._entries += (Commit(now, step), Phase(now, BETWEEN, step + 1) if more else Stopped(now))
        self.on = more

    def write(self) -> None:
        """Write what is kept, and stop for now. A disk that takes nothing loses it, and no more than it."""
        if not self._entries:
            return
        if self.on:
            self._entries.append(Stopped(time.monotonic_ns()))
        entries, self._entries, self.on = self._entries, [], False
        names = self._names(entries)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with open_lines(self._path) as file:
                origin = () if file.tell() else (self._origin(),)
                append(file, msgspec.json.Encoder().encode_lines([*origin, *names, *entries]))
        except OSError as error:
            self._named.difference_update(message.tag for message in names)
            print(f"rank {self._rank}: cannot write {self._path}: {error.strerror}", flush=True)

    def _origin(self) -> Origin:
        times = time.monotonic_ns(), time.time_ns()
        return Origin(self._rank, socket.gethostname(), os.getpid(), *times, _clock())

    def _names(self, entries: Sequence[Entry]) -> list[Message]:
        """What is new among their tags."""
        tags = {entry.tag for entry in entries if isinstance(entry, Sent)}
        tags.update(tag for entry in entries if isinstance(entry, Wait) for tag in entry.tags)
        new = tags - self._named
        self._named |= new
        return [Message(tag, *self._describe(tag)) for tag in sorted(new)]

    # ---- what the rank does -----------------------------------------------------------------

    def at(self, point: str, step: int, grain: int | None) -> None:
        """A hook point (``faults.hooks.Observer``)."""
        if self.on and point not in _PROGRAM:
            self._entries.append(Phase(time.monotonic_ns(), point, step, grain))

    def operation(self, kind: str, step: int, grain: int, chunk: int, stage: int) -> None:
        """An operation of the program begins."""
        self._entries.append(Phase(time.monotonic_ns(), kind, step, grain, chunk, stage))

    def sent(self, peer: int, tag: int) -> None:
        """A message is on its way."""
        self._entries.append(Sent(time.monotonic_ns(), self._lane, peer, tag))

    def waits(self, operations: Sequence[Any]) -> Waiting | None:
        """Operations (``comm.operation``) are waited for; None if somebody waits already, in another thread."""
        return None if self._waiting else Waiting(self, operations, ())

    def waits_for(self, whom: int) -> Waiting | None:
        """Somebody is waited for who is no rank (``faults.odometer``)."""
        return None if self._waiting else Waiting(self, (), (whom,))

    def had(self, operations: Sequence[Any]) -> None:
        """What is waited for is here already."""
        tags, lanes = _parts(operations)
        if tags or lanes:
            now = time.monotonic_ns()
            self._entries.append(Wait(now, now, self._lane, tags, lanes, [], [], []))

    # ---- what goes on beside it -------------------------------------------------------------

    def begin(self, name: str, unit: int | None) -> int:
        """A lane begins; returns its number."""
        self._lanes += 1
        self._entries.append(Begun(time.monotonic_ns(), self._lanes, self._lane, name, unit))
        return self._lanes

    def follow(self, lane: int, steps: Steps) -> Steps:
        """The same steps, whose waits and messages are the lane's."""
        while True:
            outer, self._lane = self._lane, lane
            try:
                operations = next(steps)
            except StopIteration:
                self._add(Ended(time.monotonic_ns(), lane))
                return
            finally:
                self._lane = outer
            begun, (tags, lanes) = time.monotonic_ns(), _parts(operations)
            yield operations
            if tags or lanes:
                self._add(Wait(begun, time.monotonic_ns(), lane, tags, lanes, [], tags, lanes))

    def _add(self, entry: Entry) -> None:
        if self.on:
            self._entries.append(entry)


class Waiting:
    """A wait in the main lane that is not over."""

    __slots__ = ("_begun", "_last", "_missing", "_operations", "_tracer")

    def __init__(self, tracer: Tracer, operations: Sequence[Any], whom: Sequence[int]) -> None:
        self._tracer = tracer
        self._operations = operations
        self._missing = whom
        self._last: Sequence[Any] = ()
        self._begun = time.monotonic_ns()
        tracer._waiting = True

    def look(self) -> None:
        """Before what has arrived meanwhile is looked at."""
        self._last = [operation for operation in self._operations if not operation.done]
        self._missing = [operation.peer for operation in self._last]

    def over(self, arrived: bool) -> None:
        """It has ended, because what was waited for is there, or for another reason."""
        tracer = self._tracer
        tracer._waiting = False
        whom, ended = sorted(set(self._missing)), time.monotonic_ns()
        operations, last = (self._operations, self._last) if arrived else ((), ())
        tracer._add(Wait(self._begun, ended, MAIN, *_parts(operations), whom, *_parts(last)))


def _parts(operations: Sequence[Any]) -> tuple[list[int], list[int]]:
    """The tags of the messages that are expected, and the lanes of the tasks, among operations."""
    tags = [operation.tag for operation in operations if hasattr(operation, "tag")]
    return tags, [lane for operation in operations if (lane := getattr(operation, "lane", 0))]


def _clock() -> str:
    """Names the monotonic clock of this process; empty where the system does not say."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/time')}"
    except OSError:
        return ""
