"""Screen: lines for people, or with ``--elastic-log-format json`` objects for programs, one a line.

As objects, what is also on record is told as it is there, and once: the kind of the event is the line's ``event``, and
its fields are the line's.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from megatron_elastic.cluster.recording.recorder import Clerk
from megatron_elastic.layout import Layout
from megatron_elastic.observe.dials import Figures
from megatron_elastic.observe.telling import level_of, tell

_WARNING = "WARNING: "
_encoder = msgspec.json.Encoder()


class Screen:
    """Prints as soon as the terminal or pipe takes it. ``as_json``: objects. It is a ``recorder.Watcher``, too."""

    def __init__(self, as_json: bool = False) -> None:
        self.as_json = as_json
        self._clerk: Clerk[str | None] = Clerk("screen", self._print, lambda what: None)
        self._begun: str | None = None
        """What is on its way: when it is tried again, the stream has it already."""
        self._watches = False
        self._reason: str | None = None
        """Why the job has failed, as long as that is still to be printed: what the clerk is given as None."""
        self._told = set[str]()

    def watch(self) -> None:
        """From now on it is told what is written down."""
        self._watches = True

    def say(self, line: str, tells: str = "") -> None:
        """Print a line for people. ``tells``: the kind of the event on record that it is about."""
        if not self.as_json:
            self._clerk.put(line)
        elif not (tells and self._watches):
            level = "warning" if line.startswith(_WARNING) else level_of(tells)
            self._clerk.put(as_object(level, tells or "said", line.removeprefix(_WARNING)))

    def complain(self, line: str) -> None:
        """Print why the job has failed, after all that was said before."""
        if "failed" not in self._told:
            self._reason = line
            self._clerk.put(None)

    def close(self, limit: float) -> None:
        """Wait until all is printed. Where that takes too long, or cannot be, the reason of a failure still is."""
        self._clerk.close(limit)
        self._give_reason()

    # ---- what is written down ----------------------------------------------------------------

    def step(self, record: Mapping[str, Any]) -> None:
        """A step, as in ``metrics.jsonl``."""
        message = f"step {record['step']}, loss {record['loss']}, {record['step_ms']} ms"
        self._clerk.put(as_object("info", "step", message, **record))

    def event(self, kind: str, epoch: int, at: float, fields: Mapping[str, Any]) -> None:
        """An event, as in ``events.jsonl``."""
        self._told.add(kind)
        event = {"time": at, "kind": kind, "epoch": epoch, **fields}
        self._clerk.put(as_object(level_of(kind), kind, tell(event), at, epoch=epoch, **fields))

    def layout(self, layout: Layout) -> None:
        """Nothing: events tell of it."""

    def figures(self, figures: Mapping[int, Figures]) -> None:
        """Nothing: they are no lines."""

    def _give_reason(self) -> None:
        reason, self._reason = self._reason, None
        if reason is not None:
            complain("error", reason, self.as_json)

    def _print(self, line: str | None) -> None:
        if line is None:
            self._give_reason()
            return
        if self._begun is not line:
            self._begun = line
            print(f"{line}\n", end="")  # at once: ranks' lines come from another thread
        sys.stdout.flush()
        self._begun = None


def as_object(level: str, event: str, message: str, at: float | None = None, /, **fields: Any) -> str:
    """A line for programs: ``time`` in seconds since 1970, ``level``, ``event``, ``message``, and further fields."""
    stamp = {"time": time.time() if at is None else at, "level": level, "event": event, "message": message}
    return _encoder.encode({**stamp, **fields}).decode()


def complain(level: str, line: str, as_json: bool) -> None:
    """Print a ``note`` or an ``error`` of this program, at once."""
    if as_json:
        line = as_object("info" if level == "note" else level, "said", line)
    else:
        line = f"megatron-elastic: {level}: {line}"
    with contextlib.suppress(OSError):  # nobody reads it any more: that must not end what it is about
        print(line, file=sys.stderr, flush=True)
