"""Whereabouts: where the links of ranks start, which others ask for when they need it.

A rank listens for other hosts only once it knows a layout of several. Who asks earlier is answered when it does, or is
lost.
"""

from __future__ import annotations

from immutables import Map
from msgspec.structs import replace

from megatron_elastic.cluster.messages import Addresses, Reachable, Where
from megatron_elastic.cluster.protocol.job import Job, Rank
from megatron_elastic.cluster.protocol.turn import Turn


def where(turn: Turn, message: Where) -> None:
    """A rank wants to talk to others."""
    job = turn.job
    there = {rank: each.hello for rank in message.ranks
             if (each := job.ranks.get(rank)) is not None and each.hello and not each.lost}
    for rank, hello in there.items():
        if not hello.linked and job.ranks[rank].host != job.ranks[message.rank].host:
            waiting: Map[int, Where] = job.questions.get(rank, Map())
            turn.set(questions=job.questions.set(rank, waiting.set(message.rank, message)))
            return
    addresses = {rank: hello.address for rank, hello in there.items()}
    turn.send(Addresses(ask=message.ask, addresses=addresses), [message.rank])


def reachable(turn: Turn, message: Reachable) -> None:
    """A rank listens for other hosts from now on."""
    turn.set(ranks=turn.job.ranks.set(message.rank, listening(turn.job.ranks[message.rank], message)))
    settle(turn, message.rank)


def listening(rank: Rank, message: Reachable) -> Rank:
    """The rank as it is once it listens."""
    return rank if rank.hello is None else replace(
        rank, hello=replace(rank.hello, address=message.address, linked=True))


def settle(turn: Turn, rank: int) -> None:
    """A rank is reachable, or lost: answer who has asked for it."""
    job: Job = turn.job
    if rank in job.questions:
        waiting = job.questions[rank]
        turn.set(questions=job.questions.delete(rank))
        for _, question in sorted(waiting.items()):
            where(turn, question)
