"""Error: what a program raises on a rank, or hangs in. It is that rank's fault, and a loss like others, unless it comes
again.

A file that cannot be read, say: that concerns one rank. What comes again on another rank when the step is done anew, or
on rank after rank, is the program's. What a device raises that fails is never. Memory of a device that is short is its
rank's, too, whatever is done about errors; if it is short on others then, the job does not fit its devices.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from megatron_elastic.cluster.messages import Failed, Fence, RankExited, RankNews
from megatron_elastic.cluster.protocol.changes import membership
from megatron_elastic.cluster.protocol.faults import loss, suspicion
from megatron_elastic.cluster.protocol.job import Raised
from megatron_elastic.cluster.protocol.turn import Turn

_ROW, _STEPS = 3, 5
"""Layouts, one after the other, in each of which some rank raises within so many steps: the program does."""
_DOES_NOT_FIT = (
    "memory of devices is short again when others do step {}: the job does not fit them, whoever does what; use more "
    "stages or ranks, smaller micro-batches, or --recompute-granularity"
)


def failed(turn: Turn, message: Failed) -> None:
    """The program raised on a rank; who raises outside of training tells as it ends."""
    job, number = turn.job, message.rank
    rank = job.ranks[number]
    error = _raised(message)
    if message.device:
        membership.broke(turn, number, message.device, error.summary)
    if rank.lost or rank.fenced == "failed":
        return
    turn.record("error", rank=number, traceback=message.traceback)
    if rank.standby:
        suspicion.fence(turn, number, "failed", "the program raised before this rank had joined; see its log")
        return
    if message.device and message.step is not None and job.layout is not None:
        what = f"the device of rank {number} failed ({message.device}), and is out of use"
        _leave(turn, number, f"{what}; the rank leaves: {error.summary}", "device")
        return
    if message.step is None or job.layout is None or (job.settings.on_error == "stop" and not message.short):
        turn.end(False, message.traceback if message.code else str(error), max(message.code, 1))
        return
    turn.set(errors=(*job.errors, error))
    if comes_again(turn.job.errors):
        turn.end(False, _DOES_NOT_FIT.format(message.step) if message.short else
                 f"the program raises again when others do step {message.step}; it is no fault of a rank")
    elif message.short:
        _leave(turn, number, f"memory of {message.short} is short on rank {number}, which leaves: {error.summary}",
               "out of memory")
    else:
        _leave(turn, number, f"the program raised on rank {number}, which leaves: {error.summary}", "exception")


def recall(turn: Turn, failed: Collection[Failed]) -> None:
    """A new coordinator learns from agents what was raised before it took over, as far as that is not long ago."""
    written = 0 if turn.job.ledger is None else turn.job.ledger.written
    errors = sorted((_raised(each) for each in failed), key=lambda each: (each.epoch, each.rank))
    turn.set(errors=tuple(each for each in errors if each.step > written - _STEPS))


def _raised(message: Failed) -> Raised:
    return Raised(message.rank, message.step or 0, message.epoch, message.traceback, short=message.short)


def exited(turn: Turn, news: RankNews) -> None:
    """Something has ended a rank's process with an exit code, and nobody has said why: a library, or ``os._exit``. That
    counts as what a program raises.
    """
    job, rank = turn.job, turn.job.ranks[news.rank]
    if not isinstance(news, RankExited) or news.returncode <= 0 or rank.returncode is not None:
        return
    trains = job.settings.elastic and job.layout is not None and job.ledger is not None
    if not trains or job.outcome is not None or rank.standby or (rank.lost and rank.dying is None):
        return
    assert job.layout is not None and job.ledger is not None
    what = f"rank {news.rank} ended with exit code {news.returncode}; see rank{news.rank}.log"
    if job.settings.on_error == "stop":
        turn.end(False, what, news.returncode)
        return
    step = job.ledger.written + 1
    turn.record("error", rank=news.rank, traceback=what)
    turn.set(errors=(*job.errors, Raised(news.rank, step, job.layout.epoch, what)))
    if comes_again(turn.job.errors):
        turn.end(False, f"ranks end with an exit code again when others do step {step}; it is no fault of a rank",
                 news.returncode)
    elif not rank.lost:
        _leave(turn, news.rank, what, f"exit code {news.returncode}")


def _leave(turn: Turn, number: int, why: str, cause: str) -> None:
    turn.say(f"WARNING: {why}", "error")
    turn.set_timer(f"leaving {number}", turn.job.settings.suspect_timeout)
    loss.lose(turn, [number], cause, turn.now)


def stays(turn: Turn, rank: int) -> None:
    """A rank has raised, and its process has not ended in time."""
    node = turn.job.ranks[rank].node
    if node is not None:
        turn.tell(node, Fence(rank=rank))


def hung(turn: Turn, error: Raised) -> None:
    """A rank hung, and is being killed."""
    turn.set(errors=(*turn.job.errors, error))
    if comes_again(turn.job.errors):
        turn.end(False, f"the program hangs again when others do step {error.step}; it is no fault of a rank")


def comes_again(errors: Sequence[Raised]) -> bool:
    """Whether the newest error is the program's: others raise in the step that they do anew, or one after the other.

    Those of one layout are one fault, say of a host: nobody has done anything anew yet. Ranks that hang in different
    places have nothing to do with each other, nor has memory that is short with other errors.
    """
    newest = errors[-1]
    alike = [each for each in errors if _kind(each) == _kind(newest)]
    redone = any(each.step == newest.step and each.epoch < newest.epoch for each in alike)
    return redone or len({each.epoch for each in alike}) >= _ROW


def _kind(error: Raised) -> tuple[object, ...]:
    return error.hung_at, bool(error.short), error.unheard


def committed(turn: Turn, step: int) -> None:
    """A step is finished: errors of much older ones have nothing to do with what comes."""
    if turn.job.errors:
        turn.set(errors=tuple(each for each in turn.job.errors if each.step > step - _STEPS))
