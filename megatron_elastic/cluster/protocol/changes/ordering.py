"""Ordering: in what order cells do their work, if it is searched (``--elastic-schedule search``).

Orders are looked for beside the protocol, as soon as costs are known. A layout that a loss has led to begins with the
best of the known schedules, so that nothing waits for a search, unless units move at once, for which all wait anyway;
one that is found then comes into force between two steps as a planned layout does, which is the same but for its epoch.
A layout that is planned waits for its order before anybody is told, but not for long. While copies are under way cells
do what they did, in the order that they had if it fits beside them, or else in one that does; and an order is looked
for in which they can begin when all copies are there.
"""

from __future__ import annotations

import dataclasses

from msgspec.structs import replace

from megatron_elastic.cluster.protocol.effects import Search
from megatron_elastic.cluster.protocol.events import Found
from megatron_elastic.cluster.protocol.job import Job
from megatron_elastic.cluster.protocol.turn import Turn
from megatron_elastic.layout import Layout, positions
from megatron_elastic.plan.choice import SEARCH, takes_long
from megatron_elastic.plan.work.order import WORTH, Order, alike, fits_beside, known, search

_PATIENCE = 0.5
"""Of a step, for which a planned layout waits for its order at most: it comes into force one step later at most."""


def consider(turn: Turn, layout: Layout) -> None:
    """Have a better order looked for, if that has not been done for what cells do in ``layout`` and what costs are now.

    ``layout``: the present one, or that to which it leads.
    """
    job, last, costs = turn.job, turn.job.ordering, turn.job.costs
    if job.settings.schedule != SEARCH or costs is None or last.searching:
        return
    present = job.layout is not None and job.layout.epoch == layout.epoch and _is_for(job.layout, layout)
    if not present and job.settings.places:
        return  # where chunks should be is found out of layouts that are there
    program = in_force(job, layout) if present else _first(job, layout)
    if (
        _is_for(last.sought, layout) and last.costs is not None and alike(layout, costs, last.costs)
        and ((last.better is None and last.before == program) or _better(job, layout) is not None)
    ):  # fmt: skip
        return
    turn.set(ordering=replace(last, sought=layout, costs=costs, before=program, searching=True, better=None))
    assert job.first is not None
    turn.do(Search(layout, costs, program, job.first.tied if job.settings.places else None))


def awaited(turn: Turn, new: Layout) -> bool:
    """Whether a planned layout is to wait for the order of its work, which is looked for from now on."""
    layout, costs = turn.job.layout, turn.job.costs
    if layout is None or costs is None or (_is_for(layout, new) and takes_long(new)):
        return False
    consider(turn, new)
    if not turn.job.ordering.searching or not _is_for(turn.job.ordering.sought, new):
        return False
    turn.set_timer("order", _PATIENCE * costs.pace_of(layout).step_ms / 1e3)
    return True


def in_force(job: Job, layout: Layout) -> bytes | None:
    """The packed program that cells work by in a layout; None: the usual order."""
    return job.ordering.program if job.ordering.epoch == layout.epoch else None


def planned(job: Job, new: Layout) -> tuple[Layout, bytes | None]:
    """A planned layout, with what is recomputed in it, and the packed program that cells begin with there: what was
    found for it; or what they begin with else.
    """
    if (better := _better(job, new)) is not None:
        return dataclasses.replace(new, recomputed=better.recomputed), better.program
    return new, _first(job, new)


def recovered(turn: Turn, new: Layout, moves: bool) -> Layout:
    """Cells are to begin in a layout that a loss has led to, in what order ``in_force`` says from now on; it, with what
    is recomputed there.

    ``moves``: whether units move before, so that the order is worth a wait of as long as a search takes.
    """
    if moves and (order := _searched(turn.job, new)) is not None:
        _tell(turn, order)
        new = dataclasses.replace(new, recomputed=order.recomputed)
        entered(turn, new.epoch, order.program)
        if not turn.job.ordering.searching:  # what is found would be taken for this one's
            turn.set(ordering=replace(turn.job.ordering, sought=new, costs=turn.job.costs, before=order.program,
                                      better=None))
    elif (program := _first(turn.job, new)) is not None:
        entered(turn, new.epoch, program)
    return new


def _searched(job: Job, new: Layout) -> Order | None:
    """The order for a layout, searched while all wait; None where that would take long, or there is none."""
    costs = job.costs
    if job.settings.schedule != SEARCH or job.settings.places or costs is None or takes_long(new):
        return None
    return search(new, costs, None)


def _first(job: Job, new: Layout) -> bytes | None:
    """The packed program that cells begin with in a layout for which none has been found: that which they have, if they
    do the same; the best of the known schedules; or None, the usual one.
    """
    layout, costs = job.layout, job.costs
    assert layout is not None
    if _is_for(layout, new) and layout.recomputed == new.recomputed:
        present = in_force(job, layout)
        if present is None or costs is None or fits_beside(present, layout, new, costs):
            return present
    return known(new, costs) if job.settings.schedule == SEARCH and costs is not None else None


def due(job: Job, layout: Layout) -> Order | None:
    """The order that cells are to change to in the present layout, if any."""
    better = _better(job, layout)
    return None if better is None or better.program == in_force(job, layout) else better


def _better(job: Job, layout: Layout) -> Order | None:
    """What was found for what cells do in a layout, if it fits what they hold there."""
    better, sought, costs = job.ordering.better, job.ordering.sought, job.costs
    if better is None or sought is None or costs is None or not _is_for(sought, layout):
        return None
    if better.program == in_force(job, layout):
        return better
    layout = dataclasses.replace(layout, recomputed=better.recomputed)
    return better if fits_beside(better.program, sought, layout, costs) else None


def _is_for(one: Layout | None, other: Layout) -> bool:
    """Whether cells do the same in a step of two layouts, whatever else they are sent meanwhile."""
    return one is not None and _work(one) == _work(other)


def _work(layout: Layout) -> object:
    """Whoever only follows does none of it."""
    return [(stage.units, [(cell.ranks, cell.grains, cell.parts) for cell in stage.cells if not cell.shadow])
            for stage in layout.stages]


def found(turn: Turn, event: Found) -> None:
    """An order has been looked for; or chunks are to be placed otherwise, and then it is searched anew."""
    job, last, order = turn.job, turn.job.ordering, event.order
    turn.set(ordering=replace(last, searching=False))
    if event.problem:
        turn.say(f"work stays in its order: {event.problem}")
    # Whoever coordinates since may not have asked.
    if order is None or last.sought is None or job.layout is None:
        return
    present = _is_for(last.sought, job.layout)
    _tell(turn, order, seconds=round(event.seconds, 3), **({} if present else {"ahead": True}))
    if order.stage_units is not None:
        turn.set(arrangement=replace(job.arrangement, placed=order.stage_units if present else None))
    elif not order.present_fits or order.ms < order.present_ms * (1 - WORTH):
        turn.set(ordering=replace(turn.job.ordering, better=order))


def _tell(turn: Turn, order: Order, **more: object) -> None:
    turn.record("ordered", name=order.name, ms=round(order.ms, 3), present_ms=round(order.present_ms, 3),
                bound_ms=round(order.bound_ms, 3), **more,
                **({"recomputed": list(order.recomputed)} if order.recomputed else {}),
                **({} if order.stage_units is None or order.placed_ms is None else {
                    "placed_ms": round(order.placed_ms, 3),
                    "through": [position.stage for position in positions(order.stage_units)],
                }))  # fmt: skip


def entered(turn: Turn, epoch: int, program: bytes) -> None:
    """A layout has come into force, in which cells work in this order."""
    turn.set(ordering=replace(turn.job.ordering, epoch=epoch, program=program))
