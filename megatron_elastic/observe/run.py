"""Run: the records of a run as they stand, read on as they grow."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from megatron_elastic.layout import Layout, LayoutError
from megatron_elastic.observe.goodput import Account
from megatron_elastic.observe.place import Folder, Place, layout_text
from megatron_elastic.observe.records import RecordsError, check_event, check_step
from megatron_elastic.observe.utilisation import Utilisation

RECENT = 10
"""Steps whose median says how fast a job is now."""
OVER = ("finished", "failed")


class Process(NamedTuple):
    """The process of a rank, and what it computes on: the name that torch has for it, if that is on record."""

    pid: int
    host: str
    device: str | None


class Copy(NamedTuple):
    """What a rank gets in the background, while training goes on."""

    rank: int
    done: int
    """Bytes that are here."""
    size: int
    """All of them."""
    unit: str | None
    """Of which a slice is fetched now."""
    source: int | None
    """From which rank."""
    rate: float | None
    """Bytes a second since it began; None where that cannot be said yet."""


class Run:
    """What is known of a run from its records; ``refresh`` reads what was added since.

    ``most``: lines of steps that are kept, the newest, so that memory does not grow with a run; None: all.
    """

    def __init__(self, place: Place, most: int | None = None) -> None:
        """Read the records there. Raises RecordsError if they cannot be read, or are damaged."""
        self.place = place
        self.metrics: list[Mapping[str, Any]] = []
        """Lines of committed steps, in order."""
        self.account = Account()
        """Where the time of all steps went."""
        self._most = most
        self.events: list[Mapping[str, Any]] = []
        self.layout: Layout | None = None
        """The newest."""
        self._lines = {name: _Lines(f"{place.name}/{name}.jsonl", check)
                       for name, check in (("metrics", check_step), ("events", check_event))}  # fmt: skip
        self._written: float | None = None
        """When the newest record was written, by the clock of whoever looks."""
        self.refresh()

    @classmethod
    def of_folder(cls, run_dir: Path, most: int | None = None) -> Run:
        """The run of a directory. Raises RecordsError also if there are no records."""
        return cls(Folder.of_run(run_dir), most)

    def refresh(self) -> None:
        """Read what was written since. Raises RecordsError."""
        metrics, events = self._lines["metrics"], self._lines["events"]
        more = True
        while more:
            known = -1 if self.layout is None else self.layout.epoch
            growth = self.place.grown(metrics.offset, events.offset, known)
            steps, happened = metrics.whole(growth.metrics), events.whole(growth.events)
            self.account.add(steps, happened)
            self.metrics += steps
            if self._most is not None:
                del self.metrics[: -self._most]
            self.events += happened
            if growth.layout is not None:
                self.layout = _layout(growth.layout, self.place.name)
            self._written = None if growth.age is None else time.time() - growth.age
            more = growth.more

    def of(self, *kinds: str) -> list[Mapping[str, Any]]:
        """Events of these kinds."""
        return [event for event in self.events if event["kind"] in kinds]

    @property
    def total(self) -> int | None:
        """Steps that the job is to do, as far as that is known."""
        started = self.of("started")
        return int(started[-1]["train_iters"]) if started else None

    @property
    def end(self) -> Mapping[str, Any] | None:
        """The event that the job ended with; None if it goes on, or has begun again since."""
        for event in reversed(self.events):
            if event["kind"] in OVER:
                return event
            if event["kind"] in ("started", "took_over"):
                return None
        return None

    @property
    def recovering(self) -> Mapping[str, Any] | None:
        """The fault that the job has not recovered from yet."""
        for event in reversed(self.events):
            if event["kind"] == "recovered":
                return None
            if event["kind"] == "fault":
                return event
        return None

    @property
    def processes(self) -> dict[int, Process]:
        """Rank -> its process, of all there ever were."""
        return {event["rank"]: Process(event["pid"], event["host"], event.get("device")) for event in self.of("hello")}

    @property
    def utilisation(self) -> Utilisation:
        """What the model's steps ask of devices."""
        return Utilisation(self.of("hello"))

    @property
    def slow(self) -> dict[int, float]:
        """Leader of a cell that is slow now -> how many times as long its grains take as those of the others."""
        slow: dict[int, float] = {}
        for event in self.of("slow", "well"):
            leader = event["ranks"][0]
            if event["times"] > 1:  # it may be less slow than before, and slow
                slow[leader] = event["times"]
            else:
                slow.pop(leader, None)
        return slow

    @property
    def copies(self) -> list[Copy]:
        """Those under way, by rank, as the newest layout asks for them."""
        if self.end is not None or self.layout is None:
            return []
        begun: dict[int, tuple[float, int]] = {}
        newest: dict[int, tuple[float, Copy]] = {}
        for event in reversed(self.events):
            if event["epoch"] < self.layout.epoch:
                break
            if event["kind"] != "copying" or event["epoch"] > self.layout.epoch:
                continue
            for rank, done, size, unit, source in zip(
                event["ranks"], event["done"], event["bytes"], event["units"], event["sources"], strict=True
            ):
                begun[rank] = event["time"], done
                name = None if unit < 0 else self.layout.units[unit]
                copy = Copy(rank, done, size, name, None if source < 0 else source, None)
                newest.setdefault(rank, (event["time"], copy))
        found = []
        for rank, (now, copy) in sorted(newest.items()):
            since, before = begun[rank]
            if copy.done < copy.size and rank not in self.layout.lost:
                found.append(copy._replace(rate=(copy.done - before) / (now - since) if now > since else None))
        return found

    @property
    def chores(self) -> list[Mapping[str, Any]]:
        """What takes long besides training, as the newest event of each says that is not over."""
        if self.end is not None:
            return []
        newest: dict[str, Mapping[str, Any]] = {}
        for event in reversed(self.events):
            if event["kind"] in ("took_over", "started"):
                break
            if event["kind"] == "progress":
                newest.setdefault(event["what"], event)
        return [event for _, event in sorted(newest.items()) if event["busy"]]

    def age(self, now: float | None = None) -> float | None:
        """Seconds since the newest record was written; None if there is none."""
        return None if self._written is None else max(0.0, (time.time() if now is None else now) - self._written)


def read_layout(run_dir: Path, epoch: int) -> Layout:
    """The layout of an epoch. Raises RecordsError."""
    return _layout(layout_text(run_dir, epoch), str(run_dir))


def _layout(text: str, where: str) -> Layout:
    try:
        return Layout.from_json(text)
    except LayoutError as error:
        raise RecordsError(f"{where} has a layout that cannot be read: {error}") from None


def loss_of(record: Mapping[str, Any]) -> float:
    """The exact loss of a step; the decimal field is null where it is not finite."""
    return float.fromhex(record["loss_hex"])


class _Lines:
    """The lines of a file that grows, which ``check`` finds to have what is read of them."""

    def __init__(self, name: str, check: Callable[[Mapping[str, Any], str], None]) -> None:
        self.offset = 0
        """Bytes that were read."""
        self._name, self._check = name, check
        self._number = 0

    def whole(self, text: bytes) -> Sequence[Mapping[str, Any]]:
        """Those that were completed, of what comes next. Raises RecordsError."""
        whole = text[: text.rfind(b"\n") + 1]  # the last one may still be being written
        self.offset += len(whole)
        return list(self._parsed(whole.splitlines()))

    def _parsed(self, lines: Sequence[bytes]) -> Iterator[Mapping[str, Any]]:
        decoder = msgspec.json.Decoder(dict[str, Any])
        for line in lines:
            self._number += 1
            try:
                record = decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise RecordsError(f"{self._name}:{self._number} is not a JSON object: {error}") from None
            self._check(record, f"{self._name}:{self._number}")
            yield record
