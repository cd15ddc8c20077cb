"""Elastic jobs with real processes: ranks are killed at every point, and training gives the same numbers."""

from __future__ import annotations

import math
import os
import shutil
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from megatron_elastic.faults.injection import HOOK_POINTS
from megatron_elastic.observe.records import read_digest
from tests.jobs import Grid, Job, Jobs, assert_exactly_once, assert_same_training, inject

DP8 = Grid(tp=1, pp=1, steps=9)
TP2_PP2 = Grid(tp=2, pp=2, steps=5)
PP4 = Grid(tp=1, pp=4, steps=5)
PP2_DP4 = Grid(tp=1, pp=2, steps=9)

STEP_POINTS = HOOK_POINTS[: HOOK_POINTS.index("commit") + 1]
ELSEWHERE = {"checkpoint", "prepare", "switch", "reload", "backward_weight", "evaluate", "recut"}
"""Points with tests of their own: below, in ``test_join.py``, ``test_fallback.py``, ``test_split_backward.py`` and
``test_recut.py``.
"""

# Slice k is owned by the k-th cell of its stage and replicated in the next one. So whatever dies in every other cell,
# and whenever, the cells between hold every slice. Who is to die in a recovery must be in the step of the first kill:
# all are when somebody votes, and all that need the first one's parameters in param_sync.
KILLS: dict[Grid, list[list[str]]] = {
    DP8: [
        ["0@2:data", "2@4:forward", "4@6:backward", "6@8:grad_sync"],
        ["1@2:replay", "3@4:vote", "5@6:apply", "7@8:param_sync"],
        ["0@3:commit"],  # the rank that reports the steps, before it does
        ["0@2:vote", "2@2:interrupt", "4@2:edit", "6@2:resume"],
        ["1@2:param_sync", "3@2:report", "5@2:promote", "7@2:replicate"],
    ],
    PP2_DP4: [
        ["0@2:data", "6@4:forward"],
        ["5@2:backward", "3@4:grad_sync"],
        ["4@2:replay", "2@4:vote"],
        ["1@2:apply", "7@4:param_sync"],
        ["4@2:commit"],
        ["4@2:vote", "2@2:interrupt", "0@2:edit", "6@2:replicate"],
        ["1@2:param_sync", "5@2:report", "3@2:resume", "7@2:promote"],
    ],
    TP2_PP2: [
        *([f"{rank}@3:{point}"] for rank, point in zip((0, 1, 4, 5, 2, 3, 6, 7, 0), STEP_POINTS, strict=True)),
        ["4@3:vote", "0@3:interrupt", "1@3:edit", "5@3:replicate"],
        ["3@3:vote", "6@3:report", "2@3:promote"],
        ["7@3:vote", "1@3:resume"],
    ],
    PP4: [
        *([f"{rank}@3:{point}"] for rank, point in zip((7, 4, 2, 1, 0, 3, 5, 6, 0), STEP_POINTS, strict=True)),
        ["1@3:vote", "5@3:interrupt", "3@3:edit", "7@3:replicate"],
        ["6@3:vote", "0@3:report", "2@3:promote"],
        ["0@3:vote", "3@3:interrupt", "4@3:edit", "7@3:resume"],  # one of each stage, of both columns
    ],
}


def _cases() -> Iterator[object]:
    for grid, jobs in KILLS.items():
        for kills in jobs:
            yield pytest.param(grid, kills, id=f"{grid}-{'+'.join(kills)}")


def test_every_hook_point_is_covered() -> None:
    for grid, jobs in KILLS.items():
        covered = {kill.partition(":")[2] for kills in jobs for kill in kills}
        assert covered == set(HOOK_POINTS) - ELSEWHERE, str(grid)


@pytest.mark.parametrize(("grid", "kills"), list(_cases()))
def test_killed(jobs: Jobs, grid: Grid, kills: Sequence[str]) -> None:
    reference = jobs.undisturbed(*grid.flags)
    job = jobs.run(*grid.flags, *inject(*kills))
    assert_same_training(job, reference, [int(kill[0]) for kill in kills])
    assert [event["spec"] for event in job.events("injected")]
    assert len(job.events("injected")) == len(kills)
    for event in job.events("recovered"):
        assert (event["step"], event["decision"]) in _possible(event["ranks"], kills), event


def _possible(ranks: Sequence[int], kills: Sequence[str]) -> set[tuple[int, str]]:
    """(step, decision) that a recovery from the loss of ``ranks`` may have, given what killed the first of them."""
    own = next(kill for kill in kills if int(kill[0]) in ranks)
    first = next(kill for kill in kills if kill[2] == own[2])  # who dies in a recovery dies of its step
    step, point = int(first[2]), first[4:]
    anew = {(step, "back"), (step, "resume")}
    if point == "commit" or (point in ("apply", "param_sync") and own != first):
        # The others may be done with the step as well, and have begun the next one.
        return {(step, "forward"), (step + 1, "back"), (step + 1, "resume")}
    if point in ("apply", "param_sync"):
        return {(step, "forward")}
    if point == "vote":
        return {(step, "resume")}
    return {*anew, (step - 1, "forward")}  # another column may still be gathering the last step's parameters


@pytest.mark.parametrize("grid", KILLS, ids=str)
def test_killed_while_saving(jobs: Jobs, grid: Grid) -> None:
    """The checkpoint is complete all the same, and a job that loads it goes on as if nothing had been."""
    reference = jobs.undisturbed(*grid.flags)
    folder = jobs.folder / f"checkpoint-{grid}"
    # What is due after step 2 belongs to step 3.
    job = jobs.run(*grid.flags, "--save", str(folder), "--save-interval", "2", *inject("5@3:checkpoint"))
    assert_same_training(job, reference, [5])
    due = sorted({*range(2, grid.steps + 1, 2), grid.steps})  # the last one at the end
    assert [event["step"] for event in job.events("saved")] == due
    assert (folder / "latest_checkpointed_iteration.txt").read_text() == str(grid.steps)
    (folder / "latest_checkpointed_iteration.txt").write_text("2")
    resumed = jobs.run(*grid.flags, "--load", str(folder))
    assert_continued(resumed, reference, 2)


def assert_continued(job: Job, reference: Job, done: int) -> None:
    """``job`` began after ``done`` steps and did the rest exactly like ``reference``."""
    assert_exactly_once(job, done + 1)
    expected = reference.metrics()
    for step, line in job.metrics().items():
        for name in ("loss_hex", "grad_norm_hex", "lr"):
            assert line[name] == expected[step][name], (step, name)
    assert read_digest(job.run_dir) == read_digest(reference.run_dir)


def test_a_checkpoint_changes_nothing(jobs: Jobs) -> None:
    """Saving does not disturb, and a loaded job, which loses a rank at once, equals the uninterrupted one.

    What lies where it saves does not matter.
    """
    reference = jobs.undisturbed(*TP2_PP2.flags)
    folder = jobs.folder / "checkpoint"
    job = jobs.run(*TP2_PP2.flags, "--save", str(folder), "--save-interval", "2")
    assert_same_training(job, reference)
    (folder / "latest_checkpointed_iteration.txt").write_text("2")
    elsewhere = Path(shutil.copytree(folder, jobs.folder / "elsewhere"))
    for path in (elsewhere / "iter_0000002").iterdir():
        path.write_bytes(b"of another job")
    resumed = jobs.run(*TP2_PP2.flags, "--load", str(folder), "--save", str(elsewhere), *inject("6@3:backward"))
    assert_continued(resumed, reference, 2)
    assert resumed.layouts()[-1].lost == (6,)


def test_kill_from_outside(jobs: Jobs) -> None:
    """``kill -9`` at a moment that nothing in the job knows of."""
    reference = jobs.undisturbed(*PP2_DP4.flags)
    victim = 6
    job = jobs.start(*PP2_DP4.flags)
    job.read_until("step   3/")
    os.kill(job.pid(victim), signal.SIGKILL)
    job.finish()
    assert_same_training(job, reference, [victim])
    assert job.events("injected") == []


def test_three_kills_in_turn(jobs: Jobs) -> None:
    """Each one takes what the one before it was promoted to, so replicas must have been made again."""
    job = jobs.run(*DP8.flags, *inject("2@2:forward", "3@5:apply", "4@8:grad_sync"))
    assert_same_training(job, jobs.undisturbed(*DP8.flags), [2, 3, 4])
    assert len(job.events("recovered")) == 3
    assert job.events("replicated")


MODERN = "--swiglu --normalization RMSNorm --position-embedding-type rope --group-query-attention --num-query-groups 2"


@pytest.mark.parametrize(
    ("grid", "flags", "kill"),
    [
        (PP4, "--untie-embeddings-and-output-weights", "6@3:backward"),
        (TP2_PP2, "--untie-embeddings-and-output-weights", "0@3:apply"),
        (TP2_PP2, MODERN, "5@3:apply"),
        (PP2_DP4, f"{MODERN} --disable-bias-linear --untie-embeddings-and-output-weights --bf16", "4@3:backward"),
        (TP2_PP2, "--bf16", "2@3:backward"),
    ],
    ids=["untied-PP4", "untied-TP2", "modern", "modern-bf16", "bf16"],
)
def test_models(jobs: Jobs, grid: Grid, flags: str, kill: str) -> None:
    reference = jobs.run(*grid.flags, *flags.split())
    job = jobs.run(*grid.flags, *flags.split(), *inject(kill))
    assert_same_training(job, reference, [int(kill[0])])
    layout = job.layouts()[0]
    assert (0 in layout.stages[-1].units) == ("--untie" not in flags)
    assert ("positions" in layout.units) == ("rope" not in flags)
    losses = [line["loss"] for line in job.metrics().values()]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("how", ["selective", "full"])
def test_recomputation_draws_the_same(jobs: Jobs, how: str) -> None:
    """Equal to the job that recomputes nothing, and with a kill in the middle of it."""
    job = jobs.run(*TP2_PP2.flags, "--recompute-granularity", how, *inject("1@3:backward"))
    assert_same_training(job, jobs.undisturbed(*TP2_PP2.flags), [1])


def test_fast_consistency(jobs: Jobs) -> None:
    """Float sums: not the same bits after a fault, but the same training; and close to the exact sums."""
    flags = (*PP2_DP4.flags, "--elastic-consistency", "fast")
    exact, undisturbed = jobs.undisturbed(*PP2_DP4.flags), jobs.run(*flags)
    job = jobs.run(*flags, *inject("3@3:backward"))
    assert_exactly_once(job)
    for step, line in job.metrics().items():
        assert line["loss"] == pytest.approx(undisturbed.metrics()[step]["loss"], rel=1e-3)
        assert line["loss"] == pytest.approx(exact.metrics()[step]["loss"], rel=1e-3)


def test_evaluation(jobs: Jobs) -> None:
    """It reports the validation loss, does not disturb training, and gives the same number on fewer ranks."""
    flags = (*PP2_DP4.flags, "--eval-interval", "3", "--eval-iters", "2", "--split", "3,1,1")
    reference = jobs.run(*flags)
    job = jobs.run(*flags, *inject("7@5:forward", "2@7:evaluate"))
    assert_same_training(job, reference, [2, 7])
    evaluated = [(event["step"], event["loss"]) for event in job.events("evaluated")]
    assert [step for step, _ in evaluated] == [3, 6, 9]
    assert evaluated == [(event["step"], event["loss"]) for event in reference.events("evaluated")]
    assert all(math.isfinite(loss) for _, loss in evaluated)
    without = jobs.run(*PP2_DP4.flags, "--split", "3,1,1")
    assert_same_training(without, reference)
