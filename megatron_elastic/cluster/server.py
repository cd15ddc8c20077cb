"""Server: the coordinator's connections with the agents of other nodes, and with people."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec

from megatron_elastic.cluster.coordinator import Coordinator
from megatron_elastic.cluster.messages import AgentHello, FromAgent, Heartbeat, Said, Scale, Stop, ToAgent
from megatron_elastic.cluster.protocol.events import Asked, News, NodeCame, NodeLost
from megatron_elastic.cluster.protocol.events import Said as RankSaid
from megatron_elastic.cluster.pulse import Pulse
from megatron_elastic.cluster.wire import AsyncWire, WireError
from megatron_elastic.config import ElasticConfig

_HANDSHAKE_LIMIT = 10.0
_decoder: msgspec.msgpack.Decoder[FromAgent | Scale] = msgspec.msgpack.Decoder(FromAgent | Scale)


class Server:
    """Serves one job's connections.

    Args:
        coordinator: what is told of everything that comes.
        config: limits.
        token: the job token that every client must know.
        say: prints one line for people.
    """

    def __init__(self, coordinator: Coordinator, config: ElasticConfig, token: str, say: Callable[[str], None]) -> None:
        self._coordinator = coordinator
        self._config = config
        self._token = token
        self._say = say
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    async def listen(self, host: str, port: int) -> int:
        """Listen for agents and people; 0 takes a free port. Returns the port. Raises OSError if it is in use."""
        self._server = await asyncio.start_server(self._connected, host, port)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self, timeout: float) -> None:
        """Stop listening, and wait until all connections have ended; those left after ``timeout`` seconds are cut."""
        if self._server is not None:
            self._server.close()
        if self._connections:
            await asyncio.wait(set(self._connections), timeout=timeout)
        for task, writer in list(self._connections.items()):
            writer.close()
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections[task] = writer
        try:
            async with asyncio.timeout(_HANDSHAKE_LIMIT):
                wire = await AsyncWire.accept(reader, writer, self._token, self._config.cut_off)
            await self.serve(wire)
        except (WireError, TimeoutError) as error:
            peer = writer.get_extra_info("peername")
            self._say(f"closed a connection from {peer}: {error or 'it said nothing'}")
        except asyncio.CancelledError:
            pass  # close() ends connections that outlast the job
        finally:
            writer.close()
            del self._connections[task]

    async def serve(self, wire: AsyncWire) -> None:
        """Serve one authenticated connection to its end. Raises WireError if what comes makes no sense."""
        # An agent connects before it imports what its ranks need, and introduces itself after.
        async with asyncio.timeout(self._config.start_timeout):
            first = await wire.receive(_decoder)
        match first:
            case AgentHello():
                await self._serve_agent(wire, first)
            case Scale():
                person, answer = self._coordinator.asking()
                self._coordinator.post(Asked(now=time.time(), person=person, request=first))
                wire.send(await answer)
            case None:
                pass
            case _:
                raise WireError(f"it began with {type(first).__name__} instead of AgentHello or Scale")

    async def _serve_agent(self, wire: AsyncWire, hello: AgentHello) -> None:
        coordinator = self._coordinator
        agent = RemoteAgent(wire)
        node = coordinator.name(agent)

        def silent() -> None:
            agent.obey(Stop(ok=False, reason=f"this node was silent for {limit:g} s and counts as lost "
                                             "(--elastic-heartbeat-timeout); its ranks must end"))
            coordinator.post(NodeLost(now=time.time(), node=node, cause=f"node {hello.node_rank} silent",
                                      since=pulse.heard_at))
            wire.close()

        # Losing a node ends a plain job, which has no use for knowing it that soon.
        limit = self._config.heartbeat_timeout if self._config.elastic else self._config.cut_off
        pulse = Pulse(lambda: wire.send(Heartbeat(recorded=coordinator.recorded)), self._config.heartbeat_timeout,
                      limit, silent)
        try:
            coordinator.post(NodeCame(now=time.time(), node=node, hello=hello))
            while (message := await wire.receive(_decoder)) is not None:
                pulse.heard()
                hear(coordinator, node, message)
        finally:
            pulse.stop()
            coordinator.post(NodeLost(now=time.time(), node=node, cause=f"node {hello.node_rank} lost",
                                      since=time.time()))
            coordinator.forget(node)


class RemoteAgent:
    """The agent at the other end of a connection."""

    def __init__(self, wire: AsyncWire) -> None:
        self._wire = wire

    def obey(self, message: ToAgent) -> None:
        """Send it a message."""
        self._wire.send(message)


def hear(coordinator: Coordinator, node: int, message: FromAgent | Scale) -> None:
    """The agent of ``node`` says something after it has introduced itself. Raises WireError if it may not say that."""
    match message:
        case Heartbeat():
            pass
        case Said():
            coordinator.post(RankSaid(now=time.time(), node=node, message=message.message))
        case AgentHello() | Scale():
            raise WireError(f"an agent sent an unexpected {type(message).__name__}")
        case _:
            coordinator.post(News(now=time.time(), node=node, news=message))
