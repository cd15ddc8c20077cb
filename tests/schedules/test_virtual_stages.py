"""Virtual pipeline stages: the numbers of the job without them bit for bit, whoever dies, and wherever layers move."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_elastic import cli
from megatron_elastic.layout import Layout, gpt_units
from megatron_elastic.pipeline.program import check
from megatron_elastic.pipeline.schedule import usual
from megatron_elastic.plan import Costs
from megatron_elastic.plan.replan import replan
from tests.jobs import MODERN, Jobs, assert_same_training, inject
from tests.placements import EVERYTHING, PP2_DP4, TP2_PP2, assert_loaded_either_way, killed_between_evaluations

VIRTUAL = ("--num-virtual-stages-per-pipeline-rank", "2")


def test_killed(jobs: Jobs) -> None:
    """In a stage whose cells then have different numbers of grains, with evaluations between."""
    for layout in killed_between_evaluations(jobs, VIRTUAL, "5@2:backward", "2@3:apply"):
        assert layout.num_chunks == 2


def test_few_grains_with_the_backward_split(jobs: Jobs) -> None:
    """No other grain is on its way when a weight gets its gradient."""
    flags = ("--pipeline-model-parallel-size", "2", "--train-iters", "2", "--global-batch-size", "2")
    split = (*VIRTUAL, "--elastic-schedule", "split")
    runs = [str(job.run_dir) for job in (jobs.run(*flags, ranks=2), jobs.run(*flags, *split, ranks=2))]
    assert cli.main(["compare", *runs]) == 0


@pytest.mark.parametrize(("flags", "extra"), [
    pytest.param("", ""), (MODERN, EVERYTHING),
], ids=["usual", "everything"])
def test_together_with(jobs: Jobs, flags: str, extra: str) -> None:
    reference = jobs.undisturbed(*TP2_PP2.flags, *flags.split())
    job = jobs.run(*TP2_PP2.flags, *flags.split(), *VIRTUAL, *extra.split(), *inject("7@3:forward"))
    assert_same_training(job, reference, [7])


def test_checkpoints(jobs: Jobs) -> None:
    """Saved with virtual stages, loaded without, and the other way."""
    assert_loaded_either_way(jobs, PP2_DP4, VIRTUAL, "chunks")


def test_layers_move(jobs: Jobs) -> None:
    """A stage loses all its cells: others take its layers over. And so with another number of stages."""
    flags = ("--pipeline-model-parallel-size", "2", "--train-iters", "8")
    reference = jobs.undisturbed(*flags, ranks=4)
    job = jobs.start(*flags, *VIRTUAL, *inject("2@2:backward", "3@4:backward"), ranks=4)
    job.read_until("lost ranks [3]")
    job.read_until("recovered from")
    assert cli.main(["scale", str(job.run_dir), "--pp", "1"]) == 0
    job.finish()
    assert cli.main(["compare", str(job.run_dir), str(reference.run_dir)]) == 0, job.output
    shapes = [(layout.pipeline_size, layout.num_chunks) for layout in job.layouts()]
    assert shapes[0] == (2, 2)
    assert shapes[-1] == (1, 1)


def chunked(layers: int, pp: int, dp: int) -> Layout:
    units, stage_units = gpt_units(layers, pp, tied=True, positions=True, chunks=2)
    return Layout.grid(
        tp=1, pp=pp, dp=dp, stage_units=stage_units, units=units, num_grains=4, num_slices=2, replicas=1
    )


def test_plans_keep_chunks_if_they_can() -> None:
    before = chunked(16, 4, 2)
    costs = Costs.assumed(before.units)
    assert replan(before, costs, 1).stages == before.stages
    after = replan(before, costs, 1, lost=[2])
    assert (after.pipeline_size, after.num_chunks) == (4, 2)
    for stages, chunks in ((3, 2), (2, 2), (1, 1)):
        after = replan(before, costs, 1, stages=[stages])
        assert (after.pipeline_size, after.num_chunks) == (stages, chunks)
        check(usual(after), after)
    few = chunked(4, 2, 2)
    after = replan(few, Costs.assumed(few.units), 1, stages=[4])
    assert (after.pipeline_size, after.num_chunks) == (4, 1), "six blocks do not make eight chunks"


def test_a_slow_layer_moves_between_chunks() -> None:
    before = chunked(8, 2, 1)
    costs = Costs.assumed(before.units)
    slow = replace(costs, units=tuple(
        replace(unit, forward_ms=13.0) if name == "layer.0" else unit
        for name, unit in zip(before.units, costs.units, strict=True)
    ))
    after = replan(before, slow, 1)
    assert after.num_chunks == 2
    assert slow.pace_of(after).step_ms < slow.pace_of(before).step_ms
    assert len(after.stages[0].units) < len(before.stages[0].units)
