"""What the launcher prints: lines for people, or objects with the names of the records."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import math
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from megatron_elastic.cluster.protocol.effects import WriteEvent, WriteLayout, WriteMetrics
from megatron_elastic.cluster.recording import recorder
from megatron_elastic.cluster.recording.recorder import Recorder
from megatron_elastic.cluster.recording.screen import Screen, complain
from megatron_elastic.observe.records import read_events, read_metrics
from tests.observe.test_observe import RECOVERY, line, make


def test_objects_have_what_is_on_record_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def job() -> None:
        screen = Screen(as_json=True)
        screen.say("WARNING: before there are records", "fault")
        screen.watch()
        recorder = Recorder(tmp_path, screen.say, [screen])
        recorder.write(WriteLayout(make()))
        recorder.write(WriteMetrics(line(1, math.nan)))
        screen.say("step 1 of 9", "step")
        recorder.write(WriteEvent("recovered", 1, 5.5, RECOVERY))
        screen.say("recovered from the loss of a rank", "recovered")
        screen.say("WARNING: a store is slow")
        recorder.write(WriteEvent("failed", 1, 6.5, {"reason": "for no reason"}))
        screen.complain("for no reason")
        assert recorder.close(10) == 0
        screen.close(10)

    asyncio.run(job())
    out, err = capsys.readouterr()
    told = [json.loads(each) for each in out.splitlines()]
    assert not err
    assert [(each["level"], each["event"]) for each in told] == [
        ("warning", "fault"), ("info", "step"), ("info", "recovered"), ("warning", "said"), ("error", "failed"),
    ]  # fmt: skip
    assert told[0]["message"] == "before there are records"
    assert told[3]["message"] == "a store is slow"
    assert {name: told[1][name] for name in read_metrics(tmp_path)[1]} == read_metrics(tmp_path)[1]
    for each, event in zip((told[2], told[4]), read_events(tmp_path), strict=True):
        assert each["event"] == event.pop("kind")
        assert {name: each[name] for name in event} == event


def test_lines_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    async def job() -> None:
        screen = Screen()
        screen.say("WARNING: as it is", "fault")
        screen.complain("for no reason")
        screen.close(10)

    asyncio.run(job())
    complain("note", "by the way", as_json=False)
    out, err = capsys.readouterr()
    assert out == "WARNING: as it is\n"
    assert err == "megatron-elastic: error: for no reason\nmegatron-elastic: note: by the way\n"
    complain("note", "by the way", as_json=True)
    assert {**json.loads(capsys.readouterr().err), "time": 0} == {
        "time": 0, "level": "info", "event": "said", "message": "by the way",
    }  # fmt: skip


class Disk(io.RawIOBase):
    """Full at first."""

    refusals = 3
    taken = b""

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        if self.refusals:
            self.refusals -= 1
            raise OSError(errno.ENOSPC, "it is full")
        self.taken += bytes(data)
        return len(data)


def test_what_could_not_be_printed_is_printed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Into a file, on a disk that has room again later."""
    disk = Disk()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BufferedWriter(disk)))
    monkeypatch.setattr(recorder, "_AGAIN", 0.0)

    async def job() -> None:
        screen = Screen()
        for each in ("one", "one", "two"):
            screen.say(each)
        while b"two" not in disk.taken:
            await asyncio.sleep(0)
        screen.close(60)

    asyncio.run(job())
    assert disk.taken == b"one\none\ntwo\n"


class Pipe(io.StringIO):
    """Takes nothing until somebody reads."""

    def __init__(self, read: threading.Event) -> None:
        super().__init__()
        self.read_now = read

    def write(self, text: str, /) -> int:
        self.read_now.wait(60)
        return super().write(text)


def test_why_a_job_has_failed_is_printed_last(monkeypatch: pytest.MonkeyPatch) -> None:
    read = threading.Event()
    both = Pipe(read)
    monkeypatch.setattr(sys, "stdout", both)
    monkeypatch.setattr(sys, "stderr", both)

    async def job() -> None:
        screen = Screen()
        screen.say("step 1 of 9")
        screen.complain("for no reason")
        read.set()
        screen.close(60)

    asyncio.run(job())
    assert both.getvalue() == "step 1 of 9\nmegatron-elastic: error: for no reason\n"


def test_why_a_job_has_failed_is_printed_though_nothing_else_can_be(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    disk = Disk()
    disk.refusals = 1000
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BufferedWriter(disk)))

    async def job() -> None:
        screen = Screen()
        screen.say("step 1 of 9")
        screen.complain("for no reason")
        screen.close(60)

    asyncio.run(job())
    disk.refusals = 0  # or it would be said at exit that the line is lost
    assert capsys.readouterr().err == "megatron-elastic: error: for no reason\n"
