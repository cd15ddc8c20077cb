"""Ranks that are started again: before training begins, and in place of dead ones, not too often."""

from __future__ import annotations

import os
import time
from pathlib import Path

from msgspec.structs import replace

from megatron_elastic.cluster.messages import AgentHello, Failed, Launch, RankDying, RankExited
from megatron_elastic.cluster.protocol.effects import SetTimer, Tell, WriteEvent
from megatron_elastic.cluster.protocol.events import NodeCame
from tests.jobs import ROOT, Grid, Jobs, assert_same_training
from tests.play import SETTINGS, Play

EARLY = ROOT / "tests" / "megatron_programs" / "dies_early.py"
WAITING = ROOT / "tests" / "megatron_programs" / "waits_for_data.py"
GRID = Grid(tp=1, pp=2, steps=4)


def test_who_dies_before_training_begins_is_started_again(jobs: Jobs) -> None:
    job = jobs.start(*GRID.flags, script=EARLY, env={"EARLY_DEATHS": "2"})
    job.finish()
    assert_same_training(job, jobs.undisturbed(*GRID.flags))
    assert [(event["rank"], event["cause"]) for event in job.events("restarted")] == [(3, "kill -9")] * 2
    assert "rank 3 died before training began (kill -9), and is started again" in job.output


def test_who_dies_again_and_again_before_training_begins_ends_the_job(jobs: Jobs) -> None:
    job = jobs.start(*GRID.flags, script=EARLY, env={"EARLY_DEATHS": "9"})
    assert "rank 3 died before training began (kill -9), 3 times; see its log" in job.finish(code=1)

def test_who_makes_the_indices_of_data_answers_meanwhile(jobs: Jobs, tmp_path: Path) -> None:
    """Making them takes longer than an answer may: nobody is lost but who was killed."""
    pipe, grid = tmp_path / "pipe", Grid(tp=1, pp=2, steps=4, ranks=4)
    os.mkfifo(pipe)
    limits = ("--elastic-suspect-timeout", "1", "--elastic-heartbeat-timeout", "2.5", "--elastic-report-timeout", "5")
    job = jobs.start(*grid.flags, *limits, ranks=4, script=WAITING, env={"DATA_PIPE": str(pipe)})
    with pipe.open("w"):  # as soon as somebody reads from it
        makes = int(pipe.with_suffix(".rank").read_text())
        job.kill((makes + 1) % 4)
        deadline = time.monotonic() + 60
        while not (job.run_dir / "layouts" / "1.json").exists():  # who makes them has told where it is
            assert time.monotonic() < deadline
            time.sleep(0.02)
    job.finish()
    assert_same_training(job, jobs.undisturbed(*grid.flags, ranks=4), [(makes + 1) % 4])


def test_a_node_whose_newcomers_die_is_left_out_longer_and_longer() -> None:
    play = Play(settings=replace(SETTINGS, respawn=True))
    dead, delays = 1, []
    for _ in range(12):
        play.news(RankDying(rank=dead, time=1.0))
        play.news(RankExited(rank=dead, returncode=-9, time=1.0))
        timers = [each.delay for each in play.effects if isinstance(each, SetTimer) and each.name == f"respawn {dead}"]
        delays += timers
        if timers:
            assert not launched(play)
            play.expires(f"respawn {dead}")
        (dead,) = launched(play)
    assert delays == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 300.0, 300.0]
    play.news(RankExited(rank=0, returncode=-9, time=1.0))
    assert len(launched(play)) == 1, "who has trained says nothing about the node"


def test_nothing_is_started_on_a_device_that_failed() -> None:
    """Nor if its node comes to another coordinator; on the node's other devices it is."""
    play = Play(settings=replace(SETTINGS, respawn=True))
    fault = Failed(rank=1, traceback="AcceleratorError: lost", epoch=0, step=1, device="soft:0")
    play.say(fault)
    out = [each.fields for each in play.effects if isinstance(each, WriteEvent) and each.kind == "device_out"]
    assert out == [{"rank": 1, "node": 0, "local_rank": 1, "device": "soft:0", "reason": "AcceleratorError: lost"}]
    play.news(RankExited(rank=1, returncode=1, time=1.0))
    assert not launched(play)
    hello = AgentHello(session="9", node_rank=0, slots=2, host="h", heartbeat_timeout=2.5, broken=[1])
    play.happens(NodeCame(now=2.0, node=9, hello=hello))
    assert [each.message.ranks.keys() for each in play.effects
            if isinstance(each, Tell) and isinstance(each.message, Launch)] == [{0}]


def launched(play: Play) -> list[int]:
    """Ranks that the last event has started."""
    return [rank for each in play.effects if isinstance(each, Tell) and isinstance(each.message, Launch)
            for rank in each.message.ranks.values()]
