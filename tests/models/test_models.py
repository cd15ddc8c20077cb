"""What a ``GPTModel`` can be: with ``--elastic`` it learns what plain Megatron-LM teaches it, whoever is lost."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.jobs import Job
from tests.models.test_checkout import (
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
pytestmark = needs_checkout

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
    "further predictions": "--mtp-num-layers 2 --position-embedding-type rope --no-rope-fusion",
    "DeepSeek-like, further predictions": f"{LATENT} --num-experts 4 --moe-router-topk 2 --moe-layer-freq ([0]+[1]*3) "
                                          "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-3 "
                                          "--mtp-num-layers 2 --mtp-loss-scaling-factor 0.3",
}  # fmt: skip
TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
EP2 = ("--expert-model-parallel-size", "2")
CP2 = ("--context-parallel-size", "2")
PP2 = ("--pipeline-model-parallel-size", "2")
KILLS = inject("kill:rank=3,step=4,at=backward", "kill:rank=1,step=7,at=apply")
MEASURED = re.compile(r"(\w*load_balancing_loss|z_loss|mtp_\d loss): (\S+)")
"""What Megatron logs of a step besides its loss."""
FP16 = ("--fp16", "--accumulate-allreduce-grads-in-fp32", "--initial-loss-scale", str(2**22), "--hysteresis", "1",
        "--loss-scale-window", "2")  # fmt: skip
"""Some steps are skipped at first, and others later: the scale grows soon."""
SCALES = re.compile(r"iteration +(\d+)/.* learning rate: (\S+) .*loss scale: (\S+) .*skipped iterations: +(\d+) ")
TOLERANCE = 1e-5
"""Relative difference of a loss: plain Megatron adds gradients up in floating point."""


def resumed(patched: CheckoutJobs, folder: Path, *flags: str, ranks: int = 4) -> Job:
    """An elastic job that goes on from plain training's second step, and loses two ranks."""
    (folder / "latest_checkpointed_iteration.txt").write_text("2")
    return patched.run("--elastic", *FLAGS, *PP2, *flags, "--load", str(folder), ranks=ranks)


def further_losses(*logs: Path) -> dict[int, dict[str, float]]:
    """Those of routers and of further predictions, by name, of every step that Megatron logged."""
    lines = (re.search(r"iteration +(\d+)/.*", line) for log in logs for line in log.read_text().splitlines())
    return {int(line[1]): {name: float(loss) for name, loss in MEASURED.findall(line[0])} for line in lines if line}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_learns_what_plain_megatron_teaches_it(patched: CheckoutJobs, tmp_path: Path, name: str) -> None:
    """From the same weights, through a checkpoint; and bit by bit the same with ranks that are killed."""
    model = MODELS[name].split()
    whole = losses_of(patched.plain(*FLAGS, *model, "--save", str(tmp_path), ranks=1))
    plain_log = log_of_plain(patched)
    undisturbed = resumed(patched, tmp_path, *model)
    ours = {step: line["loss"] for step, line in undisturbed.metrics().items()}
    assert ours == pytest.approx({step: whole[step] for step in range(3, STEPS + 1)}, rel=TOLERANCE)
    told, logged = further_losses(plain_log), further_losses(*undisturbed.run_dir.glob("logs/*"))
    assert set(logged) == set(ours)
    expects = ("loss" in MODELS[name] and "--num-experts" in MODELS[name]) or "--mtp-num-layers" in MODELS[name]
    for step, values in logged.items():
        assert bool(values) == expects
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
    ("further predictions", "--eod-mask-loss --vocab-size 399", CP2),
    ("DeepSeek-like, further predictions", "", (*TP2, *EP2, "--pipeline-model-parallel-size", "1")),
], ids=["TP2", "EP2", "EP2, bias, allgather", "TP2 x EP2", "CP2, windows", "TP2 x CP2", "CP2 x EP2",
        "TP2 x CP2, latent", "CP2 x EP2, DeepSeek-like", "CP2 x EP4, bias", "CP2, further predictions",
        "TP2 x EP2, further predictions"])  # fmt: skip
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
        # Where experts are divided plain Megatron has two optimizers, and wants the states of two.
        ep = parallel[parallel.index(EP2[0]) + 1] if EP2[0] in parallel else "1"
        rest = losses_after_loading(patched.plain(*FLAGS, *model, EP2[0], ep, "--moe-token-dispatcher-type",
                                                  "allgather", "--load", str(saved), ranks=int(ep)))  # fmt: skip
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


def log_of_plain(patched: CheckoutJobs) -> Path:
    """The log of the newest plain job's reporting rank."""
    return max(patched.folder.glob("plain*/runs/*/logs/rank*.log"), key=lambda path: path.stat().st_mtime)


def scales(*logs: Path) -> dict[int, list[float]]:
    """Loss scale and learning rate after each step that Megatron logged, and whether it was skipped."""
    found = (line for log in logs for line in SCALES.finditer(log.read_text()))
    return {int(line[1]): [float(line[3]), float(line[2]), float(line[4])] for line in found}


@pytest.mark.parametrize(("columns", "model"), [(1, ""), (2, ""), (1, MODELS["experts"])],
                         ids=["one column", "two", "experts"])  # fmt: skip
def test_fp16(
    patched: CheckoutJobs, tmp_path: Path, measured: Callable[[object], None], columns: int, model: str
) -> None:
    """The scale, the steps that are skipped, and the rates are Megatron's; through checkpoints both ways."""
    flags, saved = (*FP16, *model.split()), tmp_path / "saved"
    whole = losses_of(patched.plain(*FLAGS, *flags, "--save", str(tmp_path), ranks=columns))
    told = scales(*log_of_plain(patched).parent.glob("rank*.log"))
    slices = ("--elastic-slices", str(columns))
    undisturbed = resumed(patched, tmp_path, *flags, *slices)
    lines, found = undisturbed.metrics(), scales(*undisturbed.run_dir.glob("logs/rank*.log"))
    for step in range(3, STEPS + 1):
        assert found[step] == pytest.approx(told[step], rel=1e-6)
    ours = {step: lines[step]["loss"] for step in whole if step > 2}
    assert 3 <= len(ours) < STEPS - 2, "some steps after the second are skipped, too"
    measured(f"losses differ by {max(abs(loss / whole[step] - 1) for step, loss in ours.items()):.1g}")
    assert ours == pytest.approx({step: whole[step] for step in ours}, rel=TOLERANCE)
    assert_same(resumed(patched, tmp_path, *flags, *slices, *KILLS, "--save", str(saved)), undisturbed)
    (saved / "latest_checkpointed_iteration.txt").write_text("6")
    patched.plain(*FLAGS, *flags, "--load", str(saved), ranks=columns)
    again = scales(*log_of_plain(patched).parent.glob("rank*.log"))
    for step in (7, 8):
        assert again[step][:2] == pytest.approx(told[step][:2], rel=1e-6)


ATTENTIVE = ("--init-method-std", "0.1")
"""Who looks at whom shows in a loss soon."""
DOCUMENTS = ("--reset-attention-mask", "--reset-position-ids", "--eod-mask-loss", "--vocab-size", "83",
             "--make-vocab-size-divisible-by", "512", *ATTENTIVE)  # fmt: skip
"""They end with a token that most samples have; the data have larger ones, too."""
PP4 = ("--pipeline-model-parallel-size", "4")


@pytest.mark.parametrize(("model", "parallel"), [
    ("", PP4),
    (f"{LLAMA} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1", (*CP2, *PP2)),
    (MODELS["further predictions"], (*TP2, *CP2, "--pipeline-model-parallel-size", "1")),
], ids=["PP4", "CP2, recomputed", "TP2 x CP2, further predictions"])  # fmt: skip
def test_documents_are_kept_apart(patched: CheckoutJobs, tmp_path: Path, model: str, parallel: tuple[str, ...]) -> None:
    """In every stage, by all who share a layer."""
    flags = (*model.split(), *DOCUMENTS)
    plain = [*flags, *(TP2 if TP2[0] in parallel else ()), "--save", str(tmp_path)]
    whole = losses_of(patched.plain(*FLAGS, *plain, ranks=2 if TP2[0] in parallel else 1))
    undisturbed = resumed(patched, tmp_path, *flags, *parallel, ranks=8)
    ours = {step: line["loss"] for step, line in undisturbed.metrics().items()}
    assert ours == pytest.approx({step: whole[step] for step in range(3, STEPS + 1)}, rel=TOLERANCE)
    assert_same(resumed(patched, tmp_path, *flags, *parallel, *KILLS, ranks=8), undisturbed)
    others = [flag for flag in flags if flag != "--reset-attention-mask"]
    together = resumed(patched, tmp_path, *others, *parallel, ranks=8).metrics()
    assert any(together[step]["loss"] != pytest.approx(loss, rel=10 * TOLERANCE) for step, loss in ours.items())


def test_a_layer_that_moves_looks_at_documents_as_before(patched: CheckoutJobs) -> None:
    """From a stage in the middle, which loses all its ranks, to another: its results do not depend on the stage."""
    flags = ("--elastic", *FLAGS, *DOCUMENTS, *PP4)
    kills = inject("kill:rank=2,step=2,at=backward", "kill:rank=3,step=6,at=backward")
    job = patched.run(*flags, *kills, ranks=8)
    first, last = job.layouts()[0], job.layouts()[-1]
    assert (first.pipeline_size, last.pipeline_size) == (4, 3)
    assert_same(job, patched.run(*flags, ranks=8))


@pytest.fixture
def conversations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the same conversations alone, two a line, and a tokenizer of their words.

    Megatron-LM reads them with ``datasets`` and ``transformers`` (4), which nothing else needs.
    """
    pytest.importorskip("datasets")
    transformers = pytest.importorskip("transformers")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    chance = random.Random(5)
    words = [f"word{number}" for number in range(60)]

    def said(role: str, number: int) -> dict[str, str]:
        return {"role": role, "content": " ".join(chance.choices(words, k=number))}

    every = [[said("system", 1), said("user", chance.randint(1, 3)), said("assistant", chance.randint(1, 4))]
             for _ in range(256)]  # fmt: skip
    for name, packs in (("alone", every), ("packed", [a + b for a, b in zip(every[::2], every[1::2], strict=True)])):
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps({'messages': pack})}\n" for pack in packs))
    marks = ["<unk>", "</s>", "<SPECIAL_10>System", "<SPECIAL_11>User", "<SPECIAL_11>Assistant", "<SPECIAL_12>"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(marks + words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")
    fast.save_pretrained(tmp_path / "tokenizer")
    return tmp_path


@pytest.mark.parametrize(("model", "parallel"), [
    ("", PP4), (LLAMA, (*CP2, *PP2)), (LATENT, (*TP2, *CP2, "--pipeline-model-parallel-size", "1")),
], ids=["PP4", "CP2, as Llama", "TP2 x CP2, latent"])  # fmt: skip
def test_conversations(patched: CheckoutJobs, conversations: Path, model: str, parallel: tuple[str, ...]) -> None:
    """``--sft``, which plain Megatron-LM cannot do here: two in a sample are as two in two, whoever is lost."""
    usual = ("--elastic", *FLAGS[:-1], "--sft", "--no-create-attention-mask-in-dataloader", "--legacy-tokenizer",
             "--tokenizer-type", "SFTTokenizer", "--tokenizer-model", str(conversations / "tokenizer"),
             "--sft-tokenizer-prompt-format", "nemotron-nano-v2", "--split", "1,0,0", "--eval-iters", "0",
             *ATTENTIVE, *model.split())  # fmt: skip
    tensors = TP2 if TP2[0] in parallel else ()  # which say what weights are drawn
    alone = patched.run(*usual, *tensors, "--train-iters", "2", "--data-path", str(conversations / "alone.jsonl"),
                        "--micro-batch-size", "2", "--global-batch-size", "32", ranks=2)  # fmt: skip
    flags = (*usual, *parallel, "--data-path", str(conversations / "packed.jsonl"))
    packed = patched.run(*flags, ranks=8)
    assert packed.metrics()[1]["loss"] == pytest.approx(alone.metrics()[1]["loss"], rel=TOLERANCE)
    assert_same(patched.run(*flags, *KILLS, ranks=8), packed)


def test_documents_in_windows(patched: CheckoutJobs, tmp_path: Path) -> None:
    """Layers with a window do not look beyond it, nor beyond a document, for which plain Megatron has no mask."""
    flags = (*DOCUMENTS, "--window-size", "8,0", "--window-attn-skip-freq", "2")
    patched.plain(*FLAGS, *flags, "--save", str(tmp_path), "--exit-interval", "2", ranks=1)
    alone, divided = (
        {step: line["loss"] for step, line in resumed(patched, tmp_path, *flags, *more, ranks=4).metrics().items()}
        for more in ((), CP2)
    )
    assert divided == pytest.approx(alone, rel=TOLERANCE)
    every = (*DOCUMENTS, "--window-size", "31,0")
    wide = resumed(patched, tmp_path, *every, ranks=4).metrics()
    without = resumed(patched, tmp_path, *DOCUMENTS, ranks=4).metrics()
    assert {step: line["loss"] for step, line in wide.items()} == pytest.approx(
        {step: line["loss"] for step, line in without.items()}, rel=TOLERANCE
    )


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
