"""Nodes that leave politely: nothing is lost, nothing is computed again, and bits do not differ."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from megatron_elastic import cli
from megatron_elastic.cluster import wire
from megatron_elastic.cluster.messages import AgentHello, Answer, Drain, Leave, Stop
from megatron_elastic.cluster.protocol import events
from megatron_elastic.cluster.protocol.changes.drain import can_resign
from megatron_elastic.cluster.protocol.effects import Reply, Tell, WriteEvent
from megatron_elastic.layout import Holdings, Layout, transfers
from megatron_elastic.observe.records import read_events
from megatron_elastic.plan import NoLayout, improve, release
from tests.jobs import Grid, Job, Jobs
from tests.launches import TOKEN, family, free_port
from tests.play import Play

GRID = Grid(tp=1, pp=1, steps=60, ranks=6)
FLAGS = (*GRID.flags, "--num-layers", "2", "--micro-batch-size", "2", "--global-batch-size", "12")


@contextmanager
def nodes_of(jobs: Jobs, *flags: str) -> Iterator[list[Job]]:
    """Launchers of one job on three nodes of two ranks each, which end in any case."""
    launcher = ("--nnodes", "3", "--master-addr", "127.0.0.1", "--master-port", str(free_port()), "--node-rank")
    nodes = [
        jobs.start(*FLAGS, "--elastic-store", "alone", *flags, ranks=2, launcher=(*launcher, str(node)),
                   env={wire.TOKEN_VARIABLE: TOKEN}) for node in range(3)
    ]  # fmt: skip
    try:
        yield nodes
    finally:
        for node in nodes:
            node.process.kill()
            node.process.communicate()


def test_two_nodes_leave_one_is_asked_and_one_gets_sigterm(jobs: Jobs) -> None:
    reference = jobs.undisturbed(*FLAGS, ranks=6)
    with nodes_of(jobs, "--elastic-respawn") as (first, second, third):
        first.read_until("step    4/")
        for nobody in ("7", "0"):
            assert cli.main(["drain", str(first.run_dir), "--node", nobody]) == 1
        assert cli.main(["drain", str(first.run_dir), "--node", "2"]) == 0
        first.read_until("ranks [4, 5] of node 2 have left")
        assert "its ranks have left the job" in third.finish()
        for member in reversed(family(launcher_of(second))):  # as Slurm does, and who ends a pod
            os.kill(member, signal.SIGTERM)
        first.read_until("ranks [2, 3] of node 1 have left")
        assert "its ranks have left the job" in second.finish()
        first.finish()
    assert cli.main(["compare", str(first.run_dir), str(reference.run_dir)]) == 0, first.output
    assert [event["ranks"] for event in first.events("left")] == [[4, 5], [2, 3]]
    assert not first.events("recovered") and not first.events("fault") and not first.events("spawned")
    assert first.layouts()[-1].ranks == (0, 1)


def test_who_coordinates_leaves_too(jobs: Jobs, tmp_path: Path) -> None:
    """Another takes over, which interrupts once, and lets its ranks leave: nothing is lost."""
    longer = (*FLAGS, *Grid(tp=1, pp=1, steps=150, ranks=6).flags)  # it trains on meanwhile
    reference = jobs.undisturbed(*longer, ranks=6)
    shared = (*longer, "--elastic-store", "embedded", "--elastic-run-dir", str(tmp_path / "run"))
    with nodes_of(jobs, *shared) as (first, *others):
        first.read_until("another node takes over")
        for member in reversed(family(launcher_of(first))):
            os.kill(member, signal.SIGTERM)
        first.read_until("this node coordinates no longer")
        assert "its ranks have left the job" in first.finish()
        for node in others:
            node.finish()
    assert cli.main(["compare", str(tmp_path / "run"), str(reference.run_dir)]) == 0
    events = read_events(tmp_path / "run")
    assert [event["ranks"] for event in events if event["kind"] == "left"] == [[0, 1]]
    assert not [event for event in events if event["kind"] == "fault"]


def test_two_nodes_leave_together(jobs: Jobs) -> None:
    """In one change: only one layout has fewer ranks than the one before."""
    reference = jobs.undisturbed(*FLAGS, ranks=6)
    with nodes_of(jobs) as (first, *others):
        first.read_until("step    4/")
        assert cli.main(["drain", str(first.run_dir), "--node", "1,0"]) == 1, "not without the one that coordinates"
        assert cli.main(["drain", str(first.run_dir), "--node", "1,2"]) == 0
        for node in others:
            assert "its ranks have left the job" in node.finish()
        first.finish()
    assert cli.main(["compare", str(first.run_dir), str(reference.run_dir)]) == 0, first.output
    assert sorted(event["ranks"] for event in first.events("left")) == [[2, 3], [4, 5]]
    sizes = [len(layout.ranks) for layout in first.layouts()]
    assert [size for size, before in zip(sizes[1:], sizes, strict=False) if size != before] == [2]
    assert not first.events("recovered") and not first.events("fault")


@pytest.mark.parametrize("text", ["", "1,", "x", "-1", "1;2"])
def test_what_is_no_node(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["drain", "run", f"--node={text}"])
    assert "is not the number of a node, or several with commas between" in capsys.readouterr().err


def test_all_nodes_that_are_asked_for_or_none() -> None:
    """Two that have not entered yet: the answer, who is told to stop, and of whom it is recorded that they leave."""
    play = Play()
    hello = AgentHello(session="3", node_rank=5, slots=1, host="h3", heartbeat_timeout=2.5)
    play.happens(events.NodeCame(now=0.0, node=3, hello=hello))
    play.say(play.hello(3))

    def ask(*node_ranks: int) -> tuple[Answer, list[int], list[Any]]:
        play.happens(events.Asked(now=1.0, person=7, request=Drain(node_ranks=node_ranks)))
        (reply,) = [effect.answer for effect in play.effects if isinstance(effect, Reply)]
        told = [effect.node for effect in play.effects if isinstance(effect, Tell) and isinstance(effect.message, Stop)]
        leaving = [effect.fields["node"] for effect in play.effects
                   if isinstance(effect, WriteEvent) and effect.kind == "leaving"]  # fmt: skip
        return reply, told, leaving

    assert ask(5, 7, 8) == (Answer(ok=False, text="not there: nodes 7, 8"), [], [])
    answer, told, leaving = ask(5, 0)
    assert not answer.ok and "no other working cells" in answer.text and not told and not leaving
    assert not play.job.leaving
    assert ask(5, 2) == (Answer(ok=True, text="the ranks of nodes 5, 2 leave"), [2, 3], [5, 2])
    assert {2, 3} == {each.node for each in play.effects if isinstance(each, Tell) and each.message == Leave()}
    assert ask(5) == (Answer(ok=False, text="not there: node 5"), [], [])


def launcher_of(job: Job) -> int:
    """Its process."""
    return job.process.pid


def test_who_coordinates_can_leave_if_another_can_coordinate() -> None:
    """There must be a store, a majority of its members, and all that the ranks hold must be somewhere else."""
    job = Play().job
    job = replace(job, here=2, term=1, nodes=job.nodes.set(1, replace(job.nodes[1], address="h:1")))
    assert can_resign(job)
    assert not can_resign(replace(job, term=0)), "there is no store"
    assert not can_resign(replace(job, leaving=frozenset({1}))), "the other one leaves, too"
    assert not can_resign(replace(job, nodes=job.nodes.set(1, replace(job.nodes[1], address="")))), "it cannot"
    assert not can_resign(replace(job, members=("a", "b", "c"))), "the store would have no majority"
    other = replace(job, here=1, nodes=job.nodes.set(2, replace(job.nodes[2], address="h:2")))
    assert not can_resign(other), "it has all cells of the stage"


# ---- the layouts ---------------------------------------------------------------------------------


def grid(pp: int, dp: int, replicas: int = 1) -> Layout:
    return Layout.grid(
        tp=1, pp=pp, dp=dp, stage_units=[[p] for p in range(pp)], units=[f"layer.{p}" for p in range(pp)],
        num_grains=12, num_slices=dp, replicas=replicas, ranks_per_host=1,
    )  # fmt: skip


@pytest.mark.parametrize("replicas", [0, 1, 2])
@pytest.mark.parametrize("leaving", [{1}, {0, 2}, {0, 1, 2}])
def test_all_is_where_it_has_to_be_before_anybody_leaves(replicas: int, leaving: set[int]) -> None:
    layout, goal = grid(2, 4, replicas), None
    for epoch in range(1, 9):
        step = improve(layout, {}, epoch, goal, None, leaving)
        if step is None:
            break
        new, goal = step
        for move in transfers(new, Holdings.of(layout)):
            assert move.role == "replica", "owners are never waited for"
            assert move.dst not in leaving
        layout = new
    assert step is None and leaving.isdisjoint(layout.ranks)
    assert set(layout.spares) == leaving and layout.lost == ()


def test_who_cannot_be_done_without_stays() -> None:
    with pytest.raises(NoLayout, match=r"stage 1 has no other working cells than those of ranks \[0, 2, 3\]"):
        release(grid(2, 2), {0, 2, 3}, 1)
