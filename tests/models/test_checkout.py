"""A real Megatron-LM checkout, from ``MEGATRON_LM_PATH``: patched, plain and elastic, on CPUs.

    git clone --depth 1 -b core_v0.16.1 https://github.com/NVIDIA/Megatron-LM
    pip install six regex pydantic            # what megatron.training imports; tensorboard for its test
    MEGATRON_LM_PATH=$PWD/Megatron-LM bash scripts/test.sh tests/models/test_checkout.py
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch

from megatron_elastic import cli
from megatron_elastic.adaptor import doctor
from megatron_elastic.device import npu
from megatron_elastic.patching import Checkout, apply, revert
from megatron_elastic.support import REFUSALS
from tests.checkpoints.test_interchange import tensors
from tests.jobs import ROOT, Job, Jobs
from tests.launches import Launch, launches

SOURCE = os.environ.get("MEGATRON_LM_PATH", "")
needs_checkout = pytest.mark.checkout

MODEL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 1 --global-batch-size 16 --lr 5e-3 --min-lr 1e-3 --lr-decay-style cosine --weight-decay 0.1 "
    "--clip-grad 1.0 --attention-dropout 0.1 --hidden-dropout 0.1 --seed 7 --split 3,1,1 --log-interval 1 "
    "--eval-iters 2 --eval-interval 3 --num-workers 0 --tokenizer-type NullTokenizer --vocab-size 400 "
    "--use-distributed-optimizer --distributed-backend gloo --transformer-impl local --no-persist-layer-norm "
    "--no-gradient-accumulation-fusion --no-masked-softmax-fusion"
)
"""Megatron-LM's flags; the last two lines are what a CPU needs."""


class CheckoutJobs(Jobs):
    """Starts jobs of a checkout's ``pretrain_gpt.py``."""

    def __init__(self, folder: Path, data: Path, checkout: Path) -> None:
        super().__init__(folder, data)
        self.checkout = checkout
        self.usual = ["--data-path", str(data / "data"), *MODEL.split()]

    def command(
        self, *flags: str, run_dir: Path, ranks: int = 8, launcher: tuple[str, ...] = (), script: Path | None = None
    ) -> list[str]:
        """Command line of a job, elastic if ``flags`` say so; they come last, so they win. A file replaces the rest."""
        model = [] if "--yaml-cfg" in flags else self.usual
        return [
            sys.executable, "-m", "megatron_elastic.cli", "run", "--nproc-per-node", str(ranks), *launcher,
            str(script or self.checkout / "pretrain_gpt.py"), *model, "--elastic-run-dir", str(run_dir), *flags,
        ]  # fmt: skip

    def start(
        self, *flags: str, ranks: int = 8, launcher: tuple[str, ...] = (), script: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Job:  # fmt: skip
        """Start a job that also finds what PYTHONPATH has: megatron.training depends on more than we do."""
        added = {"PYTHONPATH": search_path(), **(env or {})}
        return super().start(*flags, ranks=ranks, launcher=launcher, script=script, env=added)

    def plain(self, *flags: str, ranks: int, without: str = "") -> list[str]:
        """Run without ``--elastic`` or any of our flags; returns the losses and gradient norms that Megatron logs.

        ``without``: one of the usual flags.
        """
        folder = self.folder / f"plain{len(list(self.folder.iterdir()))}"
        folder.mkdir()
        usual = self.command(*flags, run_dir=folder, ranks=ranks)
        command = [flag for flag in usual if flag not in (str(folder), "--elastic-run-dir", without)]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": search_path()}
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=200, check=False)
        logs = sorted(folder.glob("runs/*/logs/*.log"))
        assert done.returncode == 0, done.stdout + done.stderr + "".join(log.read_text()[-2000:] for log in logs)
        return losses(*logs)


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    with launches(tmp_path) as launch:
        yield launch


def search_path() -> str:
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))


def losses(*logs: Path) -> list[str]:
    """Step, loss and gradient norm of every line that Megatron logged."""
    pattern = re.compile(r"iteration +(\d+)/.*(lm loss: \S+) .*(grad norm: \S+) ")
    return [" ".join(found.groups()) for log in logs for found in pattern.finditer(log.read_text())]


def losses_of(logged: Sequence[str]) -> dict[int, float]:
    """By step, of what ``losses`` found."""
    return {int(line.split()[0]): float(line.split()[3]) for line in logged}


def losses_after_loading(logged: Sequence[str]) -> dict[int, float]:
    """The same of a job that has loaded a checkpoint: the second line of its log is the mean of two steps."""
    found = losses_of(logged)
    first, second = list(found)[:2]
    return {**found, second: 2 * found[second] - found[first]}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout, without our lines."""
    copy = tmp_path_factory.mktemp("checkout") / "Megatron-LM"
    if (Path(SOURCE) / ".git").exists():
        subprocess.run(["git", "clone", "-q", SOURCE, str(copy)], check=True)
    else:
        shutil.copytree(SOURCE, copy)
    revert(Checkout.at(copy))
    return copy


@pytest.fixture(scope="module")
def patched(checkout: Path, jobs: Jobs, tmp_path_factory: pytest.TempPathFactory) -> CheckoutJobs:
    """Jobs of the checkout with our lines in it."""
    apply(Checkout.at(checkout))
    return CheckoutJobs(tmp_path_factory.mktemp("jobs"), jobs.data, checkout)


def inject(*faults: str) -> list[str]:
    return [word for fault in faults for word in ("--elastic-inject", fault)]


def grid(tp: int, pp: int, steps: int) -> tuple[str, ...]:
    return ("--elastic", "--tensor-model-parallel-size", str(tp), "--pipeline-model-parallel-size", str(pp),
            "--train-iters", str(steps), "--elastic-slices", "2")


def assert_same(job: Job, reference: Job) -> None:
    assert cli.main(["compare", str(job.run_dir), str(reference.run_dir)]) == 0, job.output


def evaluations(job: Job) -> list[tuple[int, str, float]]:
    """Each evaluation once; one that was interrupted is done again."""
    return sorted({(event["step"], event["data"], event["loss"]) for event in job.events("evaluated")})


def changes(checkout: Path) -> str:
    """What git says is different in the checkout; nothing where there is no repository."""
    if not (checkout / ".git").exists():
        return ""
    status = ["git", "-C", str(checkout), "status", "--porcelain"]
    return subprocess.run(status, check=True, capture_output=True, text=True).stdout


# ---- without a checkout ---------------------------------------------------------------------


def test_modules_beside_the_script_come_first(launch: Launch, tmp_path: Path) -> None:
    """A checkout's ``megatron`` wins over the installed one, also for what is imported before the ranks are forked."""
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text("import os\nimported_in = os.getpid()\n")
    script = tmp_path / "script.py"
    script.write_text("import os, megatron.core as core\n"
                      "print(core.__file__, 'before the fork' if core.imported_in == os.getppid() else 'here')\n")
    launch.env["MEGATRON_ELASTIC_PRELOAD"] = "megatron.core,megatron.nothing"
    run = launch.start(str(script))
    run.finish()
    assert (run.run_dir / "logs" / "rank0.log").read_text() == f"{core / '__init__.py'} before the fork\n"


def test_without_an_npu_nothing_changes() -> None:
    """There is none here; what happens where there is one has not been run."""
    before = torch.cuda.is_available
    assert not npu.needed()
    npu.install()
    assert torch.cuda.is_available is before


def test_arguments_from_the_environment(launch: Launch, tmp_path: Path) -> None:
    """They come first, so that the command line wins."""
    script = tmp_path / "script.py"
    script.write_text("import sys\nprint(sys.argv[1:3])\n")
    launch.env["MEGATRON_ELASTIC_ARGS"] = "'--a b'"
    run = launch.start(str(script), "--c")
    run.finish()
    assert (run.run_dir / "logs" / "rank0.log").read_text() == "['--a b', '--c']\n"


def test_a_checkout_without_our_lines_is_refused(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "megatron" / "training").mkdir(parents=True)
    script = tmp_path / "pretrain_gpt.py"
    script.write_text("print('trained')\n")
    assert f"let it: megatron-elastic patch apply {tmp_path}" in launch.start(str(script), "--elastic").finish(2)
    script.write_text("print('trained')  # megatron_elastic\n")
    output = launch.start(str(script), "--elastic", "--moe-enable-deepep", name="again").finish(2)
    assert "error: --moe-enable-deepep does not work with --elastic: it goes around the elastic groups" in output


def test_what_the_checkout_imports_and_is_missing(launch: Launch, tmp_path: Path) -> None:
    """All of it is named, before anything starts. To Python a module that is None here is not installed."""
    (tmp_path / "megatron" / "training").mkdir(parents=True)
    script = tmp_path / "pretrain_gpt.py"
    script.write_text("print('trained')  # megatron_elastic\n")
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['regex'] = sys.modules['six'] = None\n")
    launch.env["PYTHONPATH"] = os.pathsep.join((str(tmp_path), launch.env["PYTHONPATH"]))
    run = launch.start(str(script), "--elastic")
    output = run.finish(2)
    assert f"error: {script} imports what is not installed: pip install " in output
    assert "regex six" in output
    assert not run.run_dir.exists()


# ---- with one -------------------------------------------------------------------------------


@needs_checkout
def test_the_checkout_fits(checkout: Path) -> None:
    assert [finding for finding in doctor.examine(checkout) if finding.problem] == []
    apply(Checkout.at(checkout))
    revert(Checkout.at(checkout))
    assert changes(checkout) == ""


@needs_checkout
def test_plain_training_is_the_same_with_our_lines(patched: CheckoutJobs) -> None:
    """And it runs on a CPU, with all of Megatron's own code."""
    flags = ("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2", "--train-iters", "3")
    with_lines = patched.plain(*flags, ranks=4)
    revert(Checkout.at(patched.checkout))
    try:
        without = patched.plain(*flags, ranks=4)
    finally:
        apply(Checkout.at(patched.checkout))
    assert len(with_lines) == 3
    assert with_lines == without


@needs_checkout
@pytest.mark.timeout(900)
def test_killed_ranks(patched: CheckoutJobs) -> None:
    """TP1 x PP2: in the backward pass, then from outside, the rank that writes the log among them; samples are read
    ahead.
    """
    flags = grid(1, 2, 9)
    reference = patched.undisturbed(*flags)
    ahead = (*flags, "--num-workers", "2")
    job = patched.start(*ahead, *inject("kill:rank=7,step=3,at=backward", "kill:rank=2,step=7,at=apply"))
    job.read_until("step   5/9")
    os.kill(job.pid(5), signal.SIGKILL)
    job.finish()
    assert_same(job, reference)
    assert evaluations(job) == evaluations(reference)
    logged = losses(*sorted((job.run_dir / "logs").glob("rank*.log")))
    assert set(logged) == set(losses(reference.run_dir / "logs" / "rank7.log"))
    assert len(set(logged)) == 9


@needs_checkout
@pytest.mark.timeout(900)
def test_kills_at_random_moments(patched: CheckoutJobs) -> None:
    """TP1 x PP2 on a clean checkout with our lines: ``kill -9`` from outside, of any rank, whatever it is doing."""
    flags = grid(1, 2, 15)
    reference = patched.undisturbed(*flags)
    seed = time.time_ns()
    print(f"random seed {seed}")
    chance = random.Random(seed)
    victims = chance.sample(range(8), 3)
    job = patched.start(*flags)
    for rank in victims:
        for _ in range(3):  # by then what the last one held is replicated again
            job.read_until("step ")
        time.sleep(chance.uniform(0, 0.5))
        os.kill(job.pid(rank), signal.SIGKILL)
        job.read_until("recovered from the loss")
    job.finish()
    assert_same(job, reference)
    assert evaluations(job) == evaluations(reference)
    assert sorted({rank for event in job.events("recovered") for rank in event["ranks"]}) == sorted(victims)
    revert(Checkout.at(patched.checkout))
    try:
        assert changes(patched.checkout) == ""
    finally:
        apply(Checkout.at(patched.checkout))


@needs_checkout
@pytest.mark.timeout(900)
def test_arguments_from_a_yaml_file(patched: CheckoutJobs, tmp_path: Path) -> None:
    """All of them, ours too: the same job as with flags, without and with a kill."""
    flags = grid(1, 2, 9)
    path = tmp_path / "arguments.yaml"
    path.write_text(
        "language_model: {num_layers: 4, hidden_size: 32, num_attention_heads: 4, attention_dropout: 0.1, "
        "hidden_dropout: 0.1, persist_layer_norm: False, masked_softmax_fusion: False, num_moe_experts: null, "
        "clone_scatter_output_in_embedding: True}\n"
        "model_parallel: {pipeline_model_parallel_size: 2, gradient_accumulation_fusion: False, bf16: False}\n"
        "seq_length: 32\nmax_position_embeddings: 32\nmicro_batch_size: 1\nglobal_batch_size: 16\nlr: 5e-3\n"
        "min_lr: 1.e-3\nlr_decay_style: cosine\nweight_decay: 0.1\nclip_grad: 1.0\nseed: 7\nsplit: '3,1,1'\n"
        "log_interval: 1\ntrain_iters: 9\neval_iters: 2\neval_interval: 3\nnum_workers: 0\nvocab_size: 400\n"
        "tokenizer_type: NullTokenizer\nuse_distributed_optimizer: True\ndistributed_backend: gloo\nspec: null\n"
        f"transformer_impl: local\ndata_path: {patched.data / 'data'}\nelastic: True\nelastic_slices: 2\n"
        "elastic_inject: ['kill:rank=7,step=3,at=backward']\n"
    )
    job = patched.start("--yaml-cfg", str(path))
    job.finish()
    assert_same(job, patched.undisturbed(*flags))
    assert len(job.events("recovered")) == 1
    refused = patched.start("--yaml-cfg", str(path), "--tp-comm-overlap").finish(2)
    assert "error: --tp-comm-overlap does not work with --elastic" in refused
    path.write_text(path.read_text() + "frobnicate: 3\n")
    assert "unrecognized arguments: --frobnicate=3" in patched.start("--yaml-cfg", str(path)).finish(2)


@needs_checkout
@pytest.mark.timeout(900)
def test_tensor_parallel_bf16_and_checkpoints(patched: CheckoutJobs, tmp_path: Path) -> None:
    """TP2 x PP2 x DP2 in bf16, saved under kills, loaded under other layouts, one with ends that are alone."""
    flags = (*grid(2, 2, 8), "--bf16")
    reference = patched.undisturbed(*flags)
    saves = ("--save", str(tmp_path / "saved"), "--save-interval", "4", "--num-workers", "2")
    job = patched.run(*flags, *saves, *inject("kill:rank=7,step=3,at=forward", "kill:rank=1,step=6,at=vote"))
    assert_same(job, reference)
    assert evaluations(job) == evaluations(reference)
    assert [event["step"] for event in job.events("saved")] == [4, 8]
    tracker = tmp_path / "saved" / "latest_checkpointed_iteration.txt"
    assert tracker.read_text() == "8"
    for tp, pp, split in ((2, 1, ()), (2, 4, ("--pipeline-model-parallel-layout", "E|tt|tt|L"))):
        tracker.write_text("4")
        loaded = patched.run(*grid(tp, pp, 8), *split, "--bf16", "--load", str(tmp_path / "saved"))
        assert list(loaded.metrics()) == [5, 6, 7, 8]
        expected = reference.metrics()
        assert {step: line["loss_hex"] for step, line in loaded.metrics().items()} == {
            step: expected[step]["loss_hex"] for step in (5, 6, 7, 8)
        }


@needs_checkout
@pytest.mark.timeout(900)
def test_checkpoints_of_plain_training_and_for_it(patched: CheckoutJobs, tmp_path: Path) -> None:
    """TP2, then PP2 with --elastic, then TP2 x PP2: the same losses as if it had been plain from beginning to end."""
    folders = plain, elastic = tmp_path / "plain", tmp_path / "elastic"
    flags = ("--train-iters", "6", "--attention-dropout", "0", "--hidden-dropout", "0", "--save-interval", "2",
             "--dist-ckpt-optim-fully-reshardable")  # fmt: skip
    whole = losses_of(patched.plain(*flags, "--tensor-model-parallel-size", "2", "--save", str(plain), ranks=2))
    trackers = [folder / "latest_checkpointed_iteration.txt" for folder in folders]
    trackers[0].write_text("2")
    job = patched.run("--elastic", *flags, "--pipeline-model-parallel-size", "2", "--load", str(plain),
                      "--save", str(elastic), *inject("kill:rank=1,step=5,at=backward"), ranks=4)
    ours = {step: line["loss"] for step, line in job.metrics().items()}
    assert ours == pytest.approx({step: whole[step] for step in (3, 4, 5, 6)}, rel=1e-5)
    for folder, tracker, pp in zip(folders, trackers, (1, 2), strict=True):
        tracker.write_text("4")
        sizes = ("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", str(pp))
        found = losses_after_loading(patched.plain(*flags, *sizes, "--load", str(folder), ranks=2 * pp))
        assert found == pytest.approx({step: whole[step] for step in (5, 6)}, rel=1e-5)


@needs_checkout
@pytest.mark.timeout(900)
def test_beginning_with_other_weights(patched: CheckoutJobs, tmp_path: Path) -> None:
    """``--finetune``, ``--pretrained-checkpoint``, ``--ckpt-step``, as plain Megatron has them."""
    flags = ("--attention-dropout", "0", "--hidden-dropout", "0", "--save-interval", "2", "--train-iters", "4",
             "--dist-ckpt-optim-fully-reshardable")  # fmt: skip
    whole = losses_of(patched.plain(*flags, "--save", str(tmp_path), ranks=1))
    loads, pp2 = ("--load", str(tmp_path)), ("--elastic", *flags, "--pipeline-model-parallel-size", "2")
    tuned = losses_after_loading(patched.plain(*flags, "--finetune", *loads, ranks=1))
    job = patched.run(*pp2, "--finetune", *loads, *inject("kill:rank=3,step=1,at=backward"), ranks=4)
    assert {step: line["loss"] for step, line in job.metrics().items()} == pytest.approx(tuned, rel=1e-5)
    assert tuned[1] != pytest.approx(whole[1], rel=1e-2)
    assert_same(patched.run(*pp2, "--pretrained-checkpoint", str(tmp_path), ranks=4), job)
    older = patched.run(*pp2, *loads, "--ckpt-step", "2", ranks=4)
    ours = {step: line["loss"] for step, line in older.metrics().items()}
    assert ours == pytest.approx({step: whole[step] for step in (3, 4)}, rel=1e-5)
    for wrong, reason in ((("--ckpt-step", "3", *loads), "iter_0000003, or it is not complete"),
                          (("--pretrained-checkpoint", str(tmp_path / "none")), "none: there is no checkpoint")):
        missing = patched.start(*pp2, *wrong, ranks=4)
        missing.output = missing.process.communicate(timeout=100)[0]
        assert missing.process.returncode in (1, 2), missing.output
        assert reason in missing.output
        assert "Traceback" not in missing.output


SHARDED = "--use-distributed-optimizer"
TP2, PP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
VIRTUAL = f"{PP2} --num-virtual-stages-per-pipeline-rank 2"
EXPERTS = "--num-experts 4 --expert-model-parallel-size 2 --swiglu --disable-bias-linear --normalization RMSNorm " \
          "--untie-embeddings-and-output-weights --position-embedding-type rope --no-rope-fusion"  # fmt: skip


@needs_checkout
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("model", "layout", "more", "ours", "without"), [
    ("", PP2, "", TP2, SHARDED),
    ("--bf16", f"{TP2} {PP2}", "", PP2, SHARDED),
    ("", f"{TP2} {PP2}", "--overlap-grad-reduce --ddp-bucket-size 7000", f"{TP2} {PP2}", ""),
    (EXPERTS, PP2, "", PP2, ""),
], ids=["not sharded", "not sharded, bf16", "in buckets", "in buckets, experts"])  # fmt: skip
def test_optimizers_as_megatron_saves_them(
    patched: CheckoutJobs, tmp_path: Path, model: str, layout: str, more: str, ours: str, without: str
) -> None:
    """Not sharded, and sharded in the default format: two steps plain, two elastic, two plain.

    What is compared with is saved by parameter, which Megatron does wrong where a rank has several buckets.
    """
    plain, elastic, reference = (tmp_path / name for name in ("plain", "elastic", "reference"))
    flags = (*model.split(), "--train-iters", "6", "--attention-dropout", "0", "--hidden-dropout", "0",
             "--save-interval", "2")  # fmt: skip
    by_parameter = ("--dist-ckpt-optim-fully-reshardable", "--save", str(reference))
    whole = losses_of(patched.plain(*flags, *layout.split(), *by_parameter, ranks=4))
    saves = ("--save", str(plain), "--exit-interval", "2")
    patched.plain(*flags, *layout.split(), *more.split(), *saves, ranks=4, without=without)
    job = patched.run("--elastic", *flags, *ours.split(), "--load", str(plain), "--save", str(elastic), ranks=8)
    tolerance = 1e-2 if "--bf16" in model else 1e-5
    lines = job.metrics()
    assert {step: line["loss"] for step, line in lines.items()} == pytest.approx(
        {step: whole[step] for step in (3, 4, 5, 6)}, rel=tolerance)
    found, expected = tensors(elastic / "iter_0000004"), tensors(reference / "iter_0000004")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].float() == pytest.approx(tensor.float(), rel=tolerance, abs=tolerance), name
    (elastic / "latest_checkpointed_iteration.txt").write_text("4")
    rest = losses_after_loading(patched.plain(*flags, *layout.split(), "--load", str(elastic), ranks=4))
    assert rest == pytest.approx({step: whole[step] for step in (5, 6)}, rel=tolerance)


@needs_checkout
def test_virtual_stages_have_buckets_of_their_own(patched: CheckoutJobs, tmp_path: Path) -> None:
    """Megatron only loads here, by parameter, and saves in its default format: without a GPU it computes no numbers."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    flags = ("--bf16", "--untie-embeddings-and-output-weights", *VIRTUAL.split(), "--lr-decay-iters", "4",
             "--eval-iters", "0")  # fmt: skip
    whole = patched.run("--elastic", *flags, "--train-iters", "4", "--save", str(ours), "--save-interval", "2")
    (ours / "latest_checkpointed_iteration.txt").write_text("2")
    patched.plain(*flags, "--train-iters", "2", "--override-opt_param-scheduler", "--load", str(ours),
                  "--save", str(theirs), "--save-interval", "5", ranks=4)  # fmt: skip
    rest = patched.run("--elastic", *flags, "--train-iters", "4", "--load", str(theirs))
    lines = whole.metrics()
    assert {step: line["loss_hex"] for step, line in rest.metrics().items()} == {
        step: lines[step]["loss_hex"] for step in (3, 4)
    }
    digests = [json.loads((job.run_dir / "digest.json").read_text())["sha256"] for job in (rest, whole)]
    assert digests[0] == digests[1]


@needs_checkout
@pytest.mark.parametrize(("placement", "readers"), [("loop", {"0 0", "1 1"}), ("v", {"0 None"})])
def test_chunks_read_only_what_they_need(
    patched: CheckoutJobs, tmp_path: Path, placement: str, readers: set[str]
) -> None:
    """Those at the ends of the model, by stage and chunk."""
    noting = f"""
_get_batch = get_batch
def get_batch(data_iterator, vp_stage=None):
    batch = _get_batch(data_iterator, vp_stage)
    if batch[0] is not None or batch[1] is not None:
        from megatron.core import mpu
        with open({str(tmp_path / "reads")!r}, "a") as file:
            print(mpu.get_pipeline_model_parallel_rank(), vp_stage, file=file)
    return batch
"""
    script = patched.checkout / f"pretrain_gpt_{placement}.py"
    main = 'if __name__ == "__main__":'
    script.write_text((patched.checkout / "pretrain_gpt.py").read_text().replace(main, noting + main))
    flags = VIRTUAL.split() if placement == "loop" else (*PP2.split(), "--elastic-placement", "v")
    whole = patched.run("--elastic", *flags, "--train-iters", "2", "--eval-iters", "0", ranks=4)
    job = patched.start("--elastic", *flags, "--train-iters", "2", "--eval-iters", "0", ranks=4, script=script)
    job.finish()
    assert_same(job, whole)
    assert {*(tmp_path / "reads").read_text().splitlines()} == readers


@needs_checkout
def test_chunks_as_a_v(patched: CheckoutJobs) -> None:
    """The script's own batches, as Megatron gives them to the first stage, have labels where the model ends there."""
    flags = ("--elastic", *PP2.split(), "--train-iters", "3")
    whole = patched.run(*flags)
    job = patched.run(*flags, "--elastic-placement", "v", *inject("kill:rank=1,step=2,at=backward"))
    assert cli.main(["compare", str(job.run_dir), str(whole.run_dir)]) == 0, job.output


@needs_checkout
def test_a_checkpoint_that_only_its_own_layout_can_load(patched: CheckoutJobs, tmp_path: Path) -> None:
    """Megatron's default. What to do instead is said in one line."""
    patched.plain("--train-iters", "2", "--save", str(tmp_path), "--save-interval", "2", ranks=2)
    for sizes, whose in ((TP2, "TP1 x PP1 x EP1, 1 chunks a stage, had it"), ("--num-layers 6", "others had it")):
        job = patched.start("--elastic", "--train-iters", "4", *sizes.split(), "--load", str(tmp_path), ranks=2)
        job.output = job.process.communicate(timeout=200)[0]
        assert job.process.returncode in (1, 2), job.output
        assert f"the optimizer's state lies there as {whose}" in job.output
        assert "let Megatron save with --dist-ckpt-optim-fully-reshardable" in job.output
        assert "Traceback" not in job.output


@needs_checkout
@pytest.mark.timeout(900)
def test_micro_batches_that_are_cut(patched: CheckoutJobs) -> None:
    """TP2 x DP4: a cell's first rank sends the others parts of micro-batches, whose size these must know."""
    flags = (*grid(2, 1, 3), "--micro-batch-size", "2")
    reference = patched.undisturbed(*flags)
    job = patched.run(*flags, "--elastic-dataflow", "resize", *inject("kill:rank=3,step=2,at=backward"))
    assert any(cell.parts for cell in job.layouts()[-1].stages[0].cells)
    for ours, theirs in zip(job.metrics().values(), reference.metrics().values(), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-6, abs=0)
    assert [loss for *_, loss in evaluations(job)] == pytest.approx([loss for *_, loss in evaluations(reference)])


@needs_checkout
@pytest.mark.timeout(900)
def test_exit_and_go_on(patched: CheckoutJobs, tmp_path: Path) -> None:
    """``--exit-interval``, then the exit signal, then the rest: a job in three parts trains as one."""
    flags = grid(1, 2, 9)
    saves = ("--save", str(tmp_path), "--load", str(tmp_path), "--save-interval", "100", "--exit-signal-handler")
    first = patched.run(*flags, *saves, "--exit-interval", "3")
    assert "training finished at step 3" in first.output
    second = patched.start(*flags, *saves)
    second.read_until("step   5/9")
    second.process.send_signal(signal.SIGTERM)
    assert "SIGTERM goes to the ranks, which end training" in second.finish()
    stopped = int((tmp_path / "latest_checkpointed_iteration.txt").read_text())
    assert 5 <= stopped < 9
    third = patched.run(*flags, *saves)
    parts = {**first.metrics(), **second.metrics(), **third.metrics()}
    reference = patched.undisturbed(*flags)
    assert {n: line["loss_hex"] for n, line in parts.items()} == {
        n: line["loss_hex"] for n, line in reference.metrics().items()
    }
    digests = [json.loads((job.run_dir / "digest.json").read_text())["sha256"] for job in (third, reference)]
    assert digests[0] == digests[1]


@needs_checkout
def test_nothing_is_left_to_train(patched: CheckoutJobs, tmp_path: Path) -> None:
    """The checkpoint is past the end: there are validation data for as many evaluations as training would have had."""
    saves = ("--save", str(tmp_path), "--save-interval", "6")
    patched.run("--elastic", "--train-iters", "6", "--eval-iters", "0", *saves, ranks=1)
    flags = ("--train-iters", "1", "--eval-interval", "1", "--eval-iters", "10", "--load", str(tmp_path))
    job = patched.run("--elastic", *flags, ranks=1)
    assert [(step, data) for step, data, _ in evaluations(job)] == [(6, "test"), (6, "validation")]


@needs_checkout
def test_a_rank_is_replaced(patched: CheckoutJobs, tmp_path: Path) -> None:
    """The rank that joins begins in the middle, reads the same data, and writes the log when it is the last."""
    saves = ("--save", str(tmp_path), "--load", str(tmp_path), "--save-interval", "3", "--async-save")
    flags = (*grid(1, 2, 9), "--elastic-respawn", *saves)
    job = patched.run(*flags, *inject("kill:rank=7,step=2,at=backward"))
    assert_same(job, patched.undisturbed(*grid(1, 2, 9)))
    assert job.metrics()[9]["world_size"] == 8
    assert job.events("saved")[-1]["step"] == 9
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "9"
    logged = losses(*sorted((job.run_dir / "logs").glob("rank*.log")))
    assert len(set(logged)) == 9
    assert any(line.startswith("9 ") for line in losses(job.run_dir / "logs" / "rank8.log"))


@needs_checkout
def test_tensorboard_goes_on(patched: CheckoutJobs, tmp_path: Path) -> None:
    """Another rank writes on when the one that did is lost."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_multiplexer")
    flags = (*grid(1, 2, 6), "--tensorboard-dir", str(tmp_path), "--log-timers-to-tensorboard")
    job = patched.run(*flags, *inject("kill:rank=7,step=4,at=backward"))
    told = re.findall(r"\(after (\d+) iterations\) memory \(MB\)", (job.run_dir / "logs" / "rank0.log").read_text())
    assert told == ["1", "2"], "as in a plain job"
    events = reader.EventMultiplexer().AddRunsFromDirectory(str(tmp_path))
    events.Reload()
    steps = {event.step for run in events.Runs() for event in events.Scalars(run, "lm loss")}
    assert steps == set(range(1, 7))
    validated = {event.step for run in events.Runs() for event in events.Scalars(run, "lm loss validation")}
    assert validated == {3, 6}
    shown = [event.tensor_proto.string_val[0] for run in events.Runs()
             for event in events.Tensors(run, "num_layers/text_summary")]  # fmt: skip
    assert len(shown) == 2 and len(set(shown)) == 1, "those of both ranks that wrote"


@needs_checkout
@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--tp-comm-overlap"], "--tp-comm-overlap does not work with --elastic: it goes around the elastic groups"),
        (["--fp16", "--bf16"], "Megatron refuses these flags"),
        (["--no-such-flag"], "unrecognized arguments: --no-such-flag"),
        (["--position-embedding-type", "yarn"], "argument --position-embedding-type: invalid choice: 'yarn'"),
        (["--tensor-model-parallel-size", "3"], "Megatron refuses these flags"),
        (["--transformer-impl", "transformer_engine"], "add --transformer-impl local"),
        (["--position-embedding-type", "rope"], "add --no-rope-fusion"),
        (["--global-batch-size", "7"], "--global-batch-size 7 is no multiple of --micro-batch-size 1 x data-parallel"),
        (["--micro-batch-size", "0"], "--micro-batch-size must be at least 1, got 0"),
        (["--train-iters", "0"], "--train-iters must be at least 1, got 0"),
        (["--data-path", "nowhere"], "--data-path nowhere: nowhere.idx does not exist"),
        (["--tokenizer-type", "GPT2BPETokenizer"], "Megatron refuses these flags (tokenizer.py:"),
        (["--num-attention-heads", "3", "--hidden-size", "18", "--tensor-model-parallel-size", "2"],
         "Megatron refuses these flags (transformer_config.py:"),
        (["--lr-warmup-iters", "3"], "--lr-warmup-iters 3 must be below --train-iters 3"),
        (["--lr-warmup-init", "1"], "Megatron refuses these flags (optimizer_param_scheduler.py:"),
    ],
    ids=lambda value: str(value[0]),
)
def test_bad_flags(patched: CheckoutJobs, flags: Sequence[str], reason: str) -> None:
    """One line each; what Megatron alone knows is told by the first rank that finds it."""
    job = patched.start(*grid(1, 1, 3), *flags, ranks=2)
    job.output = job.process.communicate(timeout=200)[0]
    assert job.process.returncode == 2, job.output
    assert reason in job.output
    assert "Traceback" not in job.output


@needs_checkout
def test_arguments_of_data_that_cannot_be_read(
    patched: CheckoutJobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only who makes data sets reads them."""
    parts, not_here = tmp_path / "parts.json", ("--data-path", str(patched.data / "data"), "--split", "3,1,1")
    parts.write_text('{"train": ["1.0", "data"],}')
    monkeypatch.setattr(patched, "usual", [word for word in patched.usual if word not in not_here])
    output = patched.start(*grid(1, 1, 3), "--per-split-data-args-path", str(parts), ranks=2).finish(2)
    assert re.search(r"error: Megatron refuses these flags \(utils\.py:\d+\): .*double quotes", output)
    assert "Traceback" not in output


@needs_checkout
def test_an_evaluation_needs_a_length_as_well(patched: CheckoutJobs) -> None:
    """Megatron makes the schedule and the data sets by it."""
    output = patched.start("--elastic", "--skip-train", ranks=1).finish(2)
    assert output.splitlines()[-1] == "megatron-elastic: error: --train-iters or --train-samples is needed"


@pytest.mark.job
@needs_checkout
def test_flags_are_counted() -> None:
    """The documentation has the numbers; and each refused flag is one of Megatron's, in one release or another."""
    text = (ROOT / "docs" / "megatron.md").read_text()
    found: set[str] = set()
    sources = list(filter(None, (SOURCE, os.environ.get("MEGATRON_LM_NEXT_PATH"))))
    for source in sources:
        command = [sys.executable, "-c", "from megatron_elastic import cli; raise SystemExit(cli.main())", "flags",
                   source, "--json"]  # fmt: skip
        shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=True).stdout
        said = json.loads(shown.splitlines()[-1])
        found.update(said["by_flag"])
        assert sum(said["counts"].values()) == said["flags"] == len(said["by_flag"])
        assert re.search(rf"the {said['flags']} (flags|at)", text)
        before = {"core_v0.16": "", "core_v0.19": r"\d+ \| "}[said["tag"].rpartition(".")[0]]
        for kind, count in said["counts"].items():
            assert re.search(rf"^\| {kind} \| {before}{count} \|", text, re.MULTILINE), kind
    if len(sources) > 1:
        assert {refusal.flag for refusal in REFUSALS} <= found


@needs_checkout
def test_help_shows_our_flags(patched: CheckoutJobs) -> None:
    """They are a group of Megatron's own parser. (That of 0.19.0 cannot print its help, with a lone % in it.)"""
    if Checkout.at(patched.checkout).tag.startswith("core_v0.19"):
        pytest.skip("Megatron's own --help ends in an error there")
    command = [sys.executable, "-c", "from megatron_elastic.device import stand_in; stand_in.install(); "
               "from megatron_elastic.adaptor.without_cuda import stand_ins; stand_ins.install(); "
               "from megatron_elastic.adaptor.script.arguments import parse; parse()", "--help"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(patched.checkout), search_path()))}
    shown = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200, check=True).stdout
    assert "--elastic-consistency {bitwise,fast}" in shown
    assert "--tensor-model-parallel-size" in shown


# ---- flags ----------------------------------------------------------------------------------


@pytest.mark.job
@needs_checkout
@pytest.mark.parametrize(("flags", "message"), [
    (("--checkpoint-activations",),
     "Megatron ends at these flags: --checkpoint-activations is no longer valid, use --recompute-activations, or, for "
     "more control, --recompute-granularity and --recompute-method."),
    (("--frobnicate", "3"), "unrecognized arguments: --frobnicate 3"),
    (("--num-experts", "4", "--moe-grouped-gemm"),
     "--moe-grouped-gemm needs a GPU, and Transformer Engine or the package grouped_gemm: leave it out, and each "
     "expert's products are computed by themselves"),
], ids=["old", "unknown", "device"])  # fmt: skip
def test_a_flag_that_cannot_work_is_the_last_line(
    patched: CheckoutJobs, flags: tuple[str, ...], message: str
) -> None:
    output = patched.start(*grid(1, 1, 4), *flags, ranks=2).finish(2)
    assert output.splitlines()[-1] == f"megatron-elastic: error: {message}"


@pytest.mark.job
@needs_checkout
@pytest.mark.parametrize("flags", [
    ("--decoder-first-pipeline-num-layers", "1"), ("--decoder-last-pipeline-num-layers", "1"),
    ("--pipeline-model-parallel-layout", "Ettt|tL"),
    ("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"),
], ids=["first", "last", "layout", "accounted"])  # fmt: skip
def test_stages_that_begin_uneven_become_others(patched: CheckoutJobs, flags: tuple[str, ...]) -> None:
    """One, and as many as there are layers: the flags say what stages begin with, and nothing later."""
    flags = (*grid(1, 2, 48), "--eval-interval", "100", "--elastic-slow", "off", *flags)
    job = patched.start(*flags, ranks=4)
    job.read_until(" 1/48")
    for stages in ("1", "4"):
        assert cli.main(["scale", str(job.run_dir), "--pp", stages]) == 0
        job.read_until(f"the pipeline has {stages} stages")
    job.finish()
    assert_same(job, patched.undisturbed(*flags, ranks=4))
    assert {layout.pipeline_size for layout in job.layouts()} >= {2, 1, 4}
