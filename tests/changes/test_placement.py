"""Numbers do not depend on placement: jobs with other optimizers and types, under other layouts and with kills."""

from __future__ import annotations

import pytest

from megatron_elastic import cli
from tests.jobs import Jobs, inject

FLAGS = ("--elastic-slices", "4", "--train-iters", "6")
PP1, PP2 = (("--pipeline-model-parallel-size", str(size)) for size in (1, 2))


def test_the_pipeline_degree_does_not_show(jobs: Jobs) -> None:
    """Not even in bf16, where a tied embedding's two gradients must not be added before they are exact."""
    deep, flat = jobs.start(*FLAGS, *PP2, "--bf16", ranks=4), jobs.start(*FLAGS, *PP1, "--bf16", ranks=2)
    deep.finish()
    flat.finish()
    assert cli.main(["compare", str(deep.run_dir), str(flat.run_dir)]) == 0


@pytest.mark.parametrize(
    "optimizer",
    [
        "--optimizer sgd --lr 0.05 --decoupled-lr 0.1 --bf16 --main-grads-dtype bf16",
        "--weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 0.3 --decoupled-lr 2e-2",
    ],
    ids=["sgd", "adam"],
)
def test_kills_do_not_show_whatever_the_optimizer(jobs: Jobs, optimizer: str) -> None:
    flags = (*FLAGS, *PP2, *optimizer.split())
    reference = jobs.undisturbed(*flags)
    job = jobs.run(*flags, *inject("5@2:replay", "0@4:apply"))
    assert cli.main(["compare", str(job.run_dir), str(reference.run_dir)]) == 0, job.output


def test_a_checkpoint_of_sgd_goes_on_under_another_layout(jobs: Jobs) -> None:
    flags = (*FLAGS, "--optimizer", "sgd", "--lr", "0.05", "--lr-decay-iters", "6")
    folder = jobs.folder / "sgd-checkpoint"
    whole = jobs.run(*flags, *PP2, "--save", str(folder), "--save-interval", "3")
    (folder / "latest_checkpointed_iteration.txt").write_text("3")
    rest = jobs.run(*flags, *PP1, "--load", str(folder))
    for step, line in rest.metrics().items():
        assert line["loss_hex"] == whole.metrics()[step]["loss_hex"]
        assert line["grad_norm_hex"] == whole.metrics()[step]["grad_norm_hex"]
    assert (whole.run_dir / "digest.json").read_text() == (rest.run_dir / "digest.json").read_text()
