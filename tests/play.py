"""Play: a small job as the coordinator sees it, for tests of its decisions event by event."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from megatron_elastic.cluster.messages import AgentHello, FromRank, Hello, Message, RankNews
from megatron_elastic.cluster.protocol import Job, Settings, advance
from megatron_elastic.cluster.protocol.effects import Effect, Record, Send
from megatron_elastic.cluster.protocol.events import Begun, Event, Expired, News, NodeCame, Recorded, Said
from megatron_elastic.layout import Layout, encode

SETTINGS = Settings(
    elastic=True, respawn=False, replay="gradient", profile_file=None, start_timeout=180.0, suspect_timeout=1.0,
    report_timeout=60.0, wait_timeout=300.0, heartbeat_timeout=2.5,
)  # fmt: skip
M = TypeVar("M", bound=Message)


class Play:
    """A job of some ranks a stage on one node that trains, and a newcomer on another, which has said hello; or, not yet
    ``training``, one whose ranks have not.
    """

    def __init__(
        self, stages: Sequence[Sequence[int]] = ((0, 1, 2),), settings: Settings = SETTINGS, layers: int = 1,
        width: int = 2, training: bool = True,
    ) -> None:
        size = width * len(stages)
        self.job = Job.new(settings, size)
        self.effects: list[Effect] = []
        """Of the last event."""
        self.first = Layout.grid(
            tp=1, pp=len(stages), dp=width, stage_units=stages, num_grains=4, num_slices=2, replicas=1,
            units=["embedding", *(f"layer.{layer}" for layer in range(layers)), "head"],
        )  # fmt: skip
        self.happens(Begun(now=0.0, torch_port=1, key=b""))
        self._come(node=1, slots=size)
        if training:
            self.say(*map(self.hello, range(size)))
        self._come(node=2, slots=1)
        if training:
            self.say(self.hello(size))

    def happens(self, event: Event) -> None:
        self.job, effects = advance(self.job, event)
        self.effects = list(effects)
        for record in [each for each in effects if isinstance(each, Record)]:
            self.job, more = advance(self.job, Recorded(now=event.now, epoch=record.epoch))
            self.effects += more

    def say(self, *messages: FromRank) -> None:
        """Ranks say something, one after the other."""
        for message in messages:
            node = self.job.ranks[message.rank].node
            assert node is not None
            self.happens(Said(now=1.0, node=node, message=message))

    def news(self, news: RankNews) -> None:
        node = self.job.ranks[news.rank].node
        assert node is not None
        self.happens(News(now=1.0, node=node, news=news))

    def expires(self, name: str) -> None:
        """A timer runs out, which must be set."""
        self.happens(Expired(now=2.0, name=name, serial=self.job.timers[name]))

    def sent(self, kind: type[M]) -> dict[int, M]:
        """What of this kind the last event has sent, by rank."""
        sends = [effect for effect in self.effects if isinstance(effect, Send)]
        return {rank: each.message for each in sends for rank in each.ranks if isinstance(each.message, kind)}

    def _come(self, node: int, slots: int) -> None:
        hello = AgentHello(session=str(node), node_rank=0 if node == 1 else self.job.world_size, slots=slots,
                           host=f"h{node}", heartbeat_timeout=2.5)
        self.happens(NodeCame(now=0.0, node=node, hello=hello))

    def hello(self, rank: int) -> Hello:
        """Of a rank that has been started."""
        return Hello(
            rank=rank, pid=rank + 1, host="h", address=b"", layout=encode(self.first) if rank == 0 else b"",
            start_step=0, train_iters=4, flags={}, likeness=b"", linked=True, tied=False,
        )  # fmt: skip
