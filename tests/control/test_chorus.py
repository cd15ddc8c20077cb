"""What ranks of a node say alike is told once, in order; and messages go to nodes with what they lack of a layout."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from megatron_elastic.cluster.coordination.outgoing import Outgoing
from megatron_elastic.cluster.messages import (
    Back,
    FromAgent,
    FromRank,
    Hello,
    Kept,
    LayoutTold,
    Plan,
    RankExited,
    Ready,
    Recovered,
    Relay,
    Report,
    Resume,
    Said,
    Settled,
    Start,
    Suspect,
    ToRank,
)
from megatron_elastic.cluster.node.chorus import Chorus, Later
from megatron_elastic.cluster.node.relay import Post
from megatron_elastic.cluster.protocol import Job, Settings
from megatron_elastic.layout import Holdings, Layout, encode, gpt_units
from megatron_elastic.plan import lose
from tests.tiers.examples import examples

VOICES = 3
_to_rank: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)


def messages(rank: int) -> st.SearchStrategy[FromRank]:
    epoch = st.integers(1, 2)
    report = st.builds(Report, rank=st.just(rank), epoch=epoch, member=st.just(True), step=st.integers(1, 2),
                       vote=st.none(), last=st.none(), held=st.none(), interrupted_at=st.just(1.0))
    return st.one_of(
        report,
        st.builds(Recovered, rank=st.just(rank), epoch=epoch, edit_ms=st.just(1.0), state_ms=st.just(2.0)),
        st.builds(Settled, rank=st.just(rank), epoch=epoch),
        st.builds(Ready, rank=st.just(rank), epoch=epoch),
        st.builds(Suspect, rank=st.just(rank), epoch=epoch, suspects=st.just([1]), reason=st.just("x")),
    )


def run(body: Callable[[], Awaitable[None]]) -> None:
    async def all_of_it() -> None:
        await body()

    asyncio.run(all_of_it())


def later() -> Later:
    return asyncio.get_running_loop().call_later


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.integers(0, VOICES - 1).flatmap(messages), max_size=20))
def test_what_each_rank_says_arrives_whole_and_in_order(said: list[FromRank]) -> None:
    async def body() -> None:
        told: list[Said] = []
        chorus = Chorus(told.append, later())
        for message in said:
            chorus.say(message, VOICES)
        chorus.flush()
        for rank in range(VOICES):
            heard = [replace(each.message, rank=rank) for each in told if rank in (each.message.rank, *each.also)]
            assert heard == [each for each in said if each.rank == rank]

    run(body)


def test_what_all_say_is_told_at_once_and_the_slowest_counts() -> None:
    async def body() -> None:
        told: list[Said] = []
        chorus = Chorus(told.append, later())
        for rank, took in enumerate((1.0, 5.0, 3.0)):
            assert not told
            chorus.say(Recovered(rank=rank, epoch=1, edit_ms=took, state_ms=-took), VOICES)
        assert told == [Said(message=Recovered(rank=0, epoch=1, edit_ms=5.0, state_ms=-1.0), also=[1, 2])]

    run(body)


def test_nobody_waits_long_for_the_others() -> None:
    async def body() -> None:
        told: asyncio.Future[Said] = asyncio.get_running_loop().create_future()
        Chorus(told.set_result, later()).say(Settled(rank=4, epoch=1), VOICES)
        assert await asyncio.wait_for(told, 10) == Said(message=Settled(rank=4, epoch=1))

    run(body)


def hello(rank: int, layout: Layout) -> Hello:
    return Hello(rank=rank, pid=1, host="h", address=b"a", linked=True, layout=encode(layout), start_step=0,
                 train_iters=4, flags={}, likeness=b"x", tied=True)


def test_ranks_of_a_plan_that_was_overtaken_are_remembered() -> None:
    """A new coordinator must not give their numbers to others: some of the ranks here may know of them."""

    async def body() -> None:
        post = Post(lambda rank, frame: None, lambda message: None, later())
        first = grid()
        newest = max(first.ranks)
        post.heard(0, hello(0, first))
        post.noted(Start(addresses={}, key=b""))
        bigger = dataclasses.replace(first, epoch=1, spares=(newest + 3,), hosts=(*first.hosts, (newest + 3,)))
        post.noted(Plan(epoch=1, layout=encode(bigger), shapes={}))
        after = encode(dataclasses.replace(first, epoch=2))
        post.noted(Back(epoch=2, layout=after, step=3, shapes={}, saved=0, gather=False))
        assert post.past(1, 0.0, False, []).newest == newest + 3

    run(body)


def test_what_cells_keep_of_a_step_is_told_to_each_node_as_far_as_it_needs_it() -> None:
    async def body() -> None:
        delivered: list[Any] = []
        post = Post(lambda rank, frame: delivered.append(_to_rank.decode(frame[4:])), lambda message: None, later())
        layout = dataclasses.replace(grid(), epoch=1)
        job = replace(Job.new(Settings(elastic=True, respawn=False, replay="gradient", profile_file=None,
                                       start_timeout=1.0, suspect_timeout=1.0, report_timeout=1.0,
                                       wait_timeout=1.0, heartbeat_timeout=1.0), 16), layout=layout)
        kept = [Kept(leader=cell.leader, added=[i], live=[], half=[])
                for stage in layout.stages for i, cell in enumerate(stage.cells)]
        resume = Resume(epoch=1, layout=encode(layout), step=3, shapes={}, saved=0, gather=False, kept=kept)
        post.relay(Outgoing(resume, job).to(layout.stages[0].cells[0].ranks, None))
        about_its_grains = [each for each in kept if each.added == [0]]
        assert delivered[0] == replace(resume, kept=about_its_grains)
        assert 0 < len(about_its_grains) < len(kept)

    run(body)


def test_what_a_rank_said_is_told_before_its_end() -> None:
    async def body() -> None:
        told: list[Any] = []
        post = Post(lambda rank, frame: None, told.append, later())
        layout = grid()
        for rank in (0, 1):
            post.heard(rank, hello(rank, layout))
        post.heard(1, Settled(rank=1, epoch=1))
        end = RankExited(rank=1, returncode=-9, time=1.0)
        post.news(end)
        assert told[-2:] == [Said(message=Settled(rank=1, epoch=1)), end]
        assert [each.message.layout for each in told[:2]] == [encode(layout), b""]

    run(body)


def test_what_ranks_are_compared_with_is_told() -> None:
    """Rank 0's flags, whoever of its node says hello first; others' only if they differ."""

    async def body() -> None:
        told: list[Any] = []
        post = Post(lambda rank, frame: None, told.append, later())
        flags = {"lr": "1"}
        for rank, likeness in ((1, b"x"), (0, b"x"), (2, b"x"), (3, b"y")):
            post.heard(rank, msgspec.structs.replace(hello(rank, grid()), flags=flags, likeness=likeness))
        assert [each.message.flags for each in told] == [flags, flags, {}, flags]
        # A later coordinator is told no more.
        running = [each.hello for each in post.running({rank: rank for rank in (1, 0, 2, 3)}) if each.hello is not None]
        assert sorted((each.rank, each.flags, each.layout) for each in running if each.flags) == [
            (1, flags, b""), (3, flags, b"")]

    run(body)


def grid() -> Layout:
    units, stage_units = gpt_units(4, 2, tied=True, positions=False)
    return Layout.grid(tp=2, pp=2, dp=4, stage_units=stage_units, units=units, num_grains=8, num_slices=4, replicas=1,
                       ranks_per_host=4)


def test_a_node_gets_layouts_as_differences_and_its_ranks_whole_ones() -> None:
    first = grid()
    second = lose(first, [5], Holdings.of(first).without([5]), 1)
    third = lose(second, [6], Holdings.of(second).without([6]), 2)
    config = Settings(elastic=True, respawn=False, replay="gradient", profile_file=None, start_timeout=1.0,
                      suspect_timeout=1.0, report_timeout=1.0, wait_timeout=1.0, heartbeat_timeout=1.0)
    job = Job.new(config, 16)
    delivered: list[ToRank] = []

    async def body() -> None:
        told: list[FromAgent] = []
        post = Post(lambda rank, frame: delivered.append(_to_rank.decode(frame[4:])), told.append, later())
        post.heard(0, hello(0, first))
        has: Layout | None = None
        relays: list[Relay] = []
        for message, layout in (
            (Start(addresses={}, key=b""), first),
            (Back(epoch=1, layout=encode(second), step=3, shapes={}, saved=0, gather=False), second),
            (Plan(epoch=2, layout=encode(third), shapes={}), third),
        ):
            outgoing = Outgoing(message, replace(job, layout=layout))
            relays.append(outgoing.to([0], has))
            post.relay(relays[-1])
            has = outgoing.leaves
            assert has == layout
            post.tell_layout()
            assert told[-1] == LayoutTold(layout=encode(second if layout is third else layout))
        assert [relay.differs for relay in relays] == [False, True, True]
        assert all(len(bytes(relay.message)) < len(encode(first)) for relay in relays)
        whole = Outgoing(Plan(epoch=2, layout=encode(third), shapes={}), replace(job, layout=third)).to([0], None)
        assert not whole.differs

    run(body)
    assert delivered == [
        Start(addresses={0: b"a"}, key=b""),
        Back(epoch=1, layout=encode(second), step=3, shapes={}, saved=0, gather=False),
        Plan(epoch=2, layout=encode(third), shapes={}),
    ]
