"""An agent's connections with its ranks: who is let in, and who costs what."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import pytest

from megatron_elastic.cluster import wire
from megatron_elastic.cluster.messages import FromRank, Ready
from megatron_elastic.cluster.node import line
from megatron_elastic.cluster.node.line import AGENT_VARIABLE, Lines
from megatron_elastic.cluster.rank.control import JobStopped, report_failure
from megatron_elastic.cluster.rank.control import _connect as connect_rank

PATIENCE = 60.0
NOBODY = 65534


class Agent:
    """The lines of an agent, and what was heard over them."""

    def __init__(self, limit: float) -> None:
        self.heard: asyncio.Queue[tuple[int, FromRank]] = asyncio.Queue()
        self.lines = Lines(lambda rank, message: self.heard.put_nowait((rank, message)), lambda rank: None, limit)

    @contextmanager
    def connected(self) -> Iterator[socket.socket]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.connect(f"\0{self.lines.name}")
            sock.setblocking(False)
            yield sock


def run(test: Callable[[Agent], Awaitable[None]], limit: float = PATIENCE) -> None:
    async def main() -> None:
        agent = Agent(limit)
        try:
            async with asyncio.timeout(PATIENCE):
                await test(agent)
        finally:
            agent.lines.close()

    asyncio.run(main())


async def is_closed(sock: socket.socket) -> bool:
    return await asyncio.get_running_loop().sock_recv(sock, 1) == b""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user for a while")
def test_other_users_are_turned_away_at_once() -> None:
    """Any of them can connect, as there is no file with rights; its pid may even become a rank's."""
    program = f"""
import os, socket, sys
os.setuid({NOBODY})
sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
sock.connect(chr(0) + sys.argv[1])
print(os.getpid(), flush=True)
sys.exit(len(sock.recv(1)))
"""

    async def test(agent: Agent) -> None:
        stranger = await asyncio.create_subprocess_exec(
            sys.executable, "-c", program, agent.lines.name, stdout=subprocess.PIPE)
        assert stranger.stdout is not None
        agent.lines.expect(3, int(await stranger.stdout.readline()))
        assert await stranger.wait() == 0, "its connection was closed"
        assert not agent.lines._lines.get(3)

    run(test)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user for a while")
def test_a_rank_tells_nothing_to_another_user_in_its_agents_place() -> None:
    program = f"""
import os, socket, sys
os.setuid({NOBODY})
sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
sock.bind(chr(0) + sys.argv[1])
sock.listen()
print(flush=True)
print(sock.accept()[0].recv(1), flush=True)
"""
    name = f"megatron-elastic-test-{os.getpid()}"
    env = {"RANK": "0", AGENT_VARIABLE: name}
    with subprocess.Popen([sys.executable, "-c", program, name], stdout=subprocess.PIPE) as impostor:
        assert impostor.stdout is not None
        impostor.stdout.readline()
        report_failure("a secret", env=env)
        assert impostor.stdout.readline() == b"b''\n"
    with pytest.raises(JobStopped, match="cannot reach the agent"):
        connect_rank(env)


def test_a_stranger_does_not_stay_until_its_pid_is_a_ranks() -> None:
    async def test(agent: Agent) -> None:
        with agent.connected() as stranger:
            assert await is_closed(stranger)
        agent.lines.expect(3, os.getpid())
        assert not agent.lines._lines.get(3)
        with agent.connected() as rank:
            await asyncio.get_running_loop().sock_sendall(rank, wire.encode(Ready(rank=3, epoch=5)))
            assert await agent.heard.get() == (3, Ready(rank=3, epoch=5))

    run(test, limit=0.01)


def test_a_rank_may_be_faster_than_the_word_that_it_was_started() -> None:
    async def test(agent: Agent) -> None:
        with agent.connected() as rank:
            await asyncio.get_running_loop().sock_sendall(rank, wire.encode(Ready(rank=3, epoch=5)))
            while not agent.lines._strangers:
                await asyncio.sleep(0)
            agent.lines.expect(3, os.getpid())
            assert await agent.heard.get() == (3, Ready(rank=3, epoch=5))

    run(test)


def test_what_a_rank_said_last_is_heard_by_whatever_connection() -> None:
    """Its program has raised: that is told by a connection of its own, as the first one closes."""

    async def test(agent: Agent) -> None:
        agent.lines.expect(3, os.getpid())
        with agent.connected(), agent.connected() as last:
            while len(agent.lines._lines.get(3, ())) < 2:
                await asyncio.sleep(0)
            await asyncio.get_running_loop().sock_sendall(last, wire.encode(Ready(rank=3, epoch=5)))
        agent.lines.forget(3)
        assert agent.heard.get_nowait() == (3, Ready(rank=3, epoch=5))

    run(test)


def test_an_agent_without_files_left_does_not_ask_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0

    def refuse(_: socket.socket) -> None:
        nonlocal asked
        asked += 1
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async def test(agent: Agent) -> None:
        agent.lines.expect(3, os.getpid())
        with agent.connected() as rank:
            with monkeypatch.context() as patch:
                patch.setattr(socket.socket, "accept", refuse)
                patch.setattr(line, "_PAUSE", 3600.0)
                while not asked:
                    await asyncio.sleep(0)
                for _ in range(100):
                    await asyncio.sleep(0)
            assert asked == 1
            agent.lines._accept_again()
            await asyncio.get_running_loop().sock_sendall(rank, wire.encode(Ready(rank=3, epoch=5)))
            assert await agent.heard.get() == (3, Ready(rank=3, epoch=5)), "it is let in later"

    run(test)
