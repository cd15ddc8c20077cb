"""Nodes: the agents of emulated ranks. What ranks say goes through the real ``relay.Post``."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable

import msgspec

from control_plane.ranks import NODE, Ranks
from megatron_elastic.cluster.messages import (
    AgentHello,
    FromAgent,
    FromRank,
    Heartbeat,
    Launch,
    RankDying,
    RankExited,
    Recall,
    Relay,
    TellLayout,
    ToAgent,
    ToRank,
)
from megatron_elastic.cluster.node.relay import Post

_decoder: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)


class Node:
    """One node: its agent's part in messages, without processes.

    Args:
        number: its rank among the nodes.
        ranks: has those of this node, too.
        world_size: ranks of the beginning.
    """

    def __init__(self, number: int, ranks: Ranks, world_size: int) -> None:
        self.number = number
        self.tell: Callable[[FromAgent], object] = lambda message: None
        """Tells whoever coordinates."""
        self.running: set[int] = set()
        self._started: set[int] = set()
        self._ranks = ranks
        self._world_size = world_size
        self._post = Post(self._deliver, lambda message: self.tell(message), asyncio.get_running_loop().call_later)
        self._frame = b""
        self._message: ToRank | None = None

    def hello(self, heartbeat_timeout: float) -> AgentHello:
        """How the agent introduces itself to the first coordinator, or to a later one."""
        past = self._post.past(1, time.time(), False, self._started) if self._started else None
        return AgentHello(session=str(self.number), node_rank=self.number, slots=NODE, host=f"node{self.number}",
                          heartbeat_timeout=heartbeat_timeout, past=past,
                          running=self._post.running({rank: rank % NODE for rank in sorted(self.running)}))

    def obey(self, message: ToAgent) -> None:
        """Do what the coordinator says."""
        match message:
            case Relay():
                self._post.relay(message)
                self._frame, self._message = b"", None  # a hundred thousand ranks would keep gigabytes
            case Heartbeat():
                self._post.recorded(message.recorded)
            case TellLayout():
                self._post.tell_layout()
            case Recall():
                self._post.recall(message)
            case Launch():
                for rank in message.ranks.values():
                    self.running.add(rank)
                    self._started.add(rank)
                    self.say(rank, self._ranks.begin(rank, joins=rank >= self._world_size))

    def say(self, rank: int, message: FromRank) -> None:
        """A rank says something."""
        self._post.heard(rank, message)

    def kill(self, rank: int) -> None:
        """A rank is killed."""
        self.running.remove(rank)
        self._ranks.end([rank])
        self._post.news(RankDying(rank=rank, time=time.time()))
        self._post.news(RankExited(rank=rank, returncode=-signal.SIGKILL, time=time.time()))

    def flush(self) -> bool:
        """Tell what waits for others that say the same; returns whether anything did."""
        return self._post.flush()

    def vanish(self) -> None:
        """The node is lost."""
        self._ranks.end(self.running)
        self.running.clear()

    def _deliver(self, rank: int, frame: bytes) -> None:
        # Ranks of a node get the same frame, which each of them would decode.
        if frame is not self._frame:
            self._frame, self._message = frame, _decoder.decode(memoryview(frame)[4:])
        assert self._message is not None
        if rank in self.running:
            self._ranks.hear(rank, self._message, self.say)
