"""The right numbers in every layout: from one checkpoint all learn what one rank learns, whatever the model is.

    MEGATRON_LM_PATH=$PWD/Megatron-LM bash scripts/test.sh tests/models/test_numbers.py

prints a line of the table in ``docs/megatron.md`` for each model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.jobs import Job
from tests.models.test_checkout import CheckoutJobs, checkout, needs_checkout, patched
from tests.models.test_models import DOCUMENTS, LATENT, LLAMA, MIXTRAL, MODELS, further_losses

__all__ = ["checkout", "patched"]
pytestmark = [needs_checkout, pytest.mark.timeout(1200)]

FLAGS = ("--elastic", "--train-iters", "3", "--global-batch-size", "8", "--attention-dropout", "0",
         "--hidden-dropout", "0", "--eval-iters", "0")  # fmt: skip
TOLERANCE = 1e-6
"""Relative difference of a loss and of a norm of gradients: sums over a layer's ranks are floating-point."""
LOGGED = 2e-6
"""The same of what Megatron logs besides, with seven digits."""
BY_TOKEN = "--calculate-per-token-loss --eod-mask-loss --vocab-size 399"
Z_LOSS = "--moe-z-loss-coeff 1e-1"
"""Of a size that shows in a norm."""
HERE = {
    "dense": "",
    "as Llama, grouped queries": f"{LLAMA} --group-query-attention --num-query-groups 2",
    "no positions, quick GEGLU": "--position-embedding-type none --quick-geglu --no-bias-gelu-fusion",
    "documents kept apart": " ".join(DOCUMENTS),
    "losses by token": BY_TOKEN,
    "experts, loss by sequence": f"{MIXTRAL} {Z_LOSS} --moe-router-load-balancing-type seq_aux_loss "
                                 "--micro-batch-size 2",
    "experts, two losses": f"{LLAMA} --num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 1e-1 1e-1 "
                           "--moe-router-load-balancing-type aux_loss seq_aux_loss",
    "experts, sinkhorn": f"{LLAMA} --num-experts 4 --moe-router-topk 1 --moe-router-load-balancing-type sinkhorn",
    "experts, losses by token": f"{MIXTRAL} {Z_LOSS} --moe-aux-loss-coeff 1 {BY_TOKEN}",
    "experts, losses by token and sequence": f"{MIXTRAL} {Z_LOSS} --moe-aux-loss-coeff 1 {BY_TOKEN} "
                                             "--moe-router-load-balancing-type seq_aux_loss --micro-batch-size 2",
    "latent attention, no latent queries": LATENT.replace("--q-lora-rank 24 ", "") + " --rope-type yarn",
    "further predictions, losses by token": f"{MODELS['further predictions']} {BY_TOKEN}",
}  # fmt: skip
ROWS = {**{name: flags for name, flags in MODELS.items() if "capacity" not in flags}, **HERE}
"""What a model can be. With a capacity tokens are dropped by what a rank has of a sequence, as in Megatron."""
TP2, CP2, EP2, PP2 = (
    f"--{name}-parallel-size 2" for name in ("tensor-model", "context", "expert-model", "pipeline-model")
)
TP2 += " --make-vocab-size-divisible-by 256"
"""Megatron pads the vocabulary to a multiple of this and TP, and what it pads with is in the loss: 512 in every row."""
LAYOUTS = {
    "TP2": TP2,
    "TP2, SP": f"{TP2} --sequence-parallel",
    "CP2": CP2,
    "EP2": EP2,
    "EP2, allgather": f"{EP2} --moe-token-dispatcher-type allgather",
    "PP2": PP2,
    "PP4": "--pipeline-model-parallel-size 4",
    "VPP2": f"{PP2} --num-virtual-stages-per-pipeline-rank 2",
}
COMBINED = {
    "TP2 x PP2": f"{TP2} {PP2}",
    "TP2 x PP2, SP": f"{TP2} {PP2} --sequence-parallel",
    "PP2 x CP2": f"{PP2} {CP2}",
    "EP2 x PP2": f"{EP2} {PP2}",
    "TP2 x CP2": f"{TP2} {CP2}",
    "TP2 x CP2, SP": f"{TP2} {CP2} --sequence-parallel",
}
"""Of four ranks."""


def layouts_of(model: str, layouts: Mapping[str, str]) -> dict[str, str]:
    """Those that a model can have: experts are shared if there are some, and need ``--sequence-parallel`` with TP."""
    experts = "--num-experts" in model
    return {name: flags for name, flags in layouts.items()
            if not (TP2 in flags and "--sequence" not in flags if experts else "--expert-model" in flags)}  # fmt: skip


def gap(job: Job, reference: Job) -> float:
    """The greatest relative difference of a loss or a norm of gradients."""
    theirs = reference.metrics()
    return max(abs(line[name] / theirs[step][name] - 1)
               for step, line in job.metrics().items() for name in ("loss", "grad_norm"))  # fmt: skip


def logged(job: Job) -> dict[int, dict[str, float]]:
    """Losses of routers and of further predictions that Megatron has logged, by step."""
    return further_losses(*job.run_dir.glob("logs/*"))


@pytest.mark.parametrize("name", ROWS)
def test_every_layout_learns_what_one_rank_learns(
    patched: CheckoutJobs, tmp_path: Path, measured: Callable[[object], None], name: str
) -> None:
    measured(compare_layouts(patched, tmp_path, name, LAYOUTS))


@pytest.mark.parametrize("name", ["dense", "experts", "latent attention"])
def test_combined_layouts_do(
    patched: CheckoutJobs, tmp_path: Path, measured: Callable[[object], None], name: str
) -> None:
    measured(compare_layouts(patched, tmp_path, name, COMBINED))


def compare_layouts(patched: CheckoutJobs, tmp_path: Path, name: str, layouts: Mapping[str, str]) -> str:
    """Steps 2 and 3 of a model, from a checkpoint of step 1, in each layout. Returns its line of the table."""
    model = (*FLAGS, *ROWS[name].split())
    alone = patched.run(*model, "--save", str(tmp_path), "--save-interval", "1", ranks=1)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("1")
    gaps = {}
    for layout, flags in layouts_of(ROWS[name], layouts).items():
        ranks = 4 if layout == "PP4" or layout in COMBINED else 2
        job = patched.run(*model, "--load", str(tmp_path), *flags.split(), ranks=ranks)
        assert list(job.metrics()) == [2, 3]
        gaps[layout] = gap(job, alone)
        for step, values in logged(job).items():
            assert values == pytest.approx(logged(alone)[step], rel=LOGGED), layout
    assert {layout: value for layout, value in gaps.items() if value > TOLERANCE} == {}
    cells = ((f"{gaps[layout]:.0e}" if gaps[layout] else "0") if layout in gaps else "" for layout in layouts)
    return f"| {name} | {' | '.join(cells)} |"
