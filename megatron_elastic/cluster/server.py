"""Server: the coordinator's connections. It lets ranks and agents in, and hands what they say to the coordinator."""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Callable

from megatron_elastic.cluster.coordinator import Coordinator, Outcome
from megatron_elastic.cluster.messages import (
    AgentHello,
    AnyMessage,
    Failed,
    Heartbeat,
    Hello,
    RankDying,
    RankExited,
    RankResumed,
    RankStopped,
    Scale,
    any_message,
)
from megatron_elastic.cluster.nodes import RemoteNode
from megatron_elastic.cluster.pulse import Pulse
from megatron_elastic.cluster.wire import AsyncWire, Credentials, WireError
from megatron_elastic.cluster.wire.door import Door
from megatron_elastic.config import ElasticConfig


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
        self._door = Door(credentials, any_message, self._serve_guest, config.cut_off, say)

    def listen(self, host: str, port: int) -> int:
        """Listen for ranks and agents; 0 takes a free port. Returns the port. Raises OSError if it is in use."""
        return self._door.open(host, port)

    async def close(self, timeout: float) -> None:
        """Stop listening, and wait until all connections have ended; those left after ``timeout`` seconds are cut."""
        await self._door.close(timeout)

    async def _serve_guest(self, wire: AsyncWire[AnyMessage]) -> None:
        try:
            await self._serve(wire)
        except (WireError, TimeoutError) as error:
            self._say(f"closed a connection: {str(error) or 'it did not introduce itself'}")
        except Exception:
            self._coordinator.stop(
                Outcome(False, f"error in the coordinator, please report it:\n{traceback.format_exc()}"))

    async def _serve(self, wire: AsyncWire[AnyMessage]) -> None:
        # An agent connects before it imports what its ranks need, and introduces itself after.
        async with asyncio.timeout(self._config.start_timeout):
            first = await wire.receive()
        match first:
            case Hello():
                await self._serve_rank(wire, first)
            case AgentHello():
                await self._serve_agent(wire, first)
            case Failed():
                self._coordinator.handle(first)
            case Scale():
                wire.send(self._coordinator.scale(first))
            case None:
                pass
            case _:
                raise WireError(f"it began with {type(first).__name__} instead of Hello, AgentHello or Failed")

    async def _serve_rank(self, wire: AsyncWire[AnyMessage], hello: Hello) -> None:
        self._coordinator.rank_connected(hello, wire)
        try:
            while (message := await wire.receive()) is not None:
                if getattr(message, "rank", None) != hello.rank:
                    raise WireError(f"rank {hello.rank} sent {type(message).__name__} in another's name")
                self._coordinator.handle(message)
        finally:
            self._coordinator.rank_disconnected(hello.rank)

    async def _serve_agent(self, wire: AsyncWire[AnyMessage], hello: AgentHello) -> None:
        def silent() -> None:
            node.stop(False, f"this node was silent for {limit:g} s and counts as lost (--elastic-heartbeat-timeout); "
                             "its ranks must end")
            self._coordinator.node_lost(hello, node, f"node {hello.node_rank} silent", pulse.heard_at)
            wire.close()

        node = RemoteNode(wire, self._coordinator.world_size)
        timeout = self._config.heartbeat_timeout
        if hello.heartbeat_timeout != timeout:
            reason = (f"--elastic-heartbeat-timeout is {timeout:g} s on node 0 and {hello.heartbeat_timeout:g} s on "
                      f"node {hello.node_rank}; give every node the same flags")
            node.stop(False, reason)
            self._coordinator.stop(Outcome(False, reason))
            return
        # Losing a node ends a plain job, which has no use for knowing it that soon.
        limit = timeout if self._config.elastic else self._config.cut_off
        pulse = Pulse(wire, timeout, limit, silent)
        try:
            self._coordinator.add_node(hello.ranks, node)
            while (message := await wire.receive()) is not None:
                pulse.heard()
                match message:
                    case Heartbeat():
                        pass
                    case RankDying() | RankExited() | RankStopped() | RankResumed() if self._coordinator.runs_on(
                        message.rank, node
                    ):
                        self._coordinator.rank_news(message)
                    case _:
                        raise WireError(f"the agent of node {hello.node_rank} sent an unexpected "
                                        f"{type(message).__name__}")
        finally:
            pulse.stop()
            self._coordinator.node_lost(hello, node, f"node {hello.node_rank} lost", time.time())
