"""What a ``GPTModel`` can be: with ``--elastic`` it learns what plain Megatron-LM teaches it, whoever is lost."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.jobs import Job
from tests.test_checkout import (
    CheckoutJobs,
    assert_same,
    checkout,
    inject,
    losses_after_loading,
    losses_of,
    needs_checkout,
    patched,
)

__all__ = ["checkout", "patched"]
pytestmark = [needs_checkout, pytest.mark.timeout(600)]

STEPS = 8
FLAGS = ("--train-iters", str(STEPS), "--attention-dropout", "0", "--hidden-dropout", "0", "--save-interval", "2",
         "--eval-interval", "4", "--dist-ckpt-optim-fully-reshardable")  # fmt: skip
LLAMA = "--swiglu --disable-bias-linear --normalization RMSNorm --untie-embeddings-and-output-weights " \
        "--position-embedding-type rope --no-rope-fusion"  # fmt: skip
MIXTRAL = f"{LLAMA} --num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 1e-2"
LATENT = f"{LLAMA} --multi-latent-attention --q-lora-rank 24 --kv-lora-rank 20 --qk-head-dim 12 --v-head-dim 10 " \
         "--qk-pos-emb-head-dim 8 --qk-layernorm"  # fmt: skip
MODELS = {
    "normalised queries, windows": "--qk-layernorm --window-size 8,0 --window-attn-skip-freq 2",
    "learnable softmax, gated attention": f"{LLAMA} --softmax-type learnable --attention-output-gate",
    "partial rotation": f"{LLAMA} --rotary-percent 0.5 --no-rope-freq 2 --softmax-type off-by-one",
    "norms after residuals, squared ReLU": "--apply-residual-connection-post-layernorm --squared-relu "
                                           "--no-bias-gelu-fusion",
    "latent attention": f"{LATENT} --rope-type rope",
    "experts": f"{MIXTRAL} --moe-token-dispatcher-type alltoall --moe-z-loss-coeff 1e-3",
    "experts with capacity": f"{MIXTRAL} --moe-token-dispatcher-type alltoall --moe-expert-capacity-factor 1 "
                             "--moe-router-load-balancing-type seq_aux_loss",
    "experts with a bias": f"{LLAMA} --num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type none "
                           "--moe-router-score-function sigmoid --moe-router-enable-expert-bias "
                           "--moe-router-bias-update-rate 2e-2",
    "shared experts, dense layers": f"{MIXTRAL} --moe-shared-expert-intermediate-size 32 --moe-ffn-hidden-size 24 "
                                    "--moe-layer-freq ([0]+[1]*3) --moe-router-dtype fp32 --moe-router-num-groups 2 "
                                    "--moe-router-group-topk 1 --moe-router-score-function sigmoid "
                                    "--moe-router-topk-scaling-factor 2.5",
    "DeepSeek-like": f"{LATENT} --num-experts 4 --moe-router-topk 2 --moe-shared-expert-intermediate-size 32 "
                     "--moe-layer-freq ([0]+[1]*3) --moe-router-score-function sigmoid --rotary-scaling-factor 40 "
                     "--moe-router-enable-expert-bias --moe-router-load-balancing-type seq_aux_loss "
                     "--moe-aux-loss-coeff 1e-3",
}  # fmt: skip
TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
EP2 = ("--expert-model-parallel-size", "2")
CP2 = ("--context-parallel-size", "2")
PP2 = ("--pipeline-model-parallel-size", "2")
KILLS = inject("kill:rank=3,step=4,at=backward", "kill:rank=1,step=7,at=apply")
ROUTERS = re.compile(r"iteration +(\d+)/.*?((?:\w*load_balancing_loss|z_loss): .*)\| loss scale")
TOLERANCE = 1e-5
"""Relative difference of a loss: plain Megatron adds gradients up in floating point."""


def resumed(patched: CheckoutJobs, folder: Path, *flags: str, ranks: int = 4) -> Job:
    """An elastic job that goes on from plain training's second step, and loses two ranks."""
    (folder / "latest_checkpointed_iteration.txt").write_text("2")
    return patched.run("--elastic", *FLAGS, *PP2, *flags, "--load", str(folder), ranks=ranks)


def router_losses(*logs: Path) -> dict[int, dict[str, float]]:
    """By name, of every step that Megatron logged."""
    found = (line for log in logs for line in ROUTERS.finditer(log.read_text()))
    return {int(line[1]): {name: float(loss) for name, loss in re.findall(r"(\w+): (\S+)", line[2])} for line in found}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_learns_what_plain_megatron_teaches_it(patched: CheckoutJobs, tmp_path: Path, name: str) -> None:
    """From the same weights, through a checkpoint; and bit by bit the same with ranks that are killed."""
    model = MODELS[name].split()
    whole = losses_of(patched.plain(*FLAGS, *model, "--save", str(tmp_path), ranks=1))
    plain_log = max((patched.folder).glob("plain*/runs/*/logs/*.log"), key=lambda path: path.stat().st_mtime)
    undisturbed = resumed(patched, tmp_path, *model)
    ours = {step: line["loss"] for step, line in undisturbed.metrics().items()}
    assert ours == pytest.approx({step: whole[step] for step in range(3, STEPS + 1)}, rel=TOLERANCE)
    told, logged = router_losses(plain_log), router_losses(*undisturbed.run_dir.glob("logs/*"))
    assert set(logged) == set(ours if "loss" in MODELS[name] and "--num-experts" in MODELS[name] else ())
    for step, values in logged.items():
        assert values == pytest.approx(told[step], rel=1e-4)
    assert_same(resumed(patched, tmp_path, *model, *KILLS), undisturbed)


@pytest.mark.parametrize(("name", "more", "parallel"), [
    ("experts", "", TP2), ("experts", "", EP2),
    ("experts with a bias", "", (*EP2, "--moe-token-dispatcher-type", "allgather")),
    ("shared experts, dense layers", "", (*TP2, *EP2, "--pipeline-model-parallel-size", "1")),
    ("normalised queries, windows", "--eod-mask-loss --vocab-size 399", CP2),
    ("partial rotation", "", (*TP2, *CP2, "--pipeline-model-parallel-size", "1")),
    ("experts", "--moe-router-load-balancing-type seq_aux_loss", (*CP2, *EP2)),
    ("latent attention", "", (*TP2, *CP2, "--pipeline-model-parallel-size", "1")),
    ("DeepSeek-like", "", (*CP2, *EP2)),
    ("experts with a bias", "", (*CP2, "--expert-model-parallel-size", "4", "--pipeline-model-parallel-size", "1")),
], ids=["TP2", "EP2", "EP2, bias, allgather", "TP2 x EP2", "CP2, windows", "TP2 x CP2", "CP2 x EP2",
        "TP2 x CP2, latent", "CP2 x EP2, DeepSeek-like", "CP2 x EP4, bias"])  # fmt: skip
def test_models_of_ranks_that_share_them(
    patched: CheckoutJobs, tmp_path: Path, name: str, more: str, parallel: tuple[str, ...]
) -> None:
    """By tensors each has a part of each layer, by experts some experts, by contexts a part of each sequence."""
    model, saved = f"{MODELS[name]} {more}".split(), tmp_path / "saved"
    plain = [*model, *(TP2 if TP2[0] in parallel else ()), "--save", str(tmp_path)]
    whole = losses_of(patched.plain(*FLAGS, *plain, ranks=2 if TP2[0] in parallel else 1))
    undisturbed = resumed(patched, tmp_path, *model, *parallel, ranks=8)
    ours = {step: line["loss"] for step, line in undisturbed.metrics().items()}
    assert ours == pytest.approx({step: whole[step] for step in range(3, STEPS + 1)}, rel=TOLERANCE)
    killed = resumed(patched, tmp_path, *model, *parallel, *KILLS, "--save", str(saved), ranks=8)
    assert_same(killed, undisturbed)
    if TP2[0] not in parallel:
        (saved / "latest_checkpointed_iteration.txt").write_text("6")
        rest = losses_after_loading(patched.plain(*FLAGS, *model, "--load", str(saved), ranks=1))
        assert rest == pytest.approx({step: whole[step] for step in (7, 8)}, rel=TOLERANCE)


@pytest.mark.parametrize(("model", "cp"), [("", 1), (MODELS["experts"], 1), ("", 2)],
                         ids=["dense", "experts", "CP2"])  # fmt: skip
def test_losses_by_token(patched: CheckoutJobs, tmp_path: Path, model: str, cp: int) -> None:
    """Some tokens do not count (the end of a document, which 399 stands for here), in some micro-batches more."""
    flags = (*model.split(), "--calculate-per-token-loss", "--eod-mask-loss", "--vocab-size", "399")
    whole = losses_of(patched.plain(*FLAGS, *flags, "--save", str(tmp_path), ranks=1))
    if cp > 1:
        flags = (*flags, "--context-parallel-size", str(cp))
    undisturbed = resumed(patched, tmp_path, *flags, ranks=4 * cp)
    lines = undisturbed.metrics()
    assert {step: line["loss"] for step, line in lines.items()} == pytest.approx(
        {step: whole[step] for step in range(3, STEPS + 1)}, rel=TOLERANCE)
    assert_same(resumed(patched, tmp_path, *flags, *KILLS, ranks=4 * cp), undisturbed)
    others = [flag for flag in flags if flag != "--calculate-per-token-loss"]
    usual = resumed(patched, tmp_path, *others, ranks=4 * cp).metrics()
    assert any(usual[step]["grad_norm"] != pytest.approx(line["grad_norm"], rel=1e-4) for step, line in lines.items())


def test_losses_by_token_of_micro_batches_that_are_cut(patched: CheckoutJobs, tmp_path: Path) -> None:
    flags = ("--calculate-per-token-loss", "--eod-mask-loss", "--vocab-size", "399", "--micro-batch-size", "2")
    whole = losses_of(patched.plain(*FLAGS, *flags, "--save", str(tmp_path), ranks=1))
    job = resumed(patched, tmp_path, *flags, "--elastic-dataflow", "resize", *KILLS, ranks=8)
    assert any(cell.parts for layout in job.layouts() for stage in layout.stages for cell in stage.cells)
    ours = {step: line["loss"] for step, line in job.metrics().items()}
    assert ours == pytest.approx({step: whole[step] for step in range(3, STEPS + 1)}, rel=TOLERANCE)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--elastic-dataflow resize", "a router looks at whole micro-batches"),
        ("--moe-router-load-balancing-type aux_loss global_aux_loss --moe-aux-loss-coeff 1e-2 1e-2",
         "--moe-router-load-balancing-type aux_loss global_aux_loss does not work with --elastic"),
        ("--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1",
         "experts are cut as other layers are"),
    ],
)  # fmt: skip
def test_experts_that_cannot_be(patched: CheckoutJobs, flags: str, reason: str) -> None:
    job = patched.start("--elastic", *FLAGS, *MIXTRAL.split(), *flags.split(), ranks=2)
    job.output = job.process.communicate(timeout=200)[0]
    assert job.process.returncode in (1, 2), job.output
    assert reason in job.output
    assert "Traceback" not in job.output
