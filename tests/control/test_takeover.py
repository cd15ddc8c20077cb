"""A new coordinator learns a job from the agents that are left: the pure part (``protocol.takeover``)."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
from msgspec.structs import replace

from megatron_elastic.cluster.coordination.coordinator import Coordinator
from megatron_elastic.cluster.messages import (
    AgentHello,
    Committed,
    Damage,
    Damaged,
    Failed,
    FromAgent,
    Hello,
    Interrupt,
    Launch,
    LayoutTold,
    Past,
    RankExited,
    Recall,
    Relay,
    Reload,
    Report,
    Running,
    Scale,
    Start,
    Stop,
    TellLayout,
    ToAgent,
    VoteResult,
    Wanted,
)
from megatron_elastic.cluster.node.relay import Post
from megatron_elastic.cluster.protocol import Job, Settings, advance, events
from megatron_elastic.cluster.protocol.effects import (
    Effect,
    ReadCosts,
    Record,
    Say,
    Send,
    SetTimer,
    Tell,
    WriteEvent,
    WriteMetrics,
)
from megatron_elastic.cluster.protocol.faults import decision
from megatron_elastic.cluster.protocol.job import Decided
from megatron_elastic.layout import Holdings, Layout, changed, decode, encode
from megatron_elastic.plan import Costs, lose
from megatron_elastic.plan.costs.cost import UnitCost
from megatron_elastic.plan.costs.power import Clocking

SETTINGS = Settings(elastic=True, respawn=False, replay="gradient", profile_file=None, start_timeout=9,
                    suspect_timeout=1, report_timeout=5, wait_timeout=9, heartbeat_timeout=2)
LAYOUT = Layout.grid(tp=1, pp=1, dp=3, stage_units=[[0]], units=["a"], num_grains=3, num_slices=3,
                                     replicas=1, ranks_per_host=1)


def vote(step: int) -> VoteResult:
    return VoteResult(step=step, loss=1 / step, grad_norm=1.0, lr=0.1, consumed_samples=step, tokens=8)


def hello(rank: int, resigned: bool = False, layout: Layout = LAYOUT, told: bool = True) -> AgentHello:
    """The agent of a node whose one rank has done five steps, two of which are on record."""
    first = Hello(rank=rank, pid=1, host="h", address=b"a", layout=b"", start_step=0, train_iters=9, flags={},
                  likeness=b"", linked=True, tied=False)
    committed = [Committed(rank=rank, epoch=0, vote=vote(step), time=float(step), first=False) for step in (3, 4, 5)]
    past = Past(in_force=layout.epoch, told=told, epoch=4, newest=max(layout.ranks),
                torch_port=1, key=b"k", shapes={}, recorded=2, committed=committed, alone_since=10.0, resigned=resigned)
    return AgentHello(session=f"s{rank}", node_rank=rank, slots=1, host="h", heartbeat_timeout=2, address=f"h:{rank}",
                      running=[Running(rank=rank, local_rank=0, hello=first)], past=past)


def newcomer(node: int, rank: int, **fields: Any) -> AgentHello:
    """The agent of a node that has come to the coordinator before; ``fields`` of what it knows."""
    like = hello(0)
    assert like.past is not None
    first, past = replace(like.running[0], rank=rank), replace(like.past, in_force=-1, committed=[], **fields)
    return replace(like, node_rank=node, session=f"s{node}", address=f"h:{node}", running=[first], past=past)


def happen(job: Job, *happened: events.Event, layout: Layout = LAYOUT) -> tuple[Job, list[Effect]]:
    """Events one after the other; who is asked for ``layout`` tells it at once."""
    effects: list[Effect] = []
    pending = deque(happened)
    while pending:
        event = pending.popleft()
        job, more = advance(job, event)
        effects += more
        pending.extendleft(events.LayoutTold(now=event.now, node=node, layout=encode(layout)) for node in asked(more))
    return job, effects


def asked(effects: Iterable[Effect]) -> list[int]:
    """Nodes that are to tell their layout."""
    return [each.node for each in effects if isinstance(each, Tell) and isinstance(each.message, TellLayout)]


def took_over(before: str = "h:0") -> events.TookOver:
    """Node 1 coordinates."""
    return events.TookOver(now=11.0, term=2, address="h:1", name="n", members=(), epoch=3, written=-1, before=before,
                           limit=1.0)


def take_over(before: str = "h:0", settings: Settings = SETTINGS) -> tuple[Job, list[Effect]]:
    """Node 1 coordinates, and the nodes 1 and 2 have come to it."""
    return happen(Job.new(settings, 3), took_over(before), events.NodeCame(now=11.1, node=1, hello=hello(1)),
                  events.NodeCame(now=11.2, node=2, hello=hello(2)))


def opcodes(nodes: int) -> int:
    """What the protocol does in a takeover with so many nodes, of a rank each: operations of the interpreter."""
    count, folder = 0, str(Path(advance.__code__.co_filename).parent)

    def trace(frame: FrameType, what: str, _: object) -> Any:
        nonlocal count
        if what == "call":
            frame.f_trace_opcodes = frame.f_code.co_filename.startswith(folder)
            return trace if frame.f_trace_opcodes else None
        count += what == "opcode"
        return trace

    layout = Layout.grid(tp=1, pp=1, dp=nodes, stage_units=[[0]], units=["a"], num_grains=nodes, num_slices=nodes,
                         replicas=1, ranks_per_host=1)
    job = Job.new(SETTINGS, nodes)
    came = [events.NodeCame(now=11.1, node=1 + rank, hello=hello(rank, layout=layout)) for rank in range(nodes)]
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        job, _ = happen(job, took_over(""), *came, layout=layout)
    finally:
        sys.settrace(before)
    assert job.gathering is None and job.lost == ()
    return count


def test_the_work_of_a_takeover_grows_with_the_nodes_and_not_with_their_square() -> None:
    small, large = opcodes(16), opcodes(160)
    assert large < 12 * small


class Agent:
    """What an agent is told."""

    def __init__(self) -> None:
        self.told: list[ToAgent] = []

    def obey(self, message: ToAgent) -> None:
        self.told.append(message)


def test_who_has_the_layout_in_force_is_told_the_next_one_as_the_difference() -> None:
    async def test() -> None:
        coordinator = Coordinator(Job.new(SETTINGS, 3), None, lambda line, tells: None)
        coordinator.post(took_over())
        agents = {rank: Agent() for rank in (1, 2)}
        for rank, agent in agents.items():  # something else was sent to that of rank 2
            coordinator.post(events.NodeCame(now=11.1, node=coordinator.name(agent), hello=hello(rank, told=rank == 1)))
        assert [TellLayout() in agent.told for agent in agents.values()] == [True, False]
        coordinator.post(events.LayoutTold(now=11.2, node=1, layout=encode(LAYOUT)))
        for rank in agents:
            report = Report(rank=rank, epoch=5, member=True, step=6, vote=None, last=vote(5),
                            held=[(0, k, 0) for k in range(3)], interrupted_at=11.3)
            coordinator.post(events.Said(now=11.3, node=rank, message=report))
        await asyncio.sleep(0)
        new = coordinator.job.layout
        assert new is not None and new.epoch == 5
        relays = {rank: next(each for each in agent.told if isinstance(each, Relay) and b"Back" in bytes(each.message))
                  for rank, agent in agents.items()}
        assert {rank: each.differs for rank, each in relays.items()} == {1: True, 2: False}
        sent = {rank: msgspec.msgpack.decode(each.message)["layout"] for rank, each in relays.items()}
        assert changed(LAYOUT, sent[1]) == decode(sent[2]) == new

    asyncio.run(test())


async def told_in_a_takeover(nodes: int) -> tuple[int, list[int]]:
    """Bytes that agents tell a new coordinator before it interrupts anybody, and who tells its layout."""
    layout = Layout.grid(tp=1, pp=1, dp=nodes, stage_units=[[0]], units=["a"], num_grains=nodes, num_slices=nodes,
                         replicas=1, ranks_per_host=1)
    answers: list[FromAgent] = []
    later = asyncio.get_running_loop().call_later
    posts = [Post(lambda rank, frame: None, answers.append, later) for _ in range(nodes)]
    job, told, tellers = advance(Job.new(SETTINGS, nodes), took_over(""))[0], 0, list[int]()
    for rank, post in enumerate(posts):
        first = hello(rank).running[0].hello
        assert first is not None
        post.heard(rank, replace(first, layout=encode(layout)))
        post.noted(Start(addresses={}, key=b"k"))
        message = replace(hello(rank), running=post.running({rank: 0}), past=post.past(1, 10.0, False, [rank]))
        told += len(msgspec.msgpack.encode(message))
        job, effects = advance(job, events.NodeCame(now=11.1, node=rank, hello=message))
        for node in asked(effects):
            tellers.append(node)
            posts[node].tell_layout()
            answer = answers[-1]
            assert isinstance(answer, LayoutTold)
            told += len(msgspec.msgpack.encode(answer))
            job, _ = advance(job, events.LayoutTold(now=11.1, node=node, layout=answer.layout))
    assert job.gathering is None and job.lost == ()
    return told, tellers


def test_one_of_all_agents_tells_the_layout_and_what_all_tell_grows_with_the_nodes() -> None:
    small, tellers = asyncio.run(told_in_a_takeover(16))
    assert tellers == [0]
    large, tellers = asyncio.run(told_in_a_takeover(160))
    assert tellers == [0]
    assert large < 11 * small


def test_if_who_is_to_tell_the_layout_goes_another_is_asked() -> None:
    come = [events.NodeCame(now=11.1, node=node, hello=hello(node)) for node in (1, 2)]
    job, effects = advance(advance(advance(Job.new(SETTINGS, 3), took_over())[0], come[0])[0], come[1])
    assert asked(effects) == []
    other, effects = advance(job, events.NodeLost(now=11.2, node=2, cause="node 2 lost", since=11.2))
    assert asked(effects) == []
    job, effects = advance(job, events.NodeLost(now=11.2, node=1, cause="node 1 lost", since=11.2))
    assert asked(effects) == [2]
    job, _ = advance(job, events.LayoutTold(now=11.3, node=2, layout=encode(LAYOUT)))
    assert job.gathering is not None and job.gathering.layout == LAYOUT
    assert sorted(job.gathering.missing) == [0, 1]
    alone, effects = advance(other, events.NodeLost(now=11.3, node=1, cause="node 1 lost", since=11.3))
    assert asked(effects) == []
    _, effects = advance(alone, events.NodeCame(now=11.4, node=3, hello=hello(0)))
    assert asked(effects) == [3]


def test_of_two_layouts_the_newer_counts_in_whatever_order_they_are_told() -> None:
    newer = dataclasses.replace(LAYOUT, epoch=2)
    come: list[events.Event] = [
        events.NodeCame(now=11.1, node=1, hello=hello(1)),
        events.NodeCame(now=11.1, node=2, hello=hello(2, layout=newer)),
    ]
    tell: list[events.Event] = [
        events.LayoutTold(now=11.2, node=node, layout=encode(layout)) for node, layout in ((1, LAYOUT), (2, newer))
    ]
    begun, _ = advance(Job.new(SETTINGS, 3), took_over())
    for order in ([*come, *tell], [*come, *tell[::-1]], [come[0], tell[0], come[1], tell[1]]):
        job = begun
        for event in order:
            assert job.gathering is not None or event is tell[0]
            job, _ = advance(job, event)
        assert job.gathering is None
        assert job.layout == newer


def test_steps_that_many_tell_are_kept_once() -> None:
    job, _ = take_over("")
    assert job.gathering is not None
    assert sorted(step for step, *_ in job.gathering.committed) == [3, 4, 5]


def test_the_others_have_as_long_again_when_one_has_come() -> None:
    """It may take longer to hear all that are there: who waits to be heard is not lost."""
    job, effects = take_over("")
    assert [each.delay for each in effects if isinstance(each, SetTimer)] == [1.0] * 4, "the layout was told, too"
    late, _ = advance(job, events.Expired(now=12.0, name="gather", serial=1))
    assert late == job, "that was before the others came"


def test_those_without_whom_state_would_be_lost_have_longer_to_come() -> None:
    job, _ = happen(Job.new(SETTINGS, 3), took_over(), events.NodeCame(now=11.1, node=1, hello=hello(1)))
    job, effects = advance(job, events.Expired(now=12.0, name="gather", serial=job.timers["gather"]))
    assert job.gathering is not None
    assert [(each.name, each.delay) for each in effects if isinstance(each, SetTimer)] == [("gather", 2)]
    came, _ = advance(job, events.NodeCame(now=13.0, node=2, hello=hello(2)))
    assert came.gathering is None and came.lost == (0,)
    job, _ = advance(job, events.Expired(now=14.0, name="gather", serial=job.timers["gather"]))
    assert job.gathering is None and job.lost == (0, 2)


def wait_in_vain(job: Job) -> Job:
    """Nobody else comes, without whom state is lost."""
    for now in (16.0, 18.0):
        assert job.gathering is not None
        job, _ = advance(job, events.Expired(now=now, name="gather", serial=job.timers["gather"]))
    return job


def interrupts(effects: list[Effect]) -> list[Send]:
    return [each for each in effects if isinstance(each, Send) and isinstance(each.message, Interrupt)]


def test_the_failed_coordinators_node_is_not_waited_for() -> None:
    job, effects = take_over()
    assert job.gathering is None
    assert job.lost == (0,)
    (interrupt,) = interrupts(effects)
    assert interrupt.ranks == (1, 2)
    assert isinstance(interrupt.message, Interrupt)
    assert interrupt.message.epoch == 5  # above what the store and the agents know of
    assert [each.record["step"] for each in effects if isinstance(each, WriteMetrics)] == [3, 4, 5]
    assert all(Tell(node, Recall(after=5)) in effects for node in (1, 2)), "steps since they came"
    (recovery,) = [job.recovery]
    assert recovery is not None
    assert dict(recovery.exits) == {0: 10.0}


def test_a_coordinator_that_has_resigned_is_waited_for() -> None:
    """Its store was away; its ranks go on like all others."""
    job, effects = happen(Job.new(SETTINGS, 3), took_over(), events.NodeCame(now=11.1, node=1, hello=hello(1)),
                          events.NodeCame(now=11.2, node=2, hello=hello(2, resigned=True)))
    assert job.gathering is not None
    delay = 1.0 + SETTINGS.heartbeat_timeout
    assert SetTimer(name="gather", delay=delay, serial=job.timers["gather"]) in effects
    job, more = advance(job, events.NodeCame(now=12.5, node=3, hello=hello(0, resigned=True)))
    assert (job.gathering, job.lost) == (None, ())
    (interrupt,) = interrupts(list(more))
    assert interrupt.ranks == (0, 1, 2)


def test_others_are_waited_for_until_the_limit() -> None:
    job, effects = take_over(before="")
    assert job.gathering is not None
    assert interrupts(effects) == []
    job, more = advance(job, events.Expired(now=12.1, name="gather", serial=job.timers["gather"]))
    assert job.lost == (0,)
    assert len(interrupts(list(more))) == 1
    # Who comes later is no part of the job any more.
    _, late = advance(job, events.NodeCame(now=13.0, node=3, hello=hello(0)))
    (told,) = late
    assert isinstance(told, Tell)
    assert isinstance(told.message, Stop)
    assert not told.message.ok
    # But if it was to leave, that is what was wanted: the word that it may go was lost.
    _, late = advance(job, events.NodeCame(now=13.0, node=4, hello=replace(hello(0), leaving=True)))
    assert [each.message.ok for each in late if isinstance(each, Tell) and isinstance(each.message, Stop)] == [True]


def test_what_is_said_meanwhile_is_heard() -> None:
    job, _ = take_over(before="")
    job, effects = advance(job, events.News(now=11.3, node=2, news=RankExited(rank=2, returncode=-9, time=11.3)))
    assert effects == ()
    job, more = advance(job, events.Expired(now=12.1, name="gather", serial=job.timers["gather"]))
    assert job.lost == (0, 2)
    assert [each.ranks for each in interrupts(list(more))] == [(1, 2), (1,)]


def test_a_node_that_goes_again_meanwhile_is_lost() -> None:
    job, _ = take_over(before="")
    job, _ = advance(job, events.NodeLost(now=11.5, node=2, cause="node 2 lost", since=11.5))
    job = wait_in_vain(job)
    assert job.lost == (0, 2)


def test_damage_is_known_although_who_told_of_it_has_gone_again() -> None:
    job, _ = take_over(before="")
    damage = Damage(rank=1, unit=0, slice=0, part=0, what="state")
    told = Damaged(rank=2, epoch=0, step=6, found=[damage], verified=4)
    job, _ = advance(job, events.Said(now=11.3, node=2, message=told))
    job, _ = advance(job, events.NodeLost(now=11.5, node=2, cause="node 2 lost", since=11.5))
    job = wait_in_vain(job)
    assert job.lost == (0, 2)
    assert list(job.trust.damaged) == [(1, (0, 0, 0))]
    assert list(job.trust.doubtful) == [5]


def test_nothing_is_decided_before_it_is_recorded() -> None:
    job, effects = take_over()
    (record,) = [each for each in effects if isinstance(each, Record)]
    assert record.epoch == 5
    for rank in (1, 2):
        held = [(0, k, 0) for k in range(3)]
        report = Report(rank=rank, epoch=5, member=True, step=6, vote=None, last=vote(5), held=held,
                        interrupted_at=11.3)
        job, more = advance(job, events.Said(now=11.3, node=rank, message=report))
        assert not any(isinstance(each, Send) for each in more)
    assert job.collecting
    job, _ = advance(job, events.Recorded(now=11.4, epoch=4))  # an older one
    assert job.collecting
    job, _ = advance(job, events.Recorded(now=11.4, epoch=5))
    assert not job.collecting
    assert job.layout is not None
    assert job.layout.epoch == 5


def test_nodes_in_no_layout_yet_are_failure_domains_of_their_own() -> None:
    job, _ = take_over(before="")
    for node in (3, 4):
        job, _ = advance(job, events.NodeCame(now=11.5, node=node, hello=newcomer(node, node)))
    job, _ = advance(job, events.Expired(now=12.1, name="gather", serial=job.timers["gather"]))
    job, _ = advance(job, events.NodeCame(now=13.0, node=5, hello=replace(hello(0), running=[], past=None)))
    assert [job.ranks[rank].host for rank in sorted(job.ranks)] == [0, 1, 2, 3, 4, 5]


def test_ids_of_the_dead_are_not_given_again() -> None:
    job, _ = take_over(before="")
    job, _ = advance(job, events.NodeCame(now=11.5, node=3, hello=newcomer(3, 4, newest=6)))
    job, _ = advance(job, events.Expired(now=12.1, name="gather", serial=job.timers["gather"]))
    assert job.lost == (0, 3, 5, 6)
    # A node whose ranks have all died may know of more.
    back = replace(newcomer(4, 0, newest=8), running=[])
    job, effects = advance(job, events.NodeCame(now=13.0, node=4, hello=back))
    assert [dict(each.message.ranks) for each in effects if isinstance(each, Tell) and isinstance(each.message, Launch)
            ] == [{0: 9}]


def test_a_node_where_nothing_was_started_joins() -> None:
    """Its agent was told how the next coordinator is found, and the order to start ranks was lost."""
    job, _ = take_over(before="")
    idle = replace(newcomer(3, 0, torch_port=0), running=[])
    job, _ = advance(job, events.NodeCame(now=11.5, node=3, hello=idle))
    job, effects = advance(job, events.Expired(now=12.1, name="gather", serial=job.timers["gather"]))
    (launch,) = [each.message for each in effects if isinstance(each, Tell) and isinstance(each.message, Launch)]
    assert (launch.ranks, launch.torch_port) == ({0: 3}, 1)


def test_a_node_that_comes_twice_is_lost_once() -> None:
    """Its first connection was given up by itself, and not yet by the coordinator."""
    job, _ = take_over(before="")
    job, _ = advance(job, events.NodeCame(now=11.5, node=3, hello=hello(2)))
    job, _ = advance(job, events.Expired(now=12.1, name="gather", serial=job.timers["gather"]))
    job, _ = advance(job, events.NodeLost(now=12.2, node=2, cause="node 2 lost", since=11.4))
    assert job.lost == (0,)


def test_what_ranks_know_of_checkpoints_counts() -> None:
    job, _ = take_over()
    for rank in (1, 2):
        report = Report(rank=rank, epoch=5, member=True, step=6, vote=None, last=vote(5), held=[(0, 0, 0)],
                        interrupted_at=11.3, saved=4)
        job, _ = advance(job, events.Said(now=11.3, node=rank, message=report))
    job, effects = advance(job, events.Recorded(now=11.4, epoch=5))
    assert [each.message.step for each in effects if isinstance(each, Send) and isinstance(each.message, Reload)] == [5]


def test_who_may_have_a_rank_that_lives_is_waited_for_longer() -> None:
    bare = replace(hello(1), running=[])
    job, _ = happen(Job.new(SETTINGS, 3), took_over(""), events.NodeCame(now=11.1, node=1, hello=bare))
    job, effects = advance(job, events.Expired(now=12.0, name="gather", serial=job.timers["gather"]))
    assert SetTimer(name="gather", delay=SETTINGS.start_timeout, serial=job.timers["gather"]) in effects
    job, effects = advance(job, events.NodeCame(now=15.0, node=2, hello=hello(2)))
    assert SetTimer(name="gather", delay=1.0, serial=job.timers["gather"]) in effects
    job = wait_in_vain(job)
    assert (job.outcome, job.lost) == (None, (0, 1))


def test_a_reload_that_some_have_not_heard_of_goes_on() -> None:
    def report(rank: int, layout: int, step: int, reloading: bool, voted: int | None = None) -> Report:
        return Report(rank=rank, epoch=9, member=True, step=step, vote=None if voted is None else vote(voted),
                      last=None if reloading else vote(step - 1), held=[], interrupted_at=0.0, layout=layout,
                      reloading=reloading)

    gone_back = report(1, 4, 5, True)
    assert decision.reloading([gone_back, report(2, 2, 7, False)]) == Decided("reload", 5)
    assert decision.reloading([gone_back, report(2, 2, 6, False)]) == Decided("reload", 5), "it did step 5 before"
    assert decision.reloading([gone_back, report(2, 4, 5, True)]) == Decided("reload", 5), "it may not have its state"
    assert decision.reloading([gone_back, report(2, 4, 6, False)]) is None, "a step has been done since"
    assert decision.reloading([gone_back, report(2, 4, 5, True, voted=5)]) is None, "one has been voted"
    assert decision.reloading([report(1, 4, 5, False), report(2, 4, 5, False)]) is None


def raised(rank: int, epoch: int) -> Failed:
    return Failed(rank=rank, traceback=f"Traceback:\nError on {rank}", epoch=epoch, step=6)


def test_what_was_raised_before_is_known() -> None:
    """Who raises in the same step when it is done again raises what the program does, whoever coordinates."""
    job = Job.new(SETTINGS, 3)
    knows = hello(2)
    assert knows.past is not None
    knows = replace(knows, past=replace(knows.past, failed=[raised(0, 0), replace(raised(0, 0), step=0)]))
    job, _ = happen(job, took_over(), events.NodeCame(now=11.1, node=1, hello=hello(1)),
                    events.NodeCame(now=11.2, node=2, hello=knows))
    assert [(each.rank, each.step) for each in job.errors] == [(0, 6)], "and nothing that was long ago"
    job, _ = advance(job, events.Said(now=12.0, node=1, message=raised(1, 5)))
    assert job.outcome is not None and "it is no fault of a rank" in job.outcome.reason


def test_who_was_asked_to_leave_still_leaves() -> None:
    """Its agent was told so, and tells it the next coordinator."""
    job, _ = happen(Job.new(SETTINGS, 3), took_over(), events.NodeCame(now=11.1, node=1, hello=hello(1)),
                    events.NodeCame(now=11.2, node=2, hello=replace(hello(2), leaving=True)))
    assert job.leaving == {2}


def test_who_says_meanwhile_that_it_leaves_does() -> None:
    job, _ = take_over(before="")
    assert job.gathering is not None
    job, _ = advance(job, events.Leaves(now=11.3, node=2))
    assert job.leaving == {2}


def test_a_job_all_of_whose_nodes_are_to_leave_ends() -> None:
    """As when a scheduler ends it: SIGTERM to all launchers, of which the one that coordinated was the first."""
    job, _ = happen(Job.new(SETTINGS, 3), took_over(),
                    events.NodeCame(now=11.1, node=1, hello=replace(hello(1), leaving=True)),
                    events.NodeCame(now=11.2, node=2, hello=replace(hello(2), leaving=True)))
    assert job.outcome is not None and not job.outcome.ok
    assert (job.outcome.reason, job.outcome.code) == ("all nodes of the job are to leave (SIGTERM)", 143)


def test_a_job_does_not_end_while_a_node_comes_again() -> None:
    """It was cut off, so that its rank is lost; all others are to leave."""
    layout = lose(LAYOUT, [1], Holdings.of(LAYOUT).without([1]), 1)
    job, effects = happen(Job.new(SETTINGS, 3), took_over(),
                          events.NodeCame(now=11.1, node=1, hello=hello(1, layout=layout)),
                          events.NodeCame(now=11.2, node=2, hello=replace(hello(2, layout=layout), leaving=True)),
                          layout=layout)  # fmt: skip
    told = [each.message for each in effects if isinstance(each, Tell)]
    assert [each.again for each in told if isinstance(each, Stop)] == [True]
    assert job.outcome is None and job.leaving == {2}


# ---- what was asked for --------------------------------------------------------------------


def wanted(effects: Iterable[Effect]) -> dict[int, Wanted]:
    """What nodes are told that somebody has asked for."""
    return {each.node: each.message for each in effects if isinstance(each, Tell) and isinstance(each.message, Wanted)}


def knowing(rank: int, told: Wanted) -> AgentHello:
    """An agent that was told so."""
    past = hello(rank).past
    assert past is not None
    return replace(hello(rank), past=replace(past, wanted=told))


def test_what_is_asked_for_is_told_to_all_agents_and_so_is_what_is_no_longer() -> None:
    job, _ = take_over()
    job, effects = advance(job, events.Asked(now=12.0, person=9, request=Scale(ranks=2)))
    told = Wanted(number=1, stages=None, ranks=2, shape=None)
    assert wanted(effects) == {1: told, 2: told}
    came = replace(hello(0), node_rank=5, running=[], past=None, session="new")
    job, effects = advance(job, events.NodeCame(now=12.1, node=3, hello=came))
    assert wanted(effects) == {3: told}, "a newcomer may be the only one who is left"
    job, effects = advance(job, events.Asked(now=12.2, person=9, request=Scale(ranks=2)))
    assert wanted(effects) == {}, "that is known"


def test_who_takes_over_knows_what_was_asked_for() -> None:
    """The newest that anybody was told, and it tells everybody."""
    old, new = (Wanted(number=number, stages=number, ranks=2 * number, shape=(number, 1, 1)) for number in (1, 2))
    for first, second in ((old, new), (new, old)):
        job, effects = happen(Job.new(SETTINGS, 3), took_over(),
                              events.NodeCame(now=11.1, node=1, hello=knowing(1, first)),
                              events.NodeCame(now=11.2, node=2, hello=knowing(2, second)))
        asked_for = job.arrangement
        assert (asked_for.stages, asked_for.cells, asked_for.shape) == (2, 4, (2, 1, 1))
        assert wanted(effects) == dict.fromkeys((1, 2), replace(new, number=3))


def test_a_shape_that_cells_have_is_not_asked_for_again() -> None:
    """The word that it is there was lost with who coordinated. Ranks, which are counted here, are as many."""
    told = Wanted(number=4, stages=None, ranks=2, shape=(LAYOUT.tp, LAYOUT.cp, LAYOUT.ep))
    job, _ = happen(Job.new(SETTINGS, 3), took_over(), events.NodeCame(now=11.1, node=1, hello=knowing(1, told)),
                    events.NodeCame(now=11.2, node=2, hello=hello(2)))
    assert (job.arrangement.shape, job.arrangement.cells) == (None, 2)


def test_who_takes_over_reads_the_profile() -> None:
    """Or layers would stay where they are, and memory would have no limits, for the rest of the job."""
    job, effects = take_over(settings=replace(SETTINGS, profile_file="p.json", dvfs="energy"))
    assert [each for each in effects if isinstance(each, ReadCosts)] == [ReadCosts("p.json", ("a",))]
    costs = Costs(units=(UnitCost(1.0, 2.0, 0, 0, 0),))
    job, _ = advance(job, events.Costed(now=11.3, costs=costs, problem=""))
    assert job.costs == dataclasses.replace(costs, clocking=Clocking("energy"))


def test_who_takes_over_reads_no_profile_where_there_is_none() -> None:
    _, effects = take_over()
    assert not any(isinstance(each, ReadCosts) for each in effects)


def test_who_takes_over_goes_on_where_the_profile_cannot_be_read() -> None:
    """It may lie on the first node alone."""
    job, _ = take_over(settings=replace(SETTINGS, profile_file="p.json"))
    job, effects = advance(job, events.Costed(now=11.3, costs=None, problem="p.json: No such file or directory"))
    assert job.outcome is None and job.costs is None
    (said,) = [each.line for each in effects if isinstance(each, Say)]
    assert said.startswith("WARNING: --elastic-profile p.json: No such file or directory; from now on")


# ---- many nodes at once --------------------------------------------------------------------


def all_there() -> Job:
    """Each of the three nodes has come, that of rank 0 as number 3."""
    job, _ = take_over("")
    job, _ = advance(job, events.NodeCame(now=11.3, node=3, hello=hello(0)))
    assert job.gathering is None and job.lost == ()
    return job


def test_nodes_whose_connections_broke_together_are_one_fault() -> None:
    """While one loss is told to a large job, the time of others runs out."""
    job = all_there()
    for node in (2, 3):
        job, _ = advance(job, events.NodeAbsent(now=12.0 + node / 10, node=node))
    job, effects = advance(job, events.Expired(now=13.4, name="absent 2", serial=job.timers["absent 2"]))
    assert job.lost == (0, 2) and "absent 3" not in job.timers
    assert len(interrupts(list(effects))) == 1
    job = all_there()
    for node in (2, 3):
        job, _ = advance(job, events.NodeAbsent(now=12.0 + node / 10, node=node))
    job, _ = advance(job, events.Expired(now=13.25, name="absent 2", serial=job.timers["absent 2"]))
    assert job.lost == (2,), "the other one has time left"


def test_nodes_that_are_lost_together_are_one_fault() -> None:
    job = all_there()
    before = job.epoch
    gone = tuple(events.NodeLost(now=12.0, node=node, cause=f"node {node} silent", since=float(node))
                 for node in (3, 2))
    job, effects = advance(job, events.NodesLost(now=12.0, lost=gone))
    assert (job.lost, job.epoch) == ((0, 2), before + 1)
    (interrupt,) = interrupts(list(effects))
    assert interrupt.ranks == (1,), "and none for one of the lost"
    faults = [each.fields for each in effects if isinstance(each, WriteEvent) and each.kind == "fault"]
    assert [(each["rank"], each["signal"], each["exited_at"]) for each in faults] == [
        (0, "node 3 silent", 3.0), (2, "node 2 silent", 2.0)]
    assert {each.node for each in effects if isinstance(each, Tell) and isinstance(each.message, Stop)} == {2, 3}
