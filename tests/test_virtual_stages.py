"""Virtual pipeline stages: the numbers of the job without them bit for bit, whoever dies; layers stay in place."""

from __future__ import annotations

import json

import pytest

from megatron_elastic import cli
from megatron_elastic.layout import Layout, gpt_units
from megatron_elastic.pipeline.program import check
from megatron_elastic.pipeline.schedule import interleaved
from megatron_elastic.plan import Costs, NoLayout
from megatron_elastic.plan.replan import replan
from tests.jobs import MODERN, Grid, Jobs, assert_same_training, inject

VIRTUAL = ("--num-virtual-stages-per-pipeline-rank", "2")
PP2_DP4 = Grid(tp=1, pp=2, steps=4)
TP2_PP2 = Grid(tp=2, pp=2, steps=4)
EVERYTHING = "--elastic-schedule split --overlap-grad-reduce --overlap-param-gather --recompute-granularity full"


def test_killed(jobs: Jobs) -> None:
    """In a stage whose cells then have different numbers of grains, with evaluations between."""
    flags = (*PP2_DP4.flags, "--eval-interval", "2", "--eval-iters", "1", "--split", "6,2,2")
    reference = jobs.undisturbed(*flags)
    job = jobs.run(*flags, *VIRTUAL, *inject("5@2:backward", "2@3:apply"))
    layouts = job.layouts()
    for layout in layouts:
        assert layout.num_chunks == 2
        check(interleaved(layout, 2), layout, chunks=2)
    assert cli.main(["compare", str(job.run_dir), str(reference.run_dir)]) == 0, job.output
    assert layouts[-1].lost == (2, 5)
    losses = [[event["loss"] for event in each.events("evaluated")] for each in (job, reference)]
    assert losses[0] == losses[1]


def test_few_grains_with_the_backward_split(jobs: Jobs) -> None:
    """No other grain is on its way when a weight gets its gradient."""
    flags = ("--pipeline-model-parallel-size", "2", "--train-iters", "2", "--global-batch-size", "2")
    split = (*VIRTUAL, "--elastic-schedule", "split")
    runs = [str(job.run_dir) for job in (jobs.run(*flags, ranks=2), jobs.run(*flags, *split, ranks=2))]
    assert cli.main(["compare", *runs]) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("flags", "extra"), [
    pytest.param("", "", marks=pytest.mark.long), (MODERN, EVERYTHING),
], ids=["usual", "everything"])
def test_together_with(jobs: Jobs, flags: str, extra: str) -> None:
    reference = jobs.undisturbed(*TP2_PP2.flags, *flags.split())
    job = jobs.run(*TP2_PP2.flags, *flags.split(), *VIRTUAL, *extra.split(), *inject("7@3:forward"))
    assert_same_training(job, reference, [7])


@pytest.mark.long
def test_checkpoints(jobs: Jobs) -> None:
    """Saved with virtual stages, loaded without, and the other way."""
    reference = jobs.undisturbed(*PP2_DP4.flags)
    for name, saves, loads in (("with", VIRTUAL, ()), ("without", (), VIRTUAL)):
        folder = jobs.folder / f"{name}-chunks"
        jobs.run(*PP2_DP4.flags, *saves, "--save", str(folder), "--save-interval", "2")
        (folder / "latest_checkpointed_iteration.txt").write_text("2")
        job = jobs.run(*PP2_DP4.flags, *loads, "--load", str(folder))
        expected = reference.metrics()
        assert {step: line["loss_hex"] for step, line in job.metrics().items()} == {
            step: expected[step]["loss_hex"] for step in (3, 4)
        }
        assert json.loads((job.run_dir / "digest.json").read_text()) == json.loads(
            (reference.run_dir / "digest.json").read_text()
        )


def test_layers_stay() -> None:
    units, stage_units = gpt_units(4, 2, tied=True, positions=True, chunks=2)
    layout = Layout.grid(
        tp=1, pp=2, dp=2, stage_units=stage_units, units=units, num_grains=4, num_slices=2, replicas=1
    )
    with pytest.raises(NoLayout, match="each stage has 2 virtual pipeline stages, so layers cannot be moved"):
        replan(layout, Costs.assumed(layout.units), 1, stages=[1])
