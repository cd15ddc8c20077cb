"""Ranks that hang: who holds all others up is found and taken out, and nobody else."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from megatron_elastic import cli
from megatron_elastic.cluster.messages import (
    Committed,
    Fence,
    Inspect,
    Interrupt,
    RankExited,
    RankReading,
    Report,
    VoteResult,
)
from megatron_elastic.cluster.node.gauge import Gauge, worked
from megatron_elastic.cluster.protocol.effects import Say, Tell, WriteEvent
from megatron_elastic.cluster.protocol.events import Inspected
from megatron_elastic.faults.odometer import COORDINATOR, DISK, Odometer
from megatron_elastic.layout import Holdings
from tests.jobs import Grid, Job, Jobs, assert_exactly_once, assert_same_training, inject
from tests.play import Play

fork = multiprocessing.get_context("fork")
LIMIT = 2.0
"""``--elastic-hang-timeout``, and so about the time that it takes to find one."""
SOON = ["--elastic-hang-timeout", str(LIMIT)]


def hang(*specs: str) -> list[str]:
    """Flags that let ranks hang: ``rank@step:point``, with further fields behind a comma."""
    flags = []
    for spec in specs:
        rank, _, rest = spec.partition("@")
        step, _, point = rest.partition(":")
        flags += ["--elastic-inject", f"hang:rank={rank},step={step},at={point}"]
    return flags


def assert_found(job: Job, ranks: list[int]) -> None:
    """These ranks, one after the other, and none before its time."""
    hangs = job.events("hang")
    assert [event["rank"] for event in hangs] == ranks
    for event in hangs:
        assert event["stood_ms"] / 1e3 > 0.8 * LIMIT, event
        assert (job.run_dir / "stacks" / f"rank{event['rank']}.txt").read_text().count("_fire") == 1, event


# ---- jobs --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grid", "faults", "ranks", "lost"),
    [
        (Grid(tp=1, pp=2, steps=22), hang("3@7:backward", "6@11:vote", "0@15:apply", "4@18:data"), [3, 6, 0, 4],
         [0, 3, 4, 6]),
        pytest.param(
            Grid(tp=2, pp=1, steps=18), [*hang("3@8:grad_sync", "5@13:edit"), *inject("0@13:forward")], [3, 5],
            [0, 3, 5],
        ),
    ],
    ids=["PP2", "TP2"],
)
def test_who_hangs_is_taken_out_and_replaced(
    jobs: Jobs, grid: Grid, faults: list[str], ranks: list[int], lost: list[int]
) -> None:
    job = jobs.run(*grid.flags, *faults, *SOON, "--elastic-respawn")
    assert_found(job, ranks)
    assert_same_training(job, jobs.undisturbed(*grid.flags), lost)
    assert "hangs" in {event["cause"] for event in job.events("recovered")}
    assert "WARNING" not in job.output


def test_a_stage_that_stands_still_as_a_whole_stays(jobs: Jobs) -> None:
    """As when the disk with the data does not answer for a while. Who stands still for a short time stays, too."""
    grid = Grid(tp=1, pp=2, steps=10, ranks=4)
    job = jobs.run(*grid.flags, *hang("0@7:data,for=5", "1@7:data,for=4", "2@9:forward,for=1"), *SOON, ranks=4)
    assert "WARNING: 2 of 4 ranks stand still: 2 at data in step 7" in job.output
    assert not job.events("hang") and not job.events("recovered")
    assert_same_training(job, jobs.undisturbed(*grid.flags, ranks=4))


def test_a_message_that_is_lost_is_sent_again(jobs: Jobs) -> None:
    """Once; if that does not help, one of those that wait for each other is taken out."""
    grid = Grid(tp=1, pp=2, steps=12)
    lose = "disconnect:rank=5,at=forward,peers=0+1+2+3+4+6+7,step={}"
    faults = ["--elastic-inject", lose.format("7,for=1"), "--elastic-inject", lose.format(10)]
    job = jobs.run(*grid.flags, *faults, *SOON, "--elastic-respawn")
    assert [event["step"] for event in job.events("tangle")] == [7, 10, 10]
    assert job.events("recovered")[0]["cause"] == "message lost"
    assert [event["signal"] for event in job.events("fault")] == ["unreachable"]
    assert cli.main(["compare", str(job.run_dir), str(jobs.undisturbed(*grid.flags).run_dir)]) == 0
    assert_exactly_once(job)


def test_a_message_that_is_lost_before_a_checkpoint_is_sent_again(jobs: Jobs, tmp_path: Path) -> None:
    """Some wait for weights, and some for those to write the checkpoint with, which may take long."""
    grid = Grid(tp=1, pp=4, steps=8)
    lose = "disconnect:rank=6,at=param_sync,peers=0+1+2+3+4+5+7,step=6,for=0.5"
    job = jobs.run(*grid.flags, "--save", str(tmp_path), "--save-interval", "6", "--elastic-inject", lose, *SOON)
    assert [event["step"] for event in job.events("tangle")]
    assert [event["step"] for event in job.events("saved")] == [6, 8]
    assert cli.main(["compare", str(job.run_dir), str(jobs.undisturbed(*grid.flags).run_dir)]) == 0


def test_the_only_cell_of_a_stage_hangs(jobs: Jobs) -> None:
    """The other stage has copies of its state, and does its part."""
    grid = Grid(tp=1, pp=2, steps=12, ranks=2)
    job = jobs.run(*grid.flags, *hang("1@7:backward"), *SOON, ranks=2)
    assert_found(job, [1])
    assert len(job.layouts()[-1].stages) == 1
    assert cli.main(["compare", str(job.run_dir), str(jobs.undisturbed(*grid.flags, ranks=2).run_dir)]) == 0


def test_a_message_that_is_lost_within_a_cell_keeps_nobody_from_being_interrupted(jobs: Jobs) -> None:
    """A backward pass is finished although an interrupt has come, but not for ever."""
    grid = Grid(tp=2, pp=1, steps=10)
    job = jobs.run(*grid.flags, "--elastic-inject", "disconnect:rank=5,at=backward,peers=4,step=7,for=0.3", *SOON)
    assert [event["step"] for event in job.events("tangle")] == [7]
    assert not job.events("fenced")
    assert len(job.events("recovered")) == 1
    assert cli.main(["compare", str(job.run_dir), str(jobs.undisturbed(*grid.flags).run_dir)]) == 0


# ---- what is decided ---------------------------------------------------------------------------


class Watched(Play):
    """Two cells of one rank for each of two stages, in step 2."""

    def __init__(self) -> None:
        super().__init__(stages=((0, 1), (2,)))
        self.commit(1)

    def commit(self, step: int) -> None:
        vote = VoteResult(step=step, loss=1.0, grad_norm=1.0, lr=0.1, consumed_samples=4, tokens=4)
        self.say(Committed(rank=0, epoch=0, vote=vote, time=float(step)))

    def look(self, *readings: RankReading, usual: float | None = 0.2, now: float = 10.0) -> None:
        """The time for a look comes, and the node tells that."""
        self.expires("hang")
        (asked,) = [each.node for each in self.effects if isinstance(each, Tell) and each.message == Inspect()]
        self.happens(Inspected(now=now, node=asked, readings=readings, usual=usual))

    @property
    def fenced(self) -> list[int]:
        """Who is killed by the last event."""
        tells = [each.message for each in self.effects if isinstance(each, Tell)]
        return [each.rank for each in tells if isinstance(each, Fence) and each.stack]

    @property
    def broken(self) -> list[int]:
        """Where no rank is started any more, on the first node; its agent has been told."""
        (out,) = [list(node.broken) for node in self.job.nodes.values() if 0 in node.ranks]
        fences = [each.message for each in self.effects if isinstance(each, Tell) and isinstance(each.message, Fence)]
        assert [self.job.ranks[fence.rank].local_rank for fence in fences if fence.device] == out
        return out

    def report(self, epoch: int, *ranks: int) -> None:
        """These say that they are in step 2, and have what the layout asks for."""
        layout = self.job.layout
        assert layout is not None
        for rank in ranks:
            held = [(unit, k, part) for unit, k, part in Holdings.of(layout).of_rank(rank)]
            self.say(Report(rank=rank, epoch=epoch, member=True, step=2, vote=None, last=None, held=held,
                            interrupted_at=10.0, stale=False, layout=layout.epoch, versions={}))

    def recorded(self, kind: str) -> list[Any]:
        return [each.fields for each in self.effects if isinstance(each, WriteEvent) and each.kind == kind]


def reading(rank: int, stood: float, waits: int | None = None, patient: bool = False) -> RankReading:
    return RankReading(rank=rank, stood=stood, at="forward", step=2, grain=3, waits=waits, patient=patient)


def test_who_neither_waits_nor_comes_further_is_killed() -> None:
    play = Watched()
    play.look(reading(0, 3.0), reading(1, 3.0, waits=0), reading(2, 3.0, waits=1), reading(3, 3.0, waits=1))
    assert not play.fenced, "not yet"
    play.look(reading(0, 4.6), reading(1, 9.0, waits=0), reading(2, 9.0, waits=DISK), reading(3, 9.0, COORDINATOR))
    assert play.fenced == [0]
    where = {"rank": 0, "step": 2, "point": "forward", "grain": 3}
    assert play.recorded("hang") == [{**where, "stood_ms": 4600.0, "waiting": 3}]
    play.look(reading(0, 5.6), reading(1, 9.0, waits=0), reading(2, 9.0, waits=1), reading(3, 9.0, waits=1))
    assert not play.fenced, "once"


@pytest.mark.parametrize(
    ("stood", "patient", "usual"), [(20.0, False, 10.0), (20.0, True, 0.2), (20.0, False, None)]
)
def test_how_long_is_too_long_depends_on_what_is_usual(stood: float, patient: bool, usual: float | None) -> None:
    play = Watched()
    rest = [reading(rank, stood, waits=0) for rank in (1, 2, 3)]
    play.look(reading(0, stood, patient=patient), *rest, usual=usual)
    assert not play.fenced
    play.look(reading(0, 310.0, patient=patient), *rest, usual=usual)
    assert play.fenced == [0]


def test_a_whole_stage_stays_and_people_are_told_once() -> None:
    play = Watched()
    for told in (1, 0):
        play.look(reading(0, 9.0), reading(1, 9.0), reading(2, 9.0, waits=1), reading(3, 9.0, waits=1))
        assert not play.fenced
        assert len(play.recorded("standstill")) == told
    play.commit(2)
    play.look(reading(0, 9.0), reading(1, 9.0), reading(2, 9.0, waits=1), reading(3, 9.0, waits=1))
    assert len(play.recorded("standstill")) == 1


def test_who_stands_still_a_little_longer_than_its_stage_has_time_again_whatever_the_clock_shows() -> None:
    play = Watched()
    play.look(reading(0, 9.0), reading(1, 9.0), reading(2, 9.0, waits=1), reading(3, 9.0, waits=1))
    some_go_on = (reading(0, 9.0), reading(1, 0.1), reading(2, 9.0, waits=0), reading(3, 9.0, waits=0))
    play.look(*some_go_on, now=1e6)
    assert not play.fenced
    play.expires("stalled")
    play.look(*some_go_on)
    assert play.fenced == [0]


@pytest.mark.parametrize(
    ("saves", "at", "stood", "out"),
    [((), "forward", 310.0, False), ((1,), "forward", 5.0, True),
     ((1,), "data", 9.0, False), ((1,), "data", 310.0, True)],
)
def test_a_cell_that_is_alone_is_taken_out_if_others_can_do_its_part(
    saves: tuple[int, ...], at: str, stood: float, out: bool
) -> None:
    """At once when it computes; when it reads data, after what a disk may take; never if its state would be gone."""
    play = Watched()
    play.news(RankExited(rank=0, returncode=-9, time=1.0))
    play.job = replace(play.job, trust=replace(play.job.trust, saves=saves))
    play.look(replace(reading(1, stood), at=at), reading(2, stood, waits=1), reading(3, stood, waits=1))
    assert play.fenced == [1] * out
    assert bool(play.recorded("standstill")) == (not saves)


def test_what_hangs_again_when_others_do_the_step_is_the_program() -> None:
    play = Watched()
    play.look(reading(0, 5.0), reading(1, 5.0, waits=0), reading(2, 5.0, waits=1), reading(3, 5.0))
    assert play.fenced == [0, 3] and play.job.outcome is None, "at once: one fault"
    play = Watched()
    play.look(reading(0, 5.0), reading(1, 5.0, waits=0), reading(2, 5.0, waits=1), reading(3, 5.0, waits=0))
    play.expires("killed 0")
    play.look(reading(1, 5.0, waits=3), reading(2, 5.0, waits=1), reading(3, 5.0))
    assert play.fenced == [3]
    assert play.job.outcome is not None and play.job.outcome.reason.startswith("the program hangs again when others")


def test_all_that_wait_for_each_other_are_interrupted_and_then_one_is_killed() -> None:
    play = Watched()
    circle = [reading(rank, 5.0, waits=(rank + 1) % 4) for rank in range(3)] + [reading(3, 5.0, waits=1)]
    play.look(*circle[:3], reading(3, 5.0, waits=COORDINATOR))
    assert not play.sent(Interrupt), "the coordinator has to do something first"
    play.look(*circle[:3], reading(3, 5.0, waits=1, patient=True))
    assert set(play.sent(Interrupt)) == {0, 1, 2, 3} and play.sent(Interrupt)[0].lost == []
    play.look(*circle)
    assert not play.sent(Interrupt), "they are on their way"


def test_who_was_in_every_circle_is_killed_and_not_whom_others_wait_for() -> None:
    """Whatever the exchange was that a message is missing of: rank 2 can be reached by nobody."""
    play = Watched()
    play.look(reading(0, 5.0, 1), reading(1, 5.0, 2), reading(2, 5.0, 1), reading(3, 5.0, 1))
    play.report(1, 0, 1, 2, 3)
    play.look(reading(0, 5.0, 2), reading(1, 5.0, 0), reading(2, 5.0, 0), reading(3, 5.0, 0))
    assert [each["rank"] for each in play.recorded("tangle")] == [2]
    assert [rank for rank, each in play.job.ranks.items() if each.fenced] == [2]


def test_who_waits_for_its_own_device_hangs() -> None:
    """What it waits for is its own, and out of use then. If others wait for theirs, too, these may wait for each other:
    interrupt all.
    """
    play = Watched()
    play.look(reading(0, 3.0, waits=0), reading(1, 3.0, waits=0), reading(2, 3.0, waits=1), reading(3, 3.0, waits=1))
    assert not play.fenced and not play.sent(Interrupt)
    play.look(reading(0, 5.0, waits=0), reading(1, 5.0, waits=0), reading(2, 5.0, waits=1), reading(3, 5.0, waits=1))
    assert play.fenced == [0] and [play.job.ranks[0].local_rank] == play.broken
    (out,) = play.recorded("device_out")
    assert out["rank"] == 0 and out["reason"].startswith("it hangs at forward of grain 3 in step 2")
    play = Watched()
    play.look(reading(0, 5.0, waits=0), reading(1, 5.0, waits=1), reading(2, 5.0, waits=1), reading(3, 5.0, waits=1))
    assert not play.fenced and set(play.sent(Interrupt)) == {0, 1, 2, 3}
    assert any("a collective of devices does not end" in each.line for each in play.effects if isinstance(each, Say))
    assert play.job.recovery is not None and play.job.recovery.causes == ((1, "device collective"),)


def test_a_device_is_not_out_of_use_for_what_may_be_another_ranks_fault() -> None:
    """What it does may need what another rank, which hangs as well, has not begun."""
    play = Watched()
    play.look(reading(0, 5.0, waits=0), reading(1, 9.0, waits=0), reading(2, 9.0, waits=1), reading(3, 5.0))
    assert play.fenced == [0, 3] and not play.broken
    play = Watched()
    play.look(reading(0, 5.0), reading(1, 9.0, waits=0), reading(2, 9.0, waits=1), reading(3, 9.0, waits=1))
    assert play.fenced == [0] and not play.broken, "no device"


def test_who_was_waited_for_most_is_not_told_if_another_one_hung() -> None:
    """All are interrupted; then it shows whose device it was, which ends the same recovery."""
    play = Watched()
    play.look(reading(0, 5.0, waits=0), reading(1, 5.0, waits=1), reading(2, 5.0, waits=1), reading(3, 5.0, waits=1))
    play.report(1, 0, 1, 2, 3)
    play.look(reading(0, 9.0, waits=0), *(reading(rank, 9.0, waits=0) for rank in (1, 2, 3)))
    assert play.fenced == [0]
    play.news(RankExited(rank=0, returncode=-9, time=10.0))
    play.report(2, 1, 2, 3)
    vote = VoteResult(step=2, loss=1.0, grad_norm=1.0, lr=0.1, consumed_samples=8, tokens=4)
    play.say(Committed(rank=1, epoch=2, vote=vote, time=11.0))
    (told,) = play.recorded("recovered")
    assert (told["cause"], told["ranks"], told["epochs"]) == ("hangs", [0], [1, 2])


# ---- what is seen ------------------------------------------------------------------------------


def test_an_agent_sees_what_a_rank_does_without_asking() -> None:
    gauge = Gauge(2, every=0.05)
    _run(gauge, _hangs_at_once)
    (seen,) = _run(gauge, _comes_to_a_grain)
    assert (seen.at, seen.step, seen.grain, seen.waits, seen.patient) == ("backward", 12, 5, None, True)
    (seen,) = _run(gauge, _waits_for_a_disk)
    assert (seen.at, seen.step, seen.grain, seen.waits, seen.patient) == ("vote", 12, None, DISK, False)


def test_who_moves_does_not_stand() -> None:
    gauge = Gauge(1, every=0.05)
    (seen,) = _run(gauge, _goes_on, seconds=0.6)
    assert seen.stood < 0.3
    (seen,) = _run(gauge, _hangs_at_once, seconds=0.6)
    assert seen.stood > 0.4


def test_time_in_which_the_agent_did_not_look_does_not_count() -> None:
    gauge = Gauge(1, every=0.05)
    (seen,) = _run(gauge, _hangs_at_once, seconds=0.6, looks=False)
    assert seen.stood < 0.2


def test_who_waits_for_a_thread_that_works_does_not_stand() -> None:
    """Though that keeps the interpreter to itself, so that nothing else of the process runs."""
    gauge, told = Gauge(1, every=0.05), fork.Queue()
    gauge.odometers.begin(0)

    def rank() -> None:
        odometer, go = Odometer.of(gauge.odometers.environment(0)), threading.Event()
        thread = threading.Thread(target=lambda: go.wait() and re.match("(a+)+$", "a" * 99 + "b"), daemon=True)
        thread.start()
        with odometer.through(thread.native_id or 0):
            told.put(thread.native_id)
            told.close()
            told.join_thread()
            go.set()
            signal.pause()

    process = fork.Process(target=rank)
    process.start()
    pid, thread, deadline = process.pid, told.get(timeout=60), time.monotonic() + 60
    assert pid is not None
    try:
        before = worked(pid, thread)
        gauge.look({7: pid}, {7: 0})
        while worked(pid, thread) < before + 3:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        again = time.monotonic()
        gauge.look({7: pid}, {7: 0})
        (seen,) = gauge.readings({7: pid}, {7: 0})
        assert seen.stood < time.monotonic() - again, "since the second look at most"
    finally:
        process.kill()
        process.join()


def test_what_is_usual_is_known_after_some_steps() -> None:
    gauge = Gauge(1, every=0.05)
    for step, when in enumerate((0.0, 2.0, 4.0, 4.0, 30.0, 32.0), start=1):
        assert (gauge.usual is not None) == (step > 4)
        vote = VoteResult(step=step, loss=1.0, grad_norm=1.0, lr=0.1, consumed_samples=4, tokens=4)
        gauge.committed(Committed(rank=0, epoch=0, vote=vote, time=when))
    assert gauge.usual == 2.0


def test_a_rank_without_an_agent_has_an_odometer_too() -> None:
    for env in ({}, {"MEGATRON_ELASTIC_ODOMETER": "/proc/1/fd/none:0"}):
        Odometer.of(env).moved()


def _run(
    gauge: Gauge, program: Callable[[Odometer], None], seconds: float = 0.1, looks: bool = True
) -> list[RankReading]:
    """Let a process be a rank, and look at it for a while."""
    gauge.odometers.begin(0)
    env, begun = gauge.odometers.environment(0), fork.Event()

    def rank() -> None:
        odometer = Odometer.of(env)
        program(odometer)
        begun.set()
        while program is _goes_on:
            odometer.moved()
            time.sleep(0.02)
        signal.pause()

    process = fork.Process(target=rank)
    process.start()
    assert begun.wait(10) and process.pid is not None
    pids, until = {7: process.pid}, time.monotonic() + seconds
    gauge.look(pids, {7: 0})
    while time.monotonic() < until:
        time.sleep(0.05)
        if looks:
            gauge.look(pids, {7: 0})
    readings = gauge.readings(pids, {7: 0})
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    gauge.look({}, {})
    return readings


def _hangs_at_once(odometer: Odometer) -> None:
    odometer.at("forward", 1, None)


def _goes_on(odometer: Odometer) -> None:
    odometer.at("forward", 1, None)


def _comes_to_a_grain(odometer: Odometer) -> None:
    odometer.at("backward", 12, 5)


def _waits_for_a_disk(odometer: Odometer) -> None:
    odometer.at("vote", 12, None)
    odometer.settle()
    odometer.wait(DISK)
