"""Megatron-LM's own launch scripts with ``--elastic``: what of their lines has to change on this machine, and why.

    MEGATRON_LM_PATH=$PWD/Megatron-LM bash scripts/test.sh tests/launch/test_example_scripts.py

The checkout's scripts are run as they are, with a ``torchrun`` that writes its arguments down. Then ``CHANGES``, and
nothing else but a port that is free, makes small jobs for CPUs of them, which ``launch_torchrun_compat.sh`` starts.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.jobs import ROOT, Jobs
from tests.launches import free_port
from tests.models.test_checkout import CheckoutJobs, assert_same, checkout, inject, needs_checkout, patched

__all__ = ["checkout", "patched"]

STEPS = 3
BATCH = 16
SCRIPT = "pretrain_gpt.py"
VOCABULARY = "--tokenizer-type NullTokenizer --vocab-size 400"


class Change(NamedTuple):
    """What takes the place of a flag and its values, nothing if it is left out; and why: its size, the device, data,
    what Megatron itself refuses, or what does not work yet.
    """

    instead: str
    why: str


SIZES = {
    "--num-layers": "4", "--hidden-size": "32", "--ffn-hidden-size": "64", "--num-attention-heads": "4",
    "--num-query-groups": "2", "--kv-channels": "8", "--seq-length": "32", "--max-position-embeddings": "32",
    "--global-batch-size": str(BATCH), "--train-iters": str(STEPS), "--eval-iters": "2",
    "--pipeline-model-parallel-size": "2",
}  # fmt: skip
"""Of any script that has the flag."""
DEVICE = "--transformer-impl local --no-gradient-accumulation-fusion --no-persist-layer-norm --no-masked-softmax-fusion"
"""What is added to any script: there is neither Transformer Engine nor a GPU."""
ROTARY = "--no-rope-fusion"
"""Where positions are rotated, too."""
SPLIT = Change("--split 3,1,1", "data")
CHANGES: dict[str, dict[str, Change]] = {
    "mixtral/train_mixtral_8x7b_distributed.sh": {
        "--expert-model-parallel-size": Change("--expert-model-parallel-size 2", "size"),
        "--moe-grouped-gemm": Change("", "device"),
        "--tokenizer-type": Change(VOCABULARY, "data"), "--tokenizer-model": Change("", "data"), "--split": SPLIT,
    },
    "gpt3/train_gpt3_175b_distributed.sh": {
        "--tensor-model-parallel-size": Change("--tensor-model-parallel-size 2", "size"),
        "--rampup-batch-size": Change("--rampup-batch-size 8 4 24", "size"),
        "--train-iters": Change("--train-samples 48", "Megatron"),
        "--lr-decay-iters": Change("--lr-decay-samples 660480000", "Megatron"),
        "--vocab-file": Change(VOCABULARY, "data"), "--merge-file": Change("", "data"), "--split": SPLIT,
    },
    "llama/train_llama3_8b_h100_fp8.sh": {
        "--train-samples": Change(f"--train-samples {STEPS * BATCH}", "size"),
        "--vocab-size": Change("--vocab-size 400", "size"),
        "--fp8-format": Change("", "device"), "--fp8-amax-history-len": Change("", "device"),
        "--fp8-amax-compute-algo": Change("", "device"), "--fp8-param-gather": Change("", "device"),
        "--apply-layernorm-1p": Change("", "device"), "--profile": Change("", "device"),
    },
}  # fmt: skip
"""By script under ``examples/``, and flag; besides ``SIZES`` and what is added."""

DEEPSEEK = """
    --use-mcore-models --disable-bias-linear --seq-length 4096 --max-position-embeddings 163840 --num-layers 61
    --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 --init-method-std 0.006
    --attention-dropout 0.0 --hidden-dropout 0.0 --normalization RMSNorm --norm-epsilon 1e-6
    --position-embedding-type rope --swiglu --untie-embeddings-and-output-weights --rotary-base 10000
    --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64
    --v-head-dim 128 --qk-layernorm --rotary-scaling-factor 40 --mscale 1.0 --mscale-all-dim 1.0
    --num-experts 256 --moe-layer-freq ([0]*3+[1]*58) --moe-ffn-hidden-size 2048
    --moe-shared-expert-intermediate-size 2048 --moe-router-topk 8 --moe-router-num-groups 8 --moe-router-group-topk 4
    --moe-router-score-function sigmoid --moe-router-topk-scaling-factor 2.5 --moe-router-enable-expert-bias
    --moe-router-bias-update-rate 1e-3 --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4
    --moe-router-dtype fp32 --moe-token-dispatcher-type alltoall --moe-grouped-gemm --moe-permute-fusion
    --mtp-num-layers 1 --mtp-loss-scaling-factor 0.3
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model TOKENIZER --data-path DATA --split 99990,8,2
    --micro-batch-size 1 --global-batch-size 15360 --lr 2.2e-4 --train-iters 500000 --lr-decay-iters 320000
    --lr-decay-style cosine --min-lr 2.2e-5 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95
    --lr-warmup-iters 2000 --clip-grad 1.0 --bf16
    --tensor-model-parallel-size 1 --pipeline-model-parallel-size 16 --expert-model-parallel-size 64
    --use-distributed-optimizer --sequence-parallel --overlap-param-gather --overlap-grad-reduce
    --recompute-granularity selective --recompute-modules mla_up_proj layernorm
    --log-interval 1 --save-interval 10000 --eval-interval 1000 --eval-iters 10 --save CHECKPOINTS --load CHECKPOINTS
"""
"""A script of its own for DeepSeek-V3 is not among Megatron-LM's: the flags of one."""
CHANGES["DeepSeek-V3"] = {
    "--num-experts": Change("--num-experts 8", "size"),
    "--moe-layer-freq": Change("--moe-layer-freq ([0]+[1]*3)", "size"),
    "--moe-ffn-hidden-size": Change("--moe-ffn-hidden-size 24", "size"),
    "--moe-shared-expert-intermediate-size": Change("--moe-shared-expert-intermediate-size 24", "size"),
    "--moe-router-topk": Change("--moe-router-topk 4", "size"),
    "--moe-router-num-groups": Change("--moe-router-num-groups 4", "size"),
    "--moe-router-group-topk": Change("--moe-router-group-topk 2", "size"),
    "--q-lora-rank": Change("--q-lora-rank 24", "size"), "--kv-lora-rank": Change("--kv-lora-rank 20", "size"),
    "--qk-head-dim": Change("--qk-head-dim 12", "size"), "--v-head-dim": Change("--v-head-dim 10", "size"),
    "--qk-pos-emb-head-dim": Change("--qk-pos-emb-head-dim 8", "size"),
    "--expert-model-parallel-size": Change("--expert-model-parallel-size 2", "size"),
    "--moe-grouped-gemm": Change("", "device"), "--moe-permute-fusion": Change("", "device"),
    "--tokenizer-type": Change(VOCABULARY, "data"), "--tokenizer-model": Change("", "data"), "--split": SPLIT,
}  # fmt: skip


class ScriptJobs(CheckoutJobs):
    """Starts jobs of a checkout's ``pretrain_gpt.py`` by ``launch_torchrun_compat.sh``, with the flags that are given,
    and no others of Megatron's. Those up to the script's name are torchrun's.
    """

    def command(
        self, *flags: str, run_dir: Path, ranks: int = 8, launcher: tuple[str, ...] = (), script: Path | None = None
    ) -> list[str]:
        at = flags.index(SCRIPT)
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
        return [
            "env", f"PATH={path}", f"RUN_DIR={run_dir}", "bash", str(ROOT / "scripts" / "launch_torchrun_compat.sh"),
            *flags[:at], str(self.checkout / SCRIPT), *flags[at + 1 :],
        ]


@pytest.fixture(scope="module")
def scripts(patched: CheckoutJobs, jobs: Jobs, tmp_path_factory: pytest.TempPathFactory) -> ScriptJobs:
    return ScriptJobs(tmp_path_factory.mktemp("scripts"), jobs.data, patched.checkout)


def arguments_of(script: Path, values: Sequence[str], folder: Path) -> list[str]:
    """What a launch script gives torchrun, if it is called with ``values``. It wants a ``pretrain_gpt.py``."""
    folder.mkdir()
    (folder / SCRIPT).touch()
    torchrun = folder / "torchrun"
    torchrun.write_text("#!/bin/bash\nprintf '%s\\0' \"$@\" > arguments\n")
    torchrun.chmod(0o755)
    path = os.pathsep.join((str(folder), os.environ["PATH"]))
    subprocess.run(["bash", script, *values], cwd=folder, env={**os.environ, "PATH": path}, check=True)
    return (folder / "arguments").read_text().split("\0")[:-1]


def changes_of(script: str, given: Sequence[str]) -> dict[str, Change]:
    """All that changes of the flags of a script."""
    sizes = {flag: Change(f"{flag} {value}", "size") for flag, value in SIZES.items() if flag in given}
    return {**sizes, **CHANGES[script]}


def changed(given: Sequence[str], changes: Mapping[str, Change]) -> Iterator[str]:
    """Words with what takes the place of some flags. Every change must be of one that is given."""
    assert set(changes) <= set(given), set(changes) - set(given)
    flag = ""
    for word in given:
        if word.startswith("--"):
            flag = word
            yield from changes[flag].instead.split() if flag in changes else [flag]
        elif flag not in changes:
            yield word
    yield from DEVICE.split()
    if "--position-embedding-type" in given:
        yield ROTARY


def small(script: str, scripts: ScriptJobs, folder: Path) -> list[str]:
    """The command line, from torchrun's flags on, of a small job that keeps its checkpoints in ``folder``."""
    checkpoints, data = str(folder / "checkpoints"), str(scripts.data / "data")
    if script == "DeepSeek-V3":
        flags = DEEPSEEK.replace("CHECKPOINTS", checkpoints).replace("DATA", data).split()
        words = ["--nproc-per-node", "8", SCRIPT, *flags]
    else:
        values = {"mixtral": (checkpoints, "TOKENIZER", data),
                  "gpt3": (checkpoints, str(folder / "tensorboard"), "VOCABULARY", "MERGES", data),
                  "llama": (checkpoints, str(folder / "tensorboard"))}[Path(script).parent.name]  # fmt: skip
        words = arguments_of(scripts.checkout / "examples" / script, values, folder)
        words[words.index("--master_port") + 1] = str(free_port())
    launcher, given = words[: words.index(SCRIPT)], words[words.index(SCRIPT) + 1 :]
    return [*launcher, SCRIPT, *changed(given, changes_of(script, given))]


@pytest.mark.job
@needs_checkout
@pytest.mark.parametrize("script", CHANGES)
def test_a_launch_script_trains_elastically(scripts: ScriptJobs, tmp_path: Path, script: str) -> None:
    """On 8 ranks, one of which is killed: as if none were."""
    undisturbed = scripts.run(*small(script, scripts, tmp_path / "undisturbed"))
    killed = scripts.run(*small(script, scripts, tmp_path / "killed"), *inject("kill:rank=3,step=2,at=backward"))
    assert_same(killed, undisturbed)
    assert len(killed.metrics()) >= STEPS
    assert killed.events("recovered")


def test_docs_have_the_same_changes() -> None:
    text = (ROOT / "docs" / "megatron.md").read_text()
    assert f"`{DEVICE}`" in text
    for script, changes in CHANGES.items():
        for flag, (instead, why) in changes.items():
            row = f"| {Path(script).name} | `{flag}` | {f'`{instead}`' if instead else 'left out'} | {why} |"
            assert row in text, row
    for flag, value in SIZES.items():
        assert f"`{flag} {value}`" in text, flag
