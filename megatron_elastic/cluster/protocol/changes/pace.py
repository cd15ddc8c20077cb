"""Pace: which cells are slower than others of their stage, and what is done about it (``--elastic-slow``).

Cells of one stage are compared, at the same clock: they do the same. Where a stage has one cell, and what units cost is
known, it is compared with others by what each should take. One that is slower gets fewer grains
(``plan.work.quotas``); with ``evict`` it is taken out if the others are faster without it, and tried again after a
while. That a cell is slow is believed at once; that it has recovered, after some steps, the more of them the more often
it was slow before. So work moves soon, and does not move to and fro. Layers are worth moving only for what lasts: they
are weighed anew when nothing else has been believed for some steps, again the more of them the more often a cell was
slow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median_low

from immutables import Map
from msgspec.structs import replace

from megatron_elastic.cluster.protocol.events import Paced
from megatron_elastic.cluster.protocol.job import Job, without
from megatron_elastic.cluster.protocol.turn import Turn
from megatron_elastic.layout import Cell, Layout, Stage
from megatron_elastic.plan.work.quotas import quotas

_SAME = 1.25
"""How many times as long a grain may take as it is believed to take: what differs by less is noise."""
_STEPS = 3
"""For which a cell has to be faster than was believed, the first time; twice as many after each time it was slow."""
_LASTS = 8
"""Steps after which what is believed is taken to last, the first time; twice as many each time a cell is slow again."""
_WORTH = 0.95
"""What a stage has to take without a cell, of what it takes with it, for the cell to be taken out."""
_AGAIN = 30.0
"""Seconds after which a cell that was taken out is tried again, the first time; twice as many after each."""
_OFTEN = 8
"""Times that count, at most."""


def paced(turn: Turn, event: Paced) -> None:
    """A node has told how fast its ranks are. Cells are compared when a step is committed, and not for each node."""
    job, layout = turn.job, turn.job.layout
    if job.settings.slow == "off" or layout is None or event.epoch != layout.epoch:
        return
    told = {rank: ms for rank, ms in event.paces.items()
            if rank in layout.places and job.ranks[rank].node == event.node and ms > 0}
    turn.set(pace=replace(job.pace, measured=job.pace.measured.update(told),
                          told=job.pace.told.update(dict.fromkeys(told))))


def stepped(turn: Turn) -> bool:
    """A step has been committed. Returns whether something else is believed now."""
    job, layout = turn.job, turn.job.layout
    if layout is None:
        return False
    pending = {*job.pace.better, *(job.pace.believed if job.settings.slow == "evict" else ())}
    stages = {layout.stage_of(rank) for rank in pending if rank in layout.cells}
    stages |= {layout.stage_of(rank) for rank in job.pace.told}
    turn.set(pace=replace(job.pace, told=Map()))
    judged = _judge(turn, stages)
    return _lasting(turn) or judged


def _lasting(turn: Turn) -> bool:
    """Whether what was believed for some steps is now to be reason enough to move layers."""
    pace, ledger = turn.job.pace, turn.job.ledger
    assert ledger is not None
    if pace.lasts_at is None or ledger.written < pace.lasts_at:
        return False
    turn.set(pace=replace(pace, lasts_at=None), arrangement=replace(turn.job.arrangement, fits=False))
    return True


def let_back(turn: Turn, rank: int) -> None:
    """A cell that was taken out is tried again."""
    pace = turn.job.pace
    turn.set(pace=replace(pace, evicted=without(pace.evicted, [each for each, leader in pace.evicted.items()
                                                               if leader == rank])))


def _judge(turn: Turn, stages: set[int]) -> bool:
    """Compare the cells of these stages."""
    job, layout = turn.job, turn.job.layout
    assert layout is not None
    changed, costs = False, job.arrangement.costs
    took_in = {index: _times(job, layout.stages[index]) for index in sorted(stages)}
    # Where there is nobody who does the same, others may be as fast for what their units should take.
    times = _of_what_it_should(job) if any(len(took) == 1 for took in took_in.values()) else None
    for index, took in took_in.items():
        usual = job.policy.usual_ms(layout, index, costs)
        if not usual and len(took) > 1:
            usual = median_low(took.values())
        elif not usual and costs is not None and times is not None:
            usual = times * costs.stage_ms(layout, index)
        if not usual:
            continue
        for cell in layout.stages[index].cells:
            if cell.leader in took:
                changed |= _believe(turn, index, cell, took[cell.leader] / usual)
        # To take it out takes a while, so first it gets less.
        if job.settings.slow == "evict" and job.idle and not job.unsettled and not changed:
            changed |= _evict(turn, index, layout.stages[index])
    return changed


def _of_what_it_should(job: Job) -> float | None:
    """How many times as long as its units should a grain takes in cells of any stage; None if nobody can say, or it
    would change nothing.
    """
    layout, costs = job.layout, job.arrangement.costs
    assert layout is not None
    if costs is None or not job.policy.arranges(costs):
        return None
    should = [costs.stage_ms(layout, index) for index in range(layout.pipeline_size)]
    each = [took / ms for stage, ms in zip(layout.stages, should, strict=True) if ms
            for took in _times(job, stage).values()]  # fmt: skip
    return median_low(each) if len(each) > 1 else None


def _times(job: Job, stage: Stage) -> dict[int, float]:
    """What a grain would take at the base clock in cells all of whose ranks were measured, by leader: a cell is as slow
    as its slowest.
    """
    measured, clocks, costs = job.pace.measured, job.pace.clocks, job.arrangement.costs
    layout = job.layout
    assert layout is not None
    units = layout.at_home(layout.stages.index(stage))

    def times(rank: int) -> float:
        clock = clocks.get(rank, 1.0)
        return 1 / clock if costs is None else costs.times_as_long(units, clock)

    return {cell.leader: max(measured[rank] / times(rank) for rank in cell.ranks)
            for cell in stage.cells if all(rank in measured for rank in cell.ranks)}


def _believe(turn: Turn, stage: int, cell: Cell, times: float) -> bool:
    """A grain takes so many times as long as usual. Returns whether that is news that counts."""
    job, leader = turn.job, cell.leader
    assert job.ledger is not None
    pace, step = job.pace, job.ledger.written
    before = pace.believed.get(leader, 1.0)
    if before / _SAME <= times <= before * _SAME:
        turn.set(pace=replace(pace, better=without(pace.better, [leader])))
        return False
    strikes = pace.strikes.get(leader, 0)
    if times < before:
        since = pace.better.get(leader, step)
        if step - since < _patience(_STEPS, strikes):
            turn.set(pace=replace(pace, better=pace.better.set(leader, since)))
            return False
    now = 1.0 if 1 / _SAME <= times <= _SAME else times
    slower = now > before
    if slower and before <= 1.0:
        strikes += 1
    turn.set(pace=replace(
        pace, better=without(pace.better, [leader]),
        believed=without(pace.believed, [leader]) if now == 1.0 else pace.believed.set(leader, now),
        strikes=pace.strikes.set(leader, strikes) if strikes else pace.strikes,
        lasts_at=step + _patience(_LASTS, strikes),
    ))  # fmt: skip
    kind = "slow" if slower else "well"
    turn.record(kind, ranks=list(cell.ranks), stage=stage, step=step, times=round(now, 3))
    turn.say(f"ranks {list(cell.ranks)} have become {'slower' if slower else 'faster'}: a micro-batch takes {now:.1f} "
             f"times as long as it should at stage {stage}; they get {'less' if slower else 'more'} to do", kind)
    return True


def _patience(first: int, strikes: int) -> int:
    """Steps to wait: ``first`` of them, and twice as many each time that a cell is slow again."""
    return first << min(max(strikes, 1), _OFTEN) - 1


def _evict(turn: Turn, index: int, stage: Stage) -> bool:
    """Take the slowest cell of a stage out, if the others are faster without it."""
    job, layout = turn.job, turn.job.layout
    assert layout is not None
    pace = job.pace
    working = [cell for cell in stage.cells if not cell.shadow and cell.leader not in pace.evicted]
    slowest = max(working, key=lambda cell: (pace.believed.get(cell.leader, 1.0), cell.leader), default=None)
    if slowest is None or slowest.leader not in pace.believed or len(working) < 2:
        return False
    others = [cell for cell in working if cell is not slowest]
    with_it = _makespan(layout.num_grains * layout.samples, working, pace.believed)
    without_it = _makespan(layout.num_grains * layout.samples, others, pace.believed)
    if without_it > _WORTH * with_it:
        return False
    leader, strikes = slowest.leader, min(pace.strikes.get(slowest.leader, 1), _OFTEN)
    turn.set(pace=replace(pace, evicted=pace.evicted.update(dict.fromkeys(slowest.ranks, leader))))
    again = _AGAIN * 2 ** (strikes - 1)
    turn.set_timer(f"evicted {leader}", again)
    turn.record("evicted", ranks=list(slowest.ranks), stage=index, times=round(pace.believed[leader], 3),
                saves=round(1 - without_it / with_it, 3))
    turn.say(f"ranks {list(slowest.ranks)} are taken out: stage {index} is faster without them. They are tried again "
             f"in {again:g} s", "evicted")
    return True


def _makespan(total: int, cells: Sequence[Cell], believed: Mapping[int, float]) -> float:
    """What a stage of these cells takes, in what a sample takes usually."""
    times = [believed.get(cell.leader, 1.0) for cell in cells]
    given = quotas(total, times, [0] * len(times))
    return max(many * each for many, each in zip(given, times, strict=True))


def clocked(turn: Turn, clocks: Mapping[int, float]) -> None:
    """Ranks run at these clocks from now on, and others at the base clock, if their nodes can set any."""
    job = turn.job
    found = Map({rank: clock for rank, clock in clocks.items() if job.ranks[rank].node not in job.pace.fixed})
    if found != job.pace.clocks:
        turn.set(pace=replace(job.pace, clocks=found, measured=Map(), told=Map(), settled=Map()))


def forget_measured(turn: Turn) -> None:
    """What was measured does not count: some devices were slower than they were told to be."""
    turn.set(pace=replace(turn.job.pace, measured=Map(), told=Map(), settled=Map()))


def refused(turn: Turn, node: int) -> None:
    """A node cannot set clocks."""
    turn.set(pace=replace(turn.job.pace, fixed=turn.job.pace.fixed | {node}))
    clocked(turn, turn.job.pace.clocks)


def enter(turn: Turn, before: Layout | None) -> None:
    """A layout has come into force after the one ``before``: what was measured counts of who does the same in it."""
    pace, layout = turn.job.pace, turn.job.layout
    assert layout is not None
    others = {*pace.measured, *pace.better}
    if before is not None and others:  # where nobody is measured, thousands of cells need not be compared
        others.difference_update(
            rank for leader, cell in layout.cells.items()
            if leader in before.cells and layout.task_of(leader) == before.task_of(leader) for rank in cell.ranks
        )  # fmt: skip
    turn.set(pace=replace(
        pace, measured=without(pace.measured, others), better=without(pace.better, others), told=Map(), settled=Map(),
        believed=without(pace.believed, set(pace.believed) - layout.places.keys()),
    ))  # fmt: skip
