"""The tensor-parallel size changes while a job trains: as if it had been stopped, and started anew with that size."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from megatron_elastic import cli
from megatron_elastic.observe.records import read_digest
from tests.changes.test_scale import EVEN, read_until_all, start
from tests.jobs import MODERN, Grid, Job, Jobs, assert_exactly_once, inject
from tests.models.test_contexts import WITHOUT_DROPOUT
from tests.models.test_experts import BIAS, EXPERTS

STEPS = 24
COMMON = ("--elastic-slices", "4", "--num-layers", "2", "--make-vocab-size-divisible-by", "8")
DENSE = (*Grid(tp=2, pp=1, steps=STEPS).flags, *COMMON)
SAVES = ("--save-interval", "1")


def ask(job: Job, size: int) -> None:
    """Ask for a tensor-parallel size, which can be had."""
    assert cli.main(["scale", str(job.run_dir), "--tp", str(size)]) == 0


def reshape(job: Job, size: int) -> None:
    """Ask for it, and wait until cells have it."""
    ask(job, size)
    job.read_until(f"cells are TP{size}")


def sizes(job: Job) -> list[tuple[int, int]]:
    """(first step, tensor-parallel size), one after the other."""
    layouts = {layout.epoch: layout for layout in job.layouts()}
    every = [(step, layouts[line["epoch"]].tp) for step, line in job.metrics().items()]
    return [every[0], *(after for before, after in itertools.pairwise(every) if after[1] != before[1])]


def assert_as_if_started_anew(job: Job, jobs: Jobs, flags: tuple[str, ...], ranks: int, tmp_path: Path) -> None:
    """Losses, norms and the final state are bit for bit those of jobs of each size, of which each goes on from the
    checkpoint that the one before saved of the step before the change.
    """
    assert_exactly_once(job)
    load: tuple[str, ...] = ()
    last: Job | None = None
    for number, (first, size) in enumerate(sizes(job)):
        save = tmp_path / str(number)
        last = jobs.run(*flags, "--tensor-model-parallel-size", str(size), *load, "--save", str(save), *SAVES,
                        ranks=ranks)  # fmt: skip
        until = [step for step, _ in sizes(job)][number + 1 : number + 2] or [STEPS + 1]
        for step in range(first, until[0]):
            for name in ("loss_hex", "grad_norm_hex"):
                assert job.metrics()[step][name] == last.metrics()[step][name], (step, name)
        (save / "latest_checkpointed_iteration.txt").write_text(str(until[0] - 1))
        load = ("--load", str(save))
    assert last is not None
    assert read_digest(job.run_dir)["units"] == read_digest(last.run_dir)["units"]


def test_tensors_are_shared_by_fewer_and_by_more(jobs: Jobs, tmp_path: Path) -> None:
    """A rank is killed while states are put together, one when some are in the new cells."""
    flags = (*DENSE, *MODERN.split())
    job = start(jobs, *flags, *inject("3@recut"), ranks=4, dies="0@promote")
    job.read_until(f" 1/{STEPS}")
    ask(job, 1)
    job.read_until("recovered from the loss of ranks [3]")
    read_until_all(job, "cells are TP1 x CP1 x EP1 (1 ranks)", "over 2 ranks")
    reshape(job, 2)
    job.finish()
    assert all(event["steps"] > 0 for event in job.events("reshaped")), "states were cut anew while it trained"
    assert [size for _, size in sizes(job)] == [2, 1, 2]
    assert_as_if_started_anew(job, jobs, flags, 4, tmp_path)


def test_losses_stay_but_for_rounding(jobs: Jobs) -> None:
    """In fp32 and without dropout, from one rank to two and back; no rank of a pair knew the other before."""
    flags = (*Grid(tp=1, pp=1, steps=STEPS).flags, *COMMON, *WITHOUT_DROPOUT, "--sequence-parallel")
    job = start(jobs, *flags, ranks=4)
    job.read_until(f" 1/{STEPS}")
    for size in (2, 4, 1):
        reshape(job, size)
    job.finish()
    assert [size for _, size in sizes(job)] == [1, 2, 4, 1]
    reference = jobs.undisturbed(*flags, ranks=4).metrics()
    for step, line in job.metrics().items():
        for name in ("loss", "grad_norm"):
            assert line[name] == pytest.approx(reference[step][name], rel=1e-4), (step, name)


@pytest.mark.parametrize("point", ["recut>data", "recut>replay", "recut>param_sync", "switch", "edit", "param_sync"])
def test_kills(jobs: Jobs, tmp_path: Path, point: str) -> None:
    """Of a rank whose states are being cut anew, that is about to get into the new cells, or has just got there."""
    job = start(jobs, *DENSE, ranks=4, dies=f"1@{point}")
    job.read_until(f" 1/{STEPS}")
    ask(job, 1)
    read_until_all(job, "cells are TP1 x CP1 x EP1", "recovered from the loss", f"{EVEN} 3 ranks")
    reshape(job, 2)
    job.finish()
    assert [size for _, size in sizes(job)] == [2, 1, 2]
    assert_as_if_started_anew(job, jobs, DENSE, 4, tmp_path)


@pytest.mark.parametrize(("pp", "extra"), [
    (2, f"{EXPERTS} {BIAS} --sequence-parallel --moe-token-dispatcher-type alltoall"),
    (1, "--group-query-attention --num-query-groups 2 --swiglu --elastic-replay state --elastic-verify-every 1"),
], ids=["PP2, experts", "grouped queries, states replayed"])  # fmt: skip
def test_other_models(jobs: Jobs, tmp_path: Path, pp: int, extra: str) -> None:
    flags = (*Grid(tp=2, pp=pp, steps=STEPS).flags, *COMMON, *extra.split())
    job = start(jobs, *flags, ranks=4 * pp)
    job.read_until(f" 1/{STEPS}")
    for size in (1, 2):
        reshape(job, size)
    job.finish()
    assert [size for _, size in sizes(job)] == [2, 1, 2]
    assert_as_if_started_anew(job, jobs, flags, 4 * pp, tmp_path)


def test_newcomers_and_checkpoints(jobs: Jobs, tmp_path: Path) -> None:
    """Who comes later begins with the flags' size, and gets into cells of another. Without copies, a checkpoint that
    such cells have saved is what is gone back to when a rank dies.
    """
    flags = (*DENSE, "--elastic-replicas", "0")
    job = start(jobs, *flags, "--save", str(tmp_path / "own"), "--save-interval", "3", "--elastic-respawn", ranks=4)
    job.read_until(f" 1/{STEPS}")
    reshape(job, 1)
    while not any(job.layouts()[-1].epoch == event["epoch"] for event in job.events("saved")):
        job.read_until("step ")
    job.kill(2)
    job.read_until("Going back to the checkpoint of step")
    job.finish()
    assert [size for _, size in sizes(job)] == [2, 1]
    assert_as_if_started_anew(job, jobs, flags, 4, tmp_path)
