"""Spans: what stopped training, for OpenTelemetry, where ``OTEL_EXPORTER_OTLP_ENDPOINT`` says where to.

A recovery is a span whose children are its parts, and whose events are what was written down meanwhile. A change of the
cells' shape is one, too, because it is the one planned change that training waits for; other planned changes are spans
without a length. The copies in the background that a layout asks for at a rank are one, from the first to the last, as
other changes wait for them.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from megatron_elastic.layout import Layout
from megatron_elastic.observe.dials import Figures
from megatron_elastic.observe.goodput import PARTS

VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"
_RECENT = 1000
"""Events that are remembered until a recovery is over."""


class Spans:
    """Sends them in a thread of its own, as the variables ``OTEL_*`` say. A ``recorder.Watcher``.

    Args:
        run: the name of the run directory: the attribute ``run`` of the resource.
    """

    def __init__(self, run: str) -> None:
        """Raises ImportError without OpenTelemetry."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        service = os.environ.get("OTEL_SERVICE_NAME", "megatron-elastic")
        self._provider = TracerProvider(resource=Resource.create({"service.name": service, "run": run}),
                                        shutdown_on_exit=False)  # close() is enough, and has a limit
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("megatron_elastic")
        self._recent: deque[tuple[float, str, dict[str, Any]]] = deque(maxlen=_RECENT)
        self._copies: dict[tuple[int, int], float] = {}
        """(epoch, rank) of copies under way -> since when."""

    @classmethod
    def wanted(cls, run: str, note: Callable[[str], None]) -> Spans | None:
        """What the environment asks for; None if it asks for nothing, or OpenTelemetry is missing, which is told."""
        if not os.environ.get(VARIABLE):
            return None
        try:
            return cls(run)
        except ImportError as error:
            note(f"{VARIABLE} is set, but nothing is sent there ({error}): pip install 'megatron-elastic[otel]'")
            return None

    def step(self, record: Mapping[str, Any]) -> None:
        """Nothing: nobody waits for a step that is done."""

    def layout(self, layout: Layout) -> None:
        """Copies that older ones have asked for are given up."""
        self._copies = {key: begun for key, begun in self._copies.items() if key[0] >= layout.epoch}

    def figures(self, figures: Mapping[int, Figures]) -> None:
        """Nothing: they are no spans."""

    def event(self, kind: str, epoch: int, at: float, fields: Mapping[str, Any]) -> None:
        """A line of ``events.jsonl``."""
        attributes = {name: _attribute(value) for name, value in {"epoch": epoch, **fields}.items()}
        self._recent.append((at, kind, attributes))
        if kind == "recovered":
            self._recovered(at, fields, attributes)
        elif kind == "reshaped":
            begun = at - fields["ms"] / 1e3
            self._tracer.start_span(kind, start_time=_ns(begun), attributes=attributes).end(_ns(at))
        elif kind == "switched":
            self._tracer.start_span(kind, start_time=_ns(at), attributes=attributes).end(_ns(at))
        elif kind == "copying":
            self._copied(epoch, at, fields)

    def close(self, limit: float) -> None:
        """Send what is left, for so many seconds at most."""
        # It sends what is left, and waits for its exporter for as long as that likes.
        closing = threading.Thread(target=self._provider.shutdown, name="spans", daemon=True)
        closing.start()
        closing.join(limit)

    def _recovered(self, at: float, fields: Mapping[str, Any], attributes: Mapping[str, Any]) -> None:
        from opentelemetry.trace import set_span_in_context

        begun = at - fields["mttr_ms"] / 1e3
        whole = self._tracer.start_span("recovered", start_time=_ns(begun), attributes=attributes)
        for when, kind, each in self._recent:
            if when >= begun and kind != "recovered":
                whole.add_event(kind, each, _ns(when))
        within, cursor = set_span_in_context(whole), begun
        for part in (*PARTS, "redo_ms"):
            span = self._tracer.start_span(part.removesuffix("_ms"), within, start_time=_ns(cursor))
            cursor += fields[part] / 1e3
            span.end(_ns(cursor))
        whole.end(_ns(at))
        self._recent.clear()

    def _copied(self, epoch: int, at: float, fields: Mapping[str, Any]) -> None:
        for rank, done, size in zip(fields["ranks"], fields["done"], fields["bytes"], strict=True):
            begun = self._copies.setdefault((epoch, rank), at)
            if done == size:
                del self._copies[epoch, rank]
                attributes = {"epoch": epoch, "rank": rank, "bytes": size}
                self._tracer.start_span("copying", start_time=_ns(begun), attributes=attributes).end(_ns(at))


def _attribute(value: Any) -> Any:
    """As OpenTelemetry takes it: plain, or a list of what is alike."""
    if isinstance(value, bool | int | float | str):
        return value
    return [str(each) for each in value] if isinstance(value, list | tuple) else str(value)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
