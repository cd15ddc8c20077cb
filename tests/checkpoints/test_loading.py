"""Checkpoints of plain Megatron-LM and of elastic jobs, there and back, and models that were converted."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.checkpoints.test_interchange import tensors
from tests.jobs import Job
from tests.launch.test_flags import last_plain_log
from tests.models.test_checkout import (
    CheckoutJobs,
    assert_same,
    checkout,
    losses_after_loading,
    losses_of,
    needs_checkout,
    patched,
)
from tests.models.test_models import EP2, FLAGS, FP16, MODELS, PP2, TOLERANCE

__all__ = ["checkout", "patched"]
pytestmark = [needs_checkout, pytest.mark.timeout(900)]

TRACKER = "latest_checkpointed_iteration.txt"
SAVED, LEFT_OUT, LAST = 2, 3, 13
"""Steps that plain training saves; the one that is left out, so that what is saved after it is what was loaded."""


def assert_learns(job: Job, logged: Sequence[str], name: str = "", close: float = 1e-6) -> None:
    """It has the losses of plain training that has loaded the same, of which the second is known from a mean."""
    whole, found = losses_after_loading(logged), {step: line["loss"] for step, line in job.metrics().items()}
    second = list(whole)[1]
    for step, loss in whole.items():
        assert found[step] == pytest.approx(loss, rel=TOLERANCE if step == second else close), (name, step)


@pytest.mark.parametrize(("model", "ranks", "plain"), [
    ("", 2, ()),
    (MODELS["experts"], 2, (*EP2, "--moe-token-dispatcher-type", "allgather")),  # gloo lacks what the other takes
    (MODELS["latent attention"], 1, ()),
    (MODELS["further predictions"], 1, ()),
    (" ".join((*FP16, "--initial-loss-scale", "65536", "--loss-scale-window", "100")), 1, ()),  # no step is skipped
], ids=["dense", "experts, EP2", "latent attention", "further predictions", "fp16"])  # fmt: skip
def test_there_and_back(
    patched: CheckoutJobs, tmp_path: Path, model: str, ranks: int, plain: tuple[str, ...]
) -> None:
    """Weights and moments bit for bit, Adam's step, and the losses of ten steps."""
    usual = (*model.split(), *plain, *FLAGS[2:], "--save-interval", "1", "--lr-decay-iters", str(LAST),
             "--override-opt_param-scheduler")  # fmt: skip
    saves, back = tmp_path / "plain", tmp_path / "back"
    patched.plain(*usual, "--train-iters", str(SAVED), "--save", str(saves), ranks=ranks)
    rest = (*usual, "--train-iters", str(LAST), "--iterations-to-skip", str(LEFT_OUT - 1), "--load", str(saves))
    expected = patched.plain(*rest, ranks=ranks)
    job = patched.run("--elastic", *rest, *PP2, "--save", str(back), ranks=4)
    ours, theirs = tensors(back / f"iter_{LEFT_OUT:07d}"), tensors(saves / f"iter_{SAVED:07d}")
    assert ours.keys() == theirs.keys()
    assert [name for name, tensor in theirs.items() if not torch.equal(ours[name], tensor)] == []
    assert list(losses_of(expected)) == list(range(LEFT_OUT + 1, LAST + 1))
    # A weight of 16 bits may be rounded up where plain training, whose sums are rounded, has it rounded down.
    assert_learns(job, expected, close=TOLERANCE if "--fp16" in model else 1e-6)
    (back / TRACKER).write_text(str(LEFT_OUT))
    again = patched.plain(*rest[:-1], str(back), ranks=ranks)
    assert losses_of(again) == pytest.approx(losses_of(expected), rel=1e-6)


GROWS = ("--rampup-batch-size", "4", "4", "96", "--train-samples", "164", "--lr-decay-samples", "600")
"""Eight steps of 4 samples, four of 8, three of 12, and four of 16."""


def test_there_and_back_while_the_batch_grows(patched: CheckoutJobs, tmp_path: Path) -> None:
    """From a step of 8 samples through two changes: the losses of ten steps; weights and moments after three."""
    usual, saves, back = (*FLAGS[2:], *GROWS, "--save-interval", "3"), tmp_path / "plain", tmp_path / "back"
    whole = losses_of(patched.plain(*usual, "--save", str(saves), ranks=1))
    assert list(whole) == list(range(1, 20))
    (saves / TRACKER).write_text("9")
    job = patched.run("--elastic", *usual, *PP2, "--load", str(saves), "--save", str(back), ranks=4)
    found = {step: line["loss"] for step, line in job.metrics().items()}
    assert found == pytest.approx({step: whole[step] for step in range(10, 20)}, rel=1e-6)
    ours, theirs = tensors(back / "iter_0000012"), tensors(saves / "iter_0000012")
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.allclose(ours[name], tensor, rtol=1e-4, atol=1e-6), name
    (back / TRACKER).write_text("12")
    rest = losses_after_loading(patched.plain(*usual, "--load", str(back), ranks=1))
    assert rest == pytest.approx({step: whole[step] for step in range(13, 20)}, rel=TOLERANCE)


DONE, OLDER, ALL = 4, 2, 8
"""Steps of a checkpoint, of the one before it, and of the whole job."""
OTHER = "--lr 1e-3 --min-lr 5e-4 --lr-decay-style linear --lr-decay-iters 6 --lr-warmup-iters 1"
"""Another schedule than that of a checkpoint."""
BEGINNINGS: dict[str, tuple[str, int]] = {
    "goes on": ("--load SAVED", DONE),
    "goes on from an older one": (f"--load SAVED --ckpt-step {OLDER}", OLDER),
    "with its weights": ("--load SAVED --finetune", 0),
    "with weights of an older one": (f"--load SAVED --finetune --ckpt-step {OLDER}", 0),
    "with its weights, where it has none of its own": ("--load NONE --pretrained-checkpoint SAVED", 0),
    "its own come first": ("--load SAVED --pretrained-checkpoint OTHER", DONE),
    "the optimizer anew": ("--load SAVED --no-load-optim", DONE),
    "random numbers anew": ("--load SAVED --no-load-rng", DONE),
    "it must be there": ("--load SAVED --exit-on-missing-checkpoint", DONE),
    "its flags": ("--load SAVED --use-checkpoint-args", DONE),
    "its schedule": (f"--load SAVED --use-checkpoint-opt_param-scheduler {OTHER}", DONE),
    "another schedule": ("--load SAVED --override-opt_param-scheduler --lr-decay-style linear --weight-decay 1", DONE),
}
"""Flags, and the step after which training begins."""


def rates_of(*logs: Path) -> dict[int, float]:
    """The learning rate of every step that Megatron logged."""
    pattern = re.compile(r"iteration +(\d+)/.* learning rate: (\S+) ")
    return {int(step): float(rate) for log in logs for step, rate in pattern.findall(log.read_text())}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("source", ["plain", "elastic"])
def test_what_a_job_begins_with(patched: CheckoutJobs, tmp_path: Path, source: str) -> None:
    """By each row of the table in the docs that is about a checkpoint with a number: losses and learning rates are
    those of plain Megatron, which begins with the same one.
    """
    saved = tmp_path / "saved"
    flags = (*FLAGS[2:], "--eval-iters", "0", "--train-iters", str(ALL), "--lr-warmup-iters", "3", "--lr-decay-iters",
             "20")  # fmt: skip
    saves = (*flags, "--exit-interval", str(DONE), "--save", str(saved))
    if source == "plain":
        patched.plain(*saves, ranks=1)
    else:
        patched.run("--elastic", *saves, *PP2, ranks=4)
    places = {"SAVED": str(saved), "NONE": str(tmp_path / "none"), "OTHER": str(tmp_path / "other")}
    shutil.copytree(saved / f"iter_{OLDER:07d}", tmp_path / "other" / f"iter_{OLDER:07d}")
    (tmp_path / "other" / TRACKER).write_text(str(OLDER))
    for name, (given, begins) in BEGINNINGS.items():
        row = (*flags, *(places.get(word, word) for word in given.split()))
        logged = patched.plain(*row, ranks=1)
        job = patched.run("--elastic", *row, *PP2, ranks=2)
        assert list(job.metrics()) == list(range(begins + 1, ALL + 1)), name
        assert_learns(job, logged, name)
        rates = rates_of(last_plain_log(patched))
        assert rates_of(*job.run_dir.glob("logs/*")) == pytest.approx(rates, rel=1e-6), name


def test_models_that_were_converted(patched: CheckoutJobs, tmp_path: Path) -> None:
    """As ``tools/checkpoint/convert.py`` names them, and others: training begins with their weights."""
    plain, release, zero = (tmp_path / name for name in ("plain", "release", "zero"))
    flags = (*FLAGS, "--train-iters", "4")
    patched.plain(*FLAGS, "--train-iters", "2", "--save", str(plain), ranks=1)
    for directory, name, tracker in ((release, "release", "release"), (zero, "iter_0000000", "0")):
        shutil.copytree(plain / "iter_0000002", directory / name)
        said = torch.load(directory / name / "common.pt", weights_only=False)
        said["args"].consumed_train_samples = said["iteration"] = 0
        torch.save(said, directory / name / "common.pt")
        (directory / TRACKER).write_text(tracker)
    expected = losses_after_loading(patched.plain(*flags, "--load", str(release), ranks=1))
    job = patched.run("--elastic", *flags, *PP2, "--load", str(release), "--exit-on-missing-checkpoint", ranks=4)
    assert {step: line["loss"] for step, line in job.metrics().items()} == pytest.approx(expected, rel=TOLERANCE)
    for loads in (("--load", str(zero), "--finetune", "--exit-on-missing-checkpoint"),
                  ("--pretrained-checkpoint", str(release), "--load", str(tmp_path / "none"))):  # fmt: skip
        assert_same(patched.run("--elastic", *flags, *PP2, *loads, ranks=4), job)


def test_the_older_format_once_it_is_converted(patched: CheckoutJobs, tmp_path: Path) -> None:
    """``torch``, by the command that its refusal names; then a job goes on in another layout, as plain Megatron."""
    flags = (*FLAGS[2:], "--eval-iters", "0", "--train-iters", str(ALL), "--lr-decay-iters", "20")
    old, new = tmp_path / "old", tmp_path / "new"
    saves = (*flags, *PP2, "--save", str(old))
    patched.plain(*saves, "--ckpt-format", "torch", "--exit-interval", str(DONE), ranks=2)
    refused = patched.start("--elastic", *flags, "--load", str(old), ranks=2).finish(2)
    told = re.search(r"is in the format torch, .* and (--ckpt-format .*?), and give (--load \S+)", refused)
    assert told is not None, refused
    convert, load = (words.replace("NEW", str(new)).split() for words in told.groups())
    patched.plain(*saves, *convert, ranks=2)
    logged = patched.plain(*flags, *PP2, "--ckpt-format", "torch", "--load", str(old), ranks=2)
    assert_learns(patched.run("--elastic", *flags, *load, ranks=2), logged)


def test_a_checkpoint_that_must_be_there(patched: CheckoutJobs, tmp_path: Path) -> None:
    refused = patched.start("--elastic", *FLAGS, "--load", str(tmp_path), "--exit-on-missing-checkpoint", ranks=2)
    assert f"--load {tmp_path}: there is no checkpoint, and --exit-on-missing-checkpoint is given" in refused.finish(2)


def test_after_a_batch_that_grew(patched: CheckoutJobs, tmp_path: Path) -> None:
    """A job goes on without ``--rampup-batch-size``, from the sample and the learning rate where it ended."""
    flags = (*FLAGS[2:], "--lr-decay-samples", "600", "--eval-iters", "0")
    patched.plain(*flags, "--rampup-batch-size", "4", "4", "24", "--train-samples", "76", "--save", str(tmp_path),
                  ranks=1)  # fmt: skip
    rest = (*flags, "--train-samples", "160", "--load", str(tmp_path), "--override-opt_param-scheduler")
    expected = losses_after_loading(patched.plain(*rest, ranks=1))
    job = patched.run("--elastic", *rest, *PP2, ranks=4)
    assert {step: line["loss"] for step, line in job.metrics().items()} == pytest.approx(expected, rel=TOLERANCE)
