"""A later megatron-core than the one that is installed, that of the checkout that ``MEGATRON_LM_NEXT_PATH`` names: jobs
lose ranks under it, and are those of the other one without faults, bit for bit.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.faults.test_elastic import assert_continued
from tests.jobs import ROOT, Grid, Job, Jobs, assert_same_training, inject
from tests.models.test_experts import EVERYTHING, EXPERTS
from tests.models.test_mtp import FURTHER
from tests.models.test_sequence_parallel import MODERN

NEXT = os.environ.get("MEGATRON_LM_NEXT_PATH", "")
pytestmark = [
    pytest.mark.job,
    pytest.mark.skipif(not NEXT, reason="a later Megatron-LM checkout: MEGATRON_LM_NEXT_PATH names none "
                                        "(core_v0.19.0)"),
]


class LaterJobs(Jobs):
    """Starts jobs under that core."""

    def start(
        self, *flags: str, ranks: int = 8, launcher: tuple[str, ...] = (), script: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Job:  # fmt: skip
        """Start a job."""
        searched = {"PYTHONPATH": os.pathsep.join([str(ROOT), NEXT]), **(env or {})}
        return super().start(*flags, ranks=ranks, launcher=launcher, script=script, env=searched)


@pytest.fixture
def later(jobs: Jobs, tmp_path: Path) -> LaterJobs:
    """Jobs on the same data."""
    return LaterJobs(tmp_path, jobs.data)


@pytest.mark.parametrize(("grid", "extra", "kills"), [
    (Grid(tp=1, pp=2, steps=6), "", ["5@2:backward", "1@4:apply"]),
    (Grid(tp=2, pp=2, steps=4), f"--sequence-parallel {MODERN}", ["4@3:backward"]),
    (Grid(tp=1, pp=2, steps=4), f"--context-parallel-size 2 {EVERYTHING}", ["5@2:backward", "1@4:apply"]),
    (Grid(tp=1, pp=2, steps=4), f"{EXPERTS} --expert-model-parallel-size 2 --bf16", ["5@2:backward", "1@4:apply"]),
    (Grid(tp=1, pp=2, steps=4), f"{FURTHER} {EVERYTHING}", ["7@2:backward", "1@4:apply"]),
], ids=["PP2", "TP2 x PP2", "CP2 x PP2", "EP2 x PP2", "further predictions"])  # fmt: skip
def test_killed(jobs: Jobs, later: LaterJobs, grid: Grid, extra: str, kills: Sequence[str]) -> None:
    flags = (*grid.flags, *extra.split())
    job = later.run(*flags, *inject(*kills))
    assert_same_training(job, jobs.undisturbed(*flags), sorted(int(kill[0]) for kill in kills))


def test_what_this_one_saved_is_continued(jobs: Jobs, later: LaterJobs, tmp_path: Path) -> None:
    flags = Grid(tp=1, pp=2, steps=6).flags
    saved = ("--save", str(tmp_path / "saved"), "--save-interval", "2")
    jobs.run(*flags, *saved)
    (tmp_path / "saved" / "latest_checkpointed_iteration.txt").write_text("2")
    job = later.run(*flags, "--load", str(tmp_path / "saved"), *inject("3@4:backward"))
    assert_continued(job, jobs.undisturbed(*flags), 2)
