"""Recorder: writes records and lines for people in threads, so that a stalled disk or terminal stops nobody.

What cannot be written now is kept, up to a limit, and written as soon as that works again; what is dropped is counted.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from megatron_elastic.cluster.protocol.effects import (
    WriteDigest,
    WriteEvent,
    WriteLayout,
    WriteMetrics,
    WriteProfile,
)
from megatron_elastic.observe.records import RunRecords

Write = WriteMetrics | WriteEvent | WriteLayout | WriteProfile | WriteDigest
T = TypeVar("T")

_MOST = 100_000
"""Items that are kept at most."""
_AGAIN = 1.0
"""Seconds until what could not be written is tried again."""


class Clerk(Generic[T]):
    """Does one thing after the other in a thread.

    Args:
        do: does it. What raises OSError is tried again, in the same place.
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


class Recorder:
    """Writes ``records`` as the protocol's effects say."""

    def __init__(self, run_dir: Path, trouble: Callable[[str], None]) -> None:
        self._run_dir = run_dir
        self._opened: RunRecords | None = None
        self.recorded = 0
        """Steps up to this one are on record."""
        self._clerk: Clerk[Write] = Clerk("records", self._write, lambda what: trouble(f"records: {what}"))

    def write(self, effect: Write) -> None:
        """Have it written."""
        self._clerk.put(effect)

    def drop(self) -> None:
        """Another writes from now on, and begins after what is written: the rest it hears from the agents."""
        self._clerk.drop()

    def close(self, limit: float) -> int:
        """Wait until all is written, and close the files; returns how much is not."""
        left = self._clerk.close(limit)
        if self._opened is not None:
            self._opened.close()
        return left

    def _write(self, effect: Write) -> None:
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
            case WriteDigest():
                records.digest(effect.digest)


class Screen:
    """Prints lines for people."""

    def __init__(self) -> None:
        self._clerk: Clerk[str] = Clerk("screen", _print, lambda what: None)

    def say(self, line: str) -> None:
        """Print a line, as soon as the terminal or pipe takes it."""
        self._clerk.put(line)

    def close(self, limit: float) -> None:
        """Wait until all is printed."""
        self._clerk.close(limit)


def _print(line: str) -> None:
    print(line, file=sys.stdout, flush=True)
