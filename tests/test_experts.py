"""Experts: a layer's feed-forward is several, of which a router chooses for each token; whoever dies, the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_elastic import cli
from megatron_elastic.observe.records import read_digest
from tests.jobs import Grid, Jobs, assert_same_training, inject
from tests.test_interchange import tensors

EXPERTS = ("--num-experts 4 --moe-ffn-hidden-size 24 --moe-shared-expert-intermediate-size 16 --disable-bias-linear "
           "--moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3 --swiglu")  # fmt: skip
EVERYTHING = "--elastic-schedule split --overlap-grad-reduce --overlap-param-gather --recompute-granularity full"


BIAS = "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-2 --bf16"


@pytest.mark.parametrize(("tp", "ep", "pp", "extra"), [
    (1, 2, 2, f"{EVERYTHING} {BIAS}"),
    pytest.param(1, 1, 2, ""),
    pytest.param(2, 1, 2, f"--sequence-parallel {BIAS}"),
    pytest.param(2, 2, 1, f"--sequence-parallel {BIAS}"),
    pytest.param(1, 2, 1, "--elastic-replay state"),
], ids=["EP2 x PP2, everything", "PP2", "TP2 x PP2, biased", "TP2 x EP2, biased", "EP2, states replayed"])  # fmt: skip
def test_killed(jobs: Jobs, tp: int, ep: int, pp: int, extra: str) -> None:
    flags = (*Grid(tp=tp, pp=pp, steps=4).flags, *EXPERTS.split(), "--expert-model-parallel-size", str(ep),
             *extra.split())  # fmt: skip
    reference = jobs.undisturbed(*flags)
    kills = {5: "5@2:backward"} if tp * ep == 4 else {5: "5@2:backward", 1: "1@4:apply"}  # of two cells a stage
    job = jobs.run(*flags, *inject(*kills.values()))
    assert_same_training(job, reference, sorted(kills))


@pytest.mark.parametrize("victim", [1, 2])
def test_ranks_that_share_experts_are_replaced(jobs: Jobs, victim: int) -> None:
    """The newcomer takes the last place of a cell, and the spare of the broken cell another than it had, or its own."""
    flags = (*Grid(tp=1, pp=1, steps=60, ranks=4).flags, *EXPERTS.split(), "--expert-model-parallel-size", "2",
             "--num-layers", "2", "--micro-batch-size", "2")  # fmt: skip
    job = jobs.start(*flags, "--elastic-respawn", *inject(f"{victim}@3:grad_sync"), ranks=4)
    job.read_until("slices and grains are even over 4 ranks")
    job.finish()
    assert_same_training(job, jobs.undisturbed(*flags, ranks=4), [victim])
    assert [cell.ranks[1] for cell in job.layouts()[-1].stages[0].cells].count(4) == 1


@pytest.mark.parametrize("ep", [1, 2])
def test_experts_and_biases_move_with_their_layers(jobs: Jobs, tmp_path: Path, ep: int) -> None:
    """Into another stage, and through checkpoints of another layout; biases are not zero."""
    ranks = 4 * ep
    pp2 = (*Grid(tp=1, pp=2, steps=6).flags, *EXPERTS.split(), *BIAS.split(), "--expert-model-parallel-size", str(ep))
    saves = ("--save", str(tmp_path), "--save-interval", "3")
    reference = jobs.undisturbed(*pp2, ranks=ranks)
    job = jobs.run(*pp2, *saves, *inject(f"{2 * ep}@2:backward", f"{3 * ep}@4:backward"), ranks=ranks)
    assert job.layouts()[-1].pipeline_size == 1
    assert cli.main(["compare", str(job.run_dir), str(reference.run_dir)]) == 0, job.output
    biases = [unit for unit in read_digest(job.run_dir)["units"] if unit.startswith("bias.")]
    assert len(biases) == 4
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    rest = jobs.run(*pp2, "--pipeline-model-parallel-size", "1", "--load", str(tmp_path), ranks=ranks)
    theirs = reference.metrics()
    assert [line["loss_hex"] for line in rest.metrics().values()] == [theirs[step]["loss_hex"] for step in (4, 5, 6)]
    saved = tensors(tmp_path / "iter_0000003")
    found = torch.cat([tensor.flatten() for name, tensor in saved.items() if name.endswith("router.expert_bias")])
    assert found.numel() == 4 * 4 and found.abs().max() > 0.5e-2
