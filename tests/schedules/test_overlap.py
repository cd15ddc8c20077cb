"""Communication that goes on while ranks compute: the same numbers, whenever a rank dies meanwhile."""

from __future__ import annotations

import pytest

from megatron_elastic import cli
from tests.jobs import Jobs, inject

FLAGS = ("--train-iters", "8", "--elastic-slices", "4", "--pipeline-model-parallel-size", "2")
OVERLAP = ("--overlap-grad-reduce", "--overlap-param-gather")


@pytest.mark.parametrize(
    ("replay", "kills"),
    [
        ("gradient", ()),
        ("gradient", ("1@2:forward", "6@4:backward", "3@6:grad_sync")),
        ("gradient", ("0@3:param_sync", "4@3:promote")),
        ("state", ("5@2:commit", "2@4:param_sync", "7@6:apply")),
    ],
)
def test_overlap_does_not_show(jobs: Jobs, replay: str, kills: tuple[str, ...]) -> None:
    reference = jobs.undisturbed(*FLAGS)
    job = jobs.run(*FLAGS, *OVERLAP, "--elastic-replay", replay, *inject(*kills))
    assert cli.main(["compare", str(job.run_dir), str(reference.run_dir)]) == 0, job.output


def test_checkpoints_and_evaluations_wait_for_parameters(jobs: Jobs) -> None:
    flags = (*FLAGS, "--eval-interval", "2", "--eval-iters", "1", "--split", "6,2,2")
    saves = "--save-interval", "3", "--save"
    first = jobs.run(*flags, *saves, str(jobs.folder / "waits"))
    second = jobs.run(*flags, *OVERLAP, *saves, str(jobs.folder / "overlaps"), *inject("2@5:forward"))
    assert cli.main(["compare", str(first.run_dir), str(second.run_dir)]) == 0
    losses = [{event["step"]: event["loss"] for event in job.events("evaluated")} for job in (first, second)]
    assert losses[0] == losses[1]
    for folder in ("waits", "overlaps"):
        (jobs.folder / folder / "latest_checkpointed_iteration.txt").write_text("3")
    rest = [jobs.run(*flags, "--load", str(jobs.folder / folder)) for folder in ("waits", "overlaps")]
    assert cli.main(["compare", str(rest[0].run_dir), str(rest[1].run_dir)]) == 0
