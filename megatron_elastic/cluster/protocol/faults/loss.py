"""Loss: what agents tell of their ranks' processes, agents that go themselves, and the losses that follow."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from megatron_elastic.cluster.messages import (
    RankClosed,
    RankDying,
    RankExited,
    RankNews,
    RankResumed,
    RankStopped,
    Stop,
    Suspect,
    TellLayout,
)
from megatron_elastic.cluster.protocol import ending, ledger, start, whereabouts
from megatron_elastic.cluster.protocol.changes import change, membership
from megatron_elastic.cluster.protocol.events import NodeAbsent, NodeBack, NodeLost
from megatron_elastic.cluster.protocol.faults import recovery, suspicion
from megatron_elastic.cluster.protocol.job import Node, without
from megatron_elastic.cluster.protocol.turn import Turn
from megatron_elastic.plan.errors import ADVICE

_END_LIMIT = 10.0
"""Seconds from a rank's death until its process must have ended, and what killed it be known."""


def news(turn: Turn, message: RankNews) -> None:
    """An agent tells what happened to the process of one of its ranks. What the rank said before has come before."""
    if isinstance(message, RankExited):
        _exited(turn, message)
    elif turn.job.settings.elastic and not turn.job.ranks[message.rank].lost:
        match message:
            case RankDying():
                _dying(turn, message)
            case RankStopped():
                suspicion.stopped(turn, message)
            case RankResumed():
                suspicion.resumed(turn, message)
            case RankClosed():
                suspicion.suspect(turn, message.rank, "it closed its line to its agent")


def _dying(turn: Turn, message: RankDying) -> None:
    rank = turn.job.ranks[message.rank]
    if rank.fenced is not None:
        lose(turn, [message.rank], rank.fenced, rank.stopped or message.time)
    else:
        turn.set_rank(message.rank, dying=message.time)
        turn.set_timer(f"dying {message.rank}", _END_LIMIT)
        lose(turn, [message.rank], None, message.time)


def does_not_end(turn: Turn, number: int) -> None:
    """A rank has died, and its process is there still: a thread of it waits for a disk, which no signal ends."""
    if (since := turn.job.ranks[number].dying) is not None:
        _died(turn, number, "hangs in the kernel", since)


def _died(turn: Turn, number: int, cause: str, since: float) -> None:
    """What has killed a rank that was seen dying is known."""
    rank = turn.set_rank(number, dying=None)
    turn.cancel_timer(f"dying {number}")
    if not rank.standby or recovery.concerns(turn.job, number):
        _name(turn, [_Death([number], cause, since)])
        ending.consider(turn)


def _exited(turn: Turn, message: RankExited) -> None:
    number, code = message.rank, message.returncode
    cause = message.cause or cause_of(code)
    before = turn.job.ranks[number]
    rank = turn.set_rank(number, returncode=code, dying=None)
    for name in ("leaving", "dying"):
        turn.cancel_timer(f"{name} {number}")
    if code < 0 and turn.job.layout is None and turn.job.settings.elastic and turn.job.outcome is None:
        start.again(turn, number, cause)
        return
    if turn.job.outcome is not None and turn.job.settings.elastic:
        return
    silent = code > 0 and turn.job.layout is not None
    if before.dying is not None and (code < 0 or silent or rank.standby):
        _died(turn, number, cause, before.dying)
        membership.respawn(turn, number)
        return
    if before.dying is None and rank.lost:
        membership.respawn(turn, number)
        return
    if not turn.job.settings.elastic:
        _plain_exit(turn, message)
    elif code < 0 or rank.standby:
        since = rank.stopped if rank.fenced else None
        lose(turn, [number], rank.fenced or cause, since or message.time)
        membership.respawn(turn, number)
    elif code == 0:
        turn.end(False, f"rank {number} ended with exit code 0 before training was finished: the end of "
                        f"rank{number}.log may tell why; with --elastic the script must train through megatron_elastic")
    else:
        turn.end(False, f"rank {number} ended with exit code {code}; see rank{number}.log", code)


def _plain_exit(turn: Turn, message: RankExited) -> None:
    rank, code = message.rank, message.returncode
    if code:
        how = f": {message.cause}" if message.cause else f" with {cause_of(code)}"
        turn.end(False, f"rank {rank} ended{how}; see rank{rank}.log", max(code, 1))
    elif all(each.returncode == 0 for each in turn.job.ranks.values()):
        turn.end(True, "all ranks ended with exit code 0")


def killed(turn: Turn, rank: int) -> None:
    """A rank was killed, and nobody saw its process end within the limit."""
    each = turn.job.ranks[rank]
    lose(turn, [rank], each.fenced or "fenced", each.stopped or turn.now)


def node_absent(turn: Turn, event: NodeAbsent) -> None:
    """The connection to an agent has broken: it has a short time to come back."""
    if event.node in turn.job.nodes:
        _set_absent(turn, event.node, event.now)
        turn.set_timer(f"absent {event.node}", turn.job.settings.suspect_timeout)


def node_back(turn: Turn, event: NodeBack) -> None:
    """It has come back."""
    if event.node in turn.job.nodes:
        _set_absent(turn, event.node, None)
        turn.cancel_timer(f"absent {event.node}")


def _set_absent(turn: Turn, node: int, since: float | None) -> None:
    turn.set(nodes=turn.job.nodes.set(node, replace(turn.job.nodes[node], absent=since)))


def absent_for_good(turn: Turn, number: int) -> None:
    """It has not come back in time, or others say that its ranks are gone. Whose time is up, too, is lost with it."""
    nodes, limit = turn.job.nodes, turn.job.settings.suspect_timeout
    late = [other for other, node in nodes.items()
            if other != number and node.absent is not None and turn.now - node.absent >= limit]
    nodes_lost(turn, [
        NodeLost(now=turn.now, node=each, cause=f"node {nodes[each].node_rank} lost",
                 since=nodes[each].absent or turn.now) for each in (number, *sorted(late))
    ])  # fmt: skip


def nodes_lost(turn: Turn, events: Iterable[NodeLost]) -> None:
    """The agents of nodes are gone, or silent: their ranks are lost with them."""
    deaths, left = list[_Death](), list[tuple[int, str]]()
    for event in events:
        if (node := turn.job.nodes.get(event.node)) is None:
            continue
        there = _gone(turn, node, event)
        alive = [rank for rank in there if not turn.job.ranks[rank].lost]
        if alive and not turn.job.settings.elastic:
            turn.end(False, f"lost the agent of node {node.node_rank} ({node.host}): {event.cause}")
        elif alive:
            deaths.append(_Death(alive, event.cause, event.since))
        left += ((rank, event.cause) for rank in there)
    if deaths:
        _lose(turn, deaths)
        if turn.job.ledger is not None:
            ledger.recall(turn)  # what their ranks committed and could not tell, others know
    for rank, cause in left:
        if (since := turn.job.ranks[rank].dying) is not None:
            _died(turn, rank, cause, since)  # nobody else will tell


def _gone(turn: Turn, node: Node, event: NodeLost) -> list[int]:
    """A node is one of the job's no more; returns its ranks whose end nobody will tell."""
    job = turn.job
    turn.cancel_timer(f"absent {event.node}")
    # Should it be there after all, it must end its ranks, whose part in the job others take over.
    turn.tell(event.node, Stop(ok=False, reason=f"{event.cause}: its ranks are no longer part of the job",
                               again=job.settings.elastic))
    turn.set(nodes=job.nodes.delete(event.node), leaving=job.leaving - {event.node},
             early=tuple(each for each in job.early if each[0] != event.node))
    # A node that has come again has another number, and its ranks are that one's.
    if job.gathering is not None:
        running = job.gathering.running
        mine = [rank for rank in node.ranks if rank in running and running[rank].node == event.node]
        known = job.gathering.went(event.node, mine)
        turn.set(gathering=known)
        if known.asked is not None and known.asked != job.gathering.asked:
            turn.tell(known.asked, TellLayout())
        return []
    if job.layout is None and (job.settings.elastic or not job.launched):
        membership.leave(turn, node)
        return []
    return [rank for rank in node.ranks
            if membership.runs_on(job, rank, event.node) and job.ranks[rank].returncode is None]


class _Death(NamedTuple):
    """What has happened to ranks, and when. A cause that is None will be named later."""

    ranks: Sequence[int]
    cause: str | None
    when: float


def lose(turn: Turn, ranks: Sequence[int], cause: str | None, when: float) -> None:
    """``ranks`` are dead since ``when``: begin the next epoch. A ``cause`` that is None will be named later."""
    _lose(turn, [_Death(ranks, cause, when)])


def _lose(turn: Turn, deaths: Sequence[_Death]) -> None:
    """All of them in one epoch: each interrupts everybody."""
    deaths = [death._replace(ranks=new) for death in deaths
              if (new := [rank for rank in death.ranks if not turn.job.ranks[rank].lost])]
    if turn.job.outcome is not None or not deaths:
        return
    ranks = [rank for death in deaths for rank in death.ranks]
    for rank in ranks:
        turn.set_rank(rank, lost=True)
        suspicion.clear(turn, rank)
        whereabouts.settle(turn, rank)
    if turn.job.layout is None:
        _name(turn, deaths)
        return
    _forget(turn, ranks)
    if all(change.unneeded(turn.job, rank) and not turn.job.ranks[rank].accused for rank in ranks):
        for death in deaths:
            change.drop(turn, death.ranks, death.cause or "killed", death.when)
        return
    recovery.interrupt(turn, ranks, None, min(death.when for death in deaths))
    _name(turn, deaths)
    if not turn.job.alive:
        raised = f": the program raised, the last time {turn.job.errors[-1].summary!r}" if turn.job.errors else ""
        turn.end(False, f"every rank is dead{raised}: {ADVICE}")


def _forget(turn: Turn, ranks: Sequence[int]) -> None:
    """Of the dead only that they are so is asked again, however many there come to be."""
    for rank in ranks:
        turn.set_rank(rank, hello=None)
    turn.set(settled=without(turn.job.settled, ranks), copies=without(turn.job.copies, ranks))


def accused(turn: Turn, message: Suspect) -> None:
    """A rank cannot reach others, and waits for an interrupt. Who has been interrupted since says so again."""
    if message.epoch < turn.job.interrupted:
        return
    dropped = [rank for rank in message.suspects if rank in turn.job.ranks and turn.job.ranks[rank].lost]
    if dropped:
        # They have ended before they had joined, and nobody was told.
        recovery.interrupt(turn, dropped, "killed", turn.now)
        return
    suspicion.accused(turn, message)
    for rank in message.suspects:
        node = turn.job.ranks[rank].node if rank in turn.job.ranks else None
        if node is not None and node in turn.job.nodes and turn.job.nodes[node].absent is not None:
            absent_for_good(turn, node)  # two see it


def _name(turn: Turn, deaths: Iterable[_Death]) -> None:
    """What killed ranks is known, as far as it is."""
    job = turn.job
    for ranks, cause, when in deaths:
        if cause is None:
            continue
        if job.layout is None:
            turn.end(False, f"ranks {list(ranks)} died before training began ({cause}); see their logs")
            return
        for rank in ranks:
            turn.record("fault", rank=rank, signal=cause, exited_at=when)
        turn.say(f"lost ranks {list(ranks)} ({cause}); epoch {job.epoch} begins with {len(job.alive)} ranks", "fault")
        recovery.name(turn, ranks, cause)


def cause_of(returncode: int) -> str:
    """Name what ended a process: ``kill -9``, ``SIGSEGV``, ``exit code 1`` and so on."""
    if returncode >= 0:
        return f"exit code {returncode}"
    if returncode == -signal.SIGKILL:
        return "kill -9"
    try:
        return signal.Signals(-returncode).name
    except ValueError:
        return f"signal {-returncode}"
