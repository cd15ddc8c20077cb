"""Experts: a layer's feed-forward is several, of which a router chooses for each token; whoever dies, the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_elastic import cli
from megatron_elastic.observe.records import read_digest
from tests.checkpoints.test_interchange import tensors
from tests.jobs import Grid, Jobs, assert_same_training, inject

EXPERTS = ("--num-experts 4 --moe-ffn-hidden-size 24 --moe-shared-expert-intermediate-size 16 --disable-bias-linear "
           "--moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3 --swiglu")  # fmt: skip
EVERYTHING = "--elastic-schedule split --overlap-grad-reduce --overlap-param-gather --recompute-granularity full"


BIAS = "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-2 --bf16"
ROUTER = ("--moe-router-pre-softmax --moe-router-num-groups 2 --moe-router-group-topk 1 --moe-router-dtype fp32 "
          "--moe-router-topk-scaling-factor 2.5 --moe-expert-capacity-factor 1 --moe-token-dispatcher-type alltoall "
          "--calculate-per-token-loss --attention-softmax-in-fp32 --apply-residual-connection-post-layernorm")
"""What else Megatron-LM's script takes that the example takes, too."""


@pytest.mark.parametrize(("tp", "ep", "pp", "extra"), [
    (1, 2, 2, f"{EVERYTHING} {BIAS}"),
    pytest.param(1, 2, 2, ROUTER),
    pytest.param(1, 1, 2, ""),
    pytest.param(2, 1, 2, f"--sequence-parallel {BIAS}"),
    pytest.param(2, 2, 1, f"--sequence-parallel {BIAS}"),
    pytest.param(1, 2, 1, "--elastic-replay state"),
], ids=["EP2 x PP2, everything", "EP2 x PP2, routed", "PP2",
        "TP2 x PP2, biased", "TP2 x EP2, biased", "EP2, states replayed"])  # fmt: skip
def test_killed(jobs: Jobs, tp: int, ep: int, pp: int, extra: str) -> None:
    flags = (*Grid(tp=tp, pp=pp, steps=4).flags, *EXPERTS.split(), "--expert-model-parallel-size", str(ep),
             *extra.split())  # fmt: skip
    reference = jobs.undisturbed(*flags)
    kills = {5: "5@2:backward"} if tp * ep == 4 else {5: "5@2:backward", 1: "1@4:apply"}  # of two cells a stage
    job = jobs.run(*flags, *inject(*kills.values()))
    assert_same_training(job, reference, sorted(kills))


@pytest.mark.parametrize(("tp", "victim"), [
    (2, 5),
    pytest.param(1, 0),
    pytest.param(1, 1),
], ids=["TP2 x EP2", "EP2, the first place", "EP2, the last place"])  # fmt: skip
def test_a_cell_is_repaired(jobs: Jobs, tp: int, victim: int) -> None:
    """The newcomer takes the place that was lost, and the others of the cell those that they had."""
    ranks = 4 * tp
    flags = (*Grid(tp=tp, pp=1, steps=100, ranks=ranks).flags, *EXPERTS.split(), "--expert-model-parallel-size", "2",
             "--num-layers", "2", "--micro-batch-size", "2", *["--sequence-parallel"] * (tp > 1))  # fmt: skip
    job = jobs.start(*flags, "--elastic-respawn", *inject(f"{victim}@3:grad_sync"), ranks=ranks)
    job.read_until(f"slices and grains are even over {ranks} ranks")
    job.finish()
    assert_same_training(job, jobs.undisturbed(*flags, ranks=ranks), [victim])
    first, *_, last = job.layouts()
    broken = first.cell_of(victim).ranks
    assert tuple(ranks if rank == victim else rank for rank in broken) in [
        cell.ranks for cell in last.stages[0].cells if not cell.shadow
    ]


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


@pytest.mark.parametrize("extra", [
    f"{BIAS} --mtp-num-layers 1 --position-embedding-type rope",
    pytest.param("--elastic-schedule split --overlap-grad-reduce --recompute-granularity full"),
    pytest.param("--tensor-model-parallel-size 2 --sequence-parallel"),
], ids=["biased, further prediction", "split, recomputed", "TP2"])  # fmt: skip
def test_how_many_ranks_share_experts_changes_no_bit(jobs: Jobs, extra: str) -> None:
    """From the first weights on, whatever the number of slices: losses and norms say so, step by step."""
    flags = (*Grid(tp=1, pp=1, steps=4).flags, *EXPERTS.split(), "--moe-token-dispatcher-type", "alltoall",
             *extra.split())  # fmt: skip
    tp = 2 if "--tensor-model-parallel-size 2" in extra else 1
    runs = [jobs.undisturbed(*flags, "--expert-model-parallel-size", str(ep), ranks=tp * ranks).metrics()
            for ep, ranks in ((1, 2), (2, 2), (4, 4))]  # fmt: skip
    for step, line in runs[0].items():
        for other in runs[1:]:
            for name in ("loss_hex", "grad_norm_hex"):
                assert other[step][name] == line[name], (step, name)
