"""The coordinator's decisions, event by event."""

from __future__ import annotations

import dataclasses

import pytest
from msgspec.structs import replace

from megatron_elastic.cluster.messages import (
    AgentHello,
    Back,
    Committed,
    Damage,
    Damaged,
    Enter,
    Failed,
    Fence,
    Finished,
    Forward,
    Hello,
    Interrupt,
    Invite,
    Kept,
    Launch,
    Moves,
    Plan,
    RankDying,
    RankExited,
    Ready,
    Recall,
    Recovered,
    Recut,
    Reload,
    Report,
    Resume,
    Scale,
    Settled,
    SliceDigest,
    Stop,
    Suspect,
    Switched,
    VoteResult,
    WorkDone,
)
from megatron_elastic.cluster.messages import Event as Note
from megatron_elastic.cluster.protocol import Job, Outcome, Settings, events
from megatron_elastic.cluster.protocol.effects import ReadCosts, Reply, Say, Tell, WriteEvent, WriteMetrics
from megatron_elastic.layout import decode
from tests.play import SETTINGS, Play


@pytest.fixture
def play() -> Play:
    return Play()


def announce(play: Play) -> int:
    """Let the newcomer get ready, and everybody know that it enters. Returns the epoch."""
    play.say(Settled(rank=0, epoch=0), Settled(rank=1, epoch=0))
    epoch = play.sent(Invite)[2].epoch
    play.say(Ready(rank=2, epoch=epoch))
    assert set(play.sent(Plan)) == {0, 1}
    return epoch


def finished(play: Play, rank: int) -> Finished:
    layout = play.job.layout
    assert layout is not None
    digests = [SliceDigest(unit=unit, slice=k, part=0, sha256=f"{unit} {k}") for unit, k in layout.owned(rank)]
    return Finished(rank=rank, step=4, digests=digests)


def test_who_finishes_before_the_word_that_all_have_switched_does_not_end_the_job(play: Play) -> None:
    epoch = announce(play)
    play.say(finished(play, 1))
    play.say(Switched(rank=0, epoch=epoch, step=5))
    assert set(play.sent(Enter)) == {2}
    play.say(finished(play, 0))
    assert play.job.outcome is None, "who has entered has not finished"
    play.say(finished(play, 2))
    assert play.job.outcome == Outcome(True, "training finished at step 4")


@pytest.mark.parametrize("last", [True, False])
def test_cells_have_another_shape_when_all_have_their_states(play: Play, last: bool) -> None:
    """Not before the last one says so; the interrupt for a loss names the layout that is in force."""
    play.news(RankExited(rank=2, returncode=-9, time=1.0))
    play.happens(events.Asked(now=1.0, person=7, request=Scale(cp=2)))
    (reply,) = [effect for effect in play.effects if isinstance(effect, Reply)]
    assert reply.answer.ok and "TP1 x CP2 x EP1 (2 ranks), from TP1 x CP1 x EP1 (1 ranks)" in reply.answer.text
    play.say(Settled(rank=0, epoch=0), Settled(rank=1, epoch=0))
    plans = play.sent(Plan)
    assert set(plans) == {0, 1} and not play.sent(Moves)
    epoch = plans[0].epoch
    play.say(Recut(rank=0, epoch=epoch, step=3), Recut(rank=0, epoch=epoch, step=3), Recut(rank=1, epoch=0, step=3))
    assert not play.sent(Enter) and play.job.layout == play.first
    if last:
        play.say(Recut(rank=1, epoch=epoch, step=3))
        assert {rank: each.step for rank, each in play.sent(Enter).items()} == {0: 3, 1: 3}
        assert play.job.layout == decode(plans[0].layout) and play.job.arrangement.shape is None
    play.news(RankDying(rank=1, time=1.0))
    assert play.sent(Interrupt)[0].layout == (epoch if last else 0)
    assert (play.job.arrangement.shape is None) == last, "asked for as long as it is not there"


def test_what_killed_a_rank_is_known_when_its_agent_is_gone(play: Play) -> None:
    """Nobody is there any more to tell how its process ended."""
    play.news(RankDying(rank=0, time=1.0))
    assert "dying 0" in play.job.timers
    play.happens(events.NodeLost(now=1.5, node=1, cause="node 0 lost", since=1.4))
    faults = [effect.fields for effect in play.effects if isinstance(effect, WriteEvent) and effect.kind == "fault"]
    assert [(fault["rank"], fault["signal"], fault["exited_at"]) for fault in faults] == [
        (1, "node 0 lost", 1.4), (0, "node 0 lost", 1.0),
    ]
    assert "dying 0" not in play.job.timers


@pytest.mark.parametrize("standby", [False, True])
def test_a_job_ends_when_what_killed_a_rank_is_known(play: Play, standby: bool) -> None:
    """Others may finish before the process of a rank that dies in the last step is gone."""
    if standby:
        announce(play)
    victim, code = (2, 7) if standby else (1, -9)
    play.news(RankDying(rank=victim, time=1.0))
    others = [rank for rank in play.job.layout.ranks if rank != victim] if play.job.layout else []
    assert set(play.sent(Interrupt)) == set(others)
    for rank in others:
        play.say(Report(rank=rank, epoch=play.job.epoch, member=True, step=5, vote=None, last=None, held=None,
                        interrupted_at=1.0))
    play.say(*(finished(play, rank) for rank in others))
    assert play.job.outcome is None
    play.news(RankExited(rank=victim, returncode=code, time=1.1))
    assert play.job.outcome == Outcome(True, "training finished at step 4")
    events = [effect for effect in play.effects if isinstance(effect, WriteEvent)]
    assert [each.kind for each in events][:2] == ["fault", "recovered"]
    assert events[0].fields["signal"] == events[1].fields["cause"] == ("exit code 7" if standby else "kill -9")


def test_a_fault_before_what_killed_a_rank_is_known_is_told_with_it(play: Play) -> None:
    play.news(RankDying(rank=0, time=1.0))
    play.say(Report(rank=1, epoch=1, member=True, step=1, vote=None, last=None, held=None, interrupted_at=1.0))
    vote = VoteResult(step=1, loss=1.0, grad_norm=1.0, lr=0.1, consumed_samples=4, tokens=4)
    play.say(Committed(rank=1, epoch=1, vote=vote, time=1.2, first=True))
    damage = Damage(rank=1, unit=0, slice=0, part=0, what="weights")
    play.say(Damaged(rank=1, epoch=1, step=2, found=[damage], verified=0))
    play.say(Report(rank=1, epoch=2, member=True, step=2, vote=None, last=vote, held=None, interrupted_at=1.3))
    play.news(RankExited(rank=0, returncode=-9, time=1.4))
    play.say(Committed(rank=1, epoch=2, vote=replace(vote, step=2), time=1.5))
    (event,) = [each.fields for each in play.effects if isinstance(each, WriteEvent) and each.kind == "recovered"]
    assert (event["cause"], event["ranks"], event["epochs"]) == ("kill -9", [0, 1], [1, 2])
    assert event["mttr_ms"] == 500


@pytest.mark.parametrize(("redo", "kept"), [("lost", True), ("step", False)])
def test_a_step_is_resumed_if_that_is_wanted_and_there_is_anything_to_keep(redo: str, kept: bool) -> None:
    for work in (WorkDone(step=1, grains=4, added=[1], live=[3], half=[]), None):
        play = Play(settings=replace(SETTINGS, redo=redo))
        play.news(RankDying(rank=0, time=1.0))
        play.say(Report(rank=1, epoch=1, member=True, step=1, vote=None, last=None, held=None, interrupted_at=1.0,
                        work=work))
        if kept and work is not None:
            (told,) = play.sent(Resume).values()
            assert (told.step, told.kept) == (1, [Kept(leader=1, added=[1], live=[3], half=[])])
        else:
            assert set(play.sent(Back)) == {1}


@pytest.mark.parametrize(
    ("found", "keeping"),
    [(Damage(rank=1, unit=1, slice=0, part=0, what="weights"), [0]),
     (Damage(rank=1, unit=1, slice=0, part=0, what="state"), [0, 1]),
     (Damage(rank=0, unit=1, slice=0, part=0, what="state"), [])],
    ids=["weights", "a copy", "what all have the weights from"],
)  # fmt: skip
def test_of_a_step_what_was_made_with_damaged_weights_is_done_again(
    play: Play, found: Damage, keeping: list[int]
) -> None:
    assert play.first.owner(1, 0, 0) == 0
    play.say(Damaged(rank=1, epoch=0, step=1, found=[found], verified=0))
    for rank, cell in play.first.cells.items():
        play.say(Report(rank=rank, epoch=1, member=True, step=1, vote=None, last=None, held=None, interrupted_at=1.0,
                        work=WorkDone(step=1, grains=4, added=list(cell.share), live=[], half=[])))
    if keeping:
        assert [each.leader for each in play.sent(Resume)[1].kept] == keeping
    else:
        assert set(play.sent(Back)) == {0, 1}


def test_damage_is_known_from_reports_if_nobody_was_told_before(play: Play) -> None:
    """Whom it was told to may have been the coordinator before."""
    damaged = Damaged(rank=1, epoch=0, step=1, found=[Damage(rank=1, unit=1, slice=0, part=0, what="weights")],
                      verified=0)
    play.news(RankDying(rank=0, time=1.0))
    play.say(Report(rank=1, epoch=1, member=True, step=1, vote=None, last=None, held=None, interrupted_at=1.0,
                    work=WorkDone(step=1, grains=4, added=list(play.first.cells[1].share), live=[], half=[]),
                    damaged=damaged))
    assert play.sent(Back)[1].gather, "weights are sent anew"
    assert play.job.trust.healing


def test_a_copy_that_is_damaged_again_counts_as_damaged_again(play: Play) -> None:
    """It was replaced by one that was no better. Who tells of the same damage twice does not matter."""
    part = (1, 0, 0)
    found = Damage(rank=1, unit=1, slice=0, part=0, what="state")
    for epoch in (0, 1):
        damaged = Damaged(rank=0, epoch=epoch, step=1, found=[found], verified=0)
        kinds = []
        for rank in (0, 1):
            play.say(*[damaged] * (1 - rank))
            kinds += [effect.kind for effect in play.effects if isinstance(effect, WriteEvent)]
            assert (1, part) in play.job.trust.damaged
            play.say(Report(rank=rank, epoch=epoch + 1, member=True, step=1, vote=None, last=None, held=None,
                            interrupted_at=1.0, damaged=damaged if rank == 0 else None, layout=epoch))
            kinds += [effect.kind for effect in play.effects if isinstance(effect, WriteEvent)]
        assert kinds.count("damaged") == 1
        play.say(Recovered(rank=1, epoch=epoch + 1, edit_ms=1.0, state_ms=1.0))
        assert not play.job.trust.damaged


def test_a_checkpoint_that_may_have_damage_in_it_is_none_for_good_unless_it_is_made_anew(play: Play) -> None:
    def saved(epoch: int) -> tuple[int, ...]:
        play.say(Note(rank=0, epoch=epoch, kind="saved", fields={"step": 2}))
        return play.job.trust.saves

    assert saved(0) == (2,)
    found = [Damage(rank=1, unit=1, slice=0, part=0, what="state")]
    play.say(Damaged(rank=1, epoch=0, step=4, found=found, verified=1))
    assert play.job.trust.saves == ()
    for rank in (0, 1):
        play.say(Report(rank=rank, epoch=1, member=True, step=1, vote=None, last=None, held=None, interrupted_at=1.0,
                        saved=2))
    vote = VoteResult(step=1, loss=1.0, grad_norm=1.0, lr=0.1, consumed_samples=4, tokens=4)
    play.say(Committed(rank=0, epoch=1, vote=vote, time=1.0))
    assert not play.job.trust.healing
    assert saved(0) == ()
    assert saved(1) == (2,)


def test_nothing_is_planned_while_a_fault_ends_the_recovery_before(play: Play) -> None:
    """Training goes on, and what ended the first rank is not known yet, so that its recovery is not over."""
    play.news(RankDying(rank=0, time=1.0))
    held = [(unit, k, 0) for unit in range(3) for k in range(2)]
    play.say(Report(rank=1, epoch=1, member=True, step=1, vote=None, last=None, held=held, interrupted_at=1.0,
                    stale=False, layout=0, versions={}))
    assert set(play.sent(Back)) == {1}
    vote = VoteResult(step=1, loss=1.0, grad_norm=1.0, lr=0.1, consumed_samples=4, tokens=4)
    play.say(Committed(rank=1, epoch=1, vote=vote, time=1.0, first=True), Settled(rank=1, epoch=1))
    damage = Damage(rank=1, unit=0, slice=0, part=0, what="weights")
    play.say(Damaged(rank=1, epoch=1, step=2, found=[damage], verified=0))
    assert set(play.sent(Interrupt)) == {1}
    assert play.job.change is None
    assert not play.sent(Invite)


def test_a_newcomer_that_raises_is_killed_and_recorded_once(play: Play) -> None:
    """Its program tells before it closes its connection, and its process, if it lives so long, as it ends."""
    kinds = []
    for traceback in ("it raised", "it raised, and more about it"):
        play.say(Failed(rank=2, traceback=traceback))
        kinds += [effect.kind for effect in play.effects if isinstance(effect, WriteEvent)]
        assert play.job.outcome is None
    assert kinds == ["error", "fenced"]


def failed(rank: int, step: int | None, epoch: int = 0) -> Failed:
    return Failed(rank=rank, traceback=f"Traceback:\nError on {rank}\n", epoch=epoch, step=step)


def test_who_finishes_a_step_with_another_result_than_was_decided_has_diverged(play: Play) -> None:
    def vote(loss: float) -> VoteResult:
        return VoteResult(step=1, loss=loss, grad_norm=1.0, lr=0.1, consumed_samples=4, tokens=4)

    play.say(Committed(rank=0, epoch=0, vote=vote(1.0), time=1.0))
    play.news(RankDying(rank=0, time=1.0))
    play.say(Report(rank=1, epoch=1, member=True, step=1, vote=None, last=None, held=None, interrupted_at=1.0))
    assert play.sent(Forward)[1].vote == vote(1.0)
    play.say(Committed(rank=1, epoch=1, vote=vote(2.0), time=1.0))
    assert play.job.outcome is not None and "the ranks have diverged: step 1" in play.job.outcome.reason


def test_why_every_rank_is_dead(play: Play) -> None:
    """One died before, so that nobody can do the step again in which the other raises."""
    play.news(RankDying(rank=0, time=1.0))
    play.say(failed(1, step=1))
    assert play.job.outcome is not None
    first, *_ = play.job.outcome.reason.splitlines()
    assert first.startswith("every rank is dead: the program raised, the last time 'Error on 1'; "
                            "no checkpoint has been written: start the job anew")


def test_a_rank_on_which_the_program_raises_leaves(play: Play) -> None:
    play.say(failed(0, step=1))
    assert set(play.sent(Interrupt)) == {1}
    assert play.job.ranks[0].lost
    play.expires("leaving 0")
    assert Tell(1, Fence(rank=0)) in play.effects, "its process has not ended"
    play.news(RankExited(rank=0, returncode=1, time=2.0))
    assert play.job.outcome is None


def test_a_device_that_fails_is_no_error_of_the_program() -> None:
    """Whatever is to be done about errors."""
    play = Play(settings=replace(SETTINGS, on_error="stop"))
    play.say(replace(failed(0, step=1), device="soft:0"))
    assert set(play.sent(Interrupt)) == {1}
    assert play.job.ranks[0].lost and not play.job.errors and play.job.outcome is None


def short(rank: int, step: int | None, epoch: int = 0) -> Failed:
    return replace(failed(rank, step, epoch), short="soft:0")


def test_memory_that_is_short_costs_its_rank_and_not_its_device() -> None:
    """Whatever is to be done about errors."""
    play = Play(settings=replace(SETTINGS, on_error="stop", respawn=True))
    play.say(short(0, step=1))
    assert set(play.sent(Interrupt)) == {1}
    assert play.job.ranks[0].lost and play.job.outcome is None
    said = [effect.line for effect in play.effects if isinstance(effect, Say)]
    assert said[0] == "WARNING: memory of soft:0 is short on rank 0, which leaves: Error on 0"
    faults = [effect.fields for effect in play.effects if isinstance(effect, WriteEvent) and effect.kind == "fault"]
    assert [fields["signal"] for fields in faults] == ["out of memory"]
    assert not any(node.broken for node in play.job.nodes.values())


def test_a_job_that_fits_no_device_ends_and_says_so() -> None:
    """It does not lose rank after rank: the first layout's, and one of those that do the step anew."""
    play = Play(stages=((0, 1), (2,)))
    play.say(short(0, step=1), failed(2, step=1))
    assert play.job.outcome is None
    play.say(short(3, step=1, epoch=1))
    assert play.job.outcome is not None
    first, *rest = play.job.outcome.reason.split("\n\n")
    assert first.startswith("memory of devices is short again when others do step 1: the job does not fit them")
    assert rest == ["memory of soft:0 was short on rank 0:\nTraceback:\nError on 0",
                    "the program raised on rank 2:\nTraceback:\nError on 2",
                    "memory of soft:0 was short on rank 3:\nTraceback:\nError on 3"]


def test_memory_that_is_short_has_nothing_to_do_with_another_error() -> None:
    play = Play(stages=((0, 1), (2,)))
    play.say(failed(0, step=1))
    play.say(short(3, step=1, epoch=1))
    assert play.job.outcome is None


def test_a_rank_that_has_left_is_not_killed(play: Play) -> None:
    play.say(failed(0, step=1))
    play.news(RankExited(rank=0, returncode=1, time=2.0))
    assert "leaving 0" not in play.job.timers


@pytest.mark.parametrize(
    ("settings", "step"), [(replace(SETTINGS, on_error="stop"), 1), (SETTINGS, None)], ids=["stop", "no step"]
)
def test_what_would_come_again_ends_the_job(settings: Settings, step: int | None) -> None:
    play = Play(settings=settings)
    play.say(failed(0, step))
    assert play.job.outcome == Outcome(False, "the program raised on rank 0:\nTraceback:\nError on 0")


def test_errors_of_one_layout_are_one_fault_and_those_of_the_next_are_the_programs() -> None:
    """A host that fails raises on all its ranks. Who raises in the step that it does anew has the same error."""
    play = Play(stages=((0, 1), (2,)))
    play.say(failed(0, step=1), failed(2, step=1))
    assert play.job.outcome is None
    play.say(failed(3, step=1, epoch=1))
    assert play.job.outcome is not None
    for rank in (0, 2, 3):
        assert f"the program raised on rank {rank}:\nTraceback:\nError on {rank}" in play.job.outcome.reason


def test_errors_in_a_row_are_the_programs_and_those_far_apart_are_not() -> None:
    for apart, ends in ((1, True), (6, False)):
        play = Play(stages=((0,), (1, 2)))
        for epoch, rank in enumerate((0, 2)):
            play.say(failed(rank, step=1 + epoch * apart, epoch=epoch))
        vote = VoteResult(step=1 + apart, loss=1.0, grad_norm=1.0, lr=0.1, consumed_samples=4, tokens=4)
        play.say(Committed(rank=1, epoch=2, vote=vote, time=1.0))
        play.say(failed(1, step=2 + 2 * apart, epoch=2))
        assert (play.job.outcome is not None and "the program raises again" in play.job.outcome.reason) == ends


def test_who_cannot_reach_a_newcomer_is_interrupted_when_that_is_dead(play: Play) -> None:
    """It waits for that, though nobody else needs to know."""
    play.say(Suspect(rank=0, epoch=0, suspects=[2], reason="the link broke"))
    play.expires("suspect 2")
    assert Tell(2, Fence(rank=2)) in play.effects
    play.news(RankExited(rank=2, returncode=-9, time=2.0))
    assert {rank: message.lost for rank, message in play.sent(Interrupt).items()} == {0: [2], 1: [2]}


def test_who_cannot_reach_a_newcomer_that_is_dead_is_interrupted(play: Play) -> None:
    play.news(RankExited(rank=2, returncode=-9, time=2.0))
    assert not play.sent(Interrupt), "nobody needs it"
    play.say(Suspect(rank=0, epoch=0, suspects=[2], reason="the link broke"))
    assert {rank: message.lost for rank, message in play.sent(Interrupt).items()} == {0: [2], 1: [2]}
    play.say(Suspect(rank=1, epoch=0, suspects=[2], reason="the link broke"))
    assert not play.sent(Interrupt), "it is told already"


def test_a_loss_while_ranks_build_begins_anew() -> None:
    """Nobody waits for copies: who has its part makes it again, and what stages keep for each other comes later."""
    play = Play(stages=((0, 1), (2,)))
    play.news(RankExited(rank=1, returncode=-9, time=1.0))
    held = [(unit, k, 0) for unit in (0, 1) for k in (0, 1)]
    for rank, built in ((0, True), (2, False), (3, True)):
        report = Report(rank=rank, epoch=1, member=True, step=1, vote=None, last=None, held=held if rank == 0 else [],
                        interrupted_at=1.0, built=built)
        play.say(report)
    reloads = play.sent(Reload)
    assert {rank: each.step for rank, each in reloads.items()} == {0: 1, 2: 1, 3: 1}
    assert not play.sent(Moves)
    layout = decode(reloads[0].layout)
    assert [set(row) for row in layout.owners] == [{0}, {0}, {2, 3}]
    assert [set(row) for row in layout.replicas] == [{()}, {()}, {(2,), (3,)}]


def test_steps_that_nobody_tells_any_more_are_named_and_those_after_them_are_written(play: Play) -> None:
    def committed(step: int) -> Committed:
        vote = VoteResult(step=step, loss=1.0, grad_norm=1.0, lr=0.1, consumed_samples=4 * step, tokens=4)
        return Committed(rank=0, epoch=0, vote=vote, time=float(step))

    def written() -> list[object]:
        return [each.record["step"] for each in play.effects if isinstance(each, WriteMetrics)]

    play.say(committed(1))
    assert written() == [1]
    play.say(committed(4))
    assert written() == []
    play.expires("steps")
    assert Tell(1, Recall(after=1)) in play.effects
    play.say(committed(2))
    assert written() == [2]
    play.expires("steps")
    assert Tell(1, Recall(after=2)) in play.effects, "the next one that is missing is another one"
    play.expires("steps")
    assert written() == [4]
    assert [each.fields for each in play.effects if isinstance(each, WriteEvent)] == [{"steps": [3]}]
    assert "steps" not in play.job.timers


def test_a_clock_that_is_set_back_costs_one_step_its_time(play: Play) -> None:
    """That one is taken to have lasted as long as the one before."""
    took = []
    for step, at in ((1, 10.0), (2, 11.0), (3, 12.0), (4, 8.0), (5, 9.5), (6, 9.5)):
        vote = VoteResult(step=step, loss=1.0, grad_norm=1.0, lr=0.1, consumed_samples=4 * step, tokens=4)
        play.say(Committed(rank=0, epoch=0, vote=vote, time=at))
        took += [each.record["step_ms"] for each in play.effects if isinstance(each, WriteMetrics)]
    assert took[1:] == [1000.0, 1000.0, 1000.0, 1500.0, 1500.0]


def test_a_node_that_is_to_leave_before_training_begins_leaves_then() -> None:
    """Its launcher has said that it will."""
    play = Play(training=False)
    assert play.job.layout is None
    play.happens(events.Leaves(now=1.0, node=2))
    assert play.job.leaving == {2}
    assert not [each for each in play.effects if isinstance(each, Say)], "there is nothing to warn of"


def test_a_node_with_other_limits_does_not_end_the_job_that_it_comes_to(play: Play) -> None:
    hello = AgentHello(session="9", node_rank=3, slots=1, host="h9", heartbeat_timeout=7.0)
    play.happens(events.NodeCame(now=2.0, node=9, hello=hello))
    assert play.job.outcome is None and 9 not in play.job.nodes
    (told,) = [effect for effect in play.effects if isinstance(effect, Tell)]
    assert told.node == 9 and isinstance(told.message, Stop) and not told.message.again
    assert told.message.reason == ("--elastic-heartbeat-timeout is 2.5 s where the job is coordinated and 7 s on node "
                                   "3; give every node the same flags")


def test_a_newcomer_that_hangs_before_it_says_anything_is_killed_and_another_is_started() -> None:
    play = Play(settings=replace(SETTINGS, respawn=True))
    play.happens(events.NodeCame(now=2.0, node=9, hello=AgentHello(
        session="9", node_rank=3, slots=1, host="h9", heartbeat_timeout=2.5)))
    assert "coming 2" not in play.job.timers, "it has said hello"
    play.expires("coming 3")
    assert Tell(9, Fence(rank=3, stack=True)) in play.effects
    play.news(RankExited(rank=3, returncode=-9, time=2.0))
    assert play.job.outcome is None and "respawn 3" in play.job.timers
    play.expires("respawn 3")
    assert any(isinstance(each, Tell) and each.message == Launch(ranks={0: 4}, world_size=2, first_host=2, torch_port=1)
               for each in play.effects)
    play.happens(events.NodeLost(now=3.0, node=9, cause="node 3 lost", since=3.0))
    assert "coming 4" not in play.job.timers


def test_a_newcomer_with_another_version_is_refused(play: Play) -> None:
    """Its bits would be others, and nobody would see it."""
    play.news(RankExited(rank=2, returncode=-9, time=1.0))
    play.happens(events.NodeCame(now=2.0, node=9, hello=AgentHello(
        session="9", node_rank=3, slots=1, host="h9", heartbeat_timeout=2.5)))
    play.say(replace(play.hello(3), versions={"torch": "2.12.0"}, likeness=b"other"))
    assert Tell(9, Fence(rank=3)) in play.effects
    (fenced,) = [each.fields for each in play.effects if isinstance(each, WriteEvent) and each.kind == "fenced"]
    assert fenced["reason"] == "it is not like the running job: it has torch 2.12.0 instead of None"


def test_a_newcomer_on_another_processor_is_told_of(play: Play) -> None:
    play.happens(events.NodeCame(now=2.0, node=9, hello=AgentHello(
        session="9", node_rank=3, slots=1, host="h9", heartbeat_timeout=2.5)))
    play.say(replace(play.hello(3), processor="another one"))
    (unlike,) = [each.fields for each in play.effects if isinstance(each, WriteEvent) and each.kind == "unlike"]
    assert unlike == {"ranks": [3], "computes_on": "another one", "instead_of": ""}
    assert play.job.ranks[3].fenced is None


def test_what_is_known_of_the_dead_does_not_grow() -> None:
    """A job of weeks loses ranks again and again; each of them was known with all that it had said."""
    play = Play(settings=replace(SETTINGS, respawn=True))
    play.say(Settled(rank=2, epoch=0))
    for rank in range(2, 52):
        play.news(RankExited(rank=rank, returncode=-9, time=1.0))
        if f"respawn {rank}" in play.job.timers:
            play.expires(f"respawn {rank}")
        play.say(play.hello(rank + 1), Settled(rank=rank + 1, epoch=0))
    job = play.job
    assert len(job.lost) == 50
    assert [rank for rank, each in job.ranks.items() if each.hello is not None] == [0, 1, 52]
    assert set(job.settled) == {52} and not job.copies and not job.suspicions and not job.injected
    assert {name for name in job.timers if name[-1].isdigit()} == set()
    assert len(job.nodes) == 2


@pytest.mark.parametrize("seen", [True, False], ids=["seen dying", "not"])
def test_an_exit_code_that_nobody_explains_is_its_ranks_fault(seen: bool) -> None:
    play = Play(stages=((0, 1), (2,)))
    if seen:
        play.news(RankDying(rank=0, time=1.0))
    play.news(RankExited(rank=0, returncode=7, time=1.0))
    assert play.job.outcome is None and play.job.ranks[0].lost
    faults = [effect.fields for effect in play.effects if isinstance(effect, WriteEvent) and effect.kind == "fault"]
    assert [each["signal"] for each in faults] == ["exit code 7"]
    assert not {"leaving 0", "dying 0"} & set(play.job.timers)
    assert play.job.layout is not None
    play.job = replace(play.job, layout=dataclasses.replace(play.job.layout, epoch=1))
    play.news(RankExited(rank=3, returncode=7, time=1.0))
    assert play.job.outcome is not None and play.job.outcome.code == 7
    assert play.job.outcome.reason.startswith("ranks end with an exit code again when others do step 1")


def test_an_exit_code_ends_the_job_where_errors_do() -> None:
    play = Play(settings=replace(SETTINGS, on_error="stop"))
    play.news(RankExited(rank=0, returncode=7, time=1.0))
    assert play.job.outcome == Outcome(False, "rank 0 ended with exit code 7; see rank0.log", 7)


def test_a_node_that_is_lost_before_training_begins_can_be_replaced() -> None:
    """Only its ranks are started once more, and all must come up before training begins."""
    play = Play()
    play.job = Job.new(SETTINGS, 4)

    def come(node: int, node_rank: int) -> None:
        play.happens(events.NodeCame(now=0.0, node=node, hello=AgentHello(
            session=str(node), node_rank=node_rank, slots=2, host=f"h{node}", heartbeat_timeout=2.5)))

    def launched() -> dict[int, list[int]]:
        return {each.node: list(each.message.ranks.values()) for each in play.effects
                if isinstance(each, Tell) and isinstance(each.message, Launch)}

    come(1, 0)
    come(2, 1)
    assert launched() == {1: [0, 1], 2: [2, 3]}
    play.say(play.hello(0), play.hello(3))
    play.happens(events.NodeLost(now=1.0, node=2, cause="node 1 lost", since=1.0))
    assert play.job.outcome is None
    come(3, 1)
    assert launched() == {3: [2, 3]}
    play.say(play.hello(1), play.hello(2))
    assert play.job.layout is None
    play.say(play.hello(3))
    assert play.job.layout is not None and play.job.outcome is None


def test_a_profile_that_does_not_fit_ends_the_job_before_training() -> None:
    play = Play()
    play.job = Job.new(replace(SETTINGS, profile_file="p.json"), 2)
    play.happens(events.NodeCame(now=0.0, node=1, hello=AgentHello(
        session="1", node_rank=0, slots=2, host="h", heartbeat_timeout=2.5)))
    play.say(play.hello(0), play.hello(1))
    assert [each.path for each in play.effects if isinstance(each, ReadCosts)] == ["p.json"]
    play.happens(events.Costed(now=1.0, costs=None, problem="p.json: the profile has no entry for unit 'head'"))
    assert play.job.outcome == Outcome(False, "--elastic-profile p.json: the profile has no entry for unit 'head'", 2)


@pytest.mark.parametrize(("start", "said"), [
    (0, "training from step 1 to 4"), (3, "training from step 4 to 4"),
    (4, "nothing is left to train, as the checkpoint that the job begins with is of step 4 and training ends at step "
        "4: raise --train-iters to train on"),
])  # fmt: skip
def test_what_is_left_to_train_is_said(start: int, said: str) -> None:
    class Begun(Play):
        def hello(self, rank: int) -> Hello:
            return replace(super().hello(rank), start_step=start)

        def happens(self, event: events.Event) -> None:
            super().happens(event)
            self.said = [*getattr(self, "said", []), *(e.line for e in self.effects if isinstance(e, Say))]

    assert f"2 ranks are up; {said}" in Begun(width=2).said
