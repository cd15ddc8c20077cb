"""Hang: a step that does not end. Who holds all others up is found and taken out.

When no step has been committed for a while, agents say how far their ranks have come. A rank that neither waits for
others nor has come any further for longer than steps usually take hangs, or its device does, for which it waits; the
others wait for it. But if all cells of a stage stand still, they stay: what they share may be at fault. So does who
cannot be done without. If all wait for each other, a message is lost, or, if some wait for their devices, a collective
of these does not end: everybody is interrupted, which sends it again, and if that happens again in the same step, one
is taken out: who was in all circles that waits have formed in it, and is waited for most. A device for which its rank
alone has waited in vain is out of use.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from immutables import Map
from msgspec.structs import replace

from megatron_elastic.cluster.messages import Inspect, RankReading
from megatron_elastic.cluster.protocol.changes import membership
from megatron_elastic.cluster.protocol.events import Inspected
from megatron_elastic.cluster.protocol.faults import error, recovery, suspicion
from megatron_elastic.cluster.protocol.job import Job, Raised, without
from megatron_elastic.cluster.protocol.turn import Turn
from megatron_elastic.cluster.protocol.watch import EARLY
from megatron_elastic.layout import Cell, Holdings, Stage
from megatron_elastic.plan import NoLayout, StateLost
from megatron_elastic.plan.work.order import foreseen

_STEPS = 3.0
"""Usual steps after which a rank that has come no further hangs, if that is longer than the limit."""
_SOON, _LATER = 0.2, 2.0
"""Seconds from one look to the next, at least and at most."""


def due(turn: Turn) -> None:
    """There was no step for a while: look how far everybody is. Who does not answer is asked again."""
    nodes = {turn.job.ranks[rank].node for rank in turn.job.alive}
    asked: Map[int, None] = Map({node: None for node in nodes if node is not None and node in turn.job.nodes})
    turn.set(watch=replace(turn.job.watch, asked=asked, readings=Map(), usual=None))
    for node in asked:
        turn.tell(node, Inspect())
    turn.set_timer("hang", _LATER)


def inspected(turn: Turn, event: Inspected) -> None:
    """A node has told."""
    watch = turn.job.watch
    if event.node not in watch.asked:
        return
    known = [each for each in (watch.usual, event.usual) if each is not None]
    watch = replace(
        watch, asked=without(watch.asked, [event.node]), usual=max(known, default=None),
        readings=watch.readings.update({each.rank: each for each in event.readings}),
    )  # fmt: skip
    turn.set(watch=watch)
    if not watch.asked:
        _judge(turn, {rank: watch.readings[rank] for rank in turn.job.alive if rank in watch.readings})


def _judge(turn: Turn, readings: Mapping[int, RankReading]) -> None:
    busy = {rank: each for rank, each in readings.items() if each.waits is None or _own(rank, readings)}
    limits = {rank: _limit(turn.job, each) for rank, each in busy.items()}
    left = {rank: limits[rank] - each.stood for rank, each in busy.items()}
    hung = [rank for rank, seconds in left.items() if seconds <= 0]
    # What makes all of a stage stand still does not do so at the same moment.
    standing = [rank for rank, seconds in left.items() if seconds <= limits[rank] / 2]
    if hung and _stay(turn.job, standing):
        _warn(turn, readings, standing)
        turn.set_timer("stalled", max(limits[rank] for rank in standing))
    elif hung:
        waiting_for_own = [rank for rank in hung if readings[rank].waits == rank]
        for rank in sorted(hung):
            if not turn.job.watch.stalled:
                _take_out(turn, readings[rank], len(readings) - len(busy), device=hung == [rank] == waiting_for_own)
    elif not busy:
        _untie(turn, readings)
    turn.set_timer("hang", min(max(min(left.values(), default=_LATER), _SOON), _LATER))


def no_longer_stalled(turn: Turn) -> None:
    """All of a stage stood still, and some have gone on long ago."""
    turn.set(watch=replace(turn.job.watch, stalled=False))


def _own(rank: int, readings: Mapping[int, RankReading]) -> bool:
    """Whether a rank waits for its own device, and no other rank, for whose device that may wait, for its own."""
    return [each.rank for each in readings.values() if each.waits == each.rank] == [rank]


def _limit(job: Job, reading: RankReading) -> float:
    """Seconds that a rank may stand where it is."""
    if reading.patient or (reading.at == "data" and _alone(job, reading.rank)):
        return job.settings.wait_timeout
    return _usual_limit(job)


def _usual_limit(job: Job) -> float:
    usual = job.watch.usual
    return job.settings.wait_timeout if usual is None else max(job.settings.hang_timeout, _STEPS * usual) * EARLY


def _alone(job: Job, rank: int) -> bool:
    """Whether no other cell does what its cell does, so that nothing tells its hanging from that of a disk."""
    layout = job.layout
    return layout is not None and rank in layout.places and len(_whole(job, layout.stages[layout.stage_of(rank)])) == 1


def _whole(job: Job, stage: Stage) -> list[Cell]:
    return [cell for cell in stage.cells if not cell.shadow and not any(job.ranks[rank].lost for rank in cell.ranks)]


def _stay(job: Job, standing: Collection[int]) -> bool:
    """Whether ranks that stand still are left alone: as several cells do, all of a stage, or nobody could go on."""
    layout = job.layout
    assert layout is not None
    for stage in layout.stages:
        whole = _whole(job, stage)
        if len(whole) > 1 and all(any(rank in standing for rank in cell.ranks) for cell in whole):
            return True
    known = {*layout.ranks, *layout.spares, *layout.lost}
    try:
        lost = [rank for rank in (*job.lost, *standing) if rank in known]
        job.policy.lose(layout, lost, Holdings.of(layout), layout.epoch + 1, job.costs,
                        foreseen(job.settings.schedule))  # fmt: skip
    except StateLost:
        return not job.trust.newest_save
    except NoLayout:
        return True
    return False


def _warn(turn: Turn, readings: Mapping[int, RankReading], hung: Collection[int]) -> None:
    """Some stand still and stay, say for a disk that they share."""
    before = turn.job.watch.stalled
    turn.set(watch=replace(turn.job.watch, stalled=True))
    if not before:
        places = Counter(place(readings[rank]) for rank in hung).most_common(3)
        where = ", ".join(f"{count} {at}" for at, count in places)
        turn.record("standstill", ranks=sorted(hung), where=where)
        turn.say(f"WARNING: {len(hung)} of {len(turn.job.alive)} ranks stand still: {where}. They are all of a "
                 "stage, or nobody could go on without them, so they stay: look at what they share, as a disk",
                 "standstill")


def place(reading: RankReading) -> str:
    """Where a rank is, for people."""
    grain = "" if reading.grain is None else f" of grain {reading.grain}"
    return f"at {reading.at}{grain} in step {reading.step}" if reading.at else "before its first step"


def _take_out(turn: Turn, reading: RankReading, waiting: int, device: bool) -> None:
    """A rank goes. ``device``: its device hangs, and nothing else does."""
    rank = reading.rank
    if turn.job.ranks[rank].fenced is not None:
        return
    turn.record("hang", rank=rank, step=reading.step, point=reading.at, grain=reading.grain,
                stood_ms=round(reading.stood * 1e3, 3), waiting=waiting)
    what = f"it hangs {place(reading)}, for {reading.stood:.1f} s, while {waiting} wait"
    turn.set_rank(rank, stopped=turn.now - reading.stood)
    if device:
        hello = turn.job.ranks[rank].hello
        membership.broke(turn, rank, "" if hello is None else hello.device, what)
    suspicion.fence(turn, rank, "hangs", what, stack=True, device=device)
    error.hung(turn, Raised(rank, reading.step, turn.job.epoch, what, (reading.at, reading.grain)))


def _untie(turn: Turn, readings: Mapping[int, RankReading]) -> None:
    """Nobody computes. If all wait for other ranks, and nothing is under way that will end that, a message is lost."""
    job = turn.job
    under_way = job.collecting or job.suspicions or any(node.absent is not None for node in job.nodes.values())
    if under_way or readings.keys() != set(job.alive) or any(
        # Patience is for those who do something: nobody does.
        each.waits is None or each.waits < 0 or each.stood < _usual_limit(job) for each in readings.values()
    ):
        return
    waits = {rank: each.waits for rank, each in readings.items() if each.waits is not None and each.waits in readings}
    if not waits:
        return
    waited = Counter(waits.values())

    def weight(rank: int) -> tuple[int, int]:
        return waited[rank], rank

    circle = _circle(waits) or frozenset(waited)
    step = readings[max(circle, key=weight)].step
    again = job.watch.freed == step
    if again:
        circle = circle & job.watch.circle or circle
    blamed = max(circle, key=weight)
    since = turn.now - min(each.stood for each in readings.values())
    turn.record("tangle", step=step, rank=blamed, waits={str(rank): each.waits for rank, each in readings.items()})
    turn.set(watch=replace(job.watch, freed=step, circle=circle))
    if again:
        turn.set_rank(blamed, stopped=since)
        suspicion.fence(turn, blamed, "unreachable", f"all ranks wait for each other again in step {step}, and for it")
        return
    devices = any(each.waits == rank for rank, each in readings.items())
    what = "a collective of devices does not end" if devices else "a message is lost"
    turn.say(f"WARNING: all ranks wait for each other in step {step}; {what}. They are interrupted", "tangle")
    recovery.interrupt(turn, [blamed], recovery.STUCK if devices else recovery.LOST, since)


def _circle(waits: Mapping[int, int]) -> frozenset[int]:
    """Who waits, over others, for itself. What was lost is lost in there: all others wait for somebody in it."""
    left = dict(waits)
    waited = Counter(left.values())
    outside = [rank for rank in left if not waited[rank]]
    while outside:
        rank = left.pop(outside.pop())
        waited[rank] -= 1
        if rank in left and not waited[rank]:
            outside.append(rank)
    return frozenset(left)
