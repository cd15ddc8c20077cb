"""Whereabouts: who asks for a rank that other hosts cannot reach yet is answered when they can, or when it is lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from immutables import Map
from msgspec.structs import replace

from megatron_elastic.cluster.messages import Addresses, Hello, RankDying, Reachable, Where
from megatron_elastic.cluster.protocol import Job, Settings, advance, events, start
from megatron_elastic.cluster.protocol.effects import Send
from megatron_elastic.cluster.protocol.job import Node, Rank
from megatron_elastic.cluster.protocol.turn import Turn
from megatron_elastic.cluster.rank.control import InterruptFlag
from megatron_elastic.comm.tag import Channel
from megatron_elastic.comm.transport import Transport
from megatron_elastic.plan.errors import ADVICE, NO_CHECKPOINT, advised, without_advice

SETTINGS = Settings(
    elastic=True, respawn=False, replay="gradient", profile_file=None, start_timeout=1.0, suspect_timeout=1.0,
    report_timeout=1.0, wait_timeout=1.0, heartbeat_timeout=1.0,
)  # fmt: skip


def job_of(hosts: int) -> Job:
    """A job of two ranks on each host; none of them listens for other hosts."""
    ranks = range(2 * hosts)
    nodes = {host: Node(node_rank=host, host="h", slots=2, ranks=(2 * host, 2 * host + 1)) for host in range(hosts)}
    return replace(
        Job.new(SETTINGS, len(ranks)), launched=True, silent=0, nodes=Map(nodes),
        ranks=Map({rank: Rank(node=rank // 2, local_rank=rank % 2, host=rank // 2, hello=hello(rank))
                   for rank in ranks}),
    )  # fmt: skip


def hello(rank: int) -> Hello:
    return Hello(rank=rank, pid=1, host="h", address=b"near %d" % rank, linked=False, layout=b"", start_step=0,
                 train_iters=1, flags={}, likeness=b"", tied=False)


def said(job: Job, message: Where | Reachable) -> tuple[Job, list[tuple[int, dict[int, bytes], tuple[int, ...]]]]:
    """What becomes of the job, and the answers: number of the question, addresses, and who gets it."""
    event = events.Said(now=0.0, node=message.rank // 2, message=message)
    return answers(*advance(job, event))


def answers(job: Job, effects: Any) -> tuple[Job, list[tuple[int, dict[int, bytes], tuple[int, ...]]]]:
    sent = [(effect.message, effect.ranks) for effect in effects if isinstance(effect, Send)]
    return job, [(each.ask, dict(each.addresses), ranks) for each, ranks in sent if isinstance(each, Addresses)]


def test_on_one_host_the_answer_comes_at_once() -> None:
    _, sent = said(job_of(2), Where(rank=0, ask=7, ranks=[1]))
    assert sent == [(7, {1: b"near 1"}, (0,))]


def test_from_another_host_the_answer_waits_until_all_are_reachable() -> None:
    job, sent = said(job_of(2), Where(rank=0, ask=1, ranks=[1, 2, 3]))
    assert sent == []
    job, sent = said(job, Where(rank=1, ask=5, ranks=[2]))
    assert sent == []
    job, sent = said(job, Reachable(rank=2, address=b"far 2"))
    assert sent == [(5, {2: b"far 2"}, (1,))]
    job, sent = said(job, Reachable(rank=3, address=b"far 3"))
    assert sent == [(1, {1: b"near 1", 2: b"far 2", 3: b"far 3"}, (0,))]
    job, sent = said(job, Reachable(rank=3, address=b"far 3"))
    assert sent == [], "each question is answered once"


def test_the_lost_are_left_out() -> None:
    job, sent = said(job_of(2), Where(rank=0, ask=1, ranks=[2]))
    assert sent == []
    gone = events.News(now=1.0, node=1, news=RankDying(rank=2, time=1.0))
    job, sent = answers(*advance(job, gone))
    assert sent == [(1, {}, (0,))]


def test_who_asks_again_is_answered_once() -> None:
    job, _ = said(job_of(2), Where(rank=0, ask=1, ranks=[2]))
    job, sent = said(job, Where(rank=0, ask=2, ranks=[2]))
    assert sent == []
    _, sent = said(job, Reachable(rank=2, address=b"far 2"))
    assert sent == [(2, {2: b"far 2"}, (0,))]


def test_a_rank_asks_for_all_whom_it_is_about_to_need_at_once() -> None:
    """Not for one after the other: of ten thousand ranks each would ask a thousand times."""
    asked: list[list[int]] = []

    def find(ranks: Sequence[int]) -> Mapping[int, bytes]:
        asked.append(list(ranks))
        return {}  # all of them have ended

    transport = Transport(0, InterruptFlag(), 60.0, True, find=find)
    try:
        transport.meet([1, 2, 3, 0, 2])
        transport.send_all([2, 4, 5], Channel.STATE, 0, torch.zeros(1))
        empty = torch.zeros(1)
        transport.exchange(Channel.STATE, 0, [(5, empty), (6, empty)], [(7, empty), (6, empty)])
        transport.send(7, Channel.STATE, 0, empty)
    finally:
        transport.close()
    assert asked == [[1, 2, 3], [4, 5], [7, 6]]


def test_nodes_that_do_not_come_are_named() -> None:
    """Of their ranks nobody has logs."""
    job = job_of(3)
    absent = Map({rank: Rank() if rank >= 2 else each for rank, each in job.ranks.items()})
    turn = Turn(replace(job, nodes=Map({0: job.nodes[0]}), ranks=absent), 0.0)
    start.late(turn)
    assert turn.job.outcome is not None
    assert turn.job.outcome.reason.startswith("nodes 1, 2 did not come within 1 s: see what the launcher says there")


def test_what_can_be_done_depends_on_checkpoints() -> None:
    lost = f"slices are gone. {ADVICE.capitalize()}"
    assert without_advice(lost) == "slices are gone"
    assert advised(lost, saved=True) == lost
    assert advised(lost, saved=False) == f"slices are gone; {NO_CHECKPOINT}"
    assert advised("something else", saved=False) == "something else"
