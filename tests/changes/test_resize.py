"""``--elastic-dataflow resize`` with real processes: cells even to within a sample, losses the same but rounding."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from megatron_elastic.layout import Layout
from tests.jobs import Grid, Job, Jobs, inject

SIZE = 2
"""Samples of a micro-batch."""
FLAGS = ["--micro-batch-size", str(SIZE), "--elastic-slices", "4"]
TP1 = Grid(tp=1, pp=2, steps=5)
TP2 = Grid(tp=2, pp=2, steps=5)
PP3 = Grid(tp=1, pp=3, steps=5, ranks=9)
PP3_FLAGS = ["--num-layers", "3", "--global-batch-size", "18", "--eval-iters", "1", "--eval-interval", "2",
             "--split", "60,20,20"]
"""Nine micro-batches, three for each cell, and a stage that is neither the first nor the last."""


def resize(jobs: Jobs, grid: Grid, *kills: str, flags: Sequence[str] = ()) -> Job:
    return jobs.run(*FLAGS, *grid.flags, *flags, "--elastic-dataflow", "resize", *inject(*kills), ranks=grid.ranks)


def assert_close(job: Job, reference: Job, first: int) -> None:
    """The numbers are those of the reference: bit for bit before step ``first``, then to a millionth."""
    ours, theirs = job.metrics(), reference.metrics()
    assert list(ours) == list(theirs)
    for step, line in ours.items():
        if step < first:
            for exact in ("loss_hex", "grad_norm_hex"):
                assert line[exact] == theirs[step][exact], step
        assert line["loss"] == pytest.approx(theirs[step]["loss"], rel=1e-6, abs=0), step
        assert line["consumed_samples"] == theirs[step]["consumed_samples"]
        assert line["lr"] == theirs[step]["lr"]


def assert_even(layout: Layout) -> None:
    """Every cell has something to do, and those of a stage equally much to within one sample."""
    assert layout.samples == SIZE
    for stage in layout.stages:
        loads = [SIZE * layout.load(cell) for cell in stage.cells]
        assert 0 < max(loads) <= min(loads) + 1
        assert sum(loads) == SIZE * layout.num_grains


@pytest.mark.parametrize(
    ("grid", "reference", "kill"),
    [
        # Of two cells the one that is left has all grains, and nothing is cut.
        (Grid(tp=1, pp=4, steps=5), TP1, "5@3:backward"),
        (TP1, TP1, "5@3:vote"),
        (TP2, TP2, "6@3:forward"),
        (Grid(tp=2, pp=1, steps=5), TP2, "2@3:apply"),
    ],
    ids=str,
)
def test_one_is_killed(jobs: Jobs, grid: Grid, reference: Grid, kill: str) -> None:
    """Losses depend neither on stages nor on data parallelism, so the reference may have another grid."""
    job = resize(jobs, grid, kill)
    assert_close(job, jobs.undisturbed(*FLAGS, *reference.flags), 4 if kill.endswith("apply") else 3)
    before, *later = job.layouts()
    assert not any(cell.parts for stage in before.stages for cell in stage.cells)
    lost = int(kill[0])
    for layout in later:
        assert_even(layout)
        assert layout.lost == (lost,)
        assert set(layout.ranks) == set(before.ranks) - set(before.cell_of(lost).ranks), "only its cell is gone"
        cut = layout.stages[before.stage_of(lost)]
        assert any(cell.parts for cell in cut.cells) == (layout.num_grains % cut.width > 0)
    if not any(cell.parts for stage in later[-1].stages for cell in stage.cells):
        assert_close(job, jobs.undisturbed(*FLAGS, *reference.flags), grid.steps + 1)


def test_two_are_killed_one_during_the_recovery(jobs: Jobs) -> None:
    """In neighbouring stages, one of which is in the middle; evaluation goes on with parts, too."""
    reference = jobs.undisturbed(*FLAGS, *PP3.flags, *PP3_FLAGS, ranks=PP3.ranks)
    job = resize(jobs, PP3, "4@3:backward", "8@3:edit", flags=PP3_FLAGS)
    assert_close(job, reference, 3)
    last = job.layouts()[-1]
    assert_even(last)
    assert [stage.width for stage in last.stages] == [3, 2, 2]
    assert [any(cell.parts for cell in stage.cells) for stage in last.stages] == [False, True, True]
    expected = {event["step"]: event["loss"] for event in reference.events("evaluated")}
    assert list(expected) == [2, 4]
    actual = [(event["step"], event["loss"]) for event in job.events("evaluated")]
    assert [step for step, _ in actual] == [2, 2, 4], "the one after step 2 belongs to step 3, which is done again"
    for step, loss in actual:
        assert loss == pytest.approx(expected[step], rel=1e-6, abs=0)
