"""Units that move: another number of stages on request, and stages that dissolve, in real jobs, bit for bit."""

from __future__ import annotations

import os
import subprocess

from megatron_elastic import cli
from megatron_elastic.layout import Layout
from tests.jobs import ROOT, Job, Jobs, assert_exactly_once

WITNESS = ROOT / "tests" / "megatron_programs" / "witness.py"
TIED = ("--elastic-slices", "4", "--train-iters", "60")
PP4 = ("--pipeline-model-parallel-size", "4")
MOVING = "units and slices that are to move are being copied"


def start(jobs: Jobs, *flags: str, ranks: int = 8, launcher: tuple[str, ...] = (), dies: str | None = None) -> Job:
    """Start a job whose ranks ask Megatron in every layout where they are (see ``witness``)."""
    run_dir = jobs.folder / os.urandom(4).hex()
    command = jobs.command(*flags, run_dir=run_dir, ranks=ranks, launcher=launcher)
    command[command.index(str(ROOT / "examples" / "pretrain_gpt.py"))] = str(WITNESS)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        command, text=True, env=env if dies is None else {**env, "WITNESS_DIES": dies}, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    return Job(process, run_dir)


def ask(job: Job, stages: int) -> int:
    """Ask for a number of stages; the exit code."""
    return cli.main(["scale", str(job.run_dir), "--pp", str(stages)])


def scale(job: Job, stages: int) -> None:
    """Ask for another number of stages, and wait until that is what there is."""
    assert ask(job, stages) == 0
    job.read_until(f"the pipeline has {stages} stages")


def assert_same(job: Job, reference: Job) -> list[Layout]:
    """Bit for bit, every step once; returns the layouts."""
    assert cli.main(["compare", str(job.run_dir), str(reference.run_dir)]) == 0, job.output
    assert_exactly_once(job)
    return job.layouts()


def shape(layout: Layout) -> list[int]:
    """Widths."""
    return [stage.width for stage in layout.stages]


def test_stages_as_asked(jobs: Jobs) -> None:
    """Four, two, three and four, while training goes on; all ranks work in the end."""
    job = start(jobs, *TIED, *PP4)
    job.read_until(" 1/60")
    for stages in (2, 3, 4):
        scale(job, stages)
    job.finish()
    layouts = assert_same(job, jobs.undisturbed(*TIED, *PP4))
    sizes = [layout.pipeline_size for layout in layouts]
    assert sorted(set(sizes), key=sizes.index) == [4, 2, 3]
    assert shape(layouts[-1]) == [2, 2, 2, 2]
    assert not any(cell.incoming for stage in layouts[-1].stages for cell in stage.cells)
    assert [event["stages"] for event in job.events("asked")] == [2, 3, 4]
