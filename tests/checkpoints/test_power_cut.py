"""A power cut at any moment of saving leaves a complete checkpoint, which a start finds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_elastic.adaptor.checkpoints.folder import TRACKER, has_step, newest, publish, step_folder
from tests.jobs import ROOT


@pytest.mark.job
def test_every_start_finds_a_complete_checkpoint(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.megatron_programs.power_cuts", str(tmp_path / "run")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["wrong"] == 0, found
    assert found["moments"] > 100


@pytest.mark.job
def test_all_that_is_written_and_read_is_told_of(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.megatron_programs.reading_back", str(tmp_path / "run")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    size = 4 * 3000 * 7 + 2 * 5
    assert json.loads(done.stdout.splitlines()[-1]) == {"save": [size, size], "load": [size, size]}


def complete(folder: Path, step: int) -> None:
    step_folder(folder, step).mkdir()
    (step_folder(folder, step) / "metadata.json").touch()


def test_without_a_tracker_the_newest_complete_one_counts(tmp_path: Path) -> None:
    assert newest(tmp_path) is None
    complete(tmp_path, 3)
    complete(tmp_path, 12345678)
    step_folder(tmp_path, 20000000).mkdir()  # half of one
    (tmp_path / "iter_0000004.partial-2").mkdir()
    assert newest(tmp_path) == 12345678
    (tmp_path / TRACKER).touch()
    assert newest(tmp_path) == 12345678
    (tmp_path / TRACKER).write_text("3\n")
    assert newest(tmp_path) == 3
    assert has_step(tmp_path, 3)
    assert not has_step(tmp_path, 20000000)
    (tmp_path / TRACKER).write_text("release")
    assert newest(tmp_path) == 0
    (tmp_path / TRACKER).write_text("soon")
    with pytest.raises(ValueError, match="soon"):
        newest(tmp_path)


@pytest.mark.parametrize(("before", "left"), [("3", [4]), ("soon", [3, 4])])
def test_the_next_one_takes_the_place_of_that_which_the_tracker_names(
    tmp_path: Path, before: str, left: list[int]
) -> None:
    """If it names one: what somebody else has written there does not keep a checkpoint from being there."""
    complete(tmp_path, 3)
    (tmp_path / TRACKER).write_text(before)
    partial = tmp_path / "iter_0000004.partial-1"
    partial.mkdir()
    publish(partial, 4, lambda: True, retain=5)
    assert newest(tmp_path) == 4
    assert [step for step in (3, 4) if step_folder(tmp_path, step).is_dir()] == left
