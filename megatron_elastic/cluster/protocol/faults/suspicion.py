"""Suspicion: ranks that seem dead or stand still get a short time to prove the contrary, and are killed after it.

Of two ranks that accuse each other, because the link between them is bad, one goes: whoever more ranks accuse, else the
higher one. Who is accused only by ranks that have gone is cleared.
"""

from __future__ import annotations

from megatron_elastic.cluster.messages import Fence, RankResumed, RankStopped, Suspect
from megatron_elastic.cluster.protocol.job import Job, Suspicion
from megatron_elastic.cluster.protocol.turn import Turn

_FENCE_LIMIT = 10.0
"""Seconds until a killed rank counts as lost although nobody saw its process end."""


def accused(turn: Turn, message: Suspect) -> None:
    """A rank cannot reach others."""
    for rank in message.suspects:
        if rank in turn.job.ranks:
            turn.set_rank(rank, accused=True)
            suspect(turn, rank, f"rank {message.rank}: {message.reason}", message.rank)


def suspect(turn: Turn, rank: int, reason: str, accuser: int | None = None) -> None:
    """Kill ``rank`` unless it reports in time."""
    job = turn.job
    each = job.ranks[rank]
    if each.lost or each.fenced is not None:
        return
    accusers = frozenset() if accuser is None else frozenset((accuser,))
    known = job.suspicions.get(rank)
    if known is not None:
        # Who is suspected without an accuser stays so, whoever accuses it besides.
        accusers = known.accusers | accusers if known.accusers and accusers else frozenset()
        turn.set(suspicions=job.suspicions.set(rank, Suspicion(reason=known.reason, accusers=accusers)))
        return
    turn.set(suspicions=job.suspicions.set(rank, Suspicion(reason=reason, accusers=accusers)))
    turn.record("suspected", rank=rank, reason=reason)
    turn.say(f"rank {rank} is suspected: {reason}", "suspected")
    turn.set_timer(f"suspect {rank}", job.settings.suspect_timeout)


def expired(turn: Turn, rank: int) -> None:
    """A suspect has had its time."""
    suspicion = turn.job.suspicions[rank]
    turn.set(suspicions=turn.job.suspicions.delete(rank))
    if suspicion.accusers and _cleared(turn.job, rank, suspicion.accusers):
        return
    fence(turn, rank, "fenced", suspicion.reason)


def _cleared(job: Job, rank: int, accusers: frozenset[int]) -> bool:
    """Whether nobody is left whose word counts more than the accused's own."""

    def outweighs(accuser: int) -> bool:
        each = job.ranks[accuser]
        if each.lost or each.fenced is not None:
            return False
        counter = job.suspicions.get(accuser)
        if counter is None or rank not in counter.accusers:
            return True
        return (len(accusers), rank) > (len(counter.accusers), accuser)

    return not any(outweighs(accuser) for accuser in accusers)


def stopped(turn: Turn, message: RankStopped) -> None:
    """A rank's process does not run any more, but is there."""
    rank = message.rank
    if turn.job.ranks[rank].stopped is None and turn.job.ranks[rank].fenced is None:
        turn.set_rank(rank, stopped=message.time)
        turn.record("suspected", rank=rank, reason=_how(message.how))
        turn.say(f"rank {rank} is suspected: {_how(message.how)}", "suspected")
        turn.set_rank(rank, stopped=message.time, how=message.how)
        turn.set_timer(f"stopped {rank}", turn.job.settings.suspect_timeout)


def _how(how: str) -> str:
    return f"its process is stopped ({how})"


def stood_still(turn: Turn, rank: int) -> None:
    """A stopped rank has not gone on in time."""
    fence(turn, rank, "stopped", _how(turn.job.ranks[rank].how))


def resumed(turn: Turn, message: RankResumed) -> None:
    """A stopped rank goes on."""
    since = turn.job.ranks[message.rank].stopped
    if since is None:
        return
    turn.cancel_timer(f"stopped {message.rank}")
    turn.record("resumed", rank=message.rank, stopped_ms=round((message.time - since) * 1e3, 3))
    turn.say(f"rank {message.rank} runs again", "resumed")
    turn.set_rank(message.rank, stopped=None)


def reported(turn: Turn, rank: int) -> None:
    """A rank has said something that only a living one can."""
    if rank in turn.job.suspicions:
        turn.set(suspicions=turn.job.suspicions.delete(rank))
        turn.cancel_timer(f"suspect {rank}")


def clear(turn: Turn, rank: int) -> None:
    """Nothing is to be found out about a rank any more."""
    reported(turn, rank)
    for name in ("stopped", "killed", "coming"):
        turn.cancel_timer(f"{name} {rank}")


def fence(turn: Turn, rank: int, cause: str, reason: str, stack: bool = False, device: bool = False) -> None:
    """Kill a rank: whatever it is, it must not come back. ``stack``: what it is doing is to be written down;
    ``device``: its device is out of use.
    """
    each = turn.job.ranks[rank]
    if each.lost or each.node is None or each.fenced is not None:
        return
    turn.set_rank(rank, fenced=cause)
    turn.record("fenced", rank=rank, reason=reason)
    turn.say(f"killing rank {rank}: {reason}", "fenced")
    turn.tell(each.node, Fence(rank=rank, stack=stack, device=device))
    turn.set_timer(f"killed {rank}", _FENCE_LIMIT)
