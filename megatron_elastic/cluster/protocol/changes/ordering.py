"""Ordering: in what order cells do their work, if it is searched (``--elastic-schedule search``).

A layout begins with the usual order, so that nothing waits for a search. When all that it asks for is live, and costs
are known, a better one is looked for beside the protocol; it comes into force between two steps as a planned layout
does, which is the same but for its epoch. Where cells do the same in the next layout, as while copies are under way,
they keep it; any other layout begins with the usual order again.
"""

from __future__ import annotations

from msgspec.structs import replace

from megatron_elastic.cluster.protocol.effects import Search
from megatron_elastic.cluster.protocol.events import Found
from megatron_elastic.cluster.protocol.job import Job, Ordering
from megatron_elastic.cluster.protocol.turn import Turn
from megatron_elastic.layout import Layout, positions
from megatron_elastic.plan.choice import SEARCH
from megatron_elastic.plan.work.order import Order, alike

_WORTH = 0.01
"""What another order has to gain at least, as a share of the passes of a step."""


def consider(turn: Turn, layout: Layout) -> None:
    """Have a better order looked for, if that has not been done for what the costs are now."""
    job, present, costs = turn.job, turn.job.ordering, turn.job.costs
    if job.settings.schedule != SEARCH or costs is None or present.searching:
        return
    same = present.epoch == layout.epoch
    if same and present.costs is not None and alike(layout, costs, present.costs):
        return
    program = in_force(job, layout)
    turn.set(ordering=Ordering(epoch=layout.epoch, costs=costs, program=program, searching=True))
    assert job.first is not None
    turn.do(Search(layout, costs, program, job.first.tied if job.settings.places else None))


def in_force(job: Job, layout: Layout) -> bytes | None:
    """The packed program that cells work by in a layout; None: the usual order."""
    return job.ordering.program if job.ordering.epoch == layout.epoch else None


def kept(job: Job, new: Layout) -> bytes | None:
    """The packed program that cells have now, if they do the same in a planned layout; None: they begin with the usual
    one there.
    """
    layout = job.layout
    assert layout is not None
    return in_force(job, layout) if _work(new) == _work(layout) else None


def _work(layout: Layout) -> object:
    """What cells do in a step, whatever else they are sent meanwhile."""
    return layout.recomputed, [
        (stage.units, [(cell.ranks, cell.grains, cell.parts) for cell in stage.cells]) for stage in layout.stages
    ]


def found(turn: Turn, event: Found) -> Order | None:
    """The order that is to be changed to, if any; or chunks are to be placed otherwise, and then searched anew."""
    job, present, order = turn.job, turn.job.ordering, event.order
    current = job.layout is not None and event.epoch == job.layout.epoch
    # Whoever coordinates since may not have asked, and another layout is to be searched for by itself.
    turn.set(ordering=replace(present, searching=False, costs=present.costs if current else None))
    if event.problem:
        turn.say(f"work stays in its order: {event.problem}")
    if order is None or not current:
        return None
    turn.record("ordered", name=order.name, ms=round(order.ms, 3), present_ms=round(order.present_ms, 3),
                bound_ms=round(order.bound_ms, 3), seconds=round(event.seconds, 3),
                **({"recomputed": list(order.recomputed)} if order.recomputed else {}),
                **({} if order.stage_units is None or order.placed_ms is None else {
                    "placed_ms": round(order.placed_ms, 3),
                    "through": [position.stage for position in positions(order.stage_units)],
                }))  # fmt: skip
    if order.stage_units is not None:
        turn.set(arrangement=replace(job.arrangement, placed=order.stage_units))
        return None
    return order if not order.present_fits or order.ms < order.present_ms * (1 - _WORTH) else None


def entered(turn: Turn, epoch: int, program: bytes) -> None:
    """A layout has come into force, in which cells work in this order."""
    turn.set(ordering=replace(turn.job.ordering, epoch=epoch, program=program))
