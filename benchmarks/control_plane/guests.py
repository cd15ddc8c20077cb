"""Guests: the nodes of one process, each with a connection of its own to the coordinator."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import struct
from collections.abc import Sequence
from functools import lru_cache
from socket import IPPROTO_TCP, TCP_INFO

import msgspec

from control_plane.coordinating import HOST
from control_plane.nodes import Node
from control_plane.pure import SETTINGS
from control_plane.ranks import NODE, Ranks, grid
from megatron_elastic.cluster.coordination.session import Letter, Session
from megatron_elastic.cluster.messages import FromRank, Heartbeat, ToAgent, Welcome
from megatron_elastic.cluster.node import relay
from megatron_elastic.cluster.pulse import Pulse
from megatron_elastic.cluster.wire import AsyncWire, Broken, Credentials

_letters: msgspec.msgpack.Decoder[Letter] = msgspec.msgpack.Decoder(Letter)
_orders: msgspec.msgpack.Decoder[ToAgent] = msgspec.msgpack.Decoder(ToAgent)
_LIMIT = 1200.0
"""Seconds to connect, and until a silent coordinator counts as gone."""
_TCP_INFO_BYTES = 120  # offset of tcpi_bytes_acked, which tcpi_bytes_received follows


class Wire(AsyncWire[Letter]):
    """A connection that knows what has passed."""

    sent = 0
    received = 0
    own_sent = 0
    """Besides heartbeats."""
    own_bytes = 0
    """Of those, before encryption."""

    def send_encoded(self, encoded: bytes) -> Broken | None:
        self.sent += 1
        self.own_sent += 1
        self.own_bytes += len(encoded)
        return super().send_encoded(encoded)

    def beat(self, session: Session) -> None:
        """Send a heartbeat of ``session``, which this is the connection of."""
        own = self.own_sent, self.own_bytes
        session.beat(Heartbeat())
        self.own_sent, self.own_bytes = own

    async def receive(self) -> Letter | None:
        letter = await super().receive()
        self.received += letter is not None
        return letter

    def passed(self) -> tuple[int, ...]:
        """Messages sent and received, those sent besides heartbeats, their bytes; bytes sent and received, as TCP
        counts them: with what encryption adds, and once they are acknowledged.
        """
        sock = self._writer.get_extra_info("socket")
        info = sock.getsockopt(IPPROTO_TCP, TCP_INFO, 256)
        acked, received = struct.unpack_from("QQ", info, _TCP_INFO_BYTES)
        return self.sent, self.received, self.own_sent, self.own_bytes, acked, received


async def begin(world_size: int, port: int, credentials: Credentials) -> Guests:
    """A process for nodes."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    for name in ("decode", "restored"):  # what each node would do for itself
        setattr(relay, name, lru_cache(4)(getattr(relay, name)))
    return Guests(world_size, port, credentials)


class Guests:
    """What a process of nodes obeys."""

    def __init__(self, world_size: int, port: int, credentials: Credentials) -> None:
        self._world_size = world_size
        self._port = port
        self._credentials = credentials
        self._ranks = Ranks(grid(world_size))
        self._nodes: dict[int, Node] = {}
        self._wires: dict[int, Wire] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._gone = [0] * 6
        """What has passed over connections that have ended."""

    async def come(self, numbers: Sequence[int]) -> None:
        """Nodes connect, all at once, and introduce themselves."""
        await asyncio.gather(*map(self._come, numbers))

    async def _come(self, number: int) -> None:
        self._nodes[number] = Node(number, self._ranks, self._world_size)
        await self._introduce(number)

    async def _introduce(self, number: int) -> None:
        wire = await Wire.connect(HOST, self._port, self._credentials, _LIMIT, _letters, _LIMIT)
        assert isinstance(wire, Wire)
        self._wires[number] = wire
        node, session = self._nodes[number], Session()
        node.tell = session.send
        self._tasks[number] = asyncio.get_running_loop().create_task(self._serve(node, wire, session))
        hello = msgspec.msgpack.encode(node.hello(SETTINGS.heartbeat_timeout))
        wire.send(Letter(0, 0, msgspec.Raw(hello)))

    async def _serve(self, node: Node, wire: Wire, session: Session) -> None:
        pulse = Pulse(lambda: wire.beat(session), SETTINGS.heartbeat_timeout, _LIMIT, wire.abort)
        try:
            while (letter := await wire.receive()) is not None:
                pulse.heard()
                if (payload := session.take(letter)) is None:
                    continue
                message = _orders.decode(payload)
                if isinstance(message, Welcome):
                    session.resume(message.received, wire.send_encoded)
                else:
                    node.obey(message)
        finally:
            pulse.stop()

    async def forsaken(self) -> None:
        """The coordinator is lost for all nodes here."""
        for number in list(self._wires):
            self._part(number)
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def follow(self, port: int) -> None:
        """Another coordinates, and all nodes come to it at once."""
        self._port = port
        await asyncio.gather(*map(self._introduce, self._nodes))

    def work(self) -> None:
        """All are in the middle of a step."""
        self._ranks.working = True

    def kill(self, rank: int) -> None:
        """A rank is killed, if it is here."""
        for node in self._nodes.values():
            if rank in node.running:
                node.kill(rank)
                return

    def lose(self, number: int) -> None:
        """A node is lost, if it is here."""
        if number in self._nodes:
            self._nodes.pop(number).vanish()
            self._part(number)

    def _part(self, number: int) -> None:
        """A node's connection ends."""
        wire = self._wires.pop(number)
        self._gone = [a + b for a, b in zip(self._gone, wire.passed(), strict=True)]
        wire.abort()

    def commit(self, switch: int | None) -> None:
        """A step ends for all members."""
        self._ranks.commit(self._say, switch)

    def settle(self) -> None:
        """All copies have been made."""
        self._ranks.settle(self._say)

    def _say(self, rank: int, message: FromRank) -> None:
        self._nodes[rank // NODE].say(rank, message)

    def state(self, epoch: int) -> dict[str, int]:
        """How far the ranks here are; ``epoch``: of the layout that is asked about."""
        ranks = self._ranks
        return {"started": ranks.started, "back": ranks.back, "informed": ranks.informed.get(epoch, 0),
                "resumed": int(ranks.decision == "Resume")}

    def passed(self) -> list[int]:
        """What has passed over all connections since the beginning."""
        each = (wire.passed() for wire in self._wires.values())
        return [sum(column) for column in zip(self._gone, *each, strict=True)]

    async def end(self) -> None:
        """Leave."""
        for wire in self._wires.values():
            wire.abort()
        for task in self._tasks.values():
            with contextlib.suppress(Exception):
                await task
