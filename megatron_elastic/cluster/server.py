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
from megatron_elastic.cluster.wire import AsyncWire, Credentials, Unsendable, WireError
from megatron_elastic.cluster.wire.door import Door
from megatron_elastic.config import ElasticConfig

FromOutside = FromAgent | Scale
_decoder: msgspec.msgpack.Decoder[FromOutside] = msgspec.msgpack.Decoder(FromOutside)


class Server:
    """Serves one job's connections.

    Args:
        coordinator: what is told of everything that comes.
        config: limits.
        credentials: what every client must show.
        say: prints one line for people.
    """

    def __init__(self, coordinator: Coordinator, config: ElasticConfig, credentials: Credentials,
                 say: Callable[[str], None]) -> None:
        self._coordinator = coordinator
        self._config = config
        self._say = say
        self._door: Door[FromOutside] = Door(credentials, _decoder, self._serve_guest, config.cut_off, say)

    def listen(self, host: str, port: int, clients: int = 0) -> int:
        """Listen for agents and people, about so many; 0 takes a free port. Returns the port. Raises OSError."""
        return self._door.open(host, port, clients)

    async def close(self, timeout: float) -> None:
        """Stop listening, and wait until all connections have ended; those left after ``timeout`` seconds are cut."""
        await self._door.close(timeout)

    async def _serve_guest(self, wire: AsyncWire[FromOutside]) -> None:
        try:
            await self._serve(wire)
        except (WireError, TimeoutError) as error:
            self._say(f"closed a connection: {str(error) or 'it did not introduce itself'}")

    async def _serve(self, wire: AsyncWire[FromOutside]) -> None:
        # An agent connects before it imports what its ranks need, and introduces itself after.
        async with asyncio.timeout(self._config.start_timeout):
            first = await wire.receive()
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

    async def _serve_agent(self, wire: AsyncWire[FromOutside], hello: AgentHello) -> None:
        coordinator = self._coordinator
        agent = RemoteAgent(wire, coordinator)
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
            while (message := await wire.receive()) is not None:
                pulse.heard()
                hear(coordinator, node, message)
        finally:
            pulse.stop()
            coordinator.post(NodeLost(now=time.time(), node=node, cause=f"node {hello.node_rank} lost",
                                      since=time.time()))
            coordinator.forget(node)


class RemoteAgent:
    """The agent at the other end of a connection."""

    def __init__(self, wire: AsyncWire[FromOutside], coordinator: Coordinator) -> None:
        self._wire = wire
        self._coordinator = coordinator

    def obey(self, message: ToAgent) -> None:
        """Send it a message."""
        problem = self._wire.send(message)
        if isinstance(problem, Unsendable):  # ours, not that agent's
            self._coordinator.trouble(str(problem), fatal=True)


def hear(coordinator: Coordinator, node: int, message: FromOutside) -> None:
    """The agent of ``node`` says something after it has introduced itself. Raises WireError if it may not say that."""
    match message:
        case Heartbeat():
            pass
        case Said():
            coordinator.post(RankSaid(now=time.time(), node=node, message=message.message, also=tuple(message.also)))
        case AgentHello() | Scale():
            raise WireError(f"an agent sent an unexpected {type(message).__name__}")
        case _:
            coordinator.post(News(now=time.time(), node=node, news=message))
