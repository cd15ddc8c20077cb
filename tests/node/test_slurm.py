"""The launch script, run by a real Slurm on hosts of its own: what is queued again, what goes on, and what ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import namespaces
import pytest

from megatron_elastic.observe.records import read_digest, read_events, read_metrics
from tests.faults.lost_hosts import FLAGS
from tests.fleet import slurm
from tests.fleet.slurm import Slurm
from tests.jobs import MODEL, SCRIPT, Job, Jobs

_REASON = namespaces.why_not() or slurm.why_not()
pytestmark = [pytest.mark.job, pytest.mark.skipif(bool(_REASON), reason=_REASON)]

NODES = 3
RANKS = 2


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Slurm]:
    with namespaces.hosts() as hosts, slurm.slurm(hosts, tmp_path, NODES) as made:
        yield made


class Training:
    """A job of the launch script, and where it writes."""

    def __init__(self, cluster: Slurm, jobs: Jobs, folder: Path, *flags: str, options: tuple[str, ...] = ()) -> None:
        self.flags = (*FLAGS, *flags)
        self._runs = folder / "runs"
        self.job = cluster.submit(
            str(SCRIPT), "--data-path", str(jobs.data), *MODEL.split(), "--elastic-slow", "off", *self.flags,
            options=(f"--nodes={NODES}", *options),
            env={"RANKS": str(RANKS), "RUNS": str(self._runs), "CHECKPOINTS": str(folder / "saved"),
                 "SAVE_INTERVAL": "50"},
        )

    def attempts(self) -> list[Path]:
        return sorted(self._runs.iterdir())

    def steps(self, attempt: int = 0) -> int:
        metrics = self._runs / str(attempt) / "metrics.jsonl"
        return max(read_metrics(metrics.parent), default=0) if metrics.exists() else 0

    def until_step(self, step: int, attempt: int = 0) -> None:
        """Wait until so many steps are done."""
        self.job.until(f"step {step}", lambda: self.steps(attempt) >= step)

    def lost(self) -> set[int]:
        """The ranks that were lost: with their node, or, where Slurm ends one process after the other, before it."""
        told = [event for run_dir in self.attempts() for event in read_events(run_dir)]
        return {event["rank"] for event in told if event["kind"] == "fault"}

    def assert_nothing_twice(self) -> None:
        """No step was done in two attempts."""
        done = [step for run_dir in self.attempts() for step in read_metrics(run_dir)]
        assert len(done) == len(set(done))

    def assert_same(self, reference: Job) -> None:
        """Every step of every attempt is the reference's, bit for bit, and so is the final state."""
        theirs, there = read_metrics(reference.run_dir), set()
        for run_dir in self.attempts():
            for step, line in read_metrics(run_dir).items():
                there.add(step)
                assert all(line[name] == theirs[step][name] for name in ("loss_hex", "grad_norm_hex"))
        assert there == theirs.keys()
        assert read_digest(self.attempts()[-1])["sha256"] == read_digest(reference.run_dir)["sha256"]


def test_wrong_flags_are_not_queued_again(cluster: Slurm, jobs: Jobs, tmp_path: Path) -> None:
    training = Training(cluster, jobs, tmp_path, "--num-attention-heads", "5")
    training.job.until_state("FAILED")
    assert "--num-attention-heads 5" in training.job.output
    assert "the flags are wrong: not queued again" in training.job.output
    assert training.job.is_told("Restarts") == "0"


@pytest.mark.parametrize("how", ["it loses power", "it is taken down"])
def test_a_node_fails_and_the_others_go_on(cluster: Slurm, jobs: Jobs, tmp_path: Path, how: str) -> None:
    training = Training(cluster, jobs, tmp_path)
    training.until_step(20)
    if how == "it loses power":
        cluster.lose("node2")
    else:
        cluster.ask("scontrol", "update", "nodename=node2", "state=down", "reason=test")
    training.job.until_state("COMPLETED")
    assert training.lost() == {4, 5}
    assert training.job.is_told("Restarts") == "0"
    training.assert_same(jobs.undisturbed(*training.flags, ranks=RANKS * NODES))


def test_cancelled_is_over(cluster: Slurm, jobs: Jobs, tmp_path: Path) -> None:
    """The nodes are free at once, and nothing is queued again."""
    training = Training(cluster, jobs, tmp_path)
    training.until_step(20)
    cluster.ask("scancel", training.job.number)
    training.job.until_state("CANCELLED")
    cluster.until("nodes are free", cluster.idle)
    assert "queued again" not in training.job.output
    assert training.job.is_told("Restarts") == "0"


def test_preempted_goes_on_from_its_checkpoint(cluster: Slurm, jobs: Jobs, tmp_path: Path) -> None:
    """All nodes are taken away for something urgent; then it has them again."""
    training = Training(cluster, jobs, tmp_path)
    training.until_step(60)
    cluster.ask("sbatch", "--partition=urgent", f"--nodes={NODES}", "--exclusive", "--wait", "--wrap", "true")
    training.job.until_state("COMPLETED")
    assert training.job.is_told("Restarts") == "1"
    training.assert_same(jobs.undisturbed(*training.flags, ranks=RANKS * NODES))


def test_when_time_is_up_it_saves_and_is_queued_again(cluster: Slurm, jobs: Jobs, tmp_path: Path) -> None:
    """Nothing is computed twice."""
    training = Training(cluster, jobs, tmp_path, "--train-iters", "1000")
    training.until_step(20)
    cluster.ask("scancel", "--signal=USR1", training.job.number)
    training.job.until_said("queued again")
    training.until_step(100, attempt=1)
    training.assert_nothing_twice()
