"""Defects: what cannot be worked into the job, and what the coordinator's process raises besides, costs little."""

from __future__ import annotations

import asyncio

import pytest

from megatron_elastic.cluster.coordination.coordinator import Coordinator
from megatron_elastic.cluster.messages import Drain, Fence, Launch, RankExited, Stop, ToAgent
from megatron_elastic.cluster.messages import Event as Note
from megatron_elastic.cluster.protocol import events
from megatron_elastic.cluster.protocol.effects import Reply, Say, Tell
from tests.play import Play


def malformed(rank: int) -> Note:
    """A word that the coordinator trips over: an event's field of a name that is taken."""
    return Note(rank=rank, epoch=0, kind="saved", fields={"rank": 7})


class Heard:
    """An agent that does what it is told, or cannot."""

    def __init__(self, able: bool = True) -> None:
        self.able = able
        self.told: list[ToAgent] = []

    def obey(self, message: ToAgent) -> None:
        if not self.able:
            raise ZeroDivisionError
        self.told.append(message)


def shell(play: Play, lines: list[str]) -> Coordinator:
    """The shell around a job that trains, with both of its nodes."""
    return Coordinator(play.job, None, lambda line, tells: lines.append(line))


def posts(play: Play, *happened: events.Event) -> tuple[Coordinator, list[str], Heard]:
    """What the shell makes of these events, what people are told, and what node 1 is."""
    lines: list[str] = []

    async def post() -> tuple[Coordinator, Heard]:
        coordinator, agents = shell(play, lines), [Heard(), Heard()]
        for agent in agents:
            coordinator.name(agent)
        for each in happened:
            coordinator.post(each)
        return coordinator, agents[0]

    coordinator, agent = asyncio.run(post())
    return coordinator, lines, agent


def test_a_word_that_cannot_be_heard_is_its_ranks_fault() -> None:
    play = Play()
    coordinator, lines, agent = posts(play, events.Said(now=1.0, node=1, message=malformed(0)))
    assert coordinator.job.outcome is None
    assert [each for each in agent.told if isinstance(each, Fence)] == [Fence(rank=0)]
    assert coordinator.job.ranks[0].fenced == "unheard"
    assert "WARNING: Event of rank 0 cannot be heard. error in the coordinator, please report it" in lines[0]
    assert "Traceback" in lines[0]


def test_what_a_rank_says_after_it_was_given_up_does_not_count() -> None:
    said = events.Said(now=1.0, node=1, message=malformed(0))
    coordinator, lines, _ = posts(Play(), said, said, said)
    assert coordinator.job.outcome is None
    assert len([line for line in lines if "cannot be heard. error" in line]) == 1


def test_words_that_cannot_be_heard_again_and_again_end_the_job() -> None:
    """It is no rank's fault: all would be taken out, one after the other."""
    coordinator, _, _ = posts(
        Play(stages=((0, 1), (2,))),
        events.Said(now=1.0, node=1, message=malformed(0)),
        events.News(now=1.1, node=1, news=RankExited(rank=0, returncode=-9, time=1.1)),
        events.Said(now=1.2, node=1, message=malformed(3)),
    )
    assert coordinator.job.outcome is not None
    first, *rest = coordinator.job.outcome.reason.split("\n\n")
    assert first == "error in the coordinator, please report it: what ranks say cannot be heard"
    assert [each.partition(":")[0] for each in rest] == [f"what rank {rank} said could not be heard" for rank in (0, 3)]


@pytest.mark.parametrize(
    ("stray", "outcome"),
    [
        (events.Metered(now=1.0, node=1, figures={}), "goes on without Metered"),
        (events.Inspected(now=1.0, node=1, readings=(), usual=None), "goes on without Inspected"),
        (events.News(now=1.0, node=2, news=RankExited(rank=2, returncode=1, time=1.0)), "node 2 counts as lost"),
        (events.Asked(now=1.0, person=5, request=Drain(node_ranks=(1,))), "answered"),
        (events.NodeCame(now=1.0, node=9, hello=None), "sent away"),  # type: ignore[arg-type]
        (events.Expired(now=1.0, name="report", serial=1), "ends"),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_what_is_done_without_an_event(stray: events.Event, outcome: str) -> None:
    play = Play()
    play.happens(events.Unheard(now=1.0, event=stray, traceback="Traceback: it raised"))
    said = [effect.line for effect in play.effects if isinstance(effect, Say)]
    match outcome:
        case "ends":
            assert play.job.outcome is not None and "Traceback: it raised" in play.job.outcome.reason
        case "answered":
            (reply,) = [effect for effect in play.effects if isinstance(effect, Reply)]
            assert not reply.answer.ok and reply.person == 5
        case "sent away":
            (told,) = [effect for effect in play.effects if isinstance(effect, Tell)]
            assert told.node == 9 and isinstance(told.message, Stop) and not told.message.ok
        case _:
            assert any(outcome in line for line in said), said
    assert (play.job.outcome is not None) == (outcome == "ends")


def test_an_agent_that_cannot_do_what_it_is_told_is_lost_alone() -> None:
    play, lines = Play(), list[str]()

    async def lose() -> tuple[Coordinator, Heard]:
        coordinator, able = shell(play, lines), Heard()
        coordinator.name(able)
        coordinator.name(Heard(able=False))
        coordinator._tell(2, Launch(ranks={}, world_size=2, first_host=2, torch_port=1))
        return coordinator, able

    coordinator, _ = asyncio.run(lose())
    assert coordinator.job.outcome is None
    assert set(coordinator.job.nodes) == {1} and coordinator.job.ranks[2].lost
    assert "ZeroDivisionError" in lines[0]


def test_what_nobody_waits_for_is_told_once_and_ends_nothing() -> None:
    """As a callback that raises: until now the job ended with it."""
    play, lines = Play(), list[str]()

    async def raise_twice() -> Coordinator:
        coordinator = shell(play, lines)
        for _ in range(2):
            coordinator.defect("ZeroDivisionError")
        return coordinator

    assert asyncio.run(raise_twice()).job.outcome is None
    assert lines == ["WARNING: error in the launcher, please report it: ZeroDivisionError"]
