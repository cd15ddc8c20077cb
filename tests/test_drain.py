"""Nodes that leave politely: nothing is lost, nothing is computed again, and bits do not differ."""

from __future__ import annotations

import os
import signal

import pytest

from megatron_elastic import cli
from megatron_elastic.cluster import wire
from megatron_elastic.layout import Holdings, Layout, transfers
from megatron_elastic.plan import NoLayout, improve, release
from tests.jobs import Grid, Job, Jobs
from tests.launches import TOKEN, free_port

GRID = Grid(tp=1, pp=1, steps=60, ranks=6)
FLAGS = (*GRID.flags, "--num-layers", "2", "--micro-batch-size", "2", "--global-batch-size", "12")


def test_two_nodes_leave_one_is_asked_and_one_gets_sigterm(jobs: Jobs) -> None:
    reference = jobs.undisturbed(*FLAGS, ranks=6)
    env = {wire.TOKEN_VARIABLE: TOKEN}
    launcher = ("--nnodes", "3", "--master-addr", "127.0.0.1", "--master-port", str(free_port()), "--node-rank")
    nodes = [
        jobs.start(*FLAGS, "--elastic-store", "alone", "--elastic-respawn", ranks=2, launcher=(*launcher, str(node)),
                   env=env) for node in range(3)
    ]  # fmt: skip
    first, second, third = nodes
    try:
        first.read_until("step    4/")
        for nobody in ("7", "0"):
            assert cli.main(["drain", str(first.run_dir), "--node", nobody]) == 1
        assert cli.main(["drain", str(first.run_dir), "--node", "2"]) == 0
        first.read_until("ranks [4, 5] of node 2 have left")
        assert "its ranks have left the job" in third.finish()
        os.kill(launcher_of(second), signal.SIGTERM)
        first.read_until("ranks [2, 3] of node 1 have left")
        assert "its ranks have left the job" in second.finish()
        first.finish()
    finally:
        for node in nodes:
            node.process.kill()
            node.process.communicate()
    assert cli.main(["compare", str(first.run_dir), str(reference.run_dir)]) == 0, first.output
    assert [event["ranks"] for event in first.events("left")] == [[4, 5], [2, 3]]
    assert not first.events("recovered") and not first.events("fault") and not first.events("spawned")
    assert first.layouts()[-1].ranks == (0, 1)


def launcher_of(job: Job) -> int:
    """Its process."""
    return job.process.pid


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
