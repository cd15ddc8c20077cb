"""Agent: a model of one node: its connection with the coordinator, its ranks' processes, and what it tells of them."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from megatron_elastic.cluster.messages import (
    AgentHello,
    Fence,
    FromRank,
    Launch,
    RankClosed,
    RankDying,
    RankExited,
    RankResumed,
    RankStopped,
    Recall,
    Start,
    Stop,
    ToRank,
)
from megatron_elastic.cluster.relay import Post
from tests.simulation.rank import Rank

if TYPE_CHECKING:
    from tests.simulation.world import World


class ModelPost(Post):
    """The real one, for messages that are not encoded."""

    def pass_on(self, content: ToRank, ranks: tuple[int, ...], deliver: Any) -> None:
        if isinstance(content, Start):
            content = replace(content, addresses={rank: hello.address for rank, hello in self._hellos.items()})
        for rank in ranks:
            deliver(rank, content)


class Agent:
    """One node. ``local``: it runs in the coordinator's process."""

    def __init__(self, world: World, node_rank: int, slots: int, local: bool) -> None:
        self.world = world
        self.node_rank = node_rank
        self.slots = slots
        self.local = local
        self.host = f"host{node_rank}"
        self.node = 0
        """How the coordinator calls it."""
        self.alive = True
        self.connected = False
        self.cut_until = 0.0
        self.clock = 0.0
        """How far its clock is ahead."""
        self.ranks: dict[int, Rank] = {}
        self.post = ModelPost(lambda rank, frame: None, self.tell, self.world.after)
        self._up: deque[Any] = deque()
        self._down: deque[Any] = deque()
        self._up_at = self._down_at = 0.0
        self._line_at: dict[int, float] = {}

    @property
    def running(self) -> list[Rank]:
        """Ranks whose processes are there."""
        return [rank for rank in self.ranks.values() if rank.alive]

    # ---- the connection ------------------------------------------------------------------------

    def introduce(self) -> None:
        """It is ready."""
        if self.alive:
            self.connected = True
            self.world.node_came(self, AgentHello(session="", node_rank=self.node_rank, slots=self.slots,
                                                  host=self.host, heartbeat_timeout=2.5))

    def tell(self, message: Any) -> None:
        """Send to the coordinator."""
        if not self.alive or not self.connected:
            return
        self._up.append(message)
        now = self.world.now
        self._up_at = max(self._up_at, self.cut_until, now if self.local else now + self.world.delay(0.001))
        self.world.at(self._up_at, self._arrive)

    def _arrive(self) -> None:
        if not self.connected or not self._up:
            return
        if self.world.now < self.cut_until:
            self.world.at(self.cut_until, self._arrive)
            return
        self.world.hear(self, self._up.popleft())

    def obey(self, message: Any, ranks: tuple[int, ...] = ()) -> None:
        """The coordinator sends a message: for the agent, or for these of its ranks."""
        if not self.connected:
            return
        self._down.append((message, ranks, self.world.written))
        now = self.world.now
        self._down_at = max(self._down_at, self.cut_until, now if self.local else now + self.world.delay(0.001))
        self.world.at(self._down_at, self._act)

    def _act(self) -> None:
        if self.world.now < self.cut_until:
            self.world.at(self.cut_until, self._act)
            return
        if not self._down:
            return
        message, ranks, recorded = self._down.popleft()
        if not self.alive:
            return
        self.post.recorded(recorded)
        if ranks:
            self.post.pass_on(message, ranks, self._deliver)
            return
        match message:
            case Launch():
                for rank in message.ranks.values():
                    self.world.after(self.world.spawn_delay(), self._start, rank)
            case Fence():
                if message.rank in self.ranks:
                    self.world.kill(self.ranks[message.rank])
                else:
                    self.world.fence_early(self, message.rank)
            case Recall():
                self.post.recall(message)
            case Stop():
                self.end()

    def _deliver(self, rank: int, message: ToRank) -> None:
        if rank in self.ranks:
            at = max(self._line_at.get(rank, 0.0), self.world.now + self.world.delay(0.0005))
            self._line_at[rank] = at
            self.world.at(at, self.ranks[rank].receive, message)

    def cut(self) -> None:
        """The connection is gone for good, and all that was on its way."""
        self.connected = False
        self._up.clear()
        self._down.clear()

    def silent(self) -> None:
        """The coordinator has given it up, and hears nothing from it any more."""
        self.connected = False
        self._up.clear()

    def end(self) -> None:
        """End all ranks, and itself."""
        for rank in self.running:
            self.world.after(self.world.delay(0.2), self.world.kill, rank)

    # ---- ranks -----------------------------------------------------------------------------------

    def _start(self, number: int) -> None:
        if not self.alive:
            return
        rank = Rank(self.world, self, number, self.world.first)
        self.ranks[number] = self.world.ranks[number] = rank
        if number in self.world.doomed:
            self.world.kill(rank)
            return
        self.world.after(self.world.spawn_delay(), rank.begin)

    def heard(self, rank: int, message: FromRank) -> None:
        """A rank has written a message. The agent reads it before it takes note of the rank's end."""
        if self.alive:
            self.post.heard(rank, message)

    def died(self, rank: Rank, code: int) -> None:
        """A rank's process begins to end."""
        world, number = self.world, rank.rank
        when = world.wall(self)
        if world.rng.random() < (0.6 if code < 0 else 0.2):
            world.after(world.delay(0.001), self.post.news, RankDying(rank=number, time=when))
        if world.rng.random() < 0.2:
            world.after(world.delay(0.003), self.post.news, RankClosed(rank=number, time=when))
        world.after(world.delay(0.01) + 0.01, self._exited, number, code)

    def _exited(self, rank: int, code: int) -> None:
        self.post.news(RankExited(rank=rank, returncode=code, time=self.world.wall(self)))

    def stopped(self, rank: int) -> None:
        self.world.after(self.world.delay(0.002), self.post.news,
                         RankStopped(rank=rank, how="SIGSTOP", time=self.world.wall(self)))

    def resumed(self, rank: int) -> None:
        self.world.after(0.001, self.post.news, RankResumed(rank=rank, time=self.world.wall(self)))
