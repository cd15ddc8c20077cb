"""Flags of Megatron-LM's that say what is logged, loaded, saved and spared: with ``--elastic`` as in plain training."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from megatron.core.dist_checkpointing import load_tensors_metadata

from tests.jobs import Job
from tests.models.test_checkout import (
    CheckoutJobs,
    assert_same,
    checkout,
    evaluations,
    inject,
    losses_after_loading,
    needs_checkout,
    patched,
)
from tests.models.test_models import FLAGS, KILLS, MODELS, PP2, STEPS, TOLERANCE, resumed

__all__ = ["checkout", "patched"]
pytestmark = needs_checkout


def last_plain_log(patched: CheckoutJobs) -> Path:
    """Of what ``patched.plain`` has run last."""
    return max(patched.folder.glob("plain*/runs/*/logs/*.log"), key=lambda path: path.stat().st_mtime)


def logged(name: str, *logs: Path) -> dict[int, float]:
    """What Megatron logged under a name, by step."""
    pattern = re.compile(rf"iteration +(\d+)/.* {name}: (\S+) ")
    return {int(step): float(value) for log in logs for step, value in pattern.findall(log.read_text())}


def scalars(folder: Path, tag: str) -> dict[int, float]:
    """What TensorBoard has under a tag, by step."""
    multiplexer: Any = pytest.importorskip("tensorboard.backend.event_processing.event_multiplexer")
    events = multiplexer.EventMultiplexer().AddRunsFromDirectory(str(folder))
    events.Reload()
    return {event.step: event.value for run in events.Runs() for event in events.Scalars(run, tag)}


def test_norms_of_weights_and_zeros_of_gradients(patched: CheckoutJobs, tmp_path: Path) -> None:
    """In the log, and equal to the last digit whoever is lost; on TP2, where some weights are there twice.

    Nothing of the batch has most tokens. Exact sums round what is tiny to 0 besides.
    """
    flags = ("--log-params-norm", "--log-num-zeros-in-grad", "--tensor-model-parallel-size", "2",
             "--untie-embeddings-and-output-weights")  # fmt: skip
    patched.plain(*FLAGS, *flags, "--save", str(tmp_path), ranks=2)
    plain = last_plain_log(patched)
    undisturbed, killed = (resumed(patched, tmp_path, *flags, *kills, ranks=8) for kills in ((), KILLS))
    assert_same(killed, undisturbed)
    for name in ("params norm", "num zeros"):
        expected = {step: value for step, value in logged(name, plain).items() if step > 2}
        found = logged(name, *undisturbed.run_dir.glob("logs/*"))
        assert found == pytest.approx(expected, rel=1e-2)
        assert found == logged(name, *killed.run_dir.glob("logs/*"))


def test_losses_of_routers_by_layer(patched: CheckoutJobs, tmp_path: Path) -> None:
    """In TensorBoard, as plain Megatron has them there."""
    model = (*MODELS["experts"].split(), "--moe-layer-freq", "([0]+[1]*3)", "--moe-per-layer-logging")
    folders = tmp_path / "plain", tmp_path / "elastic"
    patched.plain(*FLAGS, *model, "--save", str(tmp_path), "--tensorboard-dir", str(folders[0]), ranks=1)
    resumed(patched, tmp_path, *model, "--tensorboard-dir", str(folders[1]), *KILLS)
    for tag in ("z_loss", *(f"moe/{name}_layer_{i}" for name in ("load_balancing_loss", "z_loss") for i in range(4))):
        expected, found = (scalars(folder, tag) for folder in folders)
        assert found == pytest.approx({step: expected[step] for step in range(3, STEPS + 1)}, rel=1e-4)


@pytest.mark.parametrize("flag", ["--apply-wd-to-qk-layernorm", "--no-weight-decay-cond-type"])
def test_weight_decay_of_norms_of_queries(patched: CheckoutJobs, tmp_path: Path, flag: str) -> None:
    """Their weights begin with 1, and so are a good part of the norm of all."""
    model = ("--qk-layernorm", "--weight-decay", "5", "--log-params-norm")
    spared = (flag, "apply_wd_to_qk_layernorm") if flag == "--no-weight-decay-cond-type" else (flag,)
    patched.plain(*FLAGS, *model, *spared, "--save", str(tmp_path), ranks=1)
    expected = logged("params norm", last_plain_log(patched))[STEPS]
    ours, without = (
        logged("params norm", *resumed(patched, tmp_path, *model, *flags).run_dir.glob("logs/*"))[STEPS]
        for flags in (spared, ())
    )
    assert ours == pytest.approx(expected, rel=1e-4)
    assert without > expected * 1.01


def test_gradients_that_the_optimizer_gets_in_bf16(patched: CheckoutJobs) -> None:
    """``--main-grads-dtype bf16``: whoever is lost; other numbers than in fp32, and not far from them."""
    flags = ("--elastic", *FLAGS, *PP2, "--bf16")
    usual, undisturbed = patched.run(*flags, ranks=4), patched.run(*flags, "--main-grads-dtype", "bf16", ranks=4)
    ours, theirs = ([line["loss"] for line in job.metrics().values()] for job in (undisturbed, usual))
    assert ours[2:] != theirs[2:] and ours == pytest.approx(theirs, rel=1e-2)
    assert_same(patched.run(*flags, "--main-grads-dtype", "bf16", *KILLS, ranks=4), undisturbed)


def test_learning_rate_and_optimizer_that_begin_anew(patched: CheckoutJobs, tmp_path: Path) -> None:
    """``--no-load-optim`` as in plain Megatron, in the middle of a warm-up. And with ranks that are lost without
    replicas, so that all go back, first to what was loaded, and ranks that join, when --load has newer checkpoints.
    """
    flags = (*FLAGS, "--lr-warmup-iters", "9", "--lr-decay-iters", "40", "--save-interval", "4")
    rest = (*flags, "--train-iters", "30", "--no-load-optim")
    patched.plain(*flags, "--train-iters", "4", "--save", str(tmp_path / "plain"), ranks=1)

    def elastic(name: str, *more: str) -> Job:
        folder = str(shutil.copytree(tmp_path / "plain", tmp_path / name))
        return patched.run("--elastic", *rest, *PP2, "--save", folder, "--load", folder, *more, ranks=4)

    whole = elastic("undisturbed")
    plain = losses_after_loading(patched.plain(*rest, "--load", str(tmp_path / "plain"), ranks=1))
    assert {step: line["loss"] for step, line in whole.metrics().items()} == pytest.approx(plain, rel=TOLERANCE)
    kills = inject("kill:rank=3,step=6,at=backward", "kill:rank=1,step=27,at=vote")
    joined = elastic("killed", "--elastic-respawn", "--elastic-replicas", "0", *kills)
    assert_same(joined, whole)
    assert [event["step"] for event in joined.events("fallback")] == [4, 24]
    # Without the flag both counts go on, each from its own field: the optimizer has done 16 steps, and not 20.
    again = patched.run("--elastic", *flags, "--train-iters", "30", *PP2, "--ckpt-step", "20",
                        "--load", str(tmp_path / "undisturbed"), ranks=4)  # fmt: skip
    hexes = {step: line["loss_hex"] for step, line in whole.metrics().items() if step > 20}
    assert {step: line["loss_hex"] for step, line in again.metrics().items()} == hexes


def test_iterations_that_are_left_out(patched: CheckoutJobs, tmp_path: Path) -> None:
    """Their samples are taken, and nothing is learnt from them, also when a rank is lost meanwhile."""
    flags = ("--iterations-to-skip", "0", "4", "6", "--lr-warmup-iters", "7", "--lr-decay-iters", "20")
    # Megatron's second line is the mean of two steps here, too.
    whole = losses_after_loading(patched.plain(*FLAGS, *flags, "--save", str(tmp_path), ranks=1))
    undisturbed = resumed(patched, tmp_path, *flags)
    ours = {step: line["loss"] for step, line in undisturbed.metrics().items() if step not in (5, 7)}
    assert ours == pytest.approx({step: whole[step] for step in (3, 4, 6, 8)}, rel=TOLERANCE)
    assert [event["step"] for event in undisturbed.events("skipped")] == [5, 7]
    kills = inject("kill:rank=3,step=5,at=vote", "kill:rank=1,step=7,at=apply")
    assert_same(resumed(patched, tmp_path, *flags, *kills), undisturbed)


DIVERGES = ("--lr", "1e30", "--clip-grad", "0")
"""What the first step makes of the weights is too large for anything."""


def test_a_loss_that_is_not_finite_is_no_fault_of_a_rank(patched: CheckoutJobs) -> None:
    """Who finds it does not leave for others to find it again: the job ends, and says where it was."""
    job = patched.start("--elastic", *FLAGS, *PP2, *DIVERGES, ranks=4)
    job.output = job.process.communicate(timeout=200)[0]
    assert job.process.returncode == 1
    found = re.search(r"rank (\d): step 2, micro-batch \d+: found NaN in local forward loss calculation", job.output)
    computes_losses = {rank for cell in job.layouts()[0].stages[-1].cells for rank in cell.ranks}
    assert computes_losses == {2, 3}
    assert found is not None and int(found[1]) in computes_losses
    assert job.events("recovered") == [] and list(job.metrics()) == [1]


def test_losses_that_are_not_finite_and_pass(patched: CheckoutJobs) -> None:
    """With the flag that says so, such steps change nothing, whoever is lost."""
    flags = ("--elastic", *FLAGS, *PP2, *DIVERGES, "--no-check-for-nan-in-loss-and-grad")
    undisturbed = patched.run(*flags, ranks=4)
    assert [event["step"] for event in undisturbed.events("skipped")] == list(range(2, STEPS + 1))
    assert_same(patched.run(*flags, *KILLS, ranks=4), undisturbed)


def test_checkpoints_without_optimizer_states(patched: CheckoutJobs, tmp_path: Path) -> None:
    """Saved under a kill: weights are there, and no more; some are deleted when newer ones are there."""
    saved = tmp_path / "saved"
    flags = ("--elastic", *FLAGS, *PP2, "--save-interval", "2", "--no-save-optim", "--save-retain-interval", "4")
    job = patched.run(*flags, "--save", str(saved), *inject("kill:rank=3,step=3,at=backward"), ranks=4)
    assert [event["step"] for event in job.events("saved")] == [2, 4, 6, 8]
    assert sorted(path.name for path in saved.glob("iter_*")) == ["iter_0000004", "iter_0000008"]
    assert not any(key.startswith("optimizer.") for key in load_tensors_metadata(str(saved / "iter_0000008")))
    again = patched.start(*flags, "--train-iters", "9", "--load", str(saved), ranks=4)
    again.output = again.process.communicate(timeout=200)[0]
    assert "has no state of this optimizer: begin with the optimizer and the precision" in again.output
    lost = ("--elastic-replicas", "0", "--save", str(tmp_path / "lost"), *inject("kill:rank=3,step=4,at=backward"))
    assert "has no state of this optimizer" in patched.start(*flags, *lost, ranks=4).finish(2)
    tuned = ("--finetune", "--load", str(saved))
    ours = {step: line["loss"] for step, line in patched.run(*flags, *tuned, ranks=4).metrics().items()}
    assert losses_after_loading(patched.plain(*FLAGS, *tuned, ranks=1)) == pytest.approx(ours, rel=TOLERANCE)


def test_what_is_only_evaluated(patched: CheckoutJobs, tmp_path: Path) -> None:
    """``--skip-train``: the losses of plain Megatron, also when a rank is lost meanwhile, and nothing else happens."""
    patched.plain(*FLAGS, "--save", str(tmp_path), "--train-iters", "2", ranks=1)
    flags = ("--skip-train", "--load", str(tmp_path), "--save", str(tmp_path))
    patched.plain(*FLAGS, *flags, ranks=1)
    found = re.findall(r"lm loss value: (\S+) ", last_plain_log(patched).read_text())
    job = patched.run("--elastic", *FLAGS, *PP2, *flags, *inject("kill:rank=3,at=evaluate,grain=1"), ranks=4)
    assert [(step, name) for step, name, _ in evaluations(job)] == [(2, "test"), (2, "validation")]
    ours = {name: loss for _, name, loss in evaluations(job)}
    assert [ours["validation"], ours["test"]] == pytest.approx([float(loss) for loss in found], rel=TOLERANCE)
    assert job.metrics() == {} and job.events("saved") == [] and len(job.events("recovered")) == 1


def test_progress(patched: CheckoutJobs, tmp_path: Path) -> None:
    """``--log-progress``: whoever is lost, in the form in which plain Megatron goes on with it."""
    flags = (*FLAGS, "--log-progress", "--override-opt_param-scheduler", "--save", str(tmp_path))
    patched.run("--elastic", *flags, *PP2, *inject("kill:rank=0,step=3,at=backward"), ranks=4)
    patched.plain(*flags, "--load", str(tmp_path), "--train-iters", "10", ranks=1)
    lines = [line.split("\t") for line in (tmp_path / "progress.txt").read_text().splitlines()]
    assert [line[2:5] for line in lines] == [
        ["# GPUs: 4", "Starting job"], *(["# GPUs: 4", "Saved checkpoint", f"Iteration: {i}"] for i in (2, 4, 6, 8)),
        ["# GPUs: 1", "Starting job"], ["# GPUs: 1", "Saved checkpoint", "Iteration: 10"],
    ]  # fmt: skip
    operations = [float(line[7].rpartition(" ")[2]) for line in lines if line[3] == "Saved checkpoint"]
    assert operations == pytest.approx([step / 2 * operations[0] for step in (2, 4, 6, 8, 10)], rel=0.01)


def test_a_checkpoint_says_what_the_model_is(patched: CheckoutJobs, tmp_path: Path) -> None:
    """Whose it is, ours or plain Megatron's; what the flags say wins where Megatron has it so."""
    model = MODELS["partial rotation"].split()
    job = patched.run("--elastic", *FLAGS, *PP2, *model, "--save", str(tmp_path), ranks=4)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("6")
    told = ("--softmax-type", "off-by-one", "--no-rope-freq", "2", "--no-rope-fusion", "--use-checkpoint-args",
            "--load", str(tmp_path))  # fmt: skip
    again = patched.run("--elastic", *FLAGS, *PP2, *told, ranks=4)
    expected = {step: line["loss_hex"] for step, line in job.metrics().items() if step > 6}
    assert {step: line["loss_hex"] for step, line in again.metrics().items()} == expected


def test_balance_that_is_forced(patched: CheckoutJobs) -> None:
    """Routers draw at random: the same whoever computes it, also where layers are computed again."""
    flags = ("--elastic", *FLAGS, *PP2, *MODELS["experts"].split(), "--moe-router-force-load-balancing",
             "--expert-model-parallel-size", "2", "--recompute-granularity", "full", "--recompute-method", "uniform",
             "--recompute-num-layers", "1")  # fmt: skip
    undisturbed = patched.undisturbed(*flags)
    assert_same(patched.run(*flags, *KILLS), undisturbed)
    free = [flag for flag in flags if flag != "--moe-router-force-load-balancing"]
    assert patched.run(*free).metrics()[1]["loss"] != undisturbed.metrics()[1]["loss"]
