"""Ending: how a job ends, well or not."""

from __future__ import annotations

from immutables import Map

from megatron_elastic.cluster.messages import Answer, Finished, Stop
from megatron_elastic.cluster.protocol import ledger
from megatron_elastic.cluster.protocol.effects import Reply, Tell, WriteDigest
from megatron_elastic.cluster.protocol.events import Asked, Event, NodeCame, Troubled
from megatron_elastic.cluster.protocol.faults import recovery, suspicion
from megatron_elastic.cluster.protocol.ledger import Diverged
from megatron_elastic.cluster.protocol.turn import Turn
from megatron_elastic.observe.digest import combine
from megatron_elastic.observe.records import RecordsError


def finished(turn: Turn, message: Finished) -> None:
    """A rank has done its last step."""
    job = turn.job
    assert job.layout is not None
    if job.collecting:
        return  # sent before the interrupt: it will finish again, in the new layout
    unfinished = job.unfinished if job.finished else Map(dict.fromkeys(job.layout.ranks))
    if message.rank in unfinished:
        unfinished = unfinished.delete(message.rank)
    turn.set(finished=job.finished.set(message.rank, message), unfinished=unfinished)
    if unfinished:
        turn.set_timer("finish", job.settings.wait_timeout)
    else:
        consider(turn)


def consider(turn: Turn) -> None:
    """End the job if everybody in the layout in force has finished, and what has killed others is known."""
    job = turn.job
    if job.finished and not job.unfinished and job.outcome is None and recovery.named(job):
        _finish(turn, max(message.step for message in job.finished.values()))


def _finish(turn: Turn, step: int) -> None:
    layout = turn.job.layout
    assert layout is not None
    turn.cancel_timer("finish")
    recovery.over(turn)
    ledger.close(turn)  # all that anybody knows of steps has come before this
    done = [turn.job.finished[rank] for rank in layout.ranks]
    steps = {each.step for each in done}
    if len(steps) > 1:
        raise Diverged(f"ranks finished at different steps {sorted(steps)}")
    try:
        turn.do(WriteDigest(combine(layout, (item for each in done for item in each.digests), step)))
    except RecordsError as error:
        turn.end(False, f"training finished at step {step}, but what it has made is not certain: {error}")
        return
    turn.end(True, f"training finished at step {step}")


def late(turn: Turn) -> None:
    """Who has not finished in time is killed: what it had to do the others do."""
    limit = turn.job.settings.wait_timeout
    for rank in sorted(turn.job.unfinished):
        suspicion.fence(turn, rank, "fenced", f"it did not finish within {limit:g} s of another "
                                              "(--elastic-wait-timeout)")


def troubled(turn: Turn, event: Troubled) -> None:
    """Something could not be done. The records of a run are worth less than the run."""
    if event.fatal:
        turn.end(False, event.what)
    else:
        turn.say(f"WARNING: {event.what}")


def afterwards(turn: Turn, event: Event) -> None:
    """The job is over; who comes now is told so."""
    outcome = turn.job.outcome
    assert outcome is not None
    if isinstance(event, NodeCame):
        turn.do(Tell(event.node, Stop(ok=outcome.ok, reason=outcome.reason, code=outcome.code)))
    elif isinstance(event, Asked):
        turn.do(Reply(event.person, Answer(ok=False, text="the job is over")))
