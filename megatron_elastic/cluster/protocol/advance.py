"""Advance: the one entry to the coordinator's decisions."""

from __future__ import annotations

from megatron_elastic.cluster.messages import (
    Built,
    Committed,
    Damaged,
    Drain,
    Failed,
    Finished,
    FromRank,
    Hello,
    Injected,
    Profile,
    Reachable,
    Ready,
    Recovered,
    Recut,
    Report,
    Settled,
    Suspect,
    Switched,
    Where,
)
from megatron_elastic.cluster.messages import Event as Note
from megatron_elastic.cluster.protocol import copies, ending, ledger, start, unheard, watch, whereabouts
from megatron_elastic.cluster.protocol.changes import arrangement, change, clocks, drain, membership, pace, scale
from megatron_elastic.cluster.protocol.effects import Effect
from megatron_elastic.cluster.protocol.events import (
    Asked,
    Begun,
    Clocked,
    ClocksRefused,
    Costed,
    Ended,
    Event,
    Expired,
    Found,
    Inspected,
    LayoutTold,
    Leaves,
    Led,
    Metered,
    News,
    NodeAbsent,
    NodeBack,
    NodeCame,
    NodeLost,
    NodesLost,
    Paced,
    Recorded,
    Said,
    Seated,
    Sent,
    Throttled,
    TookOver,
    Troubled,
    Unheard,
)
from megatron_elastic.cluster.protocol.faults import damage, error, hang, loss, recovery, suspicion, takeover
from megatron_elastic.cluster.protocol.job import Job
from megatron_elastic.cluster.protocol.ledger import Diverged
from megatron_elastic.cluster.protocol.turn import Turn


def advance(job: Job, event: Event) -> tuple[Job, tuple[Effect, ...]]:
    """What becomes of a job by what happened, and what is to be done about it. Pure: equal arguments, equal results."""
    turn = Turn(job, event.now)
    try:
        if job.outcome is not None:
            ending.afterwards(turn, event)
        elif job.gathering is not None and isinstance(event, Said | News):
            takeover.remember(turn, event)
        else:
            _happened(turn, event)
            for each in takeover.remembered(job, turn.job):
                _happened(turn, each)
            arrangement.tell_if_new(turn, job.arrangement)
    except Diverged as diverged:
        turn.record("diverged", reason=str(diverged))
        turn.end(False, f"the ranks have diverged: {diverged}; the last steps are not to be trusted")
    return turn.job, tuple(turn.effects)


def _happened(turn: Turn, event: Event) -> None:
    match event:
        case Said():
            voices = (event.message.rank, *event.also)
            ranks = [rank for rank in voices if membership.runs_on(turn.job, rank, event.node)]
            if ranks:
                _said(turn, event.message, ranks)
        case News():
            if membership.runs_on(turn.job, event.news.rank, event.node):
                error.exited(turn, event.news)
                loss.news(turn, event.news)
        case Expired():
            if turn.job.timers.get(event.name) == event.serial:
                turn.set(timers=turn.job.timers.delete(event.name))
                _expired(turn, event.name)
        case NodeCame():
            if turn.job.gathering is None:
                membership.came(turn, event)
            else:
                takeover.came(turn, event)
        case NodeAbsent():
            loss.node_absent(turn, event)
        case NodeBack():
            loss.node_back(turn, event)
        case NodeLost():
            loss.nodes_lost(turn, [event])
        case NodesLost():
            loss.nodes_lost(turn, event.lost)
        case Inspected():
            hang.inspected(turn, event)
        case LayoutTold():
            takeover.layout_told(turn, event)
        case Paced():
            pace.paced(turn, event)
        case Metered():
            copies.metered(turn, event)
        case Leaves():
            drain.leaves(turn, event)
        case Asked():
            if isinstance(event.request, Drain):
                drain.asked(turn, event.person, event.request)
            else:
                scale.asked(turn, event.person, event.request)
        case Begun():
            start.begun(turn, event)
        case Costed():
            start.costed(turn, event)
        case Clocked():
            clocks.planned(turn, event)
        case ClocksRefused():
            if event.node in turn.job.nodes:
                clocks.refused(turn, event)
        case Throttled():
            if event.node in turn.job.nodes:
                change.throttled(turn, event)
        case Found():
            change.found(turn, event)
        case Recorded():
            turn.set(recorded=max(turn.job.recorded, event.epoch))
            recovery.decide_if_complete(turn)
            change.announce_if_ready(turn)
        case Led():
            turn.set(term=event.term)
            turn.record("led", term=event.term)
            turn.say(f"another node takes over if this one is lost (term {event.term})", "led")
        case TookOver():
            takeover.took_over(turn, event)
        case Seated():
            membership.seated(turn, event)
        case Sent():
            recovery.sent(turn, event)
        case Troubled():
            ending.troubled(turn, event)
        case Ended():
            turn.end(event.ok, event.reason)
        case Unheard():
            unheard.unheard(turn, event)


def _said(turn: Turn, message: FromRank, ranks: list[int]) -> None:
    """``ranks``: all who have said so. They are several only where that can be."""
    match message:
        case Committed():
            recovery.committed(turn, message)
            error.committed(turn, message.vote.step)
            watch.anew(turn)
            change.stepped(turn)
        case Report():
            recovery.reported(turn, message, ranks)
        case Recovered():
            recovery.recovered(turn, message, ranks)
        case Settled():
            copies.settled(turn, message.epoch, ranks)
            change.settled(turn, message, ranks)
            drain.finish(turn)
        case Suspect():
            loss.accused(turn, message)
        case Hello():
            start.hello(turn, message)
        case Where():
            whereabouts.where(turn, message)
        case Reachable():
            whereabouts.reachable(turn, message)
        case Built():
            turn.set(shapes=turn.job.shapes.update(message.shapes))
        case Ready():
            change.ready(turn, message, ranks)
        case Switched():
            change.switched(turn, message)
            drain.finish(turn)
            ending.consider(turn)
        case Recut():
            change.recut(turn, message, ranks)
            drain.finish(turn)
        case Profile():
            change.profiled(turn, message)
        case Damaged():
            recovery.damaged(turn, message)
        case Injected():
            if message.deadly:
                turn.set(injected=turn.job.injected.set(message.rank, message.time))
            turn.record("injected", rank=message.rank, spec=message.spec, injected_at=message.time)
        case Note():
            turn.record(message.kind, rank=message.rank, **message.fields)
            if message.kind == "saved":
                damage.saved(turn, message)
            elif message.kind in ("save_failed", "save_late"):
                damage.not_saved(turn, message)
            elif message.kind == "untried":
                turn.say(f"WARNING: {message.fields['what']}", message.kind)
        case Failed():
            error.failed(turn, message)
        case Finished():
            ending.finished(turn, message)


def _expired(turn: Turn, name: str) -> None:
    kind, _, rank = name.partition(" ")
    match kind:
        case "start":
            start.late(turn)
        case "report":
            recovery.reports_late(turn)
        case "ready":
            change.ready_late(turn)
        case "order":
            change.ordered(turn)
        case "finish":
            ending.late(turn)
        case "steps":
            ledger.late(turn)
        case "suspect":
            suspicion.expired(turn, int(rank))
        case "stopped":
            suspicion.stood_still(turn, int(rank))
        case "killed":
            loss.killed(turn, int(rank))
        case "dying":
            loss.does_not_end(turn, int(rank))
        case "respawn":
            membership.replaced(turn, int(rank))
        case "coming":
            start.does_not_come(turn, int(rank))
        case "hang":
            hang.due(turn)
        case "stalled":
            hang.no_longer_stalled(turn)
        case "leaving":
            error.stays(turn, int(rank))
        case "absent":
            loss.absent_for_good(turn, int(rank))
        case "evicted":
            change.let_back(turn, int(rank))
        case "gather":
            takeover.late(turn)
        case "store":
            recovery.store_late(turn)
