"""Outcome: what an event makes of a layout, and how long steps take before and after it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from megatron_elastic.layout import Holdings, Layout, LayoutError, SliceLost, Transfer, transfers
from megatron_elastic.pipeline.prediction import takes_long
from megatron_elastic.pipeline.program import Program
from megatron_elastic.pipeline.search import find
from megatron_elastic.pipeline.simulate import Step, Timeline, fastest, run, scheduled
from megatron_elastic.plan import NoLayout, lose
from megatron_elastic.plan.choice import SEARCH
from megatron_elastic.plan.costs.cost import Costs
from megatron_elastic.plan.costs.recomputation import recomputing
from megatron_elastic.plan.growth import admit
from megatron_elastic.plan.migration import size
from megatron_elastic.plan.replan import replan


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an event makes of a layout. ``interim`` is None where nothing can go on before state has been moved."""

    before: Layout
    interim: Layout | None
    after: Layout
    moves: tuple[Transfer, ...]
    """Slices to copy so that ``after`` can be entered."""
    missing: str | None
    """Why some slice has to be loaded from a checkpoint; then ``moves`` is empty."""

    @property
    def layouts(self) -> Iterable[tuple[str, Layout]]:
        """The layouts with their names, in order."""
        named = (("before", self.before), ("interim", self.interim), ("after", self.after))
        return ((name, layout) for name, layout in named if layout is not None)


def plan(
    layout: Layout, event: str, costs: Costs, tied: bool | None = None, schedule: str | None = None
) -> Outcome:
    """What ``event`` ('lose:rank=R[,R...]', 'join:ranks=N' or 'pp:N') makes of ``layout``.

    Every owner and replica is taken to hold its slices. Raises ValueError for an event that cannot be read, LayoutError
    for ranks that are not there, NoLayout where nothing can go on.
    """
    match = re.fullmatch(r"lose:rank=(\d+(?:,\d+)*)|join:ranks=([1-9]\d*)|pp:([1-9]\d*)", event)
    if match is None:
        raise ValueError(f"event {event!r} is none of 'lose:rank=R[,R...]', 'join:ranks=N', 'pp:N'")
    epoch, lost = layout.epoch, lost_ranks(layout, match[1] or "")
    if lost and {*layout.ranks, *layout.spares} <= set(lost):
        raise NoLayout(f"no rank of the layout of epoch {epoch} would be left: name fewer of them")
    held = Holdings.of(layout).without(lost)
    interim: Layout | None = layout
    if lost:
        try:
            interim = lose(layout, lost, held, epoch + 1)
        except NoLayout:
            interim = None
    elif match[2]:
        newest = max((*layout.ranks, *layout.spares, *layout.lost))
        interim = admit(layout, {newest + i + 1: len(layout.hosts) for i in range(int(match[2]))}, epoch + 1)
    stages = [int(match[3])] if match[3] else None
    if interim is None:
        after = replan(layout, costs, epoch + 1, lost=lost, tied=tied, recompute=schedule == SEARCH)
    else:
        if interim.spares:
            interim = admit(interim, {}, interim.epoch)
        after = replan(interim, costs, interim.epoch + 1, stages=stages, tied=tied, recompute=schedule == SEARCH)
    if schedule == SEARCH:
        after = recomputing(after, costs)
    try:
        moves, missing = transfers(after, held), None
    except SliceLost as error:
        moves, missing = (), f"{error}: it has to be loaded from the newest checkpoint"
    return Outcome(layout, interim, after, moves, missing)


def lost_ranks(layout: Layout, ranks: str) -> list[int]:
    """Ranks as they are written in an event. Raises LayoutError for those that are not there."""
    lost = [int(rank) for rank in ranks.split(",")] if ranks else []
    if unknown := set(lost) - {*layout.ranks, *layout.spares}:
        raise LayoutError(f"ranks {sorted(unknown)} are not in the layout of epoch {layout.epoch}, or lost already")
    return lost


def timeline(layout: Layout, costs: Costs, schedule: str | None = None) -> Timeline | None:
    """A step of ``layout``, simulated; None where that would take long. The overhead is not in it. ``schedule`` as
    ``program`` has it.
    """
    if takes_long(layout):
        return None
    return run(program(layout, costs, schedule), layout, costs)


def program(layout: Layout, costs: Costs, schedule: str | None = None) -> Program:
    """What cells do under ``--elastic-schedule``, in a layout that is ``recomputed``; None: 1F1B with as many live
    activations as are of use. Raises NotFitting if no order is known that fits the memory.
    """
    if schedule is None:
        return fastest(layout, costs)[0]
    return find(layout, costs).program if schedule == SEARCH else scheduled(schedule, layout)


def recomputed(outcome: Outcome, costs: Costs, schedule: str | None) -> Outcome:
    """With those chunks recomputed in its layouts that a search recomputes, if that is the schedule."""
    if schedule != SEARCH:
        return outcome

    def searched(layout: Layout) -> Layout:
        if takes_long(layout):
            return layout
        return replace(layout, recomputed=find(layout, costs).recomputed)

    return replace(
        outcome, before=searched(outcome.before), after=searched(outcome.after),
        interim=None if outcome.interim is None else searched(outcome.interim),
    )  # fmt: skip


def step_ms(layout: Layout, costs: Costs, schedule: str | None) -> float:
    """Milliseconds of a step of ``layout``, simulated, or estimated where that would take long."""
    if takes_long(layout):
        return costs.pace_of(layout).step_ms
    return Step.of(program(layout, costs, schedule), layout, costs).ms


def figures(outcome: Outcome, costs: Costs, schedule: str | None) -> dict[str, Any]:
    """What ``--json`` prints."""
    return {
        "step_ms": {name: round(step_ms(layout, costs, schedule), 3) for name, layout in outcome.layouts},
        "layouts": {name: json.loads(layout.to_json()) for name, layout in outcome.layouts},
        "transfers": [
            {
                "unit": outcome.after.units[move.unit], "slice": move.slice, "tp": move.part, "src": move.src,
                "dst": move.dst, "role": move.role, "bytes": round(size(move, outcome.after, costs)),
            }
            for move in outcome.moves
        ],
        "missing": outcome.missing,
    }  # fmt: skip
