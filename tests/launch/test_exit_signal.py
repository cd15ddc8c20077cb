"""``--exit-signal-handler``: training ends with a checkpoint when a scheduler asks for it, and goes on from there.

And ``--exit-duration-in-mins``: it ends by itself, before the scheduler ends it.
"""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path

import pytest

from megatron_elastic.adaptor.training import ending
from megatron_elastic.comm.distributed import backend
from megatron_elastic.observe.records import read_digest
from tests import world
from tests.jobs import Grid, Jobs
from tests.launches import family
from tests.world import Peer

GRID = Grid(tp=1, pp=2, steps=60, ranks=4)


@pytest.mark.parametrize(("number", "everybody"), [
    pytest.param(signal.SIGUSR1, True, id="all processes"),
    pytest.param(signal.SIGTERM, False, id="the launcher"),
])
def test_a_job_in_two_parts_trains_as_one(jobs: Jobs, tmp_path: Path, number: signal.Signals, everybody: bool) -> None:
    """Some schedulers signal the launcher, Slurm all processes of the job."""
    saves = ("--save", str(tmp_path), "--load", str(tmp_path), "--exit-signal-handler", "--exit-signal", number.name)
    first = jobs.start(*GRID.flags, *saves, ranks=GRID.ranks)
    first.read_until(f" 5/{GRID.steps} ")
    pid = first.process.pid
    for member in reversed(family(pid)) if everybody else [pid]:
        os.kill(member, number)
    assert f"{number.name} goes to the ranks, which end training" in first.finish()
    assert not first.events("fault")
    stopped = max(first.metrics())
    assert 5 <= stopped < GRID.steps
    second = jobs.run(*GRID.flags, *saves, ranks=GRID.ranks)
    assert min(second.metrics()) == stopped + 1
    reference = jobs.undisturbed(*GRID.flags, ranks=GRID.ranks)
    both, whole = {**first.metrics(), **second.metrics()}, reference.metrics()
    assert {n: line["loss_hex"] for n, line in both.items()} == {n: line["loss_hex"] for n, line in whole.items()}
    assert read_digest(second.run_dir)["sha256"] == read_digest(reference.run_dir)["sha256"]


@pytest.mark.job
def test_a_job_is_as_old_as_the_first_of_its_ranks() -> None:
    """Ranks that came later have it from those that were there, and know it when these are gone."""

    def body(peer: Peer) -> None:
        backend.initialize(peer.transport, range(peer.size), timedelta(seconds=60))
        limit = ending.TimeLimit(60, began=1000.0 * (1 + peer.rank))
        limit.agree()
        assert limit.began == 1000.0
        assert limit.over()
        assert not ending.TimeLimit(None, began=1000.0).over()
        assert not ending.TimeLimit(10**9, began=1000.0).over()
        peer.leave()

    world.run(body, size=3)
