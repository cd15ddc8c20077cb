"""Flags of the example: impossible ones are refused in one line that names flag and fix, before torch is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from gpt_arguments import check_arguments, parse_args

from megatron_elastic.config import ElasticConfig, UsageError
from megatron_elastic.device import visible
from megatron_elastic.plan import Costs
from megatron_elastic.support import REFUSALS, Refusal

ROOT = Path(__file__).parents[2]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("data.bin", "data.idx"):
        (folder / name).touch()
    (folder / "data.json").write_text(
        '{"vocab_size": 1000, "eod": 0, "documents": 1, "tokens": 1, "dtype": "uint16"}')
    return folder


def flags(data: Path, extra: str = "") -> list[str]:
    base = ("--num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 32 --micro-batch-size 2 "
            f"--global-batch-size 32 --train-iters 10 --lr 1e-3 --data-path {data} ")
    return (base + extra).split()


def test_derived_values(data: Path) -> None:
    args = parse_args(flags(data, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"), world_size=8)
    assert (args.world_size, args.data_parallel_size, args.num_grains) == (8, 2, 16)
    assert (args.vocab_size, args.padded_vocab_size) == (1000, 1024)
    assert (args.max_position_embeddings, args.ffn_hidden_size, args.kv_channels) == (32, 256, 8)
    assert (args.lr_decay_iters, args.elastic) == (10, False)
    assert parse_args(flags(data, "--swiglu")).ffn_hidden_size == 128
    assert parse_args(flags(data, "--recompute-granularity full")).recompute_num_layers == 1
    assert not parse_args(flags(data, "--sequence-parallel")).sequence_parallel  # as in Megatron-LM


def test_lengths_in_samples(data: Path) -> None:
    given = [flag for flag in flags(data) if flag not in ("--train-iters", "10")]
    with pytest.raises(UsageError, match="--train-iters or --train-samples is needed"):
        parse_args(given)
    args = parse_args([*given, "--train-samples", "104"])
    assert (args.train_iters, args.lr_decay_samples, args.lr_warmup_samples) == (3, 104, 0)
    with pytest.raises(UsageError, match="--train-samples 31 are too few for a step: its batch has 32; raise it"):
        parse_args([*given, "--train-samples", "31"])
    growing = [*given, "--train-samples", "104", "--rampup-batch-size", "16", "8", "32"]
    assert parse_args(growing).train_iters == 4, "16, 24, 32 and 32 samples"
    with pytest.raises(UsageError, match="--lr-warmup-samples 104 must be below --lr-decay-samples 104"):
        parse_args([*growing, "--lr-warmup-samples", "104"])
    with pytest.raises(UsageError, match="grain must be from 0 to 7 "):
        parse_args([*growing, "--elastic", "--elastic-inject", "kill:rank=0,step=1,at=forward,grain=8"])


@pytest.mark.parametrize("flag", ["elastic-run-dir", "elastic-tls-ca", "save", "load", "data-path"])
def test_a_name_that_is_empty_is_none(data: Path, flag: str) -> None:
    """As of a variable of the shell that is not set: it would be the folder where the job is started."""
    with pytest.raises(UsageError, match=f"--{flag}: .*name is empty"):
        parse_args([*flags(data), f"--{flag}", ""])


@pytest.mark.parametrize("name", ["start", "suspect", "heartbeat", "hang", "report", "wait", "end"])
def test_a_limit_of_time_is_one(name: str) -> None:
    """Clocks of the operating system cannot wait for ever."""
    with pytest.raises(UsageError, match=rf"^--elastic-{name}-timeout must be at most 1e\+09 \(31 years\), got inf"):
        ElasticConfig(**{f"{name}_timeout": float("inf")})  # type: ignore[arg-type]


def test_virtual_stages(data: Path) -> None:
    for given, chunks in (("layers-per-virtual-pipeline-stage 1", 2), ("layers-per-virtual-pipeline-stage 2", None),
                          ("virtual-stages-per-pipeline-rank 2", 2)):
        args = parse_args(flags(data, f"{PP2} --num-{given} --elastic"), world_size=2)
        assert args.virtual_pipeline_model_parallel_size == chunks


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.flag)
def test_a_refusal_of_a_checkout_is_one_here(data: Path, refusal: Refusal) -> None:
    """In the same words; what it works with works."""
    value = [] if refusal.reads is None else ["7"]
    with pytest.raises(UsageError, match=rf"^{refusal.flag}( 7)? does not work with --elastic: .*; |"
                       f"^argument {refusal.flag}: invalid choice: '7'"):
        parse_args([*flags(data, "--elastic"), refusal.flag, *value])
    for allowed in refusal.but:
        if refusal.reads == 1 and allowed and not str(allowed).startswith(("torch.", "0", "transformer_")):
            parse_args([*flags(data, "--elastic"), refusal.flag, str(allowed), "--num-experts", "2"])


def test_what_has_no_effect_in_a_checkout_is_taken_here(data: Path) -> None:
    given = ("--accumulate-allreduce-grads-in-fp32 --ddp-bucket-size 7 --cp-comm-type p2p p2p --no-load-rng "
             "--ckpt-format=torch_dist --manual-gc --log-progress")
    with pytest.raises(UsageError, match="unknown flag --log-progress"):
        parse_args(flags(data, f"{given} --elastic"))
    args = parse_args(flags(data, f"{given.removesuffix(' --log-progress')} --elastic --swiglu"))
    assert args.swiglu
    with pytest.raises(UsageError, match="unknown flag --accumulate-allreduce-grads-in-fp32"):
        parse_args(flags(data, given))


def test_experts_products_at_once_need_a_gpu(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visible, "count", lambda _: 0)
    with pytest.raises(UsageError, match=r"^--moe-grouped-gemm needs a GPU, .*: leave it out"):
        parse_args(flags(data, "--num-experts 4 --moe-grouped-gemm --elastic"))


DIFFERENCES = {
    "--position-embedding-type": "mrope and relative are of other models",
    "--norm-epsilon": "its dest is Megatron-LM's layernorm_epsilon",
    "--transformer-impl": "local is the default, as the example is for CPUs; inference_optimized is refused",
    "--rope-type": "yarn is the default of latent attention, and the flag of nothing else",
    "--moe-router-load-balancing-type": "global_aux_loss is refused, sinkhorn is of other routers",
    "--moe-token-dispatcher-type": "flex is refused",
    "--use-distributed-optimizer": "is the default",
    "--no-use-distributed-optimizer": "so that it can be switched off",
    "--distributed-backend": "elastic besides, and no nccl",
    "--lr-decay-style": "WSD needs further flags",
    "--data-path": "one data set, which it needs", "--moe-aux-loss-coeff": "one number",
    "--optimizer": "muon is refused",
    "--split": "has a default", "--eval-interval": "has a default",
}  # fmt: skip
"""Flags of the example that are not as Megatron-LM's, and how."""


@pytest.mark.checkout
def test_flags_are_those_of_megatron(data: Path) -> None:
    """In another process, as the checkout's ``megatron`` would stay imported."""
    code = (
        "import argparse, json, os, sys\n"
        "sys.path[:0] = [os.environ['MEGATRON_LM_PATH'], 'examples']\n"
        "from megatron_elastic.adaptor.without_cuda import stand_ins\n"
        "stand_ins.install()\n"
        "from gpt_arguments import _build_parser\n"
        "from megatron.training.arguments import add_megatron_arguments\n"
        "def rows(parser):\n"
        "    return {name: [a.dest, a.default, a.nargs, a.choices and sorted(map(str, a.choices))] for a in "
        "parser._actions if a.dest != 'exit_signal' for name in a.option_strings if not name.startswith('--elastic')}\n"
        "theirs = rows(add_megatron_arguments(argparse.ArgumentParser()))\n"
        "print(json.dumps([n for n, row in rows(_build_parser()).items() if row != theirs.get(n)], default=str))\n"
    )  # fmt: skip
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, capture_output=True, text=True,
                          check=True)
    assert set(json.loads(done.stdout.splitlines()[-1])) == set(DIFFERENCES)


TP2, PP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
LATENT = "--multi-latent-attention --position-embedding-type rope"


@pytest.mark.parametrize(("extra", "world_size", "message"), [
    ("--num-layer 3", 1, "unknown flag --num-layer: did you mean --num-layers?"),
    ("--frobnicate=1", 1, "unknown flag --frobnicate: --help lists the flags"),
    ("--lr much", 1, "argument --lr: invalid float value: 'much'"),
    (TP2, 3, "--tensor-model-parallel-size 2 x --pipeline-model-parallel-size 1 = 2 does not divide the world size 3"),
    (f"{TP2} {PP2}", 2, "start a multiple of 4 processes"),
    ("--tensor-model-parallel-size 0", 1, "--tensor-model-parallel-size must be at least 1, got 0"),
    ("--global-batch-size 30", 4, "use 32"),
    ("--micro-batch-size 0", 1, "--micro-batch-size must be at least 1"),
    ("--num-attention-heads 3 --hidden-size 66 " + TP2, 2, "--num-attention-heads 3 is not divisible by --tensor"),
    ("--group-query-attention --num-query-groups 1 " + TP2, 2, "--num-query-groups 1 is not divisible by --tensor-mod"),
    ("--group-query-attention --num-query-groups 3", 1, "--num-attention-heads 8 is not divisible by --num-query"),
    ("--num-query-groups 2", 1, "--num-query-groups needs --group-query-attention"),
    ("--hidden-size 65", 1, "--hidden-size 65 is not divisible by --num-attention-heads 8: use 72"),
    ("--num-layers 5 " + PP2, 2, "--num-layers 5 cannot be split evenly over --pipeline-model-parallel-size 2"),
    ("--ffn-hidden-size 63 " + TP2, 2, "--ffn-hidden-size 63 is not divisible"),
    ("--max-position-embeddings 16", 1, "--max-position-embeddings 16 is below --seq-length 32"),
    ("--hidden-dropout 1.0", 1, "--hidden-dropout must be in [0, 1)"),
    ("--recompute-num-layers 1", 1, "need --recompute-granularity full"),
    ("--recompute-granularity full --recompute-num-layers 3 " + PP2, 2, "--recompute-num-layers must be from 1 to"),
    ("--min-lr 1", 1, "--min-lr 1 is above --lr 0.001"),
    ("--train-samples 64", 1, "--train-iters goes with --lr-decay-iters and --lr-warmup-iters: leave out what is in"),
    ("--lr-warmup-samples 4", 1, "--train-iters goes with --lr-decay-iters and --lr-warmup-iters: leave out what is"),
    ("--rampup-batch-size 8 8 64", 1, "--rampup-batch-size needs --train-samples in place of --train-iters"),
    ("--rampup-batch-size 6 2 64", 2, "START and INCREMENT must be multiples of --micro-batch-size 2 x data-parallel"),
    ("--train-iters 0", 1, "--train-iters must be at least 1, got 0"),
    ("--lr-warmup-iters 10", 1, "--lr-warmup-iters 10 must be below --lr-decay-iters 10"),
    ("--optimizer sgd", 1, "add --no-use-distributed-optimizer"),
    ("--main-grads-dtype bf16", 1, "works with --elastic only"),
    ("--overlap-grad-reduce", 1, "works with --elastic only"),
    ("--overlap-param-gather --elastic", 1, "--overlap-param-gather needs --overlap-grad-reduce"),
    ("--decoupled-min-lr 1e-4", 1, "--decoupled-min-lr needs --decoupled-lr"),
    ("--end-weight-decay 0.1", 1, "need --weight-decay-incr-style linear"),
    ("--weight-decay-incr-style cosine", 1, "needs --start-weight-decay and"),
    ("--weight-decay -1", 1, "must be at least 0 and not fall"),
    ("--optimizer sgd --no-use-distributed-optimizer --load x", 1, "--load does not work with --optimizer sgd"),
    ("--save-interval 3", 1, "--save-interval needs --save"),
    ("--vocab-size 900", 1, "--vocab-size 900 contradicts the data's 1000"),
    ("--split 0,1,1", 1, "--split 0,1,1: expected up to three weights"),
    ("--split x", 1, "--split x: expected up to three weights"),
    (f"--num-virtual-stages-per-pipeline-rank 3 --elastic {PP2}", 2, "chunk 2 of stage 0 of the pipeline would be"),
    (f"--num-virtual-stages-per-pipeline-rank 2 {PP2}", 2, "virtual pipeline stages work with --elastic only"),
    ("--num-layers-per-virtual-pipeline-stage 2 --elastic", 1, "need --pipeline-model-parallel-size 2 or more"),
    (f"--sequence-parallel --seq-length 33 {TP2}", 2, "--seq-length 33 is not divisible by --tensor-model-parallel"),
    (f"{LATENT} --group-query-attention --num-query-groups 2", 1, "leave out --group-query-attention"),
    ("--multi-latent-attention", 1, "--multi-latent-attention needs --position-embedding-type rope"),
    (f"{LATENT} --kv-lora-rank 0", 1, "--kv-lora-rank must be at least 1"),
    (f"{LATENT} {TP2}", 2, "needs --sequence-parallel"),
    (f"{LATENT} {TP2} --sequence-parallel --q-lora-rank 25", 2, "must be divisible by --tensor-model-parallel-size 2"),
    ("--context-parallel-size 2", 2, "--context-parallel-size needs --elastic"),
    ("--elastic --context-parallel-size 2", 3, "x --context-parallel-size 2 = 2 does not divide the world size 3"),
    ("--elastic --context-parallel-size 2 --seq-length 30", 2, "is not divisible by 2 x --context-parallel-size 2"),
    ("--elastic --tensor-model-parallel-size 4 --context-parallel-size 2 --sequence-parallel --seq-length 12", 8,
     "is not divisible by --tensor-model-parallel-size 4 x --context-parallel-size 2"),
    ("--elastic --num-experts 6 --context-parallel-size 2 --expert-model-parallel-size 3 --global-batch-size 36",
     6, "one must divide"),
    ("--elastic --num-experts 8 --context-parallel-size 2 --expert-model-parallel-size 8", 4,
     "data-parallel size 2 x --context-parallel-size 2: start"),
    ("--num-experts 8 --moe-router-topk 9", 1, "--moe-router-topk 9 is more than --num-experts 8"),
    ("--num-experts 8 --tensor-model-parallel-size 2", 2, "needs --sequence-parallel"),
    ("--num-experts 8 --elastic --elastic-dataflow resize", 1, "a router looks at whole micro-batches"),
    ("--expert-model-parallel-size 2", 2, "--expert-model-parallel-size needs --num-experts"),
    ("--num-experts 8 --expert-model-parallel-size 3", 2, "does not divide the data-parallel size 2: start a multiple"),
    ("--num-experts 9 --expert-model-parallel-size 2", 2, "--num-experts 9 is not divisible by"),
    ("--fp16 --bf16", 1, "exclude each other"),
    ("--fp16 --min-loss-scale 8 --initial-loss-scale 4", 1, "--min-loss-scale 8 is above --initial-loss-scale 4"),
    ("--fp16 --initial-loss-scale 0", 1, "--initial-loss-scale must be above 0"),
    ("--loss-scale inf", 1, "--loss-scale must be above 0 and finite"),
    ("--fp16 --loss-scale-window 0", 1, "--loss-scale-window must be at least 1"),
    ("--fp16 --hysteresis 0", 1, "--hysteresis must be at least 1"),
    ("--elastic --elastic-slices 0", 1, "--elastic-slices must be at least 1"),
    ("--elastic --elastic-log-mb nan", 1, "--elastic-log-mb must be 0 or more, got nan"),
    ("--elastic --elastic-background-mbps nan", 1, "--elastic-background-mbps must be 0 or more, got nan"),
    ("--elastic-inject kill:rank=0,step=1,at=forward", 1, "needs --elastic"),
    ("--tensorboard-dir curves", 1, "--tensorboard-dir needs --elastic"),
    ("--elastic --elastic-inject kill:rank=4,step=1,at=forward", 4, "rank must be from 0 to 3"),
    ("--elastic --elastic-inject kill:rank=0,step=11,at=forward", 4, "step must be from 1 to 10"),
    ("--elastic --elastic-trace 3,11-12", 4, "there is no step 11, as 10 is the last one"),
    ("--elastic --elastic-placement search", 4, "--elastic-placement search needs --elastic-schedule search"),
    ("--elastic --elastic-placement v", 4, "--elastic-placement v places 2 chunks on each of several stages, not"),
    ("--elastic --elastic-inject kill:rank=0,step=1,at=forward,grain=16", 4, "grain must be from 0 to 15"),
    ("--elastic --elastic-inject kill:rank=0,step=1,at=lunch", 4, "at=lunch"),
])  # fmt: skip
def test_impossible_flags(data: Path, extra: str, world_size: int, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_arguments(flags(data, extra), world_size)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_faults_of_ranks_that_come_later(data: Path) -> None:
    for more in ("--elastic-respawn", "--elastic-spares 1"):
        check_arguments(flags(data, f"--elastic --elastic-inject kill:rank=4,step=10,at=forward {more}"), 4)


def test_data_that_is_not_there(data: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--data-path .*nowhere.*megatron-elastic data prepare"):
        check_arguments(flags(tmp_path / "nowhere"), 1)
    (data / "data.json").write_text("{")
    with pytest.raises(UsageError, match=r"data\.json cannot be read"):
        check_arguments(flags(data), 1)
    (data / "data.json").unlink()
    with pytest.raises(UsageError, match="--vocab-size is needed"):
        check_arguments(flags(data), 1)
    check_arguments(flags(data, "--vocab-size 900"), 1)


def test_checkpoint_that_cannot_be_loaded(data: Path, tmp_path: Path) -> None:
    load = f"--load {tmp_path / 'checkpoints'}"
    with pytest.raises(UsageError, match=r"latest_checkpointed_iteration\.txt does not exist.*leave --load out"):
        check_arguments(flags(data, load), 1)
    (tmp_path / "checkpoints" / "iter_0000004.partial-0-ab12").mkdir(parents=True)
    check_arguments(flags(data, load), 1)  # a job was killed before its first checkpoint was complete
    tracker = tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt"
    tracker.write_text("soon")
    with pytest.raises(UsageError, match="should hold the number of a checkpoint, or release"):
        check_arguments(flags(data, load), 1)
    tracker.write_text("7")
    with pytest.raises(UsageError, match="iter_0000007 is no complete checkpoint"):
        check_arguments(flags(data, load), 1)


def test_checking_is_light(data: Path) -> None:
    """The launcher reads the script from elsewhere and must not pay for torch."""
    code = ("import runpy, sys; script = runpy.run_path(sys.argv[1], run_name='__preflight__'); "
            "script['check_arguments'](sys.argv[2:], 4); assert not {'torch', 'megatron'} & set(sys.modules)")
    subprocess.run([sys.executable, "-c", code, str(ROOT / "examples" / "pretrain_gpt.py"), *flags(data)], check=True)


def test_a_profile_of_another_model(data: Path, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(Costs.assumed(["embedding", "positions", "layer.0", "head"]).to_json(
        ["embedding", "positions", "layer", "head"]))
    of_it = f"--elastic --elastic-profile {path} --elastic-replicas 0"
    assert parse_args(flags(data, of_it)).elastic_profile == str(path)
    path.write_text(Costs.assumed(["embedding", "layer.0", "head"]).to_json(["embedding", "layer", "head"]))
    with pytest.raises(UsageError, match=f"^--elastic-profile {path}: the profile has no entry for unit 'positions'"):
        parse_args(flags(data, of_it))
    path.unlink()
    assert parse_args(flags(data, of_it)), "on a node that does not read it"
