"""Disks that are full and terminals that stand still: training goes on, and what can be written later is."""

from __future__ import annotations

import asyncio
import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.msgpack import Decoder

from megatron_elastic.cluster.brief import Brief
from megatron_elastic.cluster.coordination.coordinator import Coordinator
from megatron_elastic.cluster.coordination.office import Office, _settings
from megatron_elastic.cluster.coordination.server import Server
from megatron_elastic.cluster.leadership import Choice
from megatron_elastic.cluster.messages import Answer, ReadRecords, Shown
from megatron_elastic.cluster.node.assignment import Assignment
from megatron_elastic.cluster.node.uplink import Uplink
from megatron_elastic.cluster.program import Program
from megatron_elastic.cluster.protocol import Job
from megatron_elastic.cluster.recording.reader import Reader
from megatron_elastic.cluster.recording.recorder import Clerk
from megatron_elastic.cluster.recording.screen import Screen
from megatron_elastic.cluster.wire import AsyncWire, Credentials, address
from megatron_elastic.config import ElasticConfig
from megatron_elastic.observe.place import Folder, Growth
from tests.disks import fill, mounted
from tests.launches import TOKEN, Launch, free_port, launches


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    with launches(tmp_path) as launch:
        yield launch


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", 64) as disk:
        yield disk


def test_a_full_run_directory_does_not_end_the_job(launch: Launch, small_disk: Path) -> None:
    """It is full from step 2 to step 50, for more lines than fit what its files have; they all are there in the end."""
    acts = [f"0:{step}:begin:{act}" for step in (2, 50) for act in ("tell", "wait")]
    run = launch.start("member.py", "--elastic", *launch.member_flags(*acts, steps=60), flags=("--nproc-per-node", "2"),
                       name="disk/run")
    launch.hear(1)
    filler = small_disk / "filler"
    fill(filler)
    launch.go()
    launch.hear(1)
    run.read_until("what is to be written is kept until it can be")
    filler.unlink()
    run.read_until("writing works again")
    launch.go()
    run.finish()
    assert run.steps() == list(range(1, 61))
    assert len(run.events("finished")) == 1


def test_a_terminal_that_stands_still_disturbs_nobody(launch: Launch) -> None:
    """The first node's output is read by nobody; the second node hears from it all the same."""
    launch.env["MEGATRON_ELASTIC_TOKEN"] = TOKEN
    port, runs = str(free_port()), []
    for node in (0, 1):
        runs.append(launch.start(
            "member.py", "--elastic", *launch.member_flags(steps=200), "--elastic-heartbeat-timeout", "0.5",
            flags=("--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "1", "--master-addr", "127.0.0.1",
                   "--master-port", port), name=f"node{node}",
        ))
        output = runs[-1].process.stdout
        assert output is not None
        fcntl.fcntl(output.fileno(), fcntl.F_SETPIPE_SZ, 4096)  # some fifty lines
    first, second = runs
    assert "training finished at step 200" in second.finish()
    first.finish()
    assert first.steps() == list(range(1, 201))
    assert os.path.getsize(first.run_dir / "metrics.jsonl") > 4096


def test_what_is_dropped_is_not_done() -> None:
    """Not even what was tried and failed; what comes after it is done."""
    done: list[int] = []
    failed, ended = threading.Event(), threading.Event()

    def do(item: int) -> None:
        if item == 1:
            failed.set()
            raise OSError("no")
        done.append(item)
        ended.set()

    async def work() -> None:
        clerk = Clerk[int]("test", do, lambda what: None)
        clerk.put(1)
        clerk.put(2)
        await asyncio.to_thread(failed.wait)
        clerk.drop()
        clerk.put(3)
        await asyncio.to_thread(ended.wait)
        assert clerk.close(5.0) == 0

    asyncio.run(work())
    assert done == [3]


def test_where_a_job_can_be_asked_is_written_down_by_the_thread_that_writes_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that stalls then, stalls no coordinator."""
    threads: list[str] = []

    def told(function: Callable[..., Any]) -> Callable[..., Any]:
        def tell(*arguments: Any, **options: Any) -> Any:
            threads.append(threading.current_thread().name)
            return function(*arguments, **options)

        return tell

    monkeypatch.setattr(address, "_opened", told(address._opened))
    monkeypatch.setattr(Path, "unlink", told(Path.unlink))

    async def gone() -> str:
        return ""

    async def work() -> None:
        config, credentials = ElasticConfig(elastic=True), Credentials(TOKEN)
        assignment = Assignment(Program("program.py", False, []), 1, 0, 2, tmp_path, "127.0.0.1", 1.0, 1.0, 1.0)
        office = Office(Brief(assignment, config, credentials, Choice("alone"), 0, begins=True),
                        Uplink(config, credentials, 1.0), Screen(False), print, gone)
        office.begin()
        await office.close()

    asyncio.run(work())
    assert threads == ["records", "records"]
    assert not (tmp_path / address.FILE).exists()


def test_who_asks_for_records_that_cannot_be_is_answered(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()

    async def work() -> None:
        reader = Reader(tmp_path)
        async with asyncio.timeout(60.0):
            answer = await reader.answer(ReadRecords(metrics=1 << 63, events=0, epoch=-1))
            assert isinstance(answer, Answer) and not answer.ok and "cannot be shown" in answer.text
            answer = await reader.answer(ReadRecords(metrics=0, events=0, epoch=-1))
            assert isinstance(answer, Shown)
        reader.close(5.0)

    asyncio.run(work())


def test_who_waits_for_a_disk_no_longer_is_let_go_and_nothing_is_read_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stalled, goes_on, asked = threading.Event(), threading.Event(), list[int]()

    def grown(self: Folder, metrics: int, events: int, epoch: int) -> Growth:
        asked.append(metrics)
        stalled.set()
        goes_on.wait(60.0)
        return Growth(metrics=b"", events=b"", more=False, layout=None, age=None)

    monkeypatch.setattr(Folder, "grown", grown)

    async def work() -> None:
        config, credentials = ElasticConfig(elastic=True), Credentials(TOKEN)
        server = Server(config, credentials, tmp_path, lambda line: None)
        port = server.listen("127.0.0.1", 0)
        server.coordinator = Coordinator(Job.new(_settings(config), 1), None, lambda line, tells: None)

        async def ask(number: int) -> AsyncWire[Shown]:
            wire = await AsyncWire.connect("127.0.0.1", port, credentials, 10.0, Decoder(Shown), 60.0)
            wire.send(ReadRecords(metrics=number, events=0, epoch=-1))
            return wire

        async with asyncio.timeout(60.0):
            for number in (1, 2):
                wire = await ask(number)
                await asyncio.to_thread(stalled.wait)
                wire.close()
                await wire.closed()
            while server._door._guests:
                await asyncio.sleep(0)
            wire = await ask(3)
            while not server._door._guests:
                await asyncio.sleep(0)
            goes_on.set()
            assert isinstance(await wire.receive(), Shown)
            wire.close()
        await server.close(5.0)

    asyncio.run(work())
    assert asked == [1, 3]
