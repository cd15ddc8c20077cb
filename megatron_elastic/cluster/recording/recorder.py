"""Recorder: writes records in a thread, so that a stalled disk stops nobody; ``screen`` does so with lines for people.

What cannot be written now is kept, up to a limit, and written as soon as that works again; what is dropped is counted.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from megatron_elastic.cluster.protocol.effects import (
    WriteDigest,
    WriteEvent,
    WriteLayout,
    WriteMetrics,
    WriteProfile,
    WriteScaleTable,
)
from megatron_elastic.cluster.wire.address import Address, leave_address, remove_address
from megatron_elastic.layout import Layout
from megatron_elastic.observe.dials import Figures
from megatron_elastic.observe.place import epochs
from megatron_elastic.observe.records import RecordsError, RunRecords, recent_metrics
from megatron_elastic.observe.run import read_layout
from megatron_elastic.plan.predict.past import Past, past

Write = WriteMetrics | WriteEvent | WriteLayout | WriteProfile | WriteScaleTable | WriteDigest
T = TypeVar("T")

_MOST = 100_000
"""Items that are kept at most."""
_AGAIN = 1.0
"""Seconds until what could not be written is tried again."""


class GivenUp(Exception):
    """Something cannot be done, and need not be tried again. The message is for people."""


class Clerk(Generic[T]):
    """Does one thing after the other in a thread.

    Args:
        do: does it. What raises OSError is tried again, in the same place; what raises GivenUp is not.
        trouble: told, in the event loop, when something cannot be done for the first time, and what was given up.
    """

    def __init__(self, name: str, do: Callable[[T], None], trouble: Callable[[str], None]) -> None:
        self._do = do
        self._trouble = trouble
        self._loop = asyncio.get_running_loop()
        self._items: deque[T] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._failing = False
        self._dropped = 0
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def put(self, item: T) -> None:
        """Have it done. Does not block."""
        with self._changed:
            if len(self._items) == _MOST:
                self._dropped += 1
                return
            self._items.append(item)
            self._changed.notify()

    def drop(self) -> None:
        """What is not done yet is not to be."""
        with self._changed:
            self._items.clear()

    def close(self, limit: float) -> int:
        """Wait at most ``limit`` seconds until all is done; returns how much is not."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(limit)
        return len(self._items) + self._dropped

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._items or self._closing)
                if not self._items:
                    return
                item = self._items[0]
            try:
                self._do(item)
            except OSError as error:
                if not self._failing:
                    self._failing = True
                    self._tell(f"{error}; what is to be written is kept until it can be")
                with self._changed:
                    if self._closing or self._changed.wait_for(lambda: self._closing, _AGAIN):
                        return
                continue
            except GivenUp as error:
                self._tell(str(error))
            except Exception as error:
                self._tell(f"left out, please report it: {error!r}")
            if self._failing:
                self._failing = False
                self._tell("writing works again" + (f"; {self._dropped} items are lost" if self._dropped else ""))
            with self._changed:
                if self._items and self._items[0] is item:
                    self._items.popleft()

    def _tell(self, what: str) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._trouble, what)


class Watcher(Protocol):
    """Is told of what is written down. Its methods neither block nor raise."""

    def step(self, record: Mapping[str, Any]) -> None:
        """A line of ``metrics.jsonl``."""

    def event(self, kind: str, epoch: int, at: float, fields: Mapping[str, Any]) -> None:
        """A line of ``events.jsonl``."""

    def layout(self, layout: Layout) -> None:
        """A layout came into force."""

    def figures(self, figures: Mapping[int, Figures]) -> None:
        """What the dials of some ranks show; it is not written down."""


class Recorder:
    """Writes records as the protocol's effects say, and lets ``watchers`` know."""

    def __init__(self, run_dir: Path, trouble: Callable[[str], None], watchers: Sequence[Watcher] = ()) -> None:
        self._run_dir = run_dir
        self._watchers = watchers
        self._opened: RunRecords | None = None
        self.recorded = 0
        """Steps up to this one are on record."""
        self._clerk: Clerk[Write | Address | None] = Clerk("records", self._write,
                                                           lambda what: trouble(f"records: {what}"))

    def write(self, effect: Write) -> None:
        """Have it written."""
        self._clerk.put(effect)
        for watcher in self._watchers:
            _tell(watcher, effect)

    def tell_where(self, address: Address | None) -> None:
        """Have it written down where the job can be asked, or that it cannot be any more."""
        self._clerk.put(address)

    def past(self, present: Layout) -> Past:
        """What the last steps on record took, by layout; nothing where records cannot be read. Takes a while."""
        try:
            layouts = [read_layout(self._run_dir, epoch) for epoch in epochs(self._run_dir)]
            return past(present, layouts, recent_metrics(self._run_dir))
        except (RecordsError, OSError):
            return {}

    def show(self, figures: Mapping[int, Figures]) -> None:
        """Let watchers know what the dials of some ranks show."""
        for watcher in self._watchers:
            watcher.figures(figures)

    def drop(self) -> None:
        """Another writes from now on, and begins after what is written: the rest it hears from the agents."""
        self._clerk.drop()

    def close(self, limit: float) -> int:
        """Wait until all is written, and close the files; returns how much is not."""
        left = self._clerk.close(limit)
        if self._opened is not None:
            self._opened.close()
        return left

    def _write(self, item: Write | Address | None) -> None:
        match item:
            case None:
                remove_address(self._run_dir)
            case Address():
                try:
                    leave_address(self._run_dir, item)
                except OSError as error:  # nothing else waits until that is possible
                    raise GivenUp(f"cannot write down where the job can be asked: {error}") from None
            case _:
                self._record(item)

    def _record(self, effect: Write) -> None:
        records = self._opened = self._opened or RunRecords(self._run_dir)
        match effect:
            case WriteMetrics():
                records.metrics(effect.record)
                self.recorded = effect.record["step"]
            case WriteEvent():
                records.event(effect.kind, effect.epoch, at=effect.time, **effect.fields)
            case WriteLayout():
                records.layout(effect.layout)
            case WriteProfile():
                records.profile(effect.text)
            case WriteScaleTable():
                records.scale_table(effect.text)
            case WriteDigest():
                records.digest(effect.digest)


def _tell(watcher: Watcher, effect: Write) -> None:
    match effect:
        case WriteMetrics():
            watcher.step(effect.record)
        case WriteEvent():
            watcher.event(effect.kind, effect.epoch, effect.time, effect.fields)
        case WriteLayout():
            watcher.layout(effect.layout)
