"""Placements: layouts whose chunks are on the stages in any order, of any number and size."""

from __future__ import annotations

import json
from collections.abc import Sequence

from hypothesis import strategies as st

from megatron_elastic import cli
from megatron_elastic.layout import PLACEMENTS, Layout, gpt_units, joined, way
from megatron_elastic.pipeline.program import check
from megatron_elastic.pipeline.schedule import usual
from tests.jobs import Grid, Jobs, inject

PP2_DP4 = Grid(tp=1, pp=2, steps=4)
TP2_PP2 = Grid(tp=2, pp=2, steps=4)
EVERYTHING = "--elastic-schedule split --overlap-grad-reduce --overlap-param-gather --recompute-granularity full"
"""Whatever else may be switched on beside several chunks a stage."""


def along(through: Sequence[int], layers: Sequence[int], dp: int, grains: int, tied: bool = True) -> Layout:
    """Chunks on the stages that a grain passes in turn, with so many layers each."""
    stages = max(through) + 1
    split = [[count for at, count in zip(through, layers, strict=True) if at == stage] for stage in range(stages)]
    units, stage_units = gpt_units(sum(layers), stages, tied, False, split=split, through=through)
    return Layout.grid(tp=1, pp=stages, dp=dp, stage_units=stage_units, units=units, num_grains=grains, num_slices=dp,
                       replicas=0)


@st.composite
def ways(draw: st.DrawFn, most: int = 5) -> tuple[int, ...]:
    """The stages that a grain passes in turn: round robin, as a V, or anyhow, with any number of chunks a stage."""
    stages, chunks = draw(st.integers(1, most)), draw(st.integers(1, 3))
    if draw(st.booleans()):
        return joined(way(draw(st.sampled_from(PLACEMENTS)), stages, chunks))
    further = draw(st.lists(st.integers(0, stages - 1), max_size=2 * stages))
    return joined([*range(stages), *further])


@st.composite
def layouts(draw: st.DrawFn, most: int = 5) -> Layout:
    """Of such ways, with chunks of any size."""
    through = draw(ways(most))
    layers = [draw(st.integers(1, 3)) for _ in through]
    dp = draw(st.integers(1, 3))
    return along(through, layers, dp, dp * draw(st.integers(1, 8)), draw(st.booleans()))


def killed_between_evaluations(jobs: Jobs, flags: Sequence[str], *kills: str) -> list[Layout]:
    """The layouts of a job with ``flags`` that loses the ranks of ``kills``, and whose numbers are those of one without
    flags, also where it is evaluated.
    """
    common = (*PP2_DP4.flags, "--eval-interval", "2", "--eval-iters", "1", "--split", "6,2,2")
    reference = jobs.undisturbed(*common)
    job = jobs.run(*common, *flags, *inject(*kills))
    found = job.layouts()
    for layout in found:
        check(usual(layout), layout)
    assert cli.main(["compare", str(job.run_dir), str(reference.run_dir)]) == 0, job.output
    assert found[-1].lost == tuple(sorted(int(kill.partition("@")[0]) for kill in kills))
    losses = [[event["loss"] for event in each.events("evaluated")] for each in (job, reference)]
    assert losses[0] == losses[1]
    return found


def assert_loaded_either_way(jobs: Jobs, grid: Grid, flags: Sequence[str], label: str) -> None:
    """A checkpoint of step 2 that is saved with ``flags`` goes on without them, and the other way, as one job of four
    steps. ``label``: for folders.
    """
    reference = jobs.undisturbed(*grid.flags)
    for name, saves, loads in (("with", flags, ()), ("without", (), flags)):
        folder = jobs.folder / f"{name}-{label}"
        jobs.run(*grid.flags, *saves, "--save", str(folder), "--save-interval", "2")
        (folder / "latest_checkpointed_iteration.txt").write_text("2")
        job = jobs.run(*grid.flags, *loads, "--load", str(folder))
        expected = reference.metrics()
        assert {step: line["loss_hex"] for step, line in job.metrics().items()} == {
            step: expected[step]["loss_hex"] for step in (3, 4)
        }
        assert json.loads((job.run_dir / "digest.json").read_text()) == json.loads(
            (reference.run_dir / "digest.json").read_text()
        )
