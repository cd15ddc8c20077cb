"""What starts ranks: a machine that refuses it something, and its end."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from megatron_elastic.cluster import wire
from megatron_elastic.cluster.messages import Failed, FromAgent, Launch, RankExited, Said
from megatron_elastic.cluster.node.agent import Agent
from megatron_elastic.cluster.node.assignment import Assignment
from megatron_elastic.cluster.program import Program
from megatron_elastic.cluster.rank import zygote
from megatron_elastic.cluster.rank.deathwatch import Deathwatch
from megatron_elastic.cluster.rank.zygote import Exited, Kill, Ready, Spawn, Spawned

Answer = Ready | Spawned | Exited
_answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def program(folder: Path) -> Program:
    """Rank 0 opens a fifo of that name and waits, others exit with 7."""
    path = folder / "program.py"
    path.write_text(f"""import os, signal, sys
if os.environ["RANK"] != "0":
    sys.exit(7)
open({str(folder / "fifo")!r}, "w").close()
signal.pause()
""")
    return Program(str(path), False, [])


class Started:
    """A zygote, and the other end of its socket."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._deathwatch = Deathwatch(2)
        self._socket, theirs = socket.socketpair()
        self.program = program(folder)
        with theirs, (folder / "zygote.log").open("ab") as log:
            self.process = zygote.start(theirs, self._deathwatch, str(folder), log,
                                        {**os.environ, zygote.PRELOAD_VARIABLE: ""})
        assert isinstance(self.hear(), Ready)

    def hear(self) -> Answer:
        payload = wire.receive_frame(self._socket)
        assert payload is not None, "it has ended"
        return _answers.decode(payload)

    def spawn(self, rank: int, log: str = "", slot: int = 0) -> None:
        log = log or str(self._folder / f"rank{rank}.log")
        env = {"RANK": str(rank), "LOCAL_RANK": str(slot)}
        self._socket.sendall(wire.encode(Spawn(rank, env, log, log, self.program, ())))

    def kill(self, rank: int) -> None:
        self._socket.sendall(wire.encode(Kill(rank, signal.SIGKILL)))

    def end(self) -> None:
        self._socket.close()
        self.process.wait()
        os.close(self._deathwatch.fd)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Started]:
    started = Started(tmp_path)
    yield started
    started.end()


def full_table(started: Started) -> Callable[[], object]:
    """No more files for the zygote; returns what lifts that."""
    pid = started.process.pid
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (1, before[1]))
    started.spawn(1)
    return lambda: resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


def no_log(started: Started) -> Callable[[], object]:
    """No place for what a rank prints."""
    started.spawn(1, log="/proc/no/such/folder")
    return lambda: None


@pytest.mark.parametrize(
    ("refuse", "why"), [(full_table, os.strerror(errno.EMFILE)), (no_log, os.strerror(errno.ENOENT))]
)
def test_a_rank_that_the_machine_refuses_has_ended_and_others_can_be_started(
    started: Started, refuse: Callable[[Started], Callable[[], object]], why: str
) -> None:
    allow = refuse(started)
    ended = started.hear()
    assert isinstance(ended, Exited), "not started: nobody is to believe that it runs"
    assert (ended.rank, ended.returncode) == (1, -signal.SIGKILL)
    assert "it could not be started" in ended.cause and why in ended.cause
    allow()
    started.spawn(2)
    assert isinstance(started.hear(), Spawned)
    ended = started.hear()
    assert isinstance(ended, Exited)
    assert (ended.rank, ended.returncode, ended.cause) == (2, 7, "")


def test_a_rank_whose_disk_stands_still_keeps_no_other_from_starting(started: Started, tmp_path: Path) -> None:
    """It can be killed meanwhile. Here it opens a fifo that nobody reads."""
    os.mkfifo(tmp_path / "log")
    started.spawn(1, log=str(tmp_path / "log"), slot=1)
    started.spawn(2)
    told = started.hear()
    assert isinstance(told, Spawned) and told.rank == 2
    told = started.hear()
    assert isinstance(told, Exited) and (told.rank, told.returncode) == (2, 7)
    started.kill(1)
    assert isinstance(started.hear(), Spawned)
    told = started.hear()
    assert isinstance(told, Exited)
    assert (told.rank, told.returncode, told.cause) == (1, -signal.SIGKILL, "")


YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
_LOOK = """
import ctypes, os, sys
pid = int(sys.argv[1])
if os.getuid() == 0:
    os.setuid(65534)
libc = ctypes.CDLL(None, use_errno=True)
sys.exit(0 if libc.ptrace(0x4206, pid, None, None) == 0 else ctypes.get_errno())  # PTRACE_SEIZE
"""


@pytest.mark.parametrize("allows", [False, True])
@pytest.mark.skipif(not YAMA.is_file() or YAMA.read_text().strip() != "1", reason="no Yama that restricts tracing")
def test_where_only_ancestors_may_trace_who_is_named_may_too(allows: bool) -> None:
    """Its children may: here one that looks at its sibling, without privileges."""
    held, hold = os.pipe()
    ready, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        if os.getuid() == 0:
            os.setuid(65534)
        ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE, which setuid takes
        if allows:
            zygote.be_traced_by(os.getppid())
        os.close(hold)
        os.write(tell, b"x")
        os.read(held, 1)
        os._exit(0)
    os.close(held)
    try:
        os.read(ready, 1)
        looked = subprocess.run([sys.executable, "-c", _LOOK, str(pid)], check=False)
        assert looked.returncode == (0 if allows else errno.EPERM)
    finally:
        for descriptor in (hold, ready, tell):
            os.close(descriptor)
        os.waitpid(pid, 0)


# ---- its end -------------------------------------------------------------------------------


class Node:
    """An agent, and what it tells."""

    def __init__(self, folder: Path) -> None:
        self.told: asyncio.Queue[FromAgent] = asyncio.Queue()
        job = Assignment(program(folder), 1, 0, 2, folder, "127.0.0.1", 10.0, 1.0, 60.0)
        self.agent = Agent(job, self.told.put_nowait)
        self.fifo = folder / "fifo"
        os.mkfifo(self.fifo)

    def launch(self, rank: int) -> None:
        self.agent.obey(Launch(ranks={0: rank}, world_size=2, first_host=2, torch_port=1))

    async def ended(self, rank: int) -> RankExited:
        """How a rank has ended."""
        while True:
            told = await self.told.get()
            if isinstance(told, RankExited):
                assert told.rank == rank
                return told

    async def lose_zygote(self) -> None:
        """Kill it while rank 0 runs."""
        self.launch(0)
        await asyncio.to_thread(self.fifo.read_bytes)
        assert self.agent._keeper._process is not None
        self.agent._keeper._process.kill()
        ended = await self.ended(0)
        assert ended.returncode == -signal.SIGKILL
        assert ended.cause == "the process that starts this node's ranks has ended"


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, test: Callable[[Node], Awaitable[None]]) -> None:
    monkeypatch.setenv(zygote.PRELOAD_VARIABLE, "")

    async def main() -> None:
        node = Node(folder)
        try:
            await node.agent.prepare(60.0)
            async with asyncio.timeout(60.0):
                await test(node)
        finally:
            await node.agent.end(patient=False)

    asyncio.run(main())


def test_a_zygote_that_is_killed_takes_its_ranks_along_and_another_starts_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(node: Node) -> None:
        await node.lose_zygote()
        for rank in (1, 2):
            node.launch(rank)
            assert (await node.ended(rank)).returncode == 7

    run(tmp_path, monkeypatch, test)


def test_who_cannot_hear_of_its_ranks_any_more_ends_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(answer: object) -> None:
        raise ValueError("a defect")

    async def test(node: Node) -> None:
        monkeypatch.setattr(node.agent._keeper, "_heard", fail)
        node.launch(1)
        with pytest.raises(ValueError, match="a defect"):
            await node.agent.over

    run(tmp_path, monkeypatch, test)


def test_a_rank_without_a_zygote_has_ended_and_can_be_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> subprocess.Popen[bytes]:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    async def test(node: Node) -> None:
        await node.lose_zygote()
        with monkeypatch.context() as patch:
            patch.setattr(zygote, "start", refuse)
            for rank in (1, 2):
                node.launch(rank)
                node.agent.kill(rank)
                ended = await node.ended(rank)
                assert ended.returncode == -signal.SIGKILL
                assert "the process that starts the ranks cannot be started" in ended.cause
        node.launch(3)
        assert (await node.ended(3)).returncode == 7

    run(tmp_path, monkeypatch, test)


def test_a_rank_is_heard_though_its_agent_can_start_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One would tell of its death at once; its end is told without."""

    async def test(node: Node) -> None:
        before = threading.stack_size(1 << 45)  # more than there is
        try:
            for rank in (1, 2):
                node.launch(rank)
                assert (await node.ended(rank)).returncode == 7
        finally:
            threading.stack_size(before)

    run(tmp_path, monkeypatch, test)


def test_an_error_is_told_whatever_is_in_its_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the name of a file that is no Unicode."""

    async def test(node: Node) -> None:
        (tmp_path / "program.py").write_text("import os; raise ValueError('cannot read ' + os.fsdecode(b'x\\xff'))")
        node.launch(1)
        while not isinstance(told := await node.told.get(), Said | RankExited):
            pass
        assert isinstance(told, Said) and isinstance(told.message, Failed)
        assert told.message.traceback.endswith("ValueError: cannot read x\\udcff\n")
        assert (await node.ended(1)).returncode == 1
        log = node.agent._assignment.log(1).read_text()
        assert log.endswith("ValueError: cannot read x\\udcff\n\n"), "as Python writes it"

    run(tmp_path, monkeypatch, test)
