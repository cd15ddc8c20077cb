"""Unheard: what could not be worked into the job, because of a defect. The job is as before, and goes on if it can.

What one rank says is that rank's fault, and a loss like others, until it comes again: then it is ours. What an agent
tells of its node is that node's. Figures, and what was looked for beside training, can be done without.
"""

from __future__ import annotations

from megatron_elastic.cluster.messages import Answer, Stop
from megatron_elastic.cluster.protocol.changes import membership
from megatron_elastic.cluster.protocol.effects import Reply, Tell
from megatron_elastic.cluster.protocol.events import (
    Asked,
    Clocked,
    ClocksRefused,
    Found,
    Inspected,
    LayoutTold,
    Leaves,
    Metered,
    News,
    NodeCame,
    NodeLost,
    Paced,
    Said,
    Seated,
    Sent,
    Throttled,
    Unheard,
)
from megatron_elastic.cluster.protocol.faults import error, loss, suspicion
from megatron_elastic.cluster.protocol.job import Raised
from megatron_elastic.cluster.protocol.turn import Turn

_DEFECT = "error in the coordinator, please report it"


def unheard(turn: Turn, stray: Unheard) -> None:
    """Go on without it, or end the job with the traceback."""
    event, why = stray.event, f"{_DEFECT}:\n{stray.traceback.rstrip()}"
    match event:
        case LayoutTold():
            if event.node in turn.job.nodes:
                _node(turn, event.node, why)
        case Said():
            rank = turn.job.ranks.get(event.message.rank)
            if rank is not None and not rank.lost and rank.fenced is None:
                _word(turn, event, why)
        case News():
            if membership.runs_on(turn.job, event.news.rank, event.node):
                _node(turn, event.node, why)
        case NodeCame():
            turn.say(f"WARNING: a node is sent away. {why}")
            turn.do(Tell(event.node, Stop(ok=False, reason=why)))
        case (
            Inspected() | Paced() | Metered() | ClocksRefused() | Throttled() | Leaves() | Found() | Clocked()
            | Seated() | Sent()
        ):
            turn.say(f"WARNING: the job goes on without {type(event).__name__}. {why}")
        case Asked():
            turn.do(Reply(event.person, Answer(ok=False, text=why)))
        case _:
            turn.end(False, why)


def _word(turn: Turn, event: Said, why: str) -> None:
    number = event.message.rank
    step = 0 if turn.job.ledger is None else turn.job.ledger.written + 1
    turn.set(errors=(*turn.job.errors, Raised(number, step, turn.job.epoch, why, unheard=True)))
    if turn.job.layout is None or error.comes_again(turn.job.errors):
        turn.end(False, f"{_DEFECT}: what ranks say cannot be heard")
        return
    turn.record("error", rank=number, traceback=why)
    turn.say(f"WARNING: {type(event.message).__name__} of rank {number} cannot be heard. {why}", "error")
    suspicion.fence(turn, number, "unheard", f"what it said cannot be heard ({type(event.message).__name__})")


def _node(turn: Turn, number: int, why: str) -> None:
    turn.say(f"WARNING: node {turn.job.nodes[number].node_rank} counts as lost. {why}")
    loss.nodes_lost(turn, [NodeLost(now=turn.now, node=number, cause="unheard", since=turn.now)])
