"""Ranks that join with real processes: in place of dead ones, or with nodes that come later, while others die."""

from __future__ import annotations

import fcntl
import os
import random
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from megatron_elastic.cluster import wire
from tests.jobs import ROOT, Grid, Job, Jobs, assert_exactly_once, assert_same_training, inject, open_ports
from tests.launches import TOKEN, free_port

STEPS = 60
"""More than two ranks need to join one after the other."""
DP4 = Grid(tp=1, pp=1, steps=STEPS, ranks=4)
PP2 = Grid(tp=1, pp=2, steps=STEPS, ranks=4)
TP2 = Grid(tp=2, pp=1, steps=STEPS, ranks=4)
LONGER = Grid(tp=1, pp=1, steps=200, ranks=4)
"""Goes on while a node waits before it starts a third rank: a second, in which a fast machine does sixty steps."""
SMALL = ("--num-layers", "2", "--micro-batch-size", "2")
"""Many steps in little time."""
FOLLOWS = "follow from step"
EVEN = "slices and grains are even over {} ranks"


def start(jobs: Jobs, grid: Grid, *flags: str) -> Job:
    """Start a job that replaces ranks that die."""
    return jobs.start(*grid.flags, *SMALL, "--elastic-respawn", *flags, ranks=grid.ranks)


def finish(jobs: Jobs, grid: Grid, job: Job, lost: Sequence[int], width: int | None = None) -> None:
    """The job ends as wide as it began (or with ``width`` ranks), and equal to the undisturbed one."""
    job.finish()
    assert_same_training(job, jobs.undisturbed(*grid.flags, *SMALL, ranks=grid.ranks), lost)
    layout = job.layouts()[-1]
    assert len(layout.ranks) == (grid.ranks if width is None else width), job.output
    shares = [len(cell.grains) for stage in layout.stages for cell in stage.cells]
    assert max(shares) - min(shares) <= 1, "everybody in the last layout works"


@pytest.mark.parametrize(
    ("grid", "kills"),
    [
        (PP2, ["3@3:backward"]),
        (PP2, ["0@3:commit"]),  # the rank that reports
        (PP2, ["2@3:apply", "1@interrupt"]),  # one of each stage
        pytest.param(DP4, ["0@3:param_sync", "2@report"]),  # both of one stage
        # Its cell mate becomes a spare, and forms a new cell with the newcomer.
        pytest.param(TP2, ["3@3:vote"]),
        # The spare has the lowest rank of all when it comes back.
        pytest.param(TP2, ["1@3:grad_sync"]),
        (TP2, ["3@5:param_sync"]),  # the spare's weights were to be distributed, by a layout that it is not in
    ],
    ids=lambda value: "+".join(value) if isinstance(value, list) else str(value),
)
def test_killed_ranks_are_replaced(jobs: Jobs, grid: Grid, kills: Sequence[str]) -> None:
    job = start(jobs, grid, *inject(*kills))
    job.read_until(FOLLOWS)
    job.read_until(EVEN.format(4))
    finish(jobs, grid, job, [int(kill[0]) for kill in kills])
    newcomers = [rank for event in job.events("spawned") for rank in event["ranks"]]
    assert newcomers == list(range(4, 4 + len(kills)))


@pytest.mark.parametrize(
    "point",
    [
        "edit",  # it has just been let in
        "param_sync",  # before it has got any weights
        "switch",  # when it is to get grains
        "forward",  # in the first grain that it computes
    ],
)
def test_a_newcomer_is_killed_and_replaced(jobs: Jobs, point: str) -> None:
    job = start(jobs, LONGER, *inject("1@3:backward", f"4@{point}"))
    job.read_until("rank 5 is started in place of rank 4")
    job.read_until(EVEN.format(4))
    finish(jobs, LONGER, job, [1, 4])


def test_a_newcomer_is_killed_before_it_is_let_in(jobs: Jobs) -> None:
    """Nobody else notices, and the next one is started a little later."""
    job = start(jobs, LONGER, *inject("1@3:backward", "4@prepare"))
    assert "rank 4 ended (kill" in job.read_until("before it had joined")
    finish(jobs, LONGER, job, [1])
    assert [event["ranks"] for event in job.events("spawned")] == [[4], [5]]
    assert [event["seconds"] for event in job.events("left_out")] == [1.0]
    assert [event["ranks"] for event in job.events("recovered")] == [[1]]


def test_four_kills_in_turn(jobs: Jobs) -> None:
    """Each when the one before has been replaced; newcomers may be hit as well. Like ``bench endurance``."""
    grid = Grid(tp=1, pp=2, steps=120)
    job = start(jobs, grid)
    job.read_until(" 3/120 ")
    chance, victims = random.Random(103), list[int]()
    for _ in range(4):
        victims.append(chance.choice(job.layouts()[-1].ranks))
        os.kill(job.pid(victims[-1]), signal.SIGKILL)
        job.read_until(EVEN.format(8))
    finish(jobs, grid, job, victims)


@pytest.mark.parametrize("victim", [0, 2])
def test_a_member_is_killed_at_a_switch(jobs: Jobs, victim: int) -> None:
    """Some have the new layout and some the old one, which had begun to be evened out; 0 is the one that tells."""
    job = start(jobs, DP4, *inject("1@3:backward", f"{victim}@switch"))
    job.read_until(EVEN.format(4))
    finish(jobs, DP4, job, [1, victim])


def test_a_member_is_killed_while_a_newcomer_follows(jobs: Jobs) -> None:
    job = start(jobs, DP4, *inject("1@3:backward"))
    job.read_until(FOLLOWS)
    os.kill(job.pid(0), signal.SIGKILL)
    job.read_until("rank 5 is started in place of rank 0")
    job.read_until(EVEN.format(4))
    finish(jobs, DP4, job, [0, 1])


def test_a_spare_is_killed_and_replaced(jobs: Jobs) -> None:
    """Its process had joined, so it counts."""
    job = start(jobs, TP2, *inject("3@3:vote"))
    job.read_until("rank 4 is started in place of rank 3")
    os.kill(job.pid(2), signal.SIGKILL)
    job.read_until("rank 5 is started in place of rank 2")
    job.read_until(EVEN.format(4))
    finish(jobs, TP2, job, [2, 3])


@pytest.mark.parametrize("victim", [0, 3])
def test_spares_take_lost_places(jobs: Jobs, victim: int) -> None:
    """Two could form a cell, and do not; one takes the lost place, the other one is left, and nobody is started."""
    job = jobs.start(*TP2.flags, *SMALL, "--elastic-spares", "2", *inject(f"{victim}@9:backward"), ranks=6)
    job.read_until(FOLLOWS)
    job.read_until(EVEN.format(4))
    job.finish()
    assert_same_training(job, jobs.undisturbed(*TP2.flags, *SMALL, ranks=4), [victim])
    first, *_, last = job.layouts()
    (spare,) = set(last.ranks) - set(first.ranks)
    assert spare in (4, 5) and last.place_of(spare) == first.place_of(victim)
    assert last.place_of(victim ^ 1) == first.place_of(victim ^ 1)
    assert [event["ranks"] for event in job.events("spawned")] == [[4, 5]]


def test_a_stopped_newcomer_is_replaced(jobs: Jobs) -> None:
    job = start(jobs, DP4, *inject("1@3:backward"))
    job.read_until(FOLLOWS)
    os.kill(job.pid(4), signal.SIGSTOP)
    job.read_until("rank 5 is started in place of rank 4")
    job.read_until(EVEN.format(4))
    job.finish()
    assert [event["cause"] for event in job.events("recovered")] == ["kill -9", "stopped"]
    assert_exactly_once(job)


def test_a_newcomer_that_raises_does_not_end_the_job(jobs: Jobs) -> None:
    job = start(jobs, DP4, *inject("1@3:backward"), "--elastic-inject", "raise:rank=4,at=prepare")
    job.read_until("rank 4 ended (failed) before it had joined")
    finish(jobs, DP4, job, [1])
    (error,) = job.events("error")
    assert error["rank"] == 4
    assert "InjectedError" in error["traceback"]


def test_saving_and_evaluating_while_a_rank_joins(jobs: Jobs) -> None:
    """Every step saves and evaluates, so shadows do; what was saved while a rank followed loads."""
    grid = Grid(tp=1, pp=2, steps=24, ranks=4)
    flags = ("--eval-interval", "2", "--eval-iters", "1", "--split", "3,1,1")
    reference = jobs.undisturbed(*grid.flags, *SMALL, *flags, ranks=4)
    folder = jobs.folder / "saved-while-joining"
    job = start(jobs, grid, *flags, "--save", str(folder), "--save-interval", "1", *inject("3@3:backward"))
    follows = int(job.read_until(FOLLOWS).partition(FOLLOWS)[2].split()[0])
    job.finish()
    assert_same_training(job, reference, [3])
    assert [event["step"] for event in job.events("saved")] == list(range(1, 25))
    # What belongs to an interrupted step is done again.
    evaluated, expected = ({e["step"]: e["loss"] for e in each.events("evaluated")} for each in (job, reference))
    assert evaluated == expected
    (folder / "latest_checkpointed_iteration.txt").write_text(str(follows))
    resumed = jobs.run(*grid.flags, *SMALL, *flags, "--load", str(folder), ranks=4)
    assert resumed.metrics()[24]["loss_hex"] == reference.metrics()[24]["loss_hex"]


# ---- nodes ---------------------------------------------------------------------------------

TWO = Grid(tp=1, pp=1, steps=150, ranks=2)
SLICES = ("--elastic-slices", "4")
PACED = ROOT / "tests" / "megatron_programs" / "paced.py"


class Nodes:
    """Launchers of one job: node 0, with 2 ranks, and those that come later."""

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs
        self._port = str(free_port())
        self._pace = jobs.folder / f"pace-{self._port}"
        self.all: list[Job] = []

    def start(self, *flags: str, ranks: int = 2) -> Job:
        """Start the next node's launcher."""
        launcher = ("--nnodes", "1", "--node-rank", str(len(self.all)), "--master-addr", "127.0.0.1",
                    "--master-port", self._port)  # fmt: skip
        flags = (*TWO.flags, *SMALL, *SLICES, *flags)
        env = {wire.TOKEN_VARIABLE: TOKEN, "PACE": str(self._pace)}
        node = self._jobs.start(*flags, ranks=ranks, launcher=launcher, script=PACED, env=env)
        self.all.append(node)
        return node

    def start_later(self, ranks: int = 2) -> Job:
        """Start a node in a job that trains, which waits meanwhile: a node has to import everything first."""
        with self._pace.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            node = self.start(ranks=ranks)
            self.all[0].read_until("on a node that has come")
        return node


@contextmanager
def nodes_of(jobs: Jobs) -> Iterator[Nodes]:
    """``Nodes`` whose launchers end in any case."""
    nodes = Nodes(jobs)
    try:
        yield nodes
    finally:
        for node in nodes.all:
            node.process.kill()
            node.process.communicate()


def test_a_node_comes_and_another_goes(jobs: Jobs) -> None:
    """The job grows beyond its first size; then a node goes, and one more comes in its place, with a rank less."""
    reference = jobs.undisturbed(*TWO.flags, *SMALL, *SLICES, ranks=2)
    with nodes_of(jobs) as nodes:
        first = nodes.start()
        first.read_until(" 1/150 ")
        assert not [port for rank in (0, 1) for port in open_ports(first.pid(rank))], "all ranks are on one host"
        second = nodes.start()
        first.read_until(EVEN.format(4))
        assert all(open_ports(node.pid(rank)) for node, ranks in ((first, (0, 1)), (second, (2, 3))) for rank in ranks)
        layout = first.layouts()[-1]
        assert layout.hosts == ((0, 1), (2, 3))
        for unit in range(len(layout.units)):
            for k in range(layout.num_slices):
                (copy,) = layout.replicas[unit][k]
                assert layout.host_of(copy) != layout.host_of(layout.owners[unit][k])
        second.process.kill()
        first.read_until("lost ranks [2, 3] (node 1 lost)")
        third = nodes.start_later(ranks=1)
        first.read_until(EVEN.format(3))
        first.finish()
        third.finish()
    assert_same_training(first, reference, [2, 3])
    (event,) = first.events("recovered")
    assert event["cause"] == "node 1 lost"
    assert first.layouts()[-1].ranks == (0, 1, 4)


def test_nodes_that_do_not_fit_are_refused(jobs: Jobs) -> None:
    """One with another learning rate; the job and another node go on."""
    with nodes_of(jobs) as nodes:
        first = nodes.start()
        second = nodes.start()
        third = nodes.start("--lr", "0.25")
        line = first.read_until("killing rank")
        assert line.rstrip().endswith("it is not like the running job: its --lr is 0.25 instead of 0.005")
        first.read_until("before it had joined")
        first.finish()
        second.finish()
        third.finish()
    assert_same_training(first, jobs.undisturbed(*TWO.flags, *SMALL, *SLICES, ranks=2))
    assert len(first.layouts()[-1].ranks) == 4
