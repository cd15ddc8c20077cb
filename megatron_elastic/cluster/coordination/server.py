"""Server: the coordinator's connections with the agents of other nodes, and with people."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from megatron_elastic.cluster.coordination.coordinator import Coordinator
from megatron_elastic.cluster.coordination.race import race
from megatron_elastic.cluster.coordination.session import Letter, Session
from megatron_elastic.cluster.messages import (
    AgentHello,
    ClocksRefused,
    Drain,
    FromAgent,
    Heartbeat,
    Inspected,
    LayoutTold,
    Leaving,
    Metered,
    Paced,
    ReadLog,
    ReadRecords,
    Resigned,
    Said,
    Scale,
    Stop,
    Throttled,
    ToAgent,
    Welcome,
)
from megatron_elastic.cluster.protocol.events import (
    Asked,
    Leaves,
    News,
    NodeAbsent,
    NodeBack,
    NodeCame,
    NodeLost,
    NodesLost,
)
from megatron_elastic.cluster.protocol.events import ClocksRefused as NoClocks
from megatron_elastic.cluster.protocol.events import Inspected as RanksInspected
from megatron_elastic.cluster.protocol.events import LayoutTold as NodesLayout
from megatron_elastic.cluster.protocol.events import Metered as RanksMetered
from megatron_elastic.cluster.protocol.events import Paced as RanksPaced
from megatron_elastic.cluster.protocol.events import Said as RankSaid
from megatron_elastic.cluster.protocol.events import Throttled as DevicesThrottled
from megatron_elastic.cluster.pulse import Pulse
from megatron_elastic.cluster.recording.reader import Reader
from megatron_elastic.cluster.wire import AsyncWire, Credentials, WireError, decode
from megatron_elastic.cluster.wire.door import Door
from megatron_elastic.config import ElasticConfig

FromOutside = Letter | Scale | Drain | ReadRecords | ReadLog
_decoder: msgspec.msgpack.Decoder[FromOutside] = msgspec.msgpack.Decoder(FromOutside)
_letters: msgspec.msgpack.Decoder[FromAgent] = msgspec.msgpack.Decoder(FromAgent)


class Server:
    """Serves one job's connections.

    Args:
        config: limits.
        credentials: what every client must show.
        run_dir: whose records people can see.
        say: prints one line for people.
    """

    def __init__(self, config: ElasticConfig, credentials: Credentials, run_dir: Path,
                 say: Callable[[str], None]) -> None:
        self.coordinator: Coordinator | None = None
        """What is told of everything that comes; None while another process coordinates."""
        self._agents: dict[str, RemoteAgent] = {}
        """By session."""
        self._silent: list[NodeLost] = []
        """Nodes that have just been found to be."""
        self._config = config
        self._reader = Reader(run_dir)
        self._say = say
        self._door: Door[FromOutside] = Door(credentials, _decoder, self._serve_guest, config.cut_off, say)

    def listen(self, host: str, port: int, clients: int = 0) -> int:
        """Listen for agents and people, about so many; 0 takes a free port. Returns the port. Raises OSError."""
        return self._door.open(host, port, clients)

    async def close(self, timeout: float) -> None:
        """Stop listening, and wait until all connections have ended; those left after ``timeout`` seconds are cut."""
        await self._door.close(timeout)
        self._reader.close(0.1)

    def depose(self) -> None:
        """Another process coordinates: agents are to look for it."""
        self.coordinator = None
        for agent in self._agents.values():
            agent.leave()
        self._agents.clear()

    async def _serve_guest(self, wire: AsyncWire[FromOutside]) -> None:
        try:
            await self._serve(wire)
        except (WireError, TimeoutError) as error:
            self._say(f"closed a connection: {str(error) or 'it did not introduce itself'}")

    async def _serve(self, wire: AsyncWire[FromOutside]) -> None:
        # An agent connects before it imports what its ranks need, and introduces itself after.
        async with asyncio.timeout(self._config.start_timeout):
            first = await wire.receive()
        coordinator = self.coordinator
        if first is None or coordinator is None:
            return  # whoever it is looks for the coordinator, who is elsewhere
        if isinstance(first, Scale | Drain):
            person, answer = coordinator.asking()
            coordinator.post(Asked(now=time.time(), person=person, request=first))
            wire.send(await answer)
            return
        if isinstance(first, ReadRecords | ReadLog):
            reading = asyncio.ensure_future(self._reader.answer(first))
            await race(reading, wire.receive())  # who has gone, as a disk stalls, does not stay
            if not reading.cancelled():
                wire.send(reading.result())
            return
        hello = decode(bytes(first.message), _letters)
        if not isinstance(hello, AgentHello):
            raise WireError(f"it began with {type(hello).__name__} instead of AgentHello or a request")
        await self._serve_agent(wire, hello, first.received, coordinator)

    async def _serve_agent(
        self, wire: AsyncWire[FromOutside], hello: AgentHello, received: int, coordinator: Coordinator
    ) -> None:
        agent = self._agents.get(hello.session)
        if agent is None and received:
            wire.send(Letter(0, 0, msgspec.Raw(msgspec.msgpack.encode(Welcome(received=-1)))))
            return
        back = agent is not None
        if agent is None:
            agent = self._agents[hello.session] = RemoteAgent(
                coordinator, partial(self._agents.pop, hello.session, None))
        agent.connect(wire, received)
        node, now = agent.node, time.time()
        coordinator.post(NodeBack(now=now, node=node) if back else NodeCame(now=now, node=node, hello=hello))

        def part(how: str, reason: str, again: bool) -> None:
            agent.obey(Stop(ok=False, reason=reason, again=again))
            self._lose(coordinator, NodeLost(now=time.time(), node=node, cause=f"node {hello.node_rank} {how}",
                                             since=pulse.heard_at))
            wire.close()

        def silent() -> None:
            part("silent", f"this node was silent for {limit:g} s and counts as lost (--elastic-heartbeat-timeout); "
                           "its ranks must end", self._config.elastic)

        # Losing a node ends a plain job, which has no use for knowing it that soon.
        limit = self._config.heartbeat_timeout if self._config.elastic else self._config.cut_off
        pulse = Pulse(lambda: agent.session.beat(Heartbeat(recorded=coordinator.recorded)),
                      self._config.heartbeat_timeout, limit, silent)
        try:
            while (letter := await wire.receive()) is not None:
                pulse.heard()
                if not isinstance(letter, Letter):
                    raise WireError(f"an agent sent an unexpected {type(letter).__name__}")
                if (payload := agent.session.take(letter)) is not None:
                    hear(coordinator, node, decode(payload, _letters))
        except WireError as error:  # it would be the same over the next connection
            part("not understood", f"the coordinator does not understand this node: {error}; have all nodes the same "
                                   "release of megatron_elastic?", again=False)
            raise
        finally:
            pulse.stop()
            if agent.disconnect(wire):
                coordinator.post(NodeAbsent(now=time.time(), node=node))

    def _lose(self, coordinator: Coordinator, lost: NodeLost) -> None:
        """Nodes whose limits have run out together are lost together: for each loss everybody is interrupted, and while
        a large job is, the limits of others run out.
        """
        self._silent.append(lost)
        if len(self._silent) == 1:
            asyncio.get_running_loop().call_soon(self._tell_lost, coordinator)

    def _tell_lost(self, coordinator: Coordinator) -> None:
        lost, self._silent = tuple(self._silent), []
        coordinator.post(NodesLost(now=time.time(), lost=lost))


class RemoteAgent:
    """The agent at the other end of connections that follow one another.

    Args:
        coordinator: what tells it what to do.
        forget: its session is over: should it come again, it has to introduce itself anew.
    """

    def __init__(self, coordinator: Coordinator, forget: Callable[[], object]) -> None:
        self.session = Session()
        self.node = coordinator.name(self)
        self._coordinator = coordinator
        self._forget = forget
        self._wire: AsyncWire[FromOutside] | None = None
        self._stopped = False
        """Whether it has been told the last that it is told."""

    def connect(self, wire: AsyncWire[FromOutside], received: int) -> None:
        """It has come, by this connection; ``received``: the number of the last message that it has."""
        if self._wire is not None:
            self._wire.abort()
        self._wire = wire
        self.session.transmit = wire.send_encoded
        self.session.beat(Welcome(received=self.session.received))
        self.session.resume(received, wire.send_encoded)

    def disconnect(self, wire: AsyncWire[FromOutside]) -> bool:
        """A connection has ended. Returns whether there is no other."""
        if self._wire is not wire:
            return False
        self._wire = self.session.transmit = None
        if self._stopped:
            self._forget()
        return True

    def leave(self) -> None:
        """Say that another is to be looked for, and close the connection."""
        self.session.beat(Resigned())
        if self._wire is not None:
            self._wire.close()

    def obey(self, message: ToAgent) -> None:
        """Send it a message; ``Stop`` is the last."""
        problem = self.session.send(message)
        self._stopped = self._stopped or isinstance(message, Stop)
        if self._stopped and self._wire is None:
            self._forget()
        if problem is not None:
            self._coordinator.trouble(str(problem), fatal=True)


def hear(coordinator: Coordinator, node: int, message: FromAgent) -> None:
    """The agent of ``node`` says something after it has introduced itself. Raises WireError if it may not say that."""
    match message:
        case Heartbeat():
            pass
        case Said():
            coordinator.post(RankSaid(now=time.time(), node=node, message=message.message, also=tuple(message.also)))
        case Inspected():
            coordinator.post(RanksInspected(now=time.time(), node=node, readings=tuple(message.readings),
                                            usual=message.usual))
        case LayoutTold():
            coordinator.post(NodesLayout(now=time.time(), node=node, layout=message.layout))
        case Paced():
            coordinator.post(RanksPaced(now=time.time(), node=node, epoch=message.epoch, paces=message.paces))
        case Metered():
            coordinator.post(RanksMetered(now=time.time(), node=node, figures=message.figures))
        case ClocksRefused():
            coordinator.post(NoClocks(now=time.time(), node=node, reason=message.reason))
        case Throttled():
            coordinator.post(DevicesThrottled(now=time.time(), node=node, clocks=message.clocks))
        case Leaving():
            coordinator.post(Leaves(now=time.time(), node=node))
        case AgentHello():
            raise WireError(f"an agent sent an unexpected {type(message).__name__}")
        case _:
            coordinator.post(News(now=time.time(), node=node, news=message))
