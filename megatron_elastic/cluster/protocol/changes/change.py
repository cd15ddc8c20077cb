"""Change: layouts that are planned while all is well: ranks that enter, slices that spread, units that move.

Nobody is interrupted. Ranks that are to enter build first; then everybody is told, and the vote of the first step that
all ranks enter knowing of the plan makes them switch at that step's end. A loss overtakes whatever is planned.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from immutables import Map
from msgspec.structs import replace

from megatron_elastic.cluster.messages import (
    Enter,
    Invite,
    Plan,
    Profile,
    Ready,
    Recut,
    Settled,
    Switched,
)
from megatron_elastic.cluster.protocol.adoption import use
from megatron_elastic.cluster.protocol.changes import arrangement, clocks, ordering, pace
from megatron_elastic.cluster.protocol.events import Found, Throttled
from megatron_elastic.cluster.protocol.faults import suspicion
from megatron_elastic.cluster.protocol.job import Change, Job, without
from megatron_elastic.cluster.protocol.moves import send_moves
from megatron_elastic.cluster.protocol.turn import Turn
from megatron_elastic.layout import Holdings, Layout, encode, transfers
from megatron_elastic.plan import Costs, NoLayout, improve


def overtaken(turn: Turn) -> None:
    """A loss has come first."""
    job = turn.job
    # Whoever was slow may be needed now.
    turn.set(change=None, goal=None, told=False, arrangement=replace(job.arrangement, fits=False, placed=None),
             pace=replace(job.pace, evicted=Map()))
    turn.cancel_timer("ready")
    turn.cancel_timer("order")


# ---- planning ------------------------------------------------------------------------------


def consider(turn: Turn) -> None:
    """Plan the next layout on the way to an even one over all ranks there are, if nothing else is going on."""
    job, layout = turn.job, turn.job.layout
    if layout is None or not job.idle or not all(job.ranks[rank].standby for rank in layout.spares):
        return
    if job.unsettled:
        if job.goal is None:  # else that of the goal has been looked for
            ordering.consider(turn, layout)
        return
    better = _improve(turn, layout, newcomers(job))
    if better is None and (reshaped := arrangement.reshaped(turn, layout)) is not None:
        turn.new_epoch()
        turn.set(change=Change(layout=reshaped, reshapes=True))
        announce_if_ready(turn)
        return
    if better is None:
        arrangement.reached(turn)
        if (order := ordering.due(job, layout)) is not None:
            changed = dataclasses.replace(layout, epoch=turn.new_epoch(), recomputed=order.recomputed)
            turn.set(change=Change(layout=changed, program=order.program))
            announce_if_ready(turn)
            return
        ordering.consider(turn, layout)
        arrangement.tabulate(turn, layout)
        if not job.told:
            turn.set(told=True)
            what = "slices are even, and grains shared by speed," if job.slow else "slices and grains are even"
            turn.say(f"{what} over {len(layout.ranks)} ranks, and all copies are there")
        return
    new, goal = better
    turn.new_epoch()
    entrants = frozenset(new.ranks) - frozenset(layout.ranks)
    turn.set(change=Change(layout=new, goal=goal, entrants=entrants, missing=entrants, unordered=True))
    if not ordering.awaited(turn, new):
        ordered(turn)
    if entrants:
        assert turn.job.change is not None
        planned = encode(turn.job.change.layout)
        turn.send(Invite(epoch=new.epoch, layout=planned, shapes=dict(job.shapes), key=job.key), sorted(entrants))
        turn.set_timer("ready", job.settings.start_timeout)


def found(turn: Turn, event: Found) -> None:
    """An order of work has been looked for. If it is better, it comes into force like a layout."""
    ordering.found(turn, event)
    ordered(turn)
    if turn.job.goal is not None:
        ordering.consider(turn, turn.job.goal)
    consider(turn)


def ordered(turn: Turn) -> None:
    """What is planned waits no longer for an order of its work: it has been looked for, or that takes long."""
    change = turn.job.change
    if change is None or not change.unordered:
        return
    turn.cancel_timer("order")
    new, program = ordering.planned(turn.job, change.layout)
    turn.set(change=replace(change, layout=new, program=program, unordered=False))
    announce_if_ready(turn)


def newcomers(job: Job) -> dict[int, int]:
    """Ranks that could join, and have never been in a layout, with the host of each."""
    assert job.layout is not None
    known = {*job.layout.spares, *leaving(job)}
    return {rank: each.host for rank, each in sorted(job.ranks.items())
            if each.standby and each.hello and not each.lost and each.fenced is None and rank not in known}


def leaving(job: Job) -> set[int]:
    """Ranks of nodes that are to go, those that are slow and taken out, and those that are gone and still listed among
    the spares.
    """
    assert job.layout is not None
    there = {rank for node in job.leaving if node in job.nodes for rank in job.nodes[node].ranks}
    return there | set(job.pace.evicted) | {rank for rank in job.layout.spares if job.ranks[rank].lost}


def _improve(turn: Turn, layout: Layout, newcomers: dict[int, int]) -> tuple[Layout, Layout | None] | None:
    epoch, gone, slow = turn.job.newest_epoch + 1, leaving(turn.job), turn.job.slow
    rearrange = arrangement.rearranging(turn, layout, bool(newcomers))
    try:
        cells = arrangement.cells(turn.job, layout, newcomers, gone)
        return improve(layout, newcomers, epoch, turn.job.goal, rearrange, gone, slow, cells)
    except NoLayout as error:
        if not gone.isdisjoint(layout.ranks):
            _stay(turn, str(error))
            return None
        # Cells may have been lost since it was asked for.
        turn.record("refused", reason=str(error))
        turn.say(f"the number of stages stays as it is: {error}", "refused")
        turn.set(arrangement=replace(turn.job.arrangement, stages=None, placed=None))
        return improve(layout, newcomers, epoch, turn.job.goal, None, gone, slow, turn.job.arrangement.cells)


def _stay(turn: Turn, reason: str) -> None:
    """Those who are to leave cannot: others have gone meanwhile. They are lost when their machines go."""
    turn.set(leaving=frozenset(), pace=replace(turn.job.pace, evicted=Map()))
    turn.record("refused", reason=reason)
    turn.say(f"WARNING: nobody can leave: {reason}", "refused")


def profiled(turn: Turn, message: Profile) -> None:
    """A rank has measured its stage."""
    if turn.job.settings.dvfs is not None:
        clocks.measured(turn, message)
    elif arrangement.measured(turn, message):
        consider(turn)


def stepped(turn: Turn) -> None:
    """A step has been committed. If cells are not as fast as was believed, work is moved; if there is none to move,
    other clocks may help.
    """
    known = clocks.fitted(turn)
    news = pace.stepped(turn)
    if news:
        change = turn.job.change
        turn.set(goal=None, change=None if change is None else replace(change, stale=True))
    if news or known:
        _clock(turn)


def costed(turn: Turn, costs: Costs | None, problem: str) -> None:
    """Who has taken over has read the profile, or cannot."""
    if costs is None:
        turn.say(f"WARNING: --elastic-profile {problem}; from now on layouts are chosen as without a profile, until a "
                 "node that can read it coordinates")
        return
    turn.set(arrangement=replace(turn.job.arrangement, costs=costs, fits=False))
    _clock(turn)


def throttled(turn: Turn, event: Throttled) -> None:
    """Devices are held down: work may be better off elsewhere, or other clocks help."""
    if clocks.throttled(turn, event):
        _clock(turn)


def _clock(turn: Turn) -> None:
    """Cells are not as fast as was believed: work may be better off elsewhere, and if not, other clocks may help."""
    replan(turn)
    if turn.job.change is None:
        clocks.plan(turn)


def let_back(turn: Turn, leader: int) -> None:
    """A cell that was taken out because it is slow is tried again."""
    pace.let_back(turn, leader)
    replan(turn)


def replan(turn: Turn) -> None:
    """Work may be better off elsewhere."""
    turn.set(told=False)
    consider(turn)


# ---- on the way ----------------------------------------------------------------------------


def ready(turn: Turn, message: Ready, ranks: Collection[int]) -> None:
    """Ranks that are to enter have built their parts."""
    change = turn.job.change
    if change is not None and change.layout.epoch == message.epoch and not change.announced:
        turn.set(change=replace(change, missing=change.missing.difference(ranks)))
        announce_if_ready(turn)


def ready_late(turn: Turn) -> None:
    """Who has not built its part in time is killed."""
    change, limit = turn.job.change, turn.job.settings.start_timeout
    assert change is not None
    for rank in sorted(change.missing):
        suspicion.fence(turn, rank, "fenced", f"it was not ready to join within {limit:g} s (--elastic-start-timeout)")


def announce_if_ready(turn: Turn) -> None:
    """Tell everybody of the planned layout, once who enters is ready and no later coordinator can begin its epoch."""
    job, change = turn.job, turn.job.change
    if (change is None or change.announced or change.missing or change.unordered
            or job.recorded < change.layout.epoch):  # fmt: skip
        return
    assert job.layout is not None
    turn.cancel_timer("ready")
    turn.set(change=replace(change, announced=True))
    new = change.layout
    if change.reshapes:  # who needs what the ranks know by themselves
        turn.set(change=replace(change, announced=True, missing=frozenset(job.layout.ranks)))
    else:
        # Everything that the present layout asks for is live: nobody needs to report.
        send_moves(turn, transfers(new, Holdings.of(job.layout)), new.epoch, {})
    turn.send(Plan(epoch=new.epoch, layout=encode(new), shapes=dict(job.shapes), program=change.program),
              job.layout.ranks)


def switched(turn: Turn, message: Switched) -> None:
    """The planned layout came into force."""
    change = turn.job.change
    if change is None or change.layout.epoch != message.epoch or not change.announced:
        return  # a loss has overtaken it
    _come_into_force(turn, change, message.step, change.entrants)


def recut(turn: Turn, message: Recut, ranks: Collection[int]) -> None:
    """Ranks have what they need in cells of another shape. When all have, that is what there is."""
    job, change = turn.job, turn.job.change
    if change is None or change.layout.epoch != message.epoch or not change.announced:
        return
    assert job.layout is not None
    change = replace(change, missing=change.missing.difference(ranks))
    turn.set(change=change)
    if not change.missing:
        arrangement.adapt(turn, job.layout, change.layout)
        _come_into_force(turn, change, message.step, job.layout.ranks)


def _come_into_force(turn: Turn, change: Change, step: int, to: Collection[int]) -> None:
    """A planned layout is the present one, from ``step`` on; ``to``: the ranks that have to be told so."""
    job = turn.job
    assert job.layout is not None
    new, stages = change.layout, job.layout.pipeline_size
    better = job.ordering.better
    ordered = better is not None and change.program == better.program != ordering.in_force(job, job.layout)
    turn.set(change=None, goal=None if change.stale else change.goal, told=False)
    if change.goal is None:
        arrangement.reached(turn)
    if change.program is not None:
        ordering.entered(turn, new.epoch, change.program)
    use(turn, new)
    if turn.job.goal is not None:
        ordering.consider(turn, turn.job.goal)
    for rank in change.entrants:
        turn.set_rank(rank, standby=False, joined=True)
    for rank in new.spares:  # who leaves may have been faster than this word
        if job.settled.get(rank, -1) >= new.epoch:
            turn.set_rank(rank, standby=True)
    enter = Enter(epoch=new.epoch, layout=encode(new), step=step, shapes=dict(job.shapes), saved=job.trust.newest_save)
    turn.send(enter, sorted(to))
    shadows = [rank for stage in new.stages for cell in stage.cells if cell.shadow for rank in cell.ranks]
    turn.record("switched", step=step, entered=sorted(change.entrants), shadows=shadows,
                world_size=len(new.ranks), **({"ordered": True} if ordered else {}))
    if change.entrants:
        turn.say(f"ranks {sorted(change.entrants)} follow from step {step} on, and will take part when they "
                 "have caught up", "switched")
    elif change.goal is not None:
        turn.say(f"units and slices that are to move are being copied from step {step} on", "switched")
    elif new.pipeline_size != stages:
        turn.say(f"the pipeline has {new.pipeline_size} stages instead of {stages} from step {step} on", "switched")
    elif change.reshapes:
        turn.say(f"cells are {arrangement.described(new)} from step {step} on, instead of "
                 f"{arrangement.described(job.layout)}", "switched")
    elif ordered:
        turn.say(f"work is done in a better order from step {step} on", "switched")
    consider(turn)


def settled(turn: Turn, message: Settled, ranks: Collection[int]) -> None:
    """All that the layout asks for is live at ranks; or spares have nothing any more that others need."""
    job, epoch = turn.job, message.epoch
    assert job.layout is not None
    members = [rank for rank in ranks if rank in job.layout.places]
    # The word that they have switched may come later than this one, from another node.
    newest = {rank: max(epoch, job.settled.get(rank, -1)) for rank in ranks}
    done = members if epoch >= job.layout.epoch else ()
    turn.set(settled=job.settled.update(newest), unsettled=without(job.unsettled, done))
    if epoch == job.epoch:
        for rank in set(ranks).difference(members):
            turn.set_rank(rank, standby=True)
    consider(turn)


# ---- ranks that are not needed -------------------------------------------------------------


def unneeded(job: Job, rank: int) -> bool:
    """Whether a rank can die without anybody noticing: it has not been let in, and is not about to be."""
    assert job.layout is not None
    entering = job.change is not None and job.change.announced and rank in job.change.entrants
    return job.ranks[rank].standby and rank not in job.layout.spares and not entering


def drop(turn: Turn, ranks: Collection[int], cause: str, when: float) -> None:
    """Ranks have ended before they had joined."""
    for rank in ranks:
        turn.record("fault", rank=rank, signal=cause, exited_at=when)
        turn.say(f"rank {rank} ended ({cause}) before it had joined; see rank{rank}.log", "fault")
    change = turn.job.change
    if change is not None and not change.entrants.isdisjoint(ranks):
        turn.cancel_timer("ready")
        turn.cancel_timer("order")
        turn.set(change=None)
        consider(turn)
