"""Cells of another shape: the expert- and the context-parallel size change while a job trains."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from megatron_elastic import cli
from tests.changes.test_scale import EVEN, assert_same, read_until_all, start
from tests.jobs import Grid, Job, Jobs, inject
from tests.models.test_contexts import WITHOUT_DROPOUT
from tests.models.test_experts import BIAS, EVERYTHING, EXPERTS

EXACT = (*EXPERTS.split(), "--moe-token-dispatcher-type", "alltoall", "--num-layers", "2", "--elastic-slices", "4")
EP2 = (*Grid(tp=1, pp=1, steps=32).flags, *EXACT, "--expert-model-parallel-size", "2")


def reshape(job: Job, *sizes: str) -> None:
    """Ask for other cells, and wait until they are there."""
    assert cli.main(["scale", str(job.run_dir), *sizes]) == 0
    job.read_until("cells are TP")


def shapes(job: Job) -> list[tuple[int, int]]:
    """Context- and expert-parallel sizes, one after the other."""
    found = [(layout.cp, layout.ep) for layout in job.layouts()]
    return [found[0], *(after for before, after in itertools.pairwise(found) if after != before)]


def test_experts_are_shared_by_fewer_and_by_more(jobs: Jobs, capsys: pytest.CaptureFixture[str]) -> None:
    """No bit is another one. A rank is killed while states are put together, one when some are in the new cells."""
    job = start(jobs, *EP2, *inject("3@recut"), ranks=4, dies="0@promote")
    job.read_until(" 1/32")
    assert cli.main(["scale", str(job.run_dir), "--ep", "1"]) == 0
    assert "cells will be TP1 x CP1 x EP1 (1 ranks), from TP1 x CP1 x EP2 (2 ranks); the numbers stay the same, bit " \
           "for bit" in capsys.readouterr().out
    job.read_until("recovered from the loss of ranks [3]")
    read_until_all(job, "cells are TP1 x CP1 x EP1 (1 ranks)", "over 2 ranks")
    reshape(job, "--ep", "2")
    job.finish()
    layouts = assert_same(job, jobs.undisturbed(*EP2, ranks=4))
    assert shapes(job) == [(1, 2), (1, 1), (1, 2)]
    assert layouts[-1].lost == (0, 3)


@pytest.mark.parametrize("point", ["recut>data", "recut>replay", "recut>param_sync", "switch", "edit", "param_sync"])
def test_kills(jobs: Jobs, point: str) -> None:
    """Of a rank whose states are being cut anew, that is about to get into the new cells, or has just got there. Three
    are left for cells of two.
    """
    job = start(jobs, *EP2, ranks=4, dies=f"1@{point}")
    job.read_until(" 1/32")
    assert cli.main(["scale", str(job.run_dir), "--ep", "1"]) == 0
    read_until_all(job, "cells are TP1 x CP1 x EP1", "recovered from the loss", f"{EVEN} 3 ranks")
    reshape(job, "--ep", "2")
    job.finish()
    assert assert_same(job, jobs.undisturbed(*EP2, ranks=4))[-1].lost == (1,)
    assert shapes(job) == [(1, 2), (1, 1), (1, 2)]


def test_states_come_no_faster_than_allowed(jobs: Jobs) -> None:
    """Then they follow for more steps, in cells of the old shape. Who watches sees how far they are."""
    job = start(jobs, *EP2, "--train-iters", "128", "--elastic-background-mbps", "0.4", ranks=4)
    job.read_until(" 1/128")
    for size in ("1", "2"):
        reshape(job, "--ep", size)
    job.finish()
    assert_same(job, jobs.undisturbed(*EP2, "--train-iters", "128", ranks=4))
    assert all(event["steps"] > 1 for event in job.events("reshaped"))
    first = job.layouts()[0].epoch
    told = [each for each in job.events("copying") if each["epoch"] == first]
    done = {rank: (have, size) for each in told
            for rank, have, size in zip(each["ranks"], each["done"], each["bytes"], strict=True)}  # fmt: skip
    assert done and all(0 < have <= size for have, size in done.values())


@pytest.mark.parametrize(("tp", "pp", "ep", "extra"), [
    (1, 2, (1, 2, 1), f"{EVERYTHING} {BIAS}"),
    (2, 1, (1, 2, 1), f"--sequence-parallel {BIAS}"),
    (1, 1, (4, 1, 2, 4), "--elastic-replay state --mtp-num-layers 1 --position-embedding-type rope "
                         "--elastic-verify-every 1"),
    (1, 1, (2, 1, 4, 2), "--context-parallel-size 2"),
], ids=["PP2, everything", "TP2, biased", "EP4, states replayed", "CP2"])  # fmt: skip
def test_other_models(jobs: Jobs, tp: int, pp: int, ep: tuple[int, ...], extra: str) -> None:
    flags = (*Grid(tp=tp, pp=pp, steps=24).flags, *EXACT, *extra.split(), "--expert-model-parallel-size", str(ep[0]))
    ranks = 4 * tp * pp
    job = start(jobs, *flags, ranks=ranks)
    job.read_until(" 1/24")
    for size in ep[1:]:
        reshape(job, "--ep", str(size))
    job.finish()
    assert_same(job, jobs.undisturbed(*flags, ranks=ranks))
    assert [size for _, size in shapes(job)] == list(ep)
    follows = "--elastic-replay" not in flags
    assert all((event["steps"] > 0) == follows for event in job.events("reshaped"))


def test_contexts_are_shared_by_fewer_and_by_more(jobs: Jobs) -> None:
    """Up to the first change no bit is another one, and after it losses differ by rounding. A rank is killed in the new
    cells before another has heard of them, which hears it from the interrupt.
    """
    flags = (*Grid(tp=1, pp=1, steps=14).flags, *WITHOUT_DROPOUT, "--elastic-slices", "4", "--num-layers", "2",
             "--context-parallel-size", "2")  # fmt: skip
    job = start(jobs, *flags, *inject("2@edit"), "--elastic-inject", "hang:rank=1,at=switch,for=1", ranks=4)
    job.read_until(" 1/14")
    reshape(job, "--cp", "1")
    job.read_until(f"{EVEN} 3 ranks")
    reshape(job, "--cp", "2")
    job.finish()
    assert shapes(job) == [(2, 1), (1, 1), (2, 1)]
    reference, before = jobs.undisturbed(*flags, ranks=4).metrics(), job.events("reshaped")[0]["step"]
    for step, line in job.metrics().items():
        for name in ("loss", "grad_norm"):
            assert line[name] == pytest.approx(reference[step][name], rel=1e-4), (step, name)
            assert step >= before or line[name] == reference[step][name]


def test_newcomers_and_checkpoints(jobs: Jobs, tmp_path: Path) -> None:
    """Who comes later begins with the flags' sizes, and gets into cells of others. Without copies, a checkpoint that
    such cells have saved is what is gone back to when a rank dies; and another job goes on from it with the flags'.
    """
    saves = ("--save", str(tmp_path), "--save-interval", "3")
    job = start(jobs, *EP2, *saves, "--elastic-replicas", "0", "--elastic-respawn", ranks=4)
    job.read_until(" 1/32")
    reshape(job, "--ep", "1")
    while not any(job.layouts()[-1].epoch == event["epoch"] for event in job.events("saved")):
        job.read_until("step ")
    job.kill(2)
    job.read_until("Going back to the checkpoint of step")
    job.read_until(f"{EVEN} 4 ranks")
    reshape(job, "--ep", "2")
    job.finish()
    reference = jobs.undisturbed(*EP2, ranks=4)
    assert_same(job, reference)
    assert shapes(job) == [(1, 2), (1, 1), (1, 2)]
    (fallback,) = job.events("fallback")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(str(fallback["step"]))
    rest = jobs.run(*EP2, "--load", str(tmp_path), ranks=4).metrics()
    assert min(rest) == fallback["step"] + 1
    assert all(line["loss_hex"] == reference.metrics()[step]["loss_hex"] for step, line in rest.items())


def test_what_cannot_be_is_refused(jobs: Jobs, capsys: pytest.CaptureFixture[str]) -> None:
    """With the reason, and before anything happens."""
    flags = (*Grid(tp=1, pp=1, steps=8).flags, *EXACT, "--expert-model-parallel-size", "2", "--seq-length", "36")
    job = start(jobs, *flags, ranks=4)
    job.read_until(" 1/8")
    for sizes, reason in (
        ("--ep 3", "4 experts cannot be divided among 3"),
        ("--ep 8", "4 experts cannot be divided among 8"),
        ("--cp 4", "--seq-length 36 is not divisible by 2 x 4"),
        ("--cp 6", "a cell is to be 6 ranks, and stage 0 has 4"),
        ("--tp 2", "--num-experts with more than one tensor-parallel rank needs --sequence-parallel"),
        ("--tp 3", "--num-attention-heads 4 is not divisible by 3"),
    ):
        assert cli.main(["scale", str(job.run_dir), *sizes.split()]) == 1
        assert reason in capsys.readouterr().out, sizes
    for wrong in ("--ep 0", "--ep 1 --dp 2", "--cp 2 --pp 2"):
        with pytest.raises(SystemExit) as refused:
            cli.main(["scale", str(job.run_dir), *wrong.split()])
        assert refused.value.code == 2
    job.finish()
    assert job.events("asked") == [] and shapes(job) == [(1, 2)]
