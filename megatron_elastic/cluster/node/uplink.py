"""Uplink: an agent's line to whoever coordinates, in this process or at the other end of connections."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time

import msgspec
from msgspec.structs import replace

from megatron_elastic.cluster.coordination.coordinator import Coordinator
from megatron_elastic.cluster.coordination.server import hear
from megatron_elastic.cluster.coordination.session import Letter, Session
from megatron_elastic.cluster.messages import AgentHello, FromAgent, Heartbeat, Resigned, Stop, ToAgent, Welcome
from megatron_elastic.cluster.node.agent import Agent
from megatron_elastic.cluster.protocol.events import NodeCame
from megatron_elastic.cluster.pulse import Pulse
from megatron_elastic.cluster.wire import AsyncWire, Credentials, WireError, decode
from megatron_elastic.config import ElasticConfig

_letters: msgspec.msgpack.Decoder[Letter] = msgspec.msgpack.Decoder(Letter)
_orders: msgspec.msgpack.Decoder[ToAgent] = msgspec.msgpack.Decoder(ToAgent)


ELSEWHERE = "it does not coordinate"
"""Why somebody does not count as a coordinator who has welcomed nobody."""
_UNKNOWN = "it does not know this node"
_RESIGNED = "it coordinates no longer"
_PAUSE = 0.2
"""Seconds between two attempts to be welcomed."""


class Uplink:
    """One node's. What is told while nobody coordinates is forgotten: who does next asks.

    Args:
        config: limits.
        credentials: what is shown to coordinators, and asked of them.
        limit: seconds without a word from a coordinator after which it counts as gone.
    """

    def __init__(self, config: ElasticConfig, credentials: Credentials, limit: float) -> None:
        self.address = ""
        """Where this node listens when it coordinates."""
        self.member = ""
        """Where it listens as a member of an embedded store."""
        self.alone_since: float | None = None
        """Since when nobody coordinates, once somebody has; by the clock on the wall, for records."""
        self._alone_from = time.monotonic()
        """The same, or since when this node is there or has come again, by a clock that nobody sets."""
        self._resigned = False
        """Whether who did so last has said that it does so no longer."""
        self._config = config
        self._limit = limit
        self._credentials = credentials
        self._session: Session | None = None
        self._here: tuple[Coordinator, int] | None = None
        """The coordinator of this process, and how it calls this node."""

    def tell(self, message: FromAgent) -> None:
        """Tell whoever coordinates. Raises Unsendable if a message is too long."""
        if self._here is not None:
            hear(*self._here, message)
        elif self._session is not None and (problem := self._session.send(message)) is not None:
            raise problem

    @property
    def recorded(self) -> int:
        """Steps up to this one are on record, if this process coordinates."""
        return 0 if self._here is None else self._here[0].recorded

    # ---- in this process -------------------------------------------------------------------

    def attach(self, coordinator: Coordinator, agent: Agent) -> None:
        """This process coordinates."""
        node = coordinator.name(agent)
        self._here, self._session = (coordinator, node), None
        coordinator.post(NodeCame(now=time.time(), node=node,
                                  hello=replace(self._hello(agent, secrets.token_hex(8)), here=True)))
        self._found()

    def detach(self) -> None:
        """It does so no longer."""
        self._here, self._resigned = None, True
        self._lost()

    def forget(self) -> None:
        """This node comes again as one that has never had a coordinator."""
        self._found()
        self._alone_from = time.monotonic()

    @property
    def alone_s(self) -> float:
        """Seconds for which nobody has coordinated, or this node has not found who does."""
        return time.monotonic() - self._alone_from

    def _lost(self) -> None:
        """Nobody coordinates, since now if it was not so before."""
        if self.alone_since is None:
            self.alone_since, self._alone_from = time.time(), time.monotonic()

    def _found(self) -> None:
        """Somebody does."""
        self.alone_since, self._resigned = None, False

    # ---- over connections --------------------------------------------------------------------

    async def connect(self, host: str, port: int, limit: float) -> AsyncWire[Letter]:
        """A connection to who coordinates there. Raises WireError, and TimeoutError after ``limit`` seconds."""
        return await AsyncWire.connect(host, port, self._credentials, self._config.cut_off, _letters, limit)

    async def follow(self, wire: AsyncWire[Letter], host: str, port: int, agent: Agent) -> str:
        """Do what a coordinator says, over this connection and others to it, until it is gone or the job is over.

        Returns why it counts as gone, for people.
        """
        unwelcome = time.monotonic() + self._config.suspect_timeout
        try:
            self._session, name = Session(), secrets.token_hex(8)
            while True:
                why = await self._serve(wire, self._session, self._hello(agent, name), agent)
                self._lost()
                if agent.over.done() or why == _RESIGNED or (why == ELSEWHERE and time.monotonic() > unwelcome):
                    return why
                if why == ELSEWHERE:
                    await asyncio.sleep(_PAUSE)
                else:
                    unwelcome = time.monotonic() + self._config.suspect_timeout
                if why == _UNKNOWN:  # it has ceased to coordinate, and does so again: all begins anew
                    self._session, name = Session(), secrets.token_hex(8)
                with contextlib.suppress(TimeoutError, WireError):
                    wire = await self.connect(host, port, self._config.suspect_timeout)
                    continue
                return why
        finally:
            self._session = None
            self._lost()

    async def _serve(self, wire: AsyncWire[Letter], session: Session, hello: AgentHello, agent: Agent) -> str:
        """One connection, to its end. Returns why it ended."""
        limit = self._limit
        silent = welcome = False

        def cut_off() -> None:
            nonlocal silent
            silent = True
            wire.abort()

        wire.send(Letter(0, session.received, msgspec.Raw(msgspec.msgpack.encode(hello))))
        pulse = Pulse(lambda: session.beat(Heartbeat()), self._config.heartbeat_timeout, limit, cut_off)
        try:
            while not agent.over.done() and (letter := await wire.receive()) is not None:
                pulse.heard()
                if (payload := session.take(letter)) is None:
                    continue
                message = decode(payload, _orders)
                if isinstance(message, Welcome) and message.received < 0:
                    return _UNKNOWN
                if isinstance(message, Resigned):
                    self._resigned = True
                    return _RESIGNED
                if isinstance(message, Welcome):
                    welcome = True
                    self._found()
                    session.resume(message.received, wire.send_encoded)
                else:
                    agent.obey(message)
        except WireError as error:  # it would be the same over the next connection
            agent.stop(Stop(ok=False, reason=f"this node cannot do what the coordinator says: {error}; have all nodes "
                                             "the same release of megatron_elastic?"))
            return str(error)
        except asyncio.CancelledError:
            wire.abort()  # to say farewell to a host that is cut off takes seconds
            raise
        finally:
            pulse.stop()
            session.transmit = None
            wire.close()
            await wire.closed()
        if silent:
            return f"the coordinator was silent for {limit:g} s"
        return "the connection broke" if welcome else ELSEWHERE

    def _hello(self, agent: Agent, session: str) -> AgentHello:
        return agent.hello(session, self.address, self.member, self.alone_since, self._resigned)
