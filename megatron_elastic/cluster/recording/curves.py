"""Curves: what is written down, as points for programs that draw them: figures of steps, recoveries by part, events."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from megatron_elastic.cluster.recording.recorder import Clerk
from megatron_elastic.layout import Layout
from megatron_elastic.observe.dials import Figures
from megatron_elastic.observe.telling import QUIET, tell
from megatron_elastic.observe.utilisation import Utilisation

_FIGURES = ("step_ms", "tokens_per_s", "world_size", "epoch")
"""Of a step; what it learns is in Megatron's own curves."""


class Point(NamedTuple):
    """Figures by name; of an event also its kind, and what there is to tell of it."""

    time: float
    step: int
    figures: Mapping[str, float]
    kind: str = ""
    text: str = ""


class Curves(ABC):
    """Writes points in a thread of its own. A ``recorder.Watcher``.

    Args:
        name: of the thread.
        flag: that asked for it.
        trouble: told of what cannot be written, and is kept until it can be.
    """

    PREFIX = "elastic/"
    """Of all names, to tell them from Megatron's."""

    def __init__(self, name: str, flag: str, trouble: Callable[[str], None]) -> None:
        self._step = 0
        self._used = Utilisation()
        self._clerk: Clerk[Point | None] = Clerk(name, self._do, lambda what: trouble(f"{flag}: {what}"))

    def step(self, record: Mapping[str, Any]) -> None:
        """A line of ``metrics.jsonl``."""
        self._step = record["step"]
        figures = {name: float(record[name]) for name in _FIGURES}
        if (flops := self._used.per_device(record)) is not None:
            figures["tflops_per_device"] = flops / 1e12
        if (mfu := self._used.mfu(record)) is not None:
            figures["mfu"] = mfu
        self._clerk.put(Point(time.time(), self._step, figures))

    def event(self, kind: str, epoch: int, at: float, fields: Mapping[str, Any]) -> None:
        """A line of ``events.jsonl``."""
        if kind == "hello":
            self._used.heard(fields)
        if kind not in QUIET:
            parts = {f"recovered/{name}": float(value) for name, value in fields.items() if name.endswith("_ms")}
            text = tell({"time": at, "kind": kind, "epoch": epoch, **fields})
            self._clerk.put(Point(at, self._step, parts if kind == "recovered" else {}, kind, text))

    def layout(self, layout: Layout) -> None:
        """A layout came into force: events tell of it."""
        return

    def figures(self, figures: Mapping[int, Figures]) -> None:
        """They are no figures of steps."""
        return

    def close(self, limit: float) -> None:
        """Wait at most ``limit`` seconds until all is written."""
        self._clerk.put(None)
        self._clerk.close(limit)

    def _do(self, point: Point | None) -> None:
        if point is None:
            self._end()
        else:
            self._write(point)

    @abstractmethod
    def _write(self, point: Point) -> None:
        """Raises OSError for what is to be tried again."""

    @abstractmethod
    def _end(self) -> None:
        """All is written."""
