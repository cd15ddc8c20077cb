"""Chunks placed as a V: the numbers of the job without them bit for bit, whoever dies, and wherever layers move."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_elastic import cli
from megatron_elastic.layout import Layout, gpt_units, joined, placement_of, positions, way
from megatron_elastic.pipeline.program import check
from megatron_elastic.pipeline.schedule import usual
from megatron_elastic.plan import Costs
from megatron_elastic.plan.graph import Planner
from megatron_elastic.plan.replan import fill, replan
from tests.jobs import MODERN, Jobs, assert_same_training, inject
from tests.placements import (
    EVERYTHING,
    PP2_DP4,
    TP2_PP2,
    along,
    assert_loaded_either_way,
    killed_between_evaluations,
    ways,
)
from tests.tiers.examples import examples

V = ("--elastic-placement", "v")


def test_killed(jobs: Jobs) -> None:
    """First where the model ends, and then at the turn, with evaluations between."""
    for layout in killed_between_evaluations(jobs, V, "1@2:backward", "6@3:apply"):
        assert layout.through(2) == (0, 1, 0)
        assert len(layout.holders(0)) == layout.stages[0].width, "nobody else has the embedding"


@pytest.mark.parametrize(("flags", "extra"), [("", ""), (MODERN, EVERYTHING)], ids=["usual", "everything"])
def test_together_with(jobs: Jobs, flags: str, extra: str) -> None:
    reference = jobs.undisturbed(*TP2_PP2.flags, *flags.split())
    job = jobs.run(*TP2_PP2.flags, *flags.split(), *V, *extra.split(), *inject("7@3:forward"))
    assert_same_training(job, reference, [7])


def test_checkpoints(jobs: Jobs) -> None:
    """Saved as a V, loaded with one chunk a stage, and the other way."""
    assert_loaded_either_way(jobs, PP2_DP4, V, "v")


def test_layers_move(jobs: Jobs) -> None:
    """A stage loses all its cells: others take its layers over. And so with other numbers of stages."""
    flags = ("--pipeline-model-parallel-size", "3", "--train-iters", "14", "--num-layers", "6")
    reference = jobs.undisturbed(*flags, ranks=6)
    job = jobs.start(*flags, *V, *inject("2@2:backward", "3@4:backward"), ranks=6)
    job.read_until("lost ranks [3]")
    job.read_until("recovered from")
    for stages in (3, 1):
        assert cli.main(["scale", str(job.run_dir), "--pp", str(stages)]) == 0
        job.read_until(f"the pipeline has {stages} stages")
    job.finish()
    assert cli.main(["compare", str(job.run_dir), str(reference.run_dir)]) == 0, job.output
    shapes = [(layout.pipeline_size, layout.placement) for layout in job.layouts()]
    assert shapes[0] == (3, ("v", 2))
    assert (2, ("v", 2)) in shapes
    assert shapes[-1] == (1, ("loop", 1))


# ---- the way ----------------------------------------------------------------------------------


@settings(max_examples=examples(2000), deadline=None)
@given(through=ways(7), data=st.data())
def test_a_way_is_what_units_say(through: tuple[int, ...], data: st.DataObject) -> None:
    layers = [data.draw(st.integers(1, 3)) for _ in through]
    layout = along(through, layers, 1, 2, tied=data.draw(st.booleans()))
    assert tuple(position.stage for position in layout.way) == through
    assert layout.through(layout.pipeline_size) == through
    assert sorted(unit for position in layout.way for unit in position.units) == list(range(len(layout.units)))
    for number, position in enumerate(layout.way):
        assert layout.position(position.stage, position.chunk) == number
        assert set(position.units) <= set(layout.chunks(position.stage)[position.chunk])
    assert layout.is_tied or 0 not in layout.stages[through[-1]].units
    assert Layout.from_json(layout.to_json()) == layout


@given(stages=st.integers(2, 9), chunks=st.integers(1, 4))
def test_placements_are_told_apart(stages: int, chunks: int) -> None:
    assert placement_of(joined(way("loop", stages, chunks))) == ("loop", chunks)
    assert placement_of(joined(way("v", stages, 2))) == ("v", 2)
    found = placement_of(joined(way("v", stages, chunks)))
    assert found is not None
    assert joined(way(found[0], stages, found[1])) == joined(way("v", stages, chunks)), "of two stages it may be a loop"
    assert placement_of([0, 1, 0, 2]) is None


def test_the_ends_of_a_v_are_in_one_stage() -> None:
    _, stage_units = gpt_units(8, 2, True, True, split=[[2, 2], [4]], through=(0, 1, 0))
    assert stage_units == [[0, 1, 2, 3, 8, 9, 10], [4, 5, 6, 7]]
    assert [position.units for position in positions(stage_units)] == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10)]


def v(layers: int, pp: int, dp: int) -> Layout:
    each = layers // (2 * pp)
    return along(joined(way("v", pp, 2)), [*[each] * (pp - 1), 2 * each, *[each] * (pp - 1)], dp, 4 * dp)


def test_it_is_known_whether_the_ends_are_tied_where_both_are_in_one_stage() -> None:
    for tied in (True, False):
        layout = replace(v(16, 4, 1), tied=tied)
        assert layout.is_tied == tied
        assert Layout.from_json(layout.to_json()).tied == tied
        apart = fill(layout, Costs.assumed(layout.units), Planner(
            layout.units, Costs.assumed(layout.units), layout.is_tied, layout.num_grains
        ).split([1] * 4), 1)  # fmt: skip
        assert (0 in apart.stages[-1].units) == tied
        assert replan(apart, Costs.assumed(layout.units), 2, stages=[1]).is_tied == tied


def test_plans_keep_the_v_if_they_can() -> None:
    before = v(16, 4, 2)
    costs = Costs.assumed(before.units)
    assert replan(before, costs, 1).stages == before.stages
    after = replan(before, costs, 1, lost=[2])
    assert (after.pipeline_size, after.placement) == (4, ("v", 2))
    for stages, expected in ((3, ("v", 2)), (2, ("v", 2)), (1, ("loop", 1))):
        after = replan(before, costs, 1, stages=[stages])
        assert (after.pipeline_size, after.placement) == (stages, expected)
        check(usual(after), after)


def test_a_slow_layer_moves_along_the_v() -> None:
    before = v(12, 3, 1)
    costs = Costs.assumed(before.units)
    slow = replace(costs, units=tuple(
        replace(unit, forward_ms=13.0) if name == "layer.0" else unit
        for name, unit in zip(before.units, costs.units, strict=True)
    ))
    after = replan(before, slow, 1)
    assert after.placement == ("v", 2)
    assert slow.pace_of(after).step_ms < slow.pace_of(before).step_ms
    assert len(after.stages[0].units) < len(before.stages[0].units)
