"""What Weights & Biases gets from the coordinator, in its own files, as it keeps them without a network."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_elastic.argument_file import launcher_flags
from megatron_elastic.cluster.protocol.effects import WriteEvent, WriteLayout, WriteMetrics
from megatron_elastic.cluster.recording.recorder import Recorder
from megatron_elastic.cluster.recording.weights_and_biases import Project, WeightsAndBiases, project_of
from tests.observe.test_observe import RECOVERY, line, make

needs_wandb = pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")


def told(project: Project, run_dir: Path, said: Callable[[str], None]) -> None:
    """A short job that loses a rank."""

    async def job() -> None:
        watcher = WeightsAndBiases(project, "a run", said)
        recorder = Recorder(run_dir, said, [watcher])
        recorder.write(WriteLayout(make()))
        hello = {"rank": 0, "device": "NVIDIA H100 80GB HBM3", "flops_per_token": 8e11}
        recorder.write(WriteEvent("hello", 0, 1.0, hello))
        recorder.write(WriteEvent("started", 0, 1.0, {"world_size": 4, "step": 0, "train_iters": 2}))
        for step in (1, 2):
            recorder.write(WriteMetrics(line(step, 2.0)))
        recorder.write(WriteEvent("recovered", 1, 3.0, RECOVERY))
        assert recorder.close(10) == 0
        await asyncio.to_thread(watcher.close, 60)
        await asyncio.sleep(0)  # what it has to say

    asyncio.run(job())


@needs_wandb
def test_figures_recoveries_and_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    problems: list[str] = []
    told(Project("a project", "", "a name", str(tmp_path / "files")), tmp_path / "run", problems.append)
    assert problems == []
    (path,) = (tmp_path / "files").glob("wandb/offline-run-*/*.wandb")
    found = list(read(path.read_bytes()))
    (run,) = [each.run for each in found if each.WhichOneof("record_type") == "run"]
    assert (run.project, run.display_name, run.run_group) == ("a project", "a name (elastic)", "a name")
    first, second = [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in each.history.item}
        for each in found if each.WhichOneof("record_type") == "history"
    ]  # fmt: skip
    assert (first["_step"], first["elastic/step_ms"], first["elastic/world_size"]) == (1, 800.0, 8.0)
    assert first["elastic/tflops_per_device"] == 100.0
    assert (second["_step"], second["elastic/recovered/mttr_ms"]) == (2, 710.5)
    lines = [each.output_logger.line for each in found if each.WhichOneof("record_type") == "output_logger"]
    assert len(lines) == 2 and "step 0: started: 4 ranks" in lines[0]
    assert "step 2: recovered: from loss of rank 1 (kill -9)" in lines[1]


@needs_wandb
def test_who_is_refused_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_API_KEY", "no key")
    problems: list[str] = []
    told(Project("a project", "", "", str(tmp_path / "files")), tmp_path / "run", problems.append)
    assert len(problems) == 1
    assert problems[0].startswith("--wandb-project: no more figures of elastic training: ")


def read(data: bytes) -> Iterator[Any]:
    """The records of a file: fragments, each behind a checksum, a length and a kind, in blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    at, whole = 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        piece = data[at + 7 : at + 7 + length]
        at += 7 + length
        whole = piece if kind in (1, 2) else whole + piece
        if kind in (1, 4):
            yield Record.FromString(whole)


def test_without_wandb_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    said: list[str] = []
    assert project_of(["--lr", "1"], tmp_path, said.append) is None and said == []
    assert project_of(["--wandb-project", "p"], tmp_path, said.append) is None
    assert len(said) == 1 and "pip install 'megatron-elastic[wandb]'" in said[0]


@pytest.mark.parametrize(("arguments", "project"), [
    (["--wandb-project", "p"], Project("p", "", "", "runs/a")),
    (["--wandb-project=p", "--wandb-exp-name", "n", "--lr", "1", "--wandb-save-dir=d", "--wandb-entity", "e"],
     Project("p", "e", "n", "d")),
    (["--wandb-project", ""], None), (["--wandb-project"], None), (["--wandb-exp-name", "n"], None),
])  # fmt: skip
def test_what_the_script_is_told(monkeypatch: pytest.MonkeyPatch, arguments: list[str],
                                 project: Project | None) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert project_of(arguments, Path("runs/a"), print) == project


def test_an_argument_file_says_it_too(tmp_path: Path) -> None:
    (tmp_path / "file.yaml").write_text("wandb_project: p\nwandb_exp_name: n\nlr: 1\n")
    flags = launcher_flags(["--yaml-cfg", str(tmp_path / "file.yaml")])
    assert flags == ["--wandb-project=p", "--wandb-exp-name=n"]
