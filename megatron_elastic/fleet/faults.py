"""Faults: when which nodes fail, and how long they are away, drawn by a rate or as a trace of real ones says."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from megatron_elastic.plan import tabular

_DAY_S = 86400.0
_SERVERS = 400
"""Of the cluster whose faults InfiniteHBD publishes; its trace names only those that had some."""


class FaultsError(Exception):
    """A trace of faults cannot be read: where, why, and what is needed."""


class Fault(NamedTuple):
    """A node fails. Times are in seconds; ``repair_s`` 0: it is replaced at once."""

    at: float
    node: int
    repair_s: float


class Faults(Protocol):
    """What happens to the nodes of a cluster."""

    def of(self, nodes: int, seed: int) -> Iterator[Fault]:
        """Of a cluster of so many nodes, by time; equal arguments give equal faults."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """A Poisson process: ``rate`` failures for 1,000 days of a node, each replaced at once."""

    rate: float

    def of(self, nodes: int, seed: int) -> Iterator[Fault]:
        """Without end, unless the rate is 0."""
        draw, now = random.Random(seed), 0.0
        a_second = self.rate * nodes / 1000 / _DAY_S
        while a_second:
            now += draw.expovariate(a_second)
            yield Fault(now, draw.randrange(nodes), 0.0)


NONE = Drawn(0.0)


class _Span(NamedTuple):
    """Seconds from the begin of the trace on, in which a server is away."""

    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class Recorded:
    """Real faults: of each of ``servers`` the spans in which it is away, from the begin of the trace on."""

    servers: tuple[tuple[_Span, ...], ...]

    @classmethod
    def read(cls, path: Path) -> Recorded:
        """A file as InfiniteHBD publishes it: JSON (also .gz), a list of ``{"node_id", "event_time", "event_type"}``.

        ``event_time`` is in days, ``event_type`` is ``fault_start`` or ``fault_end``. A server with several faults at
        once is away until the last ends; one that does not end lasts as long as the trace. Raises FaultsError, OSError.
        """
        data = path.read_bytes()
        try:
            events = json.loads(tabular.text(data))
            ordered = sorted((_moment(event["event_time"]), _CHANGES[event["event_type"]], str(event["node_id"]))
                             for event in events)  # fmt: skip
        except (ValueError, KeyError, TypeError) as error:
            raise FaultsError(
                f"{path}: {type(error).__name__} {error}; a trace of faults is a JSON list of objects with node_id, "
                "event_time (days) and event_type (fault_start or fault_end)"
            ) from None
        if not ordered:
            raise FaultsError(f"{path}: there is no fault in it")
        spans: dict[str, list[_Span]] = {}
        begun: dict[str, list[float]] = {}
        for at, change, server in ordered:
            spans.setdefault(server, [])
            open_ = begun.setdefault(server, [])
            if change > 0:
                open_.append(at)
            elif open_:
                first = open_.pop(0)
                if not open_:
                    spans[server].append(_Span(first, at))
                else:  # the other fault goes on, from when this one began
                    open_[0] = first
        for server, open_ in begun.items():
            if open_:
                spans[server].append(_Span(open_[0], ordered[-1][0]))
        healthy = max(0, _SERVERS - len(spans))
        return cls((*(tuple(spans[server]) for server in sorted(spans)), *((),) * healthy))

    def of(self, nodes: int, seed: int) -> Iterator[Fault]:
        """Each node is one of the servers, drawn; with more nodes than servers, several are the same one."""
        servers = list(self.servers)
        random.Random(seed).shuffle(servers)
        faults = [
            Fault(span.begin, node, span.end - span.begin)
            for node in range(nodes)
            for span in servers[node % len(servers)]
        ]
        return iter(sorted(faults))


def _moment(days: Any) -> float:
    """Seconds. Raises ValueError, TypeError."""
    if not 0 <= float(days) < inf:
        raise ValueError(f"event_time is {days}, which is no number of days from 0 on")
    return float(days) * _DAY_S


_CHANGES = {"fault_start": 1, "fault_end": -1}
