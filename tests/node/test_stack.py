"""What a rank that hangs is doing is written down, if that can be."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_elastic.cluster.node import stack

pytestmark = pytest.mark.skipif(shutil.which("py-spy", path=str(Path(sys.executable).parent)) is None, reason="py-spy")


def test_it_is_written_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack, "_LIMIT", 60.0)
    program = "def stuck():\n  print(flush=True); input()\nstuck()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        path = tmp_path / "stacks of it" / "rank1.txt"
        asyncio.run(stack.save_stack(process.pid, path))
        process.communicate(b"\n")
    assert "stuck (<string>:2)" in path.read_text()


def test_a_disk_that_stands_still_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be what the rank waits for. Here a fifo that nobody reads."""
    monkeypatch.setattr(stack, "_LIMIT", 0.1)
    os.mkfifo(tmp_path / "rank1.txt")
    asyncio.run(stack.save_stack(os.getpid(), tmp_path / "rank1.txt"))
