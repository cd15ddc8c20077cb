"""Goodput: the share of a run's time that was of use.

Useful is a step's time as it usually is in that part of the run. What a step took longer because it was interrupted is
lost: until the loss was known, until all had reported, for planning, editing and copying, and for what was done again.
So goodput = useful time / all time, redone and lost work taken out, as others define effective training time (Llama 3,
arXiv 2407.21783; Oobleck, SOSP 2023). That steps are slower when fewer ranks train is no loss in this sense: the ranks
that are there do what they can; ``tokens_per_s`` tells it.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PARTS = ("detect_ms", "interrupt_ms", "plan_ms", "edit_ms", "state_ms")
"""Of a recovery, in order; what is left of its time is redoing."""
_NEIGHBOURS = 9
"""Undisturbed steps whose median says what a step usually takes."""
_FEWEST = 3
"""Steps of as many ranks that are enough for that: the only one may be slow itself, as a rank that joins starts."""


@dataclass(frozen=True, slots=True)
class Goodput:
    """Times in milliseconds, from the first step on that is on record. ``lost``: by part, ``redo_ms`` the last one."""

    elapsed_ms: float
    useful_ms: float
    lost: Mapping[str, float]

    @property
    def share(self) -> float:
        """Useful of all time, from 0 to 1."""
        return self.useful_ms / self.elapsed_ms if self.elapsed_ms else 1.0


def goodput(metrics: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]]) -> Goodput:
    """Of the steps in ``metrics``, in order, with what happened meanwhile. Takes linear time."""
    recoveries: dict[int, list[Mapping[str, Any]]] = {}
    for event in events:
        if event["kind"] == "recovered":
            recoveries.setdefault(event["step"], []).append(event)
        elif event["kind"] == "fallback" and event["lost_steps"]:
            # The steps that are done again have their lines already: the next one's has their time.
            recoveries.setdefault(event["lost_steps"][-1] + 1, [])
    usual = _usual(metrics, set(recoveries))
    elapsed = useful = 0.0
    lost = dict.fromkeys((*PARTS, "redo_ms"), 0.0)
    for record, typical in zip(metrics, usual, strict=True):
        took = record["step_ms"]
        elapsed += took
        spent = min(took, typical)
        useful += spent
        rest = took - spent
        for event in recoveries.get(record["step"], ()):
            for part in PARTS:
                share = min(event[part], rest)
                lost[part] += share
                rest -= share
        lost["redo_ms"] += rest
    return Goodput(elapsed, useful, lost)


def _usual(metrics: Sequence[Mapping[str, Any]], disturbed: set[int]) -> list[float]:
    """What each step would have taken undisturbed: itself, or the median of such steps that are nearest, of as many
    ranks if there are a few of those.
    """
    by_width: dict[int | None, tuple[list[int], list[float]]] = {}
    for at, record in enumerate(metrics):
        if record["step"] not in disturbed:
            for width in (record["world_size"], None):
                places, times = by_width.setdefault(width, ([], []))
                places.append(at)
                times.append(record["step_ms"])
    usual = []
    for at, record in enumerate(metrics):
        if record["step"] not in disturbed:
            usual.append(record["step_ms"])
            continue
        places, times = by_width.get(record["world_size"], ([], []))
        if len(times) < _FEWEST:
            places, times = by_width.get(None, ([], []))
        first = max(0, bisect_left(places, at) - _NEIGHBOURS // 2)
        near = times[first : first + _NEIGHBOURS] or times[-_NEIGHBOURS:]
        usual.append(statistics.median(near) if near else record["step_ms"])
    return usual
