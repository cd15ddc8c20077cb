"""Goodput: the share of a run's time that was of use.

Useful is a step's time as it usually is in that part of the run. What a step took longer because it was interrupted is
lost: until the loss was known, until all had reported, for planning, editing and copying, and for what was done again.
So goodput = useful time / all time, redone and lost work taken out, as others define effective training time (Llama 3,
arXiv 2407.21783; Oobleck, SOSP 2023). That steps are slower when fewer ranks train is no loss in this sense: the ranks
that are there do what they can; ``tokens_per_s`` tells it.
"""

from __future__ import annotations

import statistics
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import islice
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


class Account:
    """Where a run's time went, added up as its records are read; of a step it keeps some bytes."""

    def __init__(self) -> None:
        self._elapsed = 0.0
        self._steps, self._times = array("q"), array("d")
        self._by_width: dict[int, array[int]] = {}
        """Number of ranks -> places of the steps that they did."""
        self._recoveries: dict[int, list[Mapping[str, Any]]] = {}
        """Step -> what happened in it."""

    def add(self, metrics: Iterable[Mapping[str, Any]], events: Iterable[Mapping[str, Any]]) -> None:
        """What was written since: steps, in order, and what happened."""
        for record in metrics:
            self._by_width.setdefault(record["world_size"], array("q")).append(len(self._steps))
            self._steps.append(record["step"])
            self._times.append(record["step_ms"])
            self._elapsed += record["step_ms"]
        for event in events:
            if event["kind"] == "recovered":
                self._recoveries.setdefault(event["step"], []).append(event)
            elif event["kind"] == "fallback" and event["lost_steps"]:
                # The steps that are done again have their lines already: the next one's has their time.
                self._recoveries.setdefault(event["lost_steps"][-1] + 1, [])

    def goodput(self) -> Goodput:
        """Of all that was added. Takes time by what happened, and not by steps."""
        disturbed = {at: events for step, events in self._recoveries.items() if (at := self._place(step)) is not None}
        widths = {at: self._width(at) for at in disturbed}
        undisturbed = {width: len(places) for width, places in self._by_width.items()}
        for width in widths.values():
            undisturbed[width] -= 1
        useful, lost = self._elapsed, dict.fromkeys((*PARTS, "redo_ms"), 0.0)
        for at, events in disturbed.items():
            alike = undisturbed[widths[at]] >= _FEWEST
            places = self._by_width[widths[at]] if alike else range(len(self._steps))
            rest = max(0.0, self._times[at] - self._usual(at, places, disturbed.keys()))
            useful -= rest
            for event in events:
                for part in PARTS:
                    share = min(event[part], rest)
                    lost[part] += share
                    rest -= share
            lost["redo_ms"] += rest
        return Goodput(self._elapsed, useful, lost)

    def _place(self, step: int) -> int | None:
        at = bisect_left(self._steps, step)
        return at if at < len(self._steps) and self._steps[at] == step else None

    def _width(self, at: int) -> int:
        """How many ranks did a step."""
        for width, places in self._by_width.items():
            if places[bisect_left(places, at, hi=len(places) - 1)] == at:
                return width
        raise KeyError(at)

    def _usual(self, at: int, places: Sequence[int], disturbed: Set[int]) -> float:
        """What a step would have taken undisturbed: the median of the nearest of ``places`` that were."""
        middle = bisect_left(places, at)
        before = [*islice(_others(places, range(middle - 1, -1, -1), disturbed), _NEIGHBOURS // 2)]
        after = islice(_others(places, range(middle, len(places)), disturbed), _NEIGHBOURS - len(before))
        near = [self._times[other] for other in (*before, *after)]
        return statistics.median(near) if near else self._times[at]


def goodput(metrics: Iterable[Mapping[str, Any]], events: Iterable[Mapping[str, Any]]) -> Goodput:
    """Of the steps in ``metrics``, in order, with what happened meanwhile. Takes linear time."""
    account = Account()
    account.add(metrics, events)
    return account.goodput()


def _others(places: Sequence[int], order: Iterable[int], without: Set[int]) -> Iterator[int]:
    return (places[index] for index in order if places[index] not in without)
