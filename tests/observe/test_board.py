"""What TensorBoard gets from the coordinator, read as TensorBoard does."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from megatron_elastic.argument_file import launcher_flags
from megatron_elastic.cluster.protocol.effects import WriteEvent, WriteLayout, WriteMetrics
from megatron_elastic.cluster.recording.board import Board, folder_of
from megatron_elastic.cluster.recording.curves import Point
from megatron_elastic.cluster.recording.recorder import Recorder
from tests.disks import mounted
from tests.observe.test_observe import RECOVERY, line, make


def test_figures_recoveries_and_events(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    told: list[str] = []
    blocked = tmp_path / "board"
    blocked.write_text("a file is in the way")

    async def job() -> None:
        board = Board(str(blocked / "here"), told.append)
        recorder = Recorder(tmp_path / "run", told.append, [board])
        recorder.write(WriteLayout(make()))
        recorder.write(WriteEvent("started", 0, 1.0, {"world_size": 4, "step": 0, "train_iters": 2}))
        hello = {"rank": 0, "device": "NVIDIA H100 80GB HBM3", "flops_per_token": 8e11}
        recorder.write(WriteEvent("hello", 0, 1.0, hello))
        for step in (1, 2):
            recorder.write(WriteMetrics(line(step, 2.0)))
        while not told:
            await asyncio.sleep(0)
        blocked.unlink()
        while len(told) == 1:
            await asyncio.sleep(0)
        recorder.write(WriteEvent("replicated", 1, 2.0, {"rank": 1, "step": 2}))
        recorder.write(WriteEvent("recovered", 1, 3.0, RECOVERY))
        assert recorder.close(10) == 0
        await asyncio.to_thread(board.close, 30)

    asyncio.run(job())
    assert told[0].startswith("--tensorboard-dir: ") and "kept until it can be" in told[0]
    assert told[1:] == ["--tensorboard-dir: writing works again"]
    scalars, texts = read(blocked / "here")
    assert scalars["elastic/step_ms"] == [(1, 800.0), (2, 800.0)]
    assert scalars["elastic/world_size"] == [(1, 8.0), (2, 8.0)]
    assert scalars["elastic/tflops_per_device"] == [(1, 100.0), (2, 100.0)]
    assert scalars["elastic/mfu"][0][1] == pytest.approx(100 / 989.4)
    assert scalars["elastic/recovered/mttr_ms"] == [(2, 710.5)]
    assert [step for step, _ in texts] == [0, 2]
    assert texts[1][1].startswith("**recovered** from loss of rank 1 (kill -9)")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of TensorBoard's writer
def test_a_disk_that_is_full_for_long_gets_no_files(tmp_path: Path) -> None:
    """What is to be written is tried once a second."""
    pytest.importorskip("tensorboard")
    point = Point(1.0, 1, {f"a figure with number {number}": 1.0 for number in range(200)})

    async def job(disk: Path) -> None:
        board = Board(str(disk / "board"), print)
        board._write(Point(1.0, 1, {}))
        with (disk / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(1024))
        for _ in range(5):
            with pytest.raises(OSError, match="No space left"):
                board._write(point)
        assert len(list((disk / "board").iterdir())) == 1
        (disk / "filler").unlink()
        board._write(point)
        await asyncio.to_thread(board.close, 30)

    with mounted(tmp_path / "disk", 64) as disk:
        asyncio.run(job(disk))


def read(folder: Path) -> tuple[dict[str, list[tuple[int, float]]], list[tuple[int, str]]]:
    """Figures by tag, and events; each with its step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(folder)).Reload()
    tags = board.Tags()
    # Both are stored as tensors, or as they were written.
    scalars = {tag: [(each.step, each.value) for each in board.Scalars(tag)] for tag in tags["scalars"]}
    texts = [(e.step, e.tensor_proto.string_val[0].decode()) for e in board.Tensors("elastic/events")]
    return scalars, texts


@pytest.mark.parametrize(("arguments", "folder"), [
    (["--tensorboard-dir", "x"], "x"), (["--tensorboard-dir=x", "--lr", "1"], "x"), (["--lr", "1"], None),
    (["--tensorboard-dir"], None),
])  # fmt: skip
def test_where_the_script_is_told_to_write(arguments: list[str], folder: str | None) -> None:
    pytest.importorskip("tensorboard")
    assert folder_of(arguments) == folder


def test_an_argument_file_says_it_too(tmp_path: Path) -> None:
    (tmp_path / "file.yaml").write_text("tensorboard_dir: x\nlr: 1\n")
    assert launcher_flags(["--yaml-cfg", str(tmp_path / "file.yaml")]) == ["--tensorboard-dir=x"]
