"""Availability: when a job's slots come and go, by a trace of machines that were added and removed."""

from __future__ import annotations

import csv
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple


class TraceError(Exception):
    """A trace is not what it must be; the message says where."""


@dataclass(frozen=True, slots=True)
class Change:
    """At ``at`` (s), ``slot`` comes or goes."""

    at: float
    slot: int
    comes: bool


def read(path: Path) -> list[tuple[float, int]]:
    """(s, machines from then on), from lines of ``ms,add|remove,name``. Raises TraceError."""
    found: list[tuple[float, int]] = []
    there: set[str] = set()
    with path.open(newline="") as file:
        for number, row in enumerate(csv.reader(file), 1):
            try:
                at, what, name = float(row[0]) / 1e3, row[1].strip(), row[2].strip()
            except (IndexError, ValueError):
                raise TraceError(f"{path}, line {number}: expected MS,add|remove,NAME, got {','.join(row)}") from None
            if what not in ("add", "remove") or (what == "add") == (name in there) or (found and at < found[-1][0]):
                raise TraceError(f"{path}, line {number}: {what} {name} at {at:g} s does not follow from the rest")
            there ^= {name}
            found.append((at, len(there)))
    if not found:
        raise TraceError(f"{path} is empty")
    return found


def changes(machines: Sequence[tuple[float, int]], slots: int, begin: float, end: float, seed: int) -> list[Change]:
    """What happens to ``slots`` between two times of a trace, in s from ``begin``; all are there before.

    As large a part of them is there as of the most machines that the trace ever had, rounded up. Which of them go is
    drawn with ``seed``, and who has been away longest comes first.
    """
    most = max(count for _, count in machines)
    draw, away, found = random.Random(seed), list[int](), list[Change]()
    before = [count for at, count in machines if at <= begin]
    for at, count in [(begin, before[-1] if before else 0), *(each for each in machines if begin < each[0] < end)]:
        there = max(1, -(-slots * count // most))
        while slots - len(away) > there:
            slot = draw.choice([slot for slot in range(slots) if slot not in away])
            away.append(slot)
            found.append(Change(at - begin, slot, comes=False))
        while slots - len(away) < there:
            found.append(Change(at - begin, away.pop(0), comes=True))
    return found


class Presence(NamedTuple):
    """How many slots are there from ``at`` (s) on."""

    at: float
    slots: int
    done: float
    """What those that were there could do until then, as a share of what all could in all the time."""


def presence(happens: Sequence[Change], slots: int, seconds: float) -> list[Presence]:
    """At the beginning, after each change, and at the end."""
    found = [Presence(0.0, slots, 0.0)]
    for at, more in [*((change.at, 1 if change.comes else -1) for change in happens), (seconds, 0)]:
        before = found[-1]
        done = before.done + before.slots * (at - before.at) / (slots * seconds)
        found.append(Presence(at, before.slots + more, done))
    return found
