"""The memory that a job needs: weights as Megatron has them, and who keeps what."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from gpt_arguments import parse_args

from megatron_elastic import cli
from megatron_elastic.plan.costs import memory
from megatron_elastic.plan.costs.operations import flops_per_token
from tests.jobs import Jobs

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("data")
    for name in ("data.bin", "data.idx"):
        (folder / name).touch()
    (folder / "data.json").write_text('{"vocab_size": 100, "eod": 0, "documents": 1, "tokens": 1, "dtype": "uint16"}')
    return (
        f"--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 "
        f"--global-batch-size 8 --train-iters 5 --lr 1e-3 --data-path {folder}"
    )


@pytest.mark.job
@pytest.mark.parametrize(
    "extra",
    [
        "",
        "--swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights "
        "--position-embedding-type rope",
        "--group-query-attention --num-query-groups 2 --add-qkv-bias --kv-channels 16 --ffn-hidden-size 48",
        "--qk-layernorm --group-query-attention --num-query-groups 2",
        "--multi-latent-attention --position-embedding-type rope --q-lora-rank 24 --kv-lora-rank 20 --qk-head-dim 12 "
        "--qk-pos-emb-head-dim 8 --v-head-dim 10 --qk-layernorm",
        "--multi-latent-attention --position-embedding-type rope --normalization RMSNorm --rope-type rope",
        "--num-experts 4 --moe-ffn-hidden-size 24 --moe-shared-expert-intermediate-size 40 --disable-bias-linear",
        "--num-experts 2 --moe-ffn-hidden-size 24",
        "--num-experts 3 --swiglu --disable-bias-linear --normalization RMSNorm",
        "--mtp-num-layers 2 --position-embedding-type rope",
        "--mtp-num-layers 2 --position-embedding-type none --num-experts 3 --swiglu --disable-bias-linear "
        "--untie-embeddings-and-output-weights --normalization RMSNorm",
    ],
)
def test_weights_and_operations_are_counted_as_megatron_has_them(flags: str, extra: str) -> None:
    arguments = f"{flags} {extra}".split()
    command = [sys.executable, "-m", "tests.megatron_programs.weights", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    args = parse_args(arguments, world_size=1)
    job, expected = memory.Job.of(args), json.loads(done.stdout.splitlines()[-1])
    assert {unit: job.weights(unit) for unit in expected["weights"]} == expected["weights"]
    # On CPUs all scores are computed, also those that the causal mask hides; and there is the router.
    layers, keys = args.num_layers + (args.mtp_num_layers or 0), 2 * args.kv_channels
    if args.multi_latent_attention:
        keys = args.qk_head_dim + args.qk_pos_emb_head_dim + args.v_head_dim
    besides = layers * (args.seq_length / 2 * args.num_attention_heads * keys)
    besides += len(memory.routed(args)) * args.hidden_size * (args.num_experts or 0)
    assert (flops_per_token(args) / 3 + 2 * besides) * args.seq_length == expected["flops"], "forward"


def test_what_flags_change(flags: str) -> None:
    def needs(extra: str) -> memory.Memory:
        args = parse_args(f"{flags} --elastic {extra}".split(), world_size=4)
        return memory.estimate(memory.first_layout(args, 4), memory.Job.of(args))[0]

    usual = needs("")
    assert usual.owned == usual.replicas
    assert usual.sums == 2 * usual.parameters
    assert needs("--elastic-consistency fast").sums == usual.parameters
    assert needs("--elastic-replicas 0").replicas == 0
    assert needs("--elastic-replicas 2").replicas == 2 * usual.replicas
    assert needs("--elastic-replay state").owned == 2 * usual.owned
    assert needs("--bf16").parameters * 2 == needs("--fp16").parameters * 2 == usual.parameters
    assert needs("--optimizer sgd").owned * 3 == usual.owned * 2
    assert needs("--tensor-model-parallel-size 2").parameters < usual.parameters
    assert needs("--recompute-granularity full").activations < usual.activations
    assert usual.log == 0
    in_stages = needs("--pipeline-model-parallel-size 2")
    assert in_stages.log == 4 * (16 * 32 * 4), "of four grains, forward"
    assert needs("--pipeline-model-parallel-size 4").log == 8 * (16 * 32 * 4)
    assert needs("--pipeline-model-parallel-size 2 --elastic-log-mb 0.008").log == 0, "too large, so it is not kept"
    assert needs("--pipeline-model-parallel-size 2 --elastic-redo step").log == 0
    contexts = needs("--context-parallel-size 2")
    assert (contexts.activations * 2, contexts.owned) == (usual.activations, usual.owned)
    assert needs("--context-parallel-size 2 --pipeline-model-parallel-size 2").log == 8 * (8 * 32 * 4)
    assert usual.total == usual.device - usual.totals + usual.host
    # Of the two largest units, which are layers, a quarter each. One rank has nobody to add up with.
    layer = 12 * 32 * 32 + 13 * 32
    assert usual.totals == 2 * 8 * layer // 4 == 2 * needs("--elastic-consistency fast").totals
    assert needs("--tensor-model-parallel-size 4").totals == 0


def test_what_is_added_up_on_a_device_needs_room_there(flags: str) -> None:
    args = parse_args(f"{flags} --elastic".split(), world_size=4)
    needs = list(memory.estimate(memory.first_layout(args, 4), memory.Job.of(args)).values())
    total = sum(need.device - need.activations for need in needs)
    assert memory.shortage_of_device(needs, total) is None
    assert memory.shortage_of_device(needs, total - 1) is not None


def test_a_shortage_is_one_line(flags: str) -> None:
    args = parse_args(f"{flags} --elastic".split(), world_size=4)
    needs = list(memory.estimate(memory.first_layout(args, 4), memory.Job.of(args)).values())
    total = sum(need.total - need.activations - memory.ARENA for need in needs)
    assert memory.shortage(needs, total) is None
    problem = memory.shortage(needs, total - 1)
    assert problem is not None
    assert "--elastic-replicas 0" in problem
    assert "\n" not in problem
    assert memory.available() > 1 << 28


def test_the_command_prints_a_table(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    script = str(ROOT / "examples" / "pretrain_gpt.py")
    assert cli.main(["plan", "--memory", "--ranks", "2", script, *flags.split()]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["rank", "parameters", "sums", "totals", "gradients", "owned", "replicas", "activations",
                                "log", "device", "host", "total"]  # fmt: skip
    assert lines[-1].startswith("all 2 ranks together: ")
    assert cli.main(["plan", "--memory", "--ranks", "3", script, *flags.split()]) == 2
    assert "--global-batch-size 8" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["plan", "--memory", "--ranks", "0", script, *flags.split()])
    assert "0 is not a number from 1 on" in capsys.readouterr().err


def test_spares_need_nothing_of_it(
    flags: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = str(ROOT / "examples" / "pretrain_gpt.py")
    assert cli.main(["plan", "--memory", "--ranks", "3", script, *flags.split(), "--elastic-spares", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("all 2 ranks together: ")
    monkeypatch.setenv("MEGATRON_ELASTIC_ARGS", "--elastic-spares 2")
    assert cli.main(["plan", "--memory", "--ranks", "4", script, *flags.split()]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("all 2 ranks together: ")
    assert cli.main(["plan", "--memory", "--ranks", "2", script, *flags.split()]) == 2
    assert "--elastic-spares 2: there are 2 ranks in all" in capsys.readouterr().err


def test_a_script_finds_what_is_beside_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "beside_this_script.py").touch()
    (tmp_path / "train.py").write_text("import beside_this_script")
    before = sys.path.copy()
    assert cli.main(["plan", "--memory", "--ranks", "2", str(tmp_path / "train.py")]) == 2
    assert "train.py has no parse_args" in capsys.readouterr().err
    assert sys.path == before


@pytest.mark.parametrize(
    ("text", "said"),
    [("def", "SyntaxError"), ("import nothing_of_this_name", "ModuleNotFoundError"), ("nothing_here", "NameError")],
)
def test_a_script_that_cannot_be_run_is_said_to_be_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    assert cli.main(["plan", "--memory", "--ranks", "2", str(script)]) == 2
    assert f"megatron-elastic plan: error: {script} cannot be run: {said}: " in capsys.readouterr().err


def test_a_job_that_does_not_fit_ends_at_once(jobs: Jobs) -> None:
    job = jobs.start("--num-layers", "80", "--hidden-size", "8192", "--train-iters", "2", ranks=2)
    assert "the 2 ranks of this machine need " in job.finish(code=2)
