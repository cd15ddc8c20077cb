"""Agent: a model of one node: its connection with the coordinator, its ranks' processes, and what it tells of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_elastic.cluster.messages import (
    AgentHello,
    Fence,
    FromRank,
    Given,
    Heartbeat,
    Inspect,
    Inspected,
    Launch,
    Leave,
    Leaving,
    Members,
    RankClosed,
    RankDying,
    RankExited,
    RankResumed,
    RankStopped,
    Recall,
    Stop,
    TellLayout,
    ToRank,
    Wanted,
)
from megatron_elastic.cluster.node.relay import Post
from tests.simulation.errors import Violation
from tests.simulation.ranks.rank import Rank
from tests.simulation.shell.leadership import TORCH_PORT
from tests.simulation.shell.link import Link

if TYPE_CHECKING:
    from tests.simulation.shell.coordinator import Coordinator
    from tests.simulation.world import World


class ModelPost(Post):
    """The real one, for messages that are not encoded."""

    def pass_on(self, content: ToRank, ranks: tuple[int, ...], deliver: Any) -> None:
        content = self.noted(content)
        for rank in ranks:
            deliver(rank, content)


class Agent:
    """One node."""

    def __init__(self, world: World, node_rank: int, slots: int) -> None:
        self.world = world
        self.node_rank = node_rank
        self.slots = slots
        self.host = f"host{node_rank}"
        self.address = f"{self.host}:1"
        self.member = f"{self.host}:2" if world.scenario.store == "embedded" else ""
        self.alive = True
        self.over = False
        """Whether the job is over for it."""
        self.link: Link | None = None
        """Its dealings with the coordinator that it follows."""
        self.followed = ""
        """Where the last one was that it followed and that was not here."""
        self.coordinates: Coordinator | None = None
        """Who has coordinated last in its process."""
        self.elects = False
        """Whether it has been told how it learns who coordinates."""
        self.alone_since: float | None = None
        self.resigned = False
        """Whether the last coordinator has said that it is none any more."""
        self.leaving = False
        """Whether it has said that its ranks are to leave."""
        self.cut_until = 0.0
        self.clock = 0.0
        """How far its clock is ahead."""
        self.ranks: dict[int, Rank] = {}
        self.launched: set[int] = set()
        """All ranks that ever were started here."""
        self.slots_of: dict[int, int] = {}
        """Local rank of every rank that runs here, or is being started."""
        self.post = ModelPost(lambda rank, frame: None, self.tell, self.world.after)
        self._torch_port = 0
        self._line_at: dict[int, float] = {}

    @property
    def connected(self) -> bool:
        """Whether a coordinator hears what it says."""
        return self.link is not None and self.link.open

    @property
    def local(self) -> bool:
        """Whether the coordinator that it follows is in its own process."""
        return self.link is not None and self.link.local

    @property
    def stands(self) -> bool:
        """Whether it can coordinate."""
        return self.alive and self.elects and not self.over

    @property
    def running(self) -> list[Rank]:
        """Ranks whose processes are there."""
        return [rank for rank in self.ranks.values() if rank.alive]

    # ---- coordinators --------------------------------------------------------------------------

    def introduce(self) -> None:
        """It is ready, and comes to whoever coordinates, if it has not heard of a new one and come meanwhile."""
        coordinator = self.world.leadership.coordinator
        if self.link is not None:
            return
        if coordinator is not None and coordinator.alive:
            self.come(coordinator)
        elif self.alive:
            self.world.after(0.5, self.introduce)

    def come(self, coordinator: Coordinator) -> None:
        """Introduce itself to a coordinator."""
        if not self.alive or self.over or not coordinator.alive:
            return
        if self.cut_until > self.world.now and coordinator.place is not self:
            self.world.at(self.cut_until, self.hear_of, coordinator)
            return
        past = None if self.alone_since is None else self.post.past(
            self._torch_port, self.alone_since, self.resigned, self.launched)
        self.link = Link(self.world, self, coordinator)
        if not self.link.local:
            self.followed = coordinator.address
        self.link.tell(AgentHello(
            session="", node_rank=self.node_rank, slots=self.slots, host=self.host, heartbeat_timeout=2.5,
            address=self.address, member=self.member, running=self.post.running(self.slots_of), past=past,
            leaving=self.leaving, here=self.link.local,
        ))  # fmt: skip

    def hear_of(self, coordinator: Coordinator) -> None:
        """The store says that this one coordinates."""
        if self.elects and coordinator is self.world.leadership.coordinator and (
            self.link is None or self.link.coordinator is not coordinator
        ):
            self.leave()
            self.world.after(self.world.delay(0.002), self._come, coordinator)

    def _come(self, coordinator: Coordinator) -> None:
        if self.link is None:
            self.come(coordinator)

    def leave(self) -> None:
        """Have no more to do with the coordinator that it follows."""
        if self.link is not None:
            self.link.close()
            self.link.coordinator.left(self.link)
            self.link, self.alone_since, self.resigned = None, self.alone_since or self.world.wall(self), False

    def lost(self, link: Link) -> None:
        """The coordinator at the other end is gone."""
        if self.link is link:
            self.link, self.alone_since, self.resigned = None, self.world.wall(self), link.resigned
            if not self.elects:
                self.end()

    def tell(self, message: Any) -> None:
        """Tell the coordinator, if there is one."""
        if self.alive and self.link is not None:
            self.link.tell(message)

    def obey(self, message: Any, ranks: tuple[int, ...], recorded: int) -> None:
        """Do what the coordinator says. ``recorded``: steps up to this one are on record."""
        self.post.recorded(recorded)
        if ranks:
            self.post.pass_on(message, ranks, self._deliver)
            return
        match message:
            case Launch():
                if message.torch_port != TORCH_PORT:
                    raise Violation("port", f"ranks {message.ranks} are started with port {message.torch_port}")
                self._torch_port = message.torch_port
                self.world.checks.launched(self, message.ranks.values())
                self.launched.update(message.ranks.values())
                for slot, rank in message.ranks.items():
                    self.slots_of[rank] = slot
                    self.world.after(self.world.spawn_delay(), self._start, rank, self.link)
            case Leave():
                self.leaving = True
            case Wanted():
                self.post.want(message)
            case Given():
                self.post.given(message.newest)
            case Fence():
                if message.rank in self.ranks:
                    self.world.kill(self.ranks[message.rank])
                else:
                    self.world.fence_early(self, message.rank)
            case Inspect():
                self.tell(Inspected(readings=[rank.reading() for rank in self.running], usual=0.2))
            case TellLayout():
                self.post.tell_layout()
            case Recall():
                self.post.recall(message)
            case Members():
                self.elects = bool(self.world.leadership.kind != "alone")
            case Stop():
                if message.again and not self.leaving:
                    self.begin_again()
                else:
                    self.end()
            case Heartbeat():
                pass

    def _deliver(self, rank: int, message: ToRank) -> None:
        if rank in self.ranks:
            at = max(self._line_at.get(rank, 0.0), self.world.now + self.world.delay(0.0005))
            self._line_at[rank] = at
            self.world.at(at, self.ranks[rank].control.receive, message)

    def drain(self) -> None:
        """Its machine is about to be taken away."""
        if not self.leaving and not self.local:
            self.leaving = True
            self.tell(Leaving())

    def end(self) -> None:
        """The job is over for this node: end all ranks."""
        self.over = True
        for rank in self.running:
            self.world.after(self.world.delay(0.2), self.world.kill, rank)

    def begin_again(self) -> None:
        """Others have taken over what its ranks did: it comes again as if it were new, when they have ended."""
        for rank in self.running:
            self.world.kill(rank)
        self.leave()
        self.alone_since, self.followed = None, ""
        self.post = ModelPost(lambda rank, frame: None, self.tell, self.world.after)
        self.launched, self.slots_of, self._torch_port = set(), {}, 0
        self.world.after(self.world.spawn_delay(), self.introduce)

    def die(self) -> None:
        """The machine is gone, with all that runs on it."""
        self.alive = False
        if self.link is not None:
            self.link.close()
        for rank in self.running:
            self.world.kill(rank)

    # ---- ranks -----------------------------------------------------------------------------------

    def _start(self, number: int, link: Link | None) -> None:
        if not self.alive or self.over or number not in self.slots_of:  # it has begun again meanwhile
            return
        rank = Rank(self.world, self, number, self.world.first)
        self.ranks[number] = rank
        # Somebody who does not know yet that another coordinates can give the same id as that one: to nobody's rank.
        if link is not None and link.coordinator is self.world.leadership.coordinator:
            self.world.ranks[number] = rank
        self.world.ranks.setdefault(number, rank)
        if number in self.world.doomed:
            self.world.kill(rank)
            return
        if not self.world.mute(number):
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
        self.slots_of.pop(rank, None)
        self.post.news(RankExited(rank=rank, returncode=code, time=self.world.wall(self)))

    def stopped(self, rank: int) -> None:
        self.world.after(self.world.delay(0.002), self.post.news,
                         RankStopped(rank=rank, how="SIGSTOP", time=self.world.wall(self)))

    def resumed(self, rank: int) -> None:
        self.world.after(0.001, self.post.news, RankResumed(rank=rank, time=self.world.wall(self)))
