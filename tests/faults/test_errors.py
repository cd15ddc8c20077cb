"""Errors of the program: of one rank, they cost that rank; of the program, they end the job and are told."""

from __future__ import annotations

import math
from pathlib import Path

from tests.jobs import ROOT, Grid, Jobs, assert_exactly_once, assert_same_training, inject

INFINITE = ROOT / "tests" / "megatron_programs" / "infinite.py"
GRID = Grid(tp=1, pp=2, steps=6)


def raises(rank: int, step: int, at: str) -> list[str]:
    return ["--elastic-inject", f"raise:rank={rank},step={step},at={at}"]


def test_the_others_go_on_without_a_rank_that_raises(jobs: Jobs) -> None:
    """In mid-step; in the recovery from another one's error; and when it finishes a step that all have voted."""
    job = jobs.run(*GRID.flags, *raises(3, 2, "backward"), *raises(5, 2, "edit"), *raises(0, 4, "apply"))
    assert_same_training(job, jobs.undisturbed(*GRID.flags), [0, 3, 5])
    assert {event["cause"] for event in job.events("recovered")} == {"exception"}
    assert [event["rank"] for event in job.events("error")] == [3, 5, 0]
    assert "InjectedError: injected: raise:rank=3" in (job.run_dir / "logs" / "rank3.log").read_text()
    assert "WARNING: the program raised on rank 3, which leaves: " in job.output


def test_what_comes_again_when_others_do_the_step_ends_the_job(jobs: Jobs) -> None:
    job = jobs.start(*GRID.flags, *raises(3, 2, "backward"), *raises(5, 2, "vote"))
    message = job.finish(code=1)
    assert "the program raises again when others do step 2; it is no fault of a rank" in message
    for rank, at in ((3, "backward"), (5, "vote")):
        assert f"the program raised on rank {rank}:\nTraceback (most recent call last):" in message
        assert f"InjectedError: injected: raise:rank={rank},step=2,at={at}" in message


def test_what_one_rank_raises_before_training_begins_ends_the_job(jobs: Jobs, tmp_path: Path) -> None:
    """While all make their part of the model, and data: nobody could go on."""
    script = tmp_path / "no_data.py"
    script.write_text(
        f"import os, sys\nsys.path.insert(0, {str(ROOT / 'examples')!r})\nimport pretrain_gpt\n"
        "check_arguments, provide = pretrain_gpt.check_arguments, pretrain_gpt.datasets_provider\n"
        "def no_data(args):\n    return {}['data'] if os.environ['RANK'] == '1' else provide(args)\n"
        "pretrain_gpt.datasets_provider = no_data\nsys.exit(pretrain_gpt.main())\n"
    )
    job = jobs.start(*Grid(tp=1, pp=1, steps=2).flags, ranks=2, script=script)
    message = job.finish(code=1)
    assert "the program raised on rank 1:\nTraceback (most recent call last):" in message
    assert "KeyError: 'data'" in message and "lost ranks" not in message
    assert [event["rank"] for event in job.events("error")] == [1]


def test_a_step_with_an_infinite_gradient_changes_nothing(jobs: Jobs) -> None:
    """It is skipped, once, although a rank dies when half of the others have skipped it."""
    job = jobs.start(*GRID.flags, "--elastic-consistency", "fast", *inject("6@3:apply"), script=INFINITE)
    job.finish()
    assert_exactly_once(job)
    assert [event["step"] for event in job.events("skipped")] == [3]
    assert "ms  8 ranks  skipped" in job.output or "ms  7 ranks  skipped" in job.output
    norms = {step: float.fromhex(line["grad_norm_hex"]) for step, line in job.metrics().items()}
    assert [step for step, norm in norms.items() if not math.isfinite(norm)] == [3]
    assert all(math.isfinite(line["loss"]) for line in job.metrics().values())
