"""Drain: the ranks of nodes leave politely, because their machines are to be taken away.

What they own or keep copies of is copied to others while training goes on (``plan.release``); at the end of a step the
others go on without them. Then the nodes are told to stop. Nothing is computed again. Nodes that are asked for together
leave in one change.
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Sequence

from msgspec.structs import replace

from megatron_elastic.cluster.messages import Answer, Drain, Leave, Stop
from megatron_elastic.cluster.protocol import whereabouts
from megatron_elastic.cluster.protocol.changes import change
from megatron_elastic.cluster.protocol.effects import Reply
from megatron_elastic.cluster.protocol.events import Leaves
from megatron_elastic.cluster.protocol.faults import suspicion
from megatron_elastic.cluster.protocol.job import Job
from megatron_elastic.cluster.protocol.turn import Turn
from megatron_elastic.plan import NoLayout, release


def asked(turn: Turn, person: int, request: Drain) -> None:
    """Somebody asks for it. Says whether it will be done; that takes some steps."""
    numbers = {there.node_rank: number for number, there in turn.job.nodes.items()}
    unknown = [rank for rank in request.node_ranks if rank not in numbers]
    nodes = [numbers[rank] for rank in request.node_ranks if rank in numbers]
    problem = f"not there: {_named(unknown)}" if unknown else _problem(turn.job, nodes)
    if problem is None:
        _begin(turn, [number for number in nodes if number not in turn.job.leaving])
    text = f"the ranks of {_named(request.node_ranks)} leave" if problem is None else problem
    turn.do(Reply(person, Answer(ok=problem is None, text=text)))


def leaves(turn: Turn, event: Leaves) -> None:
    """An agent says that its machine will go. If its ranks cannot leave, they are lost when it does."""
    node = turn.job.nodes.get(event.node)
    if node is None or event.node in turn.job.leaving:
        return
    if turn.job.gathering is not None or turn.job.layout is None:  # as if it had come with that word
        turn.set(leaving=turn.job.leaving | {event.node})
        return
    problem = _problem(turn.job, [event.node])
    if problem is None:
        _begin(turn, [event.node])
    else:
        turn.say(f"WARNING: node {node.node_rank} is to leave, and cannot: {problem}")


def can_resign(job: Job) -> bool:
    """Whether this coordinator's own node could leave if another coordinated, and some node can that stays."""
    heirs = [node for number, node in job.nodes.items() if number != job.here and number not in job.leaving]
    if not job.term or job.gathering is not None or not any(node.address for node in heirs):
        return False
    there = {node.member for node in heirs}.intersection(job.members)
    enough = 2 * len(there) > len(job.members) if job.members else True
    return enough and _problem(replace(job, here=0), [job.here]) is None


def end_if_all_leave(turn: Turn) -> bool:
    """Who signals all nodes of a job ends it: there is nobody for whom anything could be copied. Whether that is so."""
    if not turn.job.nodes or not turn.job.leaving.issuperset(turn.job.nodes):
        return False
    turn.end(False, "all nodes of the job are to leave (SIGTERM)", 128 + signal.SIGTERM)
    return True


def _named(node_ranks: Sequence[int]) -> str:
    """Nodes, for people."""
    return f"node{'s' if len(node_ranks) > 1 else ''} {', '.join(map(str, node_ranks))}"


def _problem(job: Job, nodes: Collection[int]) -> str | None:
    """Why the ranks of these nodes cannot leave, for people."""
    if job.layout is None:
        return "the job is not training yet"
    if job.here in nodes:
        return (f"node {job.nodes[job.here].node_rank} coordinates the job: send SIGTERM to its launcher, which lets "
                "its ranks leave if another node can coordinate; or drain other nodes")
    mine = change.leaving(job).union(*(job.nodes[node].ranks for node in nodes))
    if mine.isdisjoint(job.layout.ranks):
        return None
    try:
        release(job.layout, mine, job.layout.epoch)
    except NoLayout as error:
        return str(error)
    return None


def _begin(turn: Turn, numbers: Sequence[int]) -> None:
    turn.set(leaving=turn.job.leaving.union(numbers))
    for number in numbers:
        node = turn.job.nodes[number]
        ranks = [rank for rank in node.ranks if not turn.job.ranks[rank].lost]
        turn.record("leaving", node=node.node_rank, ranks=ranks)
        turn.say(f"the ranks of node {node.node_rank} leave", "leaving")
        turn.tell(number, Leave())
    change.consider(turn)
    finish(turn)


def finish(turn: Turn) -> None:
    """Let the nodes go whose ranks nobody needs any more."""
    layout, entrants = turn.job.layout, () if turn.job.change is None else turn.job.change.entrants
    if layout is None:
        return
    for number in sorted(number for number in turn.job.leaving if number in turn.job.nodes):
        node = turn.job.nodes[number]
        ranks = [rank for rank in node.ranks if not turn.job.ranks[rank].lost]
        if any(rank in layout.places or rank in entrants or not turn.job.ranks[rank].standby for rank in ranks):
            continue
        for rank in ranks:
            turn.set_rank(rank, lost=True)
            suspicion.clear(turn, rank)
            whereabouts.settle(turn, rank)
        turn.record("left", node=node.node_rank, ranks=ranks)
        turn.say(f"ranks {ranks} of node {node.node_rank} have left", "left")
        turn.tell(number, Stop(ok=True, reason="its ranks have left the job"))
        turn.set(nodes=turn.job.nodes.delete(number), leaving=turn.job.leaving - {number})
