"""Reading: what the ranks have written of traced steps, on one clock, and which message answers which wait."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from megatron_elastic.observe.records import RecordsError
from megatron_elastic.observe.tracing.clocks import Flight, align, rates, shortest_of
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
from megatron_elastic.observe.tracing.tracer import BEGIN, FOLDER

_VOTE = "vote"

T = TypeVar("T")


class Piece(NamedTuple):
    """A phase of a rank, from its beginning to the next one's."""

    begun: int
    ended: int
    phase: Phase


class Section(NamedTuple):
    """A step of a rank: from when it committed the one before, or came to this one, until it committed it."""

    step: int
    begun: int
    ended: int
    whole: bool
    """Whether it begins with the commit of the step before."""


@dataclass(slots=True)
class RankTrace:
    """What one rank has done. Times are nanoseconds of its host's clock or, once read, since 1970 on the common one."""

    origin: Origin
    phases: list[Phase] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    sent: list[Sent] = field(default_factory=list)
    begun: dict[int, Begun] = field(default_factory=dict)
    ended: dict[int, int] = field(default_factory=dict)
    commits: list[Commit] = field(default_factory=list)
    stops: list[int] = field(default_factory=list)
    messages: dict[int, Message] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """Whose it is."""
        return self.origin.rank

    @property
    def clock(self) -> str:
        """Which clock its times are of, before they are brought to a common one."""
        return self.origin.clock or self.origin.host

    def add(self, entry: msgspec.Struct) -> None:
        """Take in a line."""
        match entry:
            case Phase():
                self.phases.append(entry)
            case Wait():
                self.waits.append(entry)
            case Sent():
                self.sent.append(entry)
            case Begun():
                self.begun[entry.lane] = entry
            case Ended():
                self.ended[entry.lane] = entry.at
            case Commit():
                self.commits.append(entry)
            case Stopped():
                self.stops.append(entry.at)
            case Message():
                self.messages[entry.tag] = entry

    def sort(self) -> None:
        """Put everything in the order of its beginning."""
        self.phases.sort(key=lambda phase: phase.at)
        self.waits.sort(key=lambda wait: (wait.begun, wait.ended))
        self.sent.sort(key=lambda sent: sent.at)

    def pieces(self) -> Iterator[Piece]:
        """The phases, with their ends."""
        ends = sorted([*(phase.at for phase in self.phases), *self.stops])
        for phase in self.phases:
            following = bisect_right(ends, phase.at)
            if following < len(ends):
                yield Piece(phase.at, ends[following], phase)

    def sections(self) -> list[Section]:
        """The steps. One that is committed twice, because a fault came between, ends the second time."""
        found: dict[int, Section] = {}
        ends: dict[int, int] = {}
        began = sorted(phase.at for phase in self.phases if phase.name == BEGIN)
        for commit in self.commits:
            before = ends.get(commit.step - 1)
            ends[commit.step] = commit.at
            if commit.step in found:
                found[commit.step] = found[commit.step]._replace(ended=commit.at)
            elif before is not None and not any(before < stop < commit.at for stop in self.stops):
                found[commit.step] = Section(commit.step, before, commit.at, True)
            elif earlier := bisect_right(began, commit.at):
                found[commit.step] = Section(commit.step, began[earlier - 1], commit.at, False)
        return list(found.values())

    def text(self, tag: int) -> str:
        """What a message is."""
        return self.messages[tag].text if tag in self.messages else f"message {tag:#x}"

    def channel(self, tag: int) -> str:
        """Its channel."""
        return self.messages[tag].channel if tag in self.messages else "unknown"


@dataclass(slots=True)
class Traces:
    """Those of all ranks, on one clock."""

    ranks: dict[int, RankTrace]

    @property
    def steps(self) -> list[int]:
        """Those that are traced from commit to commit on some rank."""
        return sorted(self.elapsed())

    def elapsed(self) -> dict[int, int]:
        """Nanoseconds of those, on the first such rank."""
        found: dict[int, int] = {}
        for _, trace in sorted(self.ranks.items()):
            for section in trace.sections():
                if section.whole:
                    found.setdefault(section.step, section.ended - section.begun)
        return found

    @classmethod
    def read(cls, run_dirs: Sequence[Path]) -> Traces:
        """What is in run directories, of one for each host that has its own. Raises RecordsError."""
        raw = [trace for run_dir in run_dirs for path in _files(run_dir) if (trace := _read(path)) is not None]
        if not any(next(trace.pieces(), None) for trace in raw):
            raise RecordsError("nothing was traced: the ranks were killed before they had written what they did")
        clocks = list(dict.fromkeys(trace.clock for trace in raw))
        guess: dict[str, int] = {}
        for trace in raw:
            guess.setdefault(trace.clock, trace.origin.time_ns - trace.origin.monotonic_ns)
        flights = list(_flights(raw))
        run = rates(clocks, flights)
        offsets = align(clocks, shortest_of(flights, run), guess)

        def common(clock: str) -> Callable[[int], int]:
            return lambda at: run[clock].corrected(at) + offsets[clock]

        return cls({trace.rank: _moved(trace, common(trace.clock)) for trace in raw})

    def senders(self) -> Mapping[tuple[int, int], list[tuple[int, Sent]]]:
        """(tag, rank that it went to) -> each (rank that sent it, when), in the order of time."""
        found: dict[tuple[int, int], list[tuple[int, Sent]]] = defaultdict(list)
        for trace in self.ranks.values():
            for sent in trace.sent:
                found[sent.tag, sent.peer].append((trace.rank, sent))
        for each in found.values():
            each.sort(key=lambda item: item[1].at)
        return found


def answer(
    senders: Mapping[tuple[int, int], list[tuple[int, Sent]]], rank: int, tag: int, by: int
) -> tuple[int, Sent] | None:
    """Who sent the message that a rank had ``by`` then, and when; None if that was not traced.

    Tags come again, but not before what they stood for has arrived: it is the last that was sent before.
    """
    found = senders.get((tag, rank), [])
    at = bisect_right(found, by, key=lambda item: item[1].at)
    return found[at - 1] if at else None


def _files(run_dir: Path) -> list[Path]:
    paths = sorted((run_dir / FOLDER).glob("rank*.jsonl"))
    if not paths:
        raise RecordsError(f"{run_dir} has no traces: give the job --elastic-trace STEPS; steps are written when all "
                           "of them are over")  # fmt: skip
    return paths


def _read(path: Path) -> RankTrace | None:
    """None if its rank was killed before it had written a line."""
    decoder = msgspec.json.Decoder(Entry)
    try:
        written = path.read_bytes()
        whole = written[: written.rfind(b"\n") + 1]  # who is killed leaves half a line
        entries = [decoder.decode(line) for line in whole.splitlines()]
    except OSError as error:
        raise RecordsError(f"cannot read {path}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RecordsError(f"{path} is damaged: {error}") from None
    if not entries:
        return None
    if not isinstance(entries[0], Origin):
        raise RecordsError(f"{path} does not say whose it is")
    trace = RankTrace(entries[0])
    for entry in entries[1:]:
        trace.add(entry)
    trace.sort()
    return trace


def _moved(trace: RankTrace, to: Callable[[int], int]) -> RankTrace:
    """By another clock."""
    replace = msgspec.structs.replace
    return RankTrace(
        trace.origin, phases=[replace(each, at=to(each.at)) for each in trace.phases],
        waits=[replace(each, begun=to(each.begun), ended=to(each.ended)) for each in trace.waits],
        sent=[replace(each, at=to(each.at)) for each in trace.sent],
        begun={lane: replace(each, at=to(each.at)) for lane, each in trace.begun.items()},
        ended={lane: to(at) for lane, at in trace.ended.items()},
        commits=[replace(each, at=to(each.at)) for each in trace.commits], stops=[to(at) for at in trace.stops],
        messages=trace.messages,
    )  # fmt: skip


def _flights(traces: Sequence[RankTrace]) -> Iterator[Flight]:
    """The messages of votes between clocks.

    In a vote everybody waits for everybody, and a message is sent and waited for in the same step.
    """
    sent: dict[tuple[int, int, int, int], int] = {}
    clock = {trace.rank: trace.clock for trace in traces}
    for trace in traces:
        for piece in trace.pieces():
            if piece.phase.name == _VOTE:
                for each in _within(piece, trace.sent, lambda sent: sent.at):
                    sent[piece.phase.step, each.tag, trace.rank, each.peer] = each.at
    source = {key[1]: key[2] for key in sent}
    for trace in traces:
        for piece in trace.pieces():
            if piece.phase.name != _VOTE:
                continue
            for wait in _within(piece, trace.waits, lambda wait: wait.begun):
                if wait.lane != MAIN:
                    continue
                for tag in wait.tags:
                    at = sent.get((piece.phase.step, tag, source.get(tag, -1), trace.rank))
                    if at is not None and clock[source[tag]] != clock[trace.rank]:
                        yield Flight(clock[source[tag]], clock[trace.rank], at, wait.ended)


def _within(piece: Piece, ordered: Sequence[T], at: Callable[[T], int]) -> Sequence[T]:
    """Those that are from the beginning to the end of a phase."""
    return ordered[bisect_left(ordered, piece.begun, key=at) : bisect_right(ordered, piece.ended, key=at)]
