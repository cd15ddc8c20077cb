"""What cannot work ends with a line that says what to do, an exit code, and (see conftest) no process left."""

from __future__ import annotations

import re
import shutil
import socket
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.jobs import Grid, Jobs, inject

GRID = Grid(tp=1, pp=2, steps=4)
TRACKER = "latest_checkpointed_iteration.txt"


def fails(
    jobs: Jobs, *flags: str, code: int = 2, launcher: tuple[str, ...] = (), env: dict[str, str] | None = None,
    begins: bool = False,
) -> str:
    """Run a job that must fail; returns the one error of the launcher. ``begins``: ranks are started to find out."""
    job = jobs.start(*GRID.flags, *flags, launcher=launcher, env=env)
    output = job.finish(code)
    errors = re.findall(r"^megatron-elastic: error: (.*?)(?=^records and logs|\Z)", output, re.MULTILINE | re.DOTALL)
    assert len(errors) == 1, output
    if code == 2:
        assert "Traceback" not in output
        assert job.run_dir.exists() == begins
        assert len(errors[0].splitlines()) == 1
    return str(errors[0]).rstrip()


# ---- before any process starts ------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--data-path", "nowhere/data"],
         "--data-path nowhere/data: nowhere/data.idx does not exist; write it with: megatron-elastic data prepare"),
        (["--tensor-model-parallel-size", "3"], "does not divide the world size 8: start a multiple of 6 processes"),
        (["--global-batch-size", "18"], "is no multiple of --micro-batch-size 1 x data-parallel size 4"),
        (["--elastic-suspect-timeout", "9", "--elastic-report-timeout", "9"],
         "--elastic-suspect-timeout (9 s) must be below --elastic-report-timeout (9 s)"),
        (["--elastic-inject", "kill:rank=8,step=1,at=vote"], "rank must be from 0 to 7"),
        (["--elastic-inject", "kill:rank=1,step=1,at=lunch"], "is no hook point: one of data, forward"),
        (["--elastic-inject", "kill:rank=1,step=2"], "lacks at"),
        (["--learning-rate", "1"], "unknown flag --learning-rate"),
    ],
    ids=["data", "world-size", "batch", "limits", "inject-rank", "inject-point", "inject-step", "flag"],
)
def test_flags(jobs: Jobs, flags: Sequence[str], message: str) -> None:
    assert message in fails(jobs, *flags)


def test_ucxx_missing(jobs: Jobs, tmp_path: Path) -> None:
    """An importer in front of all others that knows no ucxx, as on a machine without it."""
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.machinery, sys\n"
        "class Hide(importlib.machinery.PathFinder):\n"
        "    @classmethod\n"
        "    def find_spec(cls, name, path=None, target=None):\n"
        "        return None if name == 'ucxx' else super().find_spec(name, path, target)\n"
        "sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = Hide\n"
    )
    message = fails(jobs, env={"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"})
    assert message == ("--elastic needs ucxx, which is not installed: pip install 'ucxx-cu13==0.52.*' "
                       "(beside a torch for CUDA 12: ucxx-cu12)")


def test_port_in_use(jobs: Jobs) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        message = fails(jobs, launcher=("--master-port", str(port)), code=1)
    assert message == f"port {port} is in use by another program; choose another --master-port, or leave it out"


# ---- checkpoints --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(jobs: Jobs) -> Path:
    """A good checkpoint after step 4."""
    folder = jobs.folder / "good-checkpoint"
    jobs.run(*GRID.flags, "--save", str(folder), "--save-interval", "4")
    assert (folder / TRACKER).read_text() == "4"
    return folder


@pytest.fixture
def damaged(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(checkpoint, tmp_path / "checkpoint"))


def test_tracker_missing(jobs: Jobs, damaged: Path) -> None:
    (damaged / TRACKER).unlink()
    (damaged / "iter_0000004" / "metadata.json").unlink()
    message = fails(jobs, "--load", str(damaged))
    assert f"{TRACKER} does not exist, and there is no checkpoint; leave --load out" in message


def test_tracker_garbage(jobs: Jobs, damaged: Path) -> None:
    (damaged / TRACKER).write_text("release candidate")
    message = fails(jobs, "--load", str(damaged))
    assert "says 'release candidate': it should hold the number of a checkpoint, or release" in message


def test_checkpoint_missing(jobs: Jobs, damaged: Path) -> None:
    shutil.rmtree(damaged / "iter_0000004")
    message = fails(jobs, "--load", str(damaged))
    assert "iter_0000004 is no complete checkpoint" in message
    assert "there is no older one beside it" in message


@pytest.mark.parametrize("name", [".metadata", "common.pt", "__0_0.distcp"])
def test_checkpoint_damaged(jobs: Jobs, damaged: Path, name: str) -> None:
    path = damaged / "iter_0000004" / name
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    message = fails(jobs, "--load", str(damaged), "--train-iters", "6", begins=True)
    assert f"--load {damaged}: {damaged / 'iter_0000004'}" in message
    assert ("was cut short: it has" if name.startswith("__") else "cannot be loaded; give the flags") in message
    assert "there is no older one beside it" in message
    assert len(message.splitlines()) == 1


def test_checkpoint_of_another_model(jobs: Jobs, checkpoint: Path) -> None:
    message = fails(jobs, "--load", str(checkpoint), "--train-iters", "6", "--hidden-size", "64", begins=True)
    assert f"--load {checkpoint}: {checkpoint / 'iter_0000004'} is of another model: " in message
    shape = r"\[[\d, ]+\]"
    assert re.search(rf": \S+ has the shape {shape} there, and these flags make it {shape}; give the flags", message)
    assert len(message.splitlines()) == 1


def test_checkpoint_of_another_batch(jobs: Jobs, checkpoint: Path) -> None:
    message = fails(jobs, "--load", str(checkpoint), "--train-iters", "6", "--global-batch-size", "8", begins=True)
    assert "its 4 steps took 64 samples" in message
    assert "give --global-batch-size 16, or the --rampup-batch-size" in message


# ---- while the job runs -------------------------------------------------------------------


def test_program_error_on_one_rank(jobs: Jobs) -> None:
    """If no error is to be a fault, nobody trains on, and the traceback is shown once."""
    message = fails(jobs, "--elastic-on-error", "stop", "--elastic-inject", "raise:rank=3,step=2,at=backward", code=1)
    assert message.startswith("the program raised on rank 3:\nTraceback (most recent call last):")
    assert message.splitlines()[-1].endswith("InjectedError: injected: raise:rank=3,step=2,at=backward")
    assert message.count("Traceback") == 1


def test_data_too_small_for_evaluation(jobs: Jobs) -> None:
    """Found by the ranks, not by the launcher; still a line and not a traceback."""
    message = fails(jobs, "--eval-iters", "1", "--split", "98,1,1", begins=True)
    assert re.match(r"--split 98,1,1: the valid part has 0 tokens", message)
    assert len(message.splitlines()) == 1


def test_all_of_a_stage_dead(jobs: Jobs) -> None:
    message = fails(jobs, *inject("4@2:data", "5@2:data", "6@2:data", "7@2:data"), code=1)
    assert "training cannot go on" in message
    assert message.endswith("no checkpoint has been written: start the job anew, with --save and --save-interval")


def test_slice_lost(jobs: Jobs) -> None:
    """Rank 1 owns slices whose only copies rank 2 holds."""
    message = fails(jobs, *inject("1@2:vote", "2@2:vote"), code=1)
    assert re.match(r"training cannot go on: slice \d of unit \S+ \(part 0\) is held by no live rank",
                    message)
    assert message.endswith("no checkpoint has been written: start the job anew, with --save and --save-interval")


def test_what_failed_before_its_first_step_can_be_started_again(jobs: Jobs) -> None:
    failed = jobs.start(*GRID.flags, "--eval-iters", "1", "--split", "98,1,1")
    failed.finish(2)
    again = jobs.run(*GRID.flags, "--elastic-run-dir", str(failed.run_dir))
    assert "choose another" not in again.output
    assert (failed.run_dir / "attempt-1" / "events.jsonl").exists()
    assert (failed.run_dir / "digest.json").exists()
