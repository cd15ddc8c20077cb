"""Samples that are read ahead: the same as without, whoever is lost or joins; and nobody waits for them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import pytest

from megatron_elastic import cli
from tests.jobs import ROOT, Grid, Job, Jobs, assert_exactly_once, assert_same_training, inject

COUNTED = ROOT / "tests" / "megatron_programs" / "counted.py"
ODD = ROOT / "tests" / "megatron_programs" / "odd_data.py"
AT_ONCE = ("--num-workers", "0")
DP2 = Grid(tp=1, pp=1, steps=9, ranks=2)
PP2_DP2 = Grid(tp=1, pp=2, steps=5, ranks=4)


def _steps(job: Job, rank: int) -> list[dict[str, Any]]:
    log = (job.run_dir / "logs" / f"rank{rank}.log").read_text()
    return [json.loads(line) for line in log.splitlines() if line.startswith('{"step"')]


def test_reading_overlaps_with_computing(jobs: Jobs, measured: Callable[[object], None]) -> None:
    """In odd steps samples are read ahead, in even ones they are not. Of eight micro-batches that a rank has, it reads
    itself the first, where the step before had expected none, and what its thread has not begun, if that gets no
    processor.
    """
    job = jobs.start(*DP2.flags, script=ODD, ranks=2, env={"ODD_SLOW": "15"})
    job.finish()
    assert_same_training(job, jobs.undisturbed(*DP2.flags, *AT_ONCE, ranks=2))
    for rank in range(2):
        steps = _steps(job, rank)[2:]
        ahead, at_once = steps[::2], steps[1::2]
        assert [step["read_by_itself"] for step in at_once] == [8.0] * 3
        assert all(step["read_by_itself"] <= 4 for step in ahead), ahead
        ratio = median(step["seconds"] for step in ahead) / median(step["seconds"] for step in at_once)
        measured(f"rank {rank}, seconds a step, read ahead / when computed: {ratio:.2f}")
        assert min(step["seconds"] for step in ahead) < min(step["seconds"] for step in at_once)


@pytest.mark.parametrize(("model", "how", "kills"), [
    ((), (), ["1@2:backward", "2@4:forward"]),
    ((), (), ["0@3:vote"]),
    ((), ("--num-workers", "1"), ["3@3:data"]),
    (("--num-layers-per-virtual-pipeline-stage", "1"), (), ["1@3:backward"]),
    (("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "1"), (), ["3@3:backward"]),
    ((), ("--elastic-device", "soft"), ["1@2:backward"]),
    ((), ("--elastic-device", "soft"), ["2@3:grad_sync"]),
], ids=str)  # fmt: skip
def test_ranks_are_lost(jobs: Jobs, model: Sequence[str], how: Sequence[str], kills: list[str]) -> None:
    """What was read ahead may be somebody else's then."""
    job = jobs.run(*PP2_DP2.flags, *model, *how, *inject(*kills), ranks=4)
    reference = jobs.undisturbed(*PP2_DP2.flags, *model, *AT_ONCE, ranks=4)
    assert_same_training(job, reference, [int(kill.partition("@")[0]) for kill in kills])


@pytest.mark.parametrize("device", ["cpu", "soft"])
def test_ranks_join(jobs: Jobs, device: str) -> None:
    grid = Grid(tp=1, pp=2, steps=30, ranks=4)
    job = jobs.run(*grid.flags, "--elastic-device", device, "--elastic-respawn", *inject("3@3:backward"), ranks=4)
    reference = jobs.undisturbed(*grid.flags, *AT_ONCE, ranks=4)
    assert_same_training(job, reference, [3])
    assert len(job.layouts()[-1].ranks) == 4, job.output


@pytest.mark.parametrize("device", ["cpu", "soft"])
def test_batches_grow(jobs: Jobs, device: str) -> None:
    """The next step has more micro-batches than this one."""
    flags = ("--rampup-batch-size", "4", "4", "24", "--train-samples", "120", "--elastic-slices", "4")
    job = jobs.run(*flags, "--elastic-device", device, *inject("2@3:backward"), ranks=4)
    reference = jobs.undisturbed(*flags, *AT_ONCE, ranks=4)
    assert cli.main(["compare", str(job.run_dir), str(reference.run_dir)]) == 0, job.output


def test_nobody_waits_for_the_device_but_the_vote(jobs: Jobs) -> None:
    """Batches come in a stream of their own, for which only the device waits."""
    job = jobs.start(*PP2_DP2.flags, "--elastic-device", "soft", ranks=4, script=COUNTED)
    job.finish()
    assert_same_training(job, jobs.undisturbed(*PP2_DP2.flags, *AT_ONCE, ranks=4))
    for rank in range(4):
        for step in _steps(job, rank)[1:]:
            assert step["waits"]["Event.synchronize"] == 1, step
            assert set(step["waits"]) == {"Event.synchronize", "Event.synchronize, in another thread"}, step


def test_evaluations_are_of_other_data(jobs: Jobs) -> None:
    flags = (*PP2_DP2.flags, "--eval-iters", "2", "--eval-interval", "2", "--split", "60,20,20")
    job, reference = jobs.run(*flags, ranks=4), jobs.undisturbed(*flags, *AT_ONCE, ranks=4)
    assert_exactly_once(job)
    assert [event["loss"] for event in job.events("evaluated")] == [e["loss"] for e in reference.events("evaluated")]
    assert_same_training(job, reference)


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_sample_that_cannot_be_read_is_told_as_ever(jobs: Jobs, workers: str) -> None:
    """Whoever gets it raises: it is the program's error, and its traceback leads to the data set."""
    job = jobs.start(*DP2.flags, "--num-workers", workers, script=ODD, ranks=2, env={"ODD_BAD": "37"})
    message = job.finish(code=1)
    assert "ValueError: sample 37 is damaged" in message and "in __getitem__" in message
    assert "the program raises again when others do step 3; it is no fault of a rank" in message
    assert list(job.metrics()) == [1, 2]
