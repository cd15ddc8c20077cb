"""Journal: what a fleet must not forget: a file for each job and one for itself, each replaced as a whole.

What is to be done is written before it is done, so that whoever goes on after a kill knows of everything that may have
been begun, and what is begun again is known to be the same.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from megatron_elastic.fleet.arrivals import Rates
from megatron_elastic.fleet.managers.launch import write
from megatron_elastic.fleet.managers.lock import hold, is_held
from megatron_elastic.fleet.running.submission import JOBS, Submission

FLEET, STATE, EVENTS, LOCK = "fleet.json", "state.json", "events.jsonl", "lock"
VERSION = 1
"""Of both files."""

Record = TypeVar("Record", "Entry", "Fleet")
Phase = Literal["waiting", "running", "done", "failed", "cancelled", "refused"]


class JournalError(Exception):
    """A fleet's folder cannot be used."""


class Node(msgspec.Struct):
    """A launch of a job. Times are in seconds since 1970."""

    rank: int
    """Its ``--node-rank``; never given twice."""
    devices: int
    slots: list[int]
    since: float
    runs: float | None = None
    """Since when it runs: before, the manager had it wait."""
    joined: float | None = None
    """Since when its ranks train."""
    leaves: float | None = None
    """Since when it is to leave."""
    told: bool = False
    """The job has agreed to that."""
    stopped: float | None = None
    """When it was last told to end."""
    unstarted: str = ""
    """Why it could not be started when that was last tried."""


class Entry(msgspec.Struct):
    """A job, and what has become of it."""

    name: str
    index: int
    """By the order of submission."""
    submission: Submission | None = None
    """What was asked for; None if that cannot be read."""
    phase: Phase = "waiting"
    started: float | None = None
    ended: float | None = None
    reason: str = ""
    """Why it ended so, or was refused."""
    port: int = 0
    nodes: list[Node] = []
    next_node: int = 0
    changes: int = 0
    failures: int = 0
    """Nodes in a row that did not come to join."""
    trouble: str = ""
    """What it does not do; it is left alone until it has."""
    version: int = VERSION

    @property
    def held(self) -> int:
        """Devices that its launches have."""
        return sum(node.devices for node in self.nodes)

    @property
    def target(self) -> int:
        """Devices that it is to have."""
        return sum(node.devices for node in self.nodes if node.leaves is None)

    @property
    def over(self) -> bool:
        """Whether it has ended, for good or not."""
        return self.phase not in ("waiting", "running")


class Fleet(msgspec.Struct):
    """What concerns no single job."""

    total: int
    policy: str
    manager: str
    pid: int
    now: float
    """When it last looked."""
    rates: Rates | None = None
    next_index: int = 0
    leads: list[float] = []
    """Seconds that the last growths took until the new ranks trained."""
    starts: list[float] = []
    """Seconds that the last jobs took until their first step."""
    scalings: int = 0
    version: int = VERSION


class Journal:
    """The files of the fleet in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def job(self, name: str) -> Path:
        """The folder of a job."""
        return self.folder / JOBS / name

    def names(self) -> list[str]:
        """Of all jobs that were ever submitted."""
        try:
            with os.scandir(self.folder / JOBS) as found:
                return sorted(each.name for each in found if each.is_dir() and not each.name.startswith("."))
        except FileNotFoundError:
            return []

    def read_entry(self, name: str) -> Entry | None:
        """A job; None if no fleet has seen it yet. Raises JournalError."""
        return _read(self.job(name) / STATE, Entry)

    def read_fleet(self) -> Fleet | None:
        """The fleet; None where none has run yet. Raises JournalError."""
        return _read(self.folder / FLEET, Fleet)

    def keep(self, record: Entry | Fleet) -> None:
        """Write it, so that it outlives a loss of power. Raises OSError."""
        path = self.folder / FLEET if isinstance(record, Fleet) else self.job(record.name) / STATE
        write(path, msgspec.to_builtins(record))

    def tell(self, kind: str, **fields: Any) -> None:
        """Append a line to what has happened. Raises OSError."""
        line = json.dumps({"time": time.time(), "kind": kind, **fields}) + "\n"
        with (self.folder / EVENTS).open("ab", buffering=0) as file:
            file.write(line.encode())

    def events(self) -> list[dict[str, Any]]:
        """What has happened; a last line that was not finished is left out."""
        try:
            lines = (self.folder / EVENTS).read_text().splitlines()
        except FileNotFoundError:
            return []
        return [event for line in lines if isinstance(event := _parsed(line), dict)]

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Nobody else writes meanwhile. Raises JournalError if somebody does."""
        try:
            (self.folder / JOBS).mkdir(parents=True, exist_ok=True)
            file = (self.folder / LOCK).open("ab")
        except OSError as error:
            raise JournalError(f"cannot write in {self.folder}: {error.strerror}") from None
        with file:
            if not hold(file):
                raise JournalError(f"a fleet runs in {self.folder} already")
            yield

    def is_led(self) -> bool:
        """Whether a fleet runs here now."""
        return is_held(self.folder / LOCK)


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _read(path: Path, kind: type[Record]) -> Record | None:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise JournalError(f"cannot read {path}: {error.strerror}") from None
    try:
        record = msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise JournalError(f"{path} is damaged: {error}") from None
    if record.version != VERSION:
        raise JournalError(f"{path} is of version {record.version}, and this program reads {VERSION}")
    return record
