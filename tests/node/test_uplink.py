"""An agent's line to whoever coordinates: coordinators that resign, that do not coordinate, that do so anew."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace as with_limits
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from msgspec.structs import replace

from megatron_elastic.cluster.coordination.coordinator import Coordinator
from megatron_elastic.cluster.coordination.server import FromOutside, RemoteAgent, Server
from megatron_elastic.cluster.coordination.session import Letter
from megatron_elastic.cluster.messages import AgentHello, Heartbeat, Members, Stop, ToAgent, Welcome
from megatron_elastic.cluster.node.agent import Agent
from megatron_elastic.cluster.node.assignment import Assignment
from megatron_elastic.cluster.node.uplink import Uplink
from megatron_elastic.cluster.program import Program
from megatron_elastic.cluster.protocol import Job, Settings
from megatron_elastic.cluster.protocol.events import Event, NodeCame, NodeLost, NodesLost, TookOver
from megatron_elastic.cluster.wire import AsyncWire, Credentials
from megatron_elastic.config import ElasticConfig

CONFIG = ElasticConfig(elastic=True, suspect_timeout=1.0)
CREDENTIALS = Credentials("a token of this test, with more than 32 characters")
SETTINGS = Settings(elastic=True, respawn=False, replay="gradient", profile_file=None, start_timeout=9,
                    suspect_timeout=1, report_timeout=5, wait_timeout=9, heartbeat_timeout=CONFIG.heartbeat_timeout)
LIMIT = 20.0


class Heard(Coordinator):
    """The coordinator of a term, and how agents have introduced themselves to it."""

    def __init__(self, term: int) -> None:
        super().__init__(Job.new(SETTINGS, 4), None, lambda line, tells: None)
        self.hellos: asyncio.Queue[AgentHello] = asyncio.Queue()
        self.post(TookOver(now=time.time(), term=term, address="h:0", name="n", members=(), epoch=0, written=-1,
                           before="", limit=60.0))

    def post(self, event: Event) -> None:
        super().post(event)
        if isinstance(event, NodeCame):
            self.hellos.put_nowait(event.hello)


class CountedUplink(Uplink):
    """Counts its connections."""

    connections = 0

    async def connect(self, host: str, port: int, limit: float) -> AsyncWire[Letter]:
        self.connections += 1
        return await super().connect(host, port, limit)


class Node:
    """A server at which agents come, and one agent that follows it."""

    def __init__(self, folder: Path) -> None:
        self.server = Server(CONFIG, CREDENTIALS, Path("none"), lambda line: None)
        self.port = self.server.listen("127.0.0.1", 0)
        program = Program("program.py", False, [])
        self.agent = Agent(Assignment(program, 2, 1, 2, folder, "127.0.0.1", CONFIG.heartbeat_timeout, 1.0, 1.0),
                           lambda message: None)
        self.uplink = CountedUplink(CONFIG, CREDENTIALS, CONFIG.heartbeat_timeout)

    async def follow(self) -> str:
        wire = await self.uplink.connect("127.0.0.1", self.port, LIMIT)
        return await self.uplink.follow(wire, "127.0.0.1", self.port, self.agent)

    async def end(self) -> None:
        await self.agent.end(patient=False)
        await self.server.close(1.0)


def run(folder: Path, test: Callable[[Node], Awaitable[None]]) -> None:
    async def main() -> None:
        node = Node(folder)
        try:
            async with asyncio.timeout(LIMIT):
                await test(node)
        finally:
            await node.end()

    asyncio.run(main())


def test_who_resigns_says_so_and_the_next_one_is_told(tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        first = node.server.coordinator = Heard(1)
        following = asyncio.create_task(node.follow())
        assert (await first.hellos.get()).past is None
        node.server.depose()
        assert await following == "it coordinates no longer"
        second = node.server.coordinator = Heard(2)
        following = asyncio.create_task(node.follow())
        past = (await second.hellos.get()).past
        assert past is not None
        assert past.resigned
        assert past.alone_since == node.uplink.alone_since
        following.cancel()

    run(tmp_path, test)


def test_who_breaks_off_has_not_resigned(tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        first = node.server.coordinator = Heard(1)
        following = asyncio.create_task(node.follow())
        await first.hellos.get()
        await node.server.close(0.0)
        await following
        node.server = Server(CONFIG, CREDENTIALS, Path("none"), lambda line: None)
        node.server.listen("127.0.0.1", node.port)
        second = node.server.coordinator = Heard(2)
        following = asyncio.create_task(node.follow())
        past = (await second.hellos.get()).past
        assert past is not None
        assert not past.resigned
        following.cancel()

    run(tmp_path, test)


def test_who_is_cut_off_is_let_go_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another coordinates: nobody waits until the one before says that it has heard the last word."""
    slow = with_limits(CONFIG, suspect_timeout=600.0, report_timeout=700.0, wait_timeout=800.0)
    monkeypatch.setattr("tests.node.test_uplink.CONFIG", slow)  # or this takes as long

    async def test(node: Node) -> None:
        following, remote = await followed(node)
        cable = wire_of(remote)._writer.transport._ssl_protocol._transport  # type: ignore[attr-defined]
        cable.pause_reading()
        cable.write = lambda data: None
        following.cancel()
        await asyncio.wait([following])

    run(tmp_path, test)


async def followed(node: Node) -> tuple[asyncio.Task[str], RemoteAgent]:
    """Someone coordinates, and the node follows; that, and the other end of it."""
    coordinator = node.server.coordinator = Heard(1)
    following = asyncio.create_task(node.follow())
    await coordinator.hellos.get()
    (remote,) = node.server._agents.values()
    return following, remote


def wire_of(remote: RemoteAgent) -> AsyncWire[FromOutside]:
    """Its present connection."""
    assert remote._wire is not None
    return remote._wire


async def introduce(node: Node, session: str) -> tuple[AsyncWire[Letter], ToAgent]:
    """Come to a server as the agent of that session; what is said first."""
    wire = await node.uplink.connect("127.0.0.1", node.port, LIMIT)
    hello = replace(node.agent.hello(session, "", "", None, False), heartbeat_timeout=CONFIG.heartbeat_timeout)
    wire.send(Letter(0, 0, msgspec.Raw(msgspec.msgpack.encode(hello))))
    return wire, await said(wire)


async def said(wire: AsyncWire[Letter]) -> ToAgent:
    """The next thing that is said besides heartbeats."""
    while True:
        letter = await wire.receive()
        assert letter is not None
        message = msgspec.msgpack.decode(letter.message, type=ToAgent)
        if not isinstance(message, Heartbeat):
            return message


def lost(coordinator: Coordinator) -> NodeLost:
    """The newest node is."""
    return NodeLost(now=time.time(), node=coordinator._names, cause="lost", since=time.time())


class Novel(msgspec.Struct, frozen=True, tag=True, tag_field="type"):
    """A message of another release."""


@pytest.mark.parametrize("in_letter", [True, False])
def test_a_node_ends_that_does_not_understand_what_it_is_told(tmp_path: Path, in_letter: bool) -> None:
    """The coordinator does not take that for done."""
    async def test(node: Node) -> None:
        following, remote = await followed(node)
        assert (remote.session if in_letter else wire_of(remote)).send(Novel()) is None
        await following
        assert "the same release" in node.agent.over.result().reason

    run(tmp_path, test)


@pytest.mark.parametrize("said_last", [Letter(1, 0, msgspec.Raw(msgspec.msgpack.encode(Novel()))), Novel()])
def test_a_node_that_is_not_understood_is_lost_and_told_so(tmp_path: Path, said_last: msgspec.Struct) -> None:
    async def test(node: Node) -> None:
        coordinator = node.server.coordinator = Heard(1)
        wire, _ = await introduce(node, "s")
        wire.send(said_last)
        while not isinstance(told := await said(wire), Stop):
            pass
        assert "the same release" in told.reason and not told.again
        wire.close()
        while coordinator.job.nodes:
            await asyncio.sleep(0.001)

    run(tmp_path, test)


def test_nodes_that_come_and_are_lost_are_forgotten(tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        coordinator = node.server.coordinator = Heard(1)
        for i in range(20):
            wire, _ = await introduce(node, f"s{i}")
            assert (len(node.server._agents), len(coordinator._agents)) == (1, 1)
            coordinator.post(lost(coordinator))
            while not isinstance(await said(wire), Stop):
                pass
            wire.close()
            while node.server._agents:
                await asyncio.sleep(0.001)
            assert not coordinator._agents and not coordinator._told and not coordinator.job.nodes

    run(tmp_path, test)


def test_who_is_lost_while_its_connection_is_broken_introduces_itself_anew(tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        coordinator = node.server.coordinator = Heard(1)
        wire, _ = await introduce(node, "s")
        wire.abort()
        while coordinator.job.nodes[coordinator._names].absent is None:
            await asyncio.sleep(0.001)
        assert len(node.server._agents) == 1, "it may come back"
        coordinator.post(lost(coordinator))
        assert not node.server._agents and not coordinator._agents
        wire, first = await introduce(node, "s")
        assert first == Welcome(received=0)
        assert len(coordinator.job.nodes) == 1
        wire.abort()

    run(tmp_path, test)


def test_who_does_not_coordinate_is_asked_now_and_then_and_not_for_ever(tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        node.uplink.alone_since = 1.0
        assert await node.follow() == "it does not coordinate"
        assert 2 <= node.uplink.connections <= 7, "about every fifth of a second, for one"
        assert node.uplink.alone_since == 1.0, "nobody has coordinated meanwhile"

    run(tmp_path, test)


def test_who_coordinates_anew_is_followed_anew(tmp_path: Path) -> None:
    """The agent stays: it need not be told by a store that there is another term at the same address."""
    async def test(node: Node) -> None:
        node.uplink.alone_since = 1.0
        following = asyncio.create_task(node.follow())
        first = node.server.coordinator = Heard(1)
        hello = await first.hellos.get()
        (remote,) = node.server._agents.values()
        remote.obey(Members(addresses=[], name="n", term=1))
        await node.agent.members
        # It forgets this agent, and breaks the connection without a word: as if its words had been lost.
        second = node.server.coordinator = Heard(2)
        node.server._agents.clear()
        assert remote._wire is not None
        remote._wire.abort()
        again = await second.hellos.get()
        assert again.past is not None
        assert again.session != hello.session
        assert not following.done()
        following.cancel()

    run(tmp_path, test)


def test_a_clock_that_is_set_does_not_change_for_how_long_nobody_coordinates(monkeypatch: pytest.MonkeyPatch) -> None:
    wall, steady = [1000.0], [50.0]
    clock = SimpleNamespace(time=lambda: wall[0], monotonic=lambda: steady[0])
    monkeypatch.setattr("megatron_elastic.cluster.node.uplink.time", clock)
    uplink = Uplink(CONFIG, CREDENTIALS, CONFIG.heartbeat_timeout)
    steady[0] += 1.0
    assert uplink.alone_s == 1.0, "it has not found anybody yet"
    uplink.detach()
    assert (uplink.alone_s, uplink.alone_since) == (0.0, 1000.0)
    wall[0] += 1e6
    steady[0] += 2.0
    uplink.detach()
    assert (uplink.alone_s, uplink.alone_since) == (2.0, 1000.0), "since nobody did first"
    uplink.forget()
    assert (uplink.alone_s, uplink.alone_since) == (0.0, None), "it comes again"


def test_nodes_whose_limits_run_out_together_are_lost_together() -> None:
    """Each loss interrupts everybody, and while a large job is interrupted the limits of others run out."""
    class Told(Coordinator):
        def __init__(self) -> None:
            self.heard: list[Event] = []
            super().__init__(Job.new(SETTINGS, 4), None, lambda line, tells: None)

        def post(self, event: Event) -> None:
            self.heard.append(event)

    async def test() -> None:
        server = Server(CONFIG, CREDENTIALS, Path("none"), lambda line: None)
        told = Told()
        gone = [NodeLost(now=1.0, node=node, cause="silent", since=1.0) for node in (1, 2, 3)]
        for each in gone[:2]:
            server._lose(told, each)
        await asyncio.sleep(0)
        server._lose(told, gone[2])
        await asyncio.sleep(0)
        assert [each.lost for each in told.heard if isinstance(each, NodesLost)] == [tuple(gone[:2]), (gone[2],)]
        await server.close(0.0)

    asyncio.run(test())
