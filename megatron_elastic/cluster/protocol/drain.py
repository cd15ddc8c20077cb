"""Drain: the ranks of a node leave politely, because its machine is to be taken away.

What they own or keep copies of is copied to others while training goes on (``plan.release``); at the end of a step the
others go on without them. Then the node is told to stop. Nothing is computed again.
"""

from __future__ import annotations

from megatron_elastic.cluster.messages import Answer, Drain, Stop
from megatron_elastic.cluster.protocol import change, suspicion, whereabouts
from megatron_elastic.cluster.protocol.effects import Reply
from megatron_elastic.cluster.protocol.events import Leaves
from megatron_elastic.cluster.protocol.job import Job
from megatron_elastic.cluster.protocol.turn import Turn
from megatron_elastic.plan import NoLayout, release


def asked(turn: Turn, person: int, request: Drain) -> None:
    """Somebody asks for it. Says whether it will be done; that takes some steps."""
    node = next((each for each, there in turn.job.nodes.items() if there.node_rank == request.node_rank), None)
    problem = f"there is no node {request.node_rank}" if node is None else _problem(turn.job, node)
    if node is not None and problem is None:
        _begin(turn, node)
    text = f"the ranks of node {request.node_rank} leave" if problem is None else problem
    turn.do(Reply(person, Answer(ok=problem is None, text=text)))


def leaves(turn: Turn, event: Leaves) -> None:
    """An agent says that its machine will go. If its ranks cannot leave, they are lost when it does."""
    node = turn.job.nodes.get(event.node)
    if node is None or event.node in turn.job.leaving:
        return
    problem = _problem(turn.job, event.node)
    if problem is None:
        _begin(turn, event.node)
    else:
        turn.say(f"WARNING: node {node.node_rank} is to leave, and cannot: {problem}")


def _problem(job: Job, node: int) -> str | None:
    """Why the ranks of a node cannot leave, for people."""
    if job.layout is None:
        return "the job is not training yet"
    if node == job.here:
        return f"node {job.nodes[node].node_rank} coordinates the job"
    mine = change.leaving(job) | set(job.nodes[node].ranks)
    if mine.isdisjoint(job.layout.ranks):
        return None
    try:
        release(job.layout, mine, job.layout.epoch)
    except NoLayout as error:
        return str(error)
    return None


def _begin(turn: Turn, number: int) -> None:
    node = turn.job.nodes[number]
    turn.set(leaving=turn.job.leaving | {number})
    turn.record("leaving", node=node.node_rank, ranks=[rank for rank in node.ranks if not turn.job.ranks[rank].lost])
    turn.say(f"the ranks of node {node.node_rank} leave")
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
        turn.say(f"ranks {ranks} of node {node.node_rank} have left")
        turn.tell(number, Stop(ok=True, reason="its ranks have left the job"))
        turn.set(nodes=turn.job.nodes.delete(number), leaving=turn.job.leaving - {number})
