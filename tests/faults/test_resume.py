"""Resumed steps with real processes: a loss in mid-step costs what the lost cells had done, and no number changes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.jobs import MODERN, Grid, Job, Jobs, assert_same_training, inject

DP8 = Grid(tp=1, pp=1, steps=5)
PP2_DP4 = Grid(tp=1, pp=2, steps=5)
PP4 = Grid(tp=1, pp=4, steps=4)
TP2_PP2 = Grid(tp=2, pp=2, steps=4)
OVERLAP = ("--overlap-grad-reduce", "--overlap-param-gather")


def killed(rank: int, step: int, at: str, grain: int) -> list[str]:
    """Flags that kill a rank when it comes to a grain."""
    return ["--elastic-inject", f"kill:rank={rank},step={step},at={at},grain={grain}"]


def assert_resumed(job: Job, reference: Job, lost: Sequence[Sequence[int]]) -> None:
    """All recoveries, from the loss of these ranks, went on with the step, and the numbers are the reference's."""
    assert_same_training(job, reference, [rank for ranks in lost for rank in ranks])
    recoveries = job.events("recovered")
    assert [(event["ranks"], event["decision"]) for event in recoveries] == [(list(ranks), "resume") for ranks in lost]
    for event in recoveries:
        assert event["kept_ops"] > 0 and event["redone_ops"] > 0


@pytest.mark.parametrize(("grid", "extra"), [(DP8, ()), (PP2_DP4, OVERLAP)], ids=str)
def test_killed_in_mid_step(jobs: Jobs, grid: Grid, extra: Sequence[str]) -> None:
    """In the middle of computing, with all computed, and with all but the update done."""
    width = 8 // grid.pp
    flags = (*killed(1, 2, "backward", 1 + 16 - width), *killed(6, 3, "forward", 6 % width + 16 - width))
    job = jobs.run(*grid.flags, *extra, *flags, *inject("3@4:grad_sync"))
    assert_resumed(job, jobs.undisturbed(*grid.flags), [[1], [6], [3]])
    first = job.events("recovered")[0]
    share = 16 // width
    assert first["redone_ops"] == 2 * share, "all of the lost cell, which had all but one backward done"
    assert first["kept_ops"] > share, "of the others"


def test_killed_in_a_resumed_step(jobs: Jobs) -> None:
    """In a grain that it has from the first who died; with chunks, halves of backwards, and another loss meanwhile."""
    flags = ("--num-virtual-stages-per-pipeline-rank", "2", "--elastic-schedule", "split", *OVERLAP)
    # Rank 1 leaves grains 1, 5, 9 and 13: rank 3 gets the second.
    kills = (*killed(1, 2, "backward", 13), *killed(3, 2, "backward", 5), *inject("6@2:edit"))
    job = jobs.run(*PP2_DP4.flags, *flags, *kills)
    assert_resumed(job, jobs.undisturbed(*PP2_DP4.flags), [[1, 3, 6]])


def test_halves_of_backwards_and_bf16(jobs: Jobs) -> None:
    flags = (*PP4.flags, "--bf16")
    reference = jobs.undisturbed(*flags)
    kills = (*killed(2, 2, "backward_weight", 6), *killed(7, 3, "backward", 9))
    job = jobs.run(*flags, "--elastic-schedule", "split", *kills)
    assert_resumed(job, reference, [[2], [7]])


def test_cells_of_several_ranks(jobs: Jobs) -> None:
    """In a backward, where the others of the cell wait for it, and after partial sums were added up in cells."""
    flags = (*TP2_PP2.flags, *MODERN.split())
    kills = (*killed(3, 2, "backward", 9), *inject("4@3:vote"))
    job = jobs.run(*flags, *OVERLAP, *kills)
    assert_resumed(job, jobs.undisturbed(*flags), [[3], [4]])


def test_where_the_log_is_too_small_the_step_is_done_again(jobs: Jobs) -> None:
    job = jobs.run(*PP2_DP4.flags, "--elastic-log-mb", "0", *killed(1, 2, "backward", 13))
    assert_same_training(job, jobs.undisturbed(*PP2_DP4.flags), [1])
    (event,) = job.events("recovered")
    assert event["decision"] == "back"
