"""Pure: the coordinator's function alone, and how long it takes; all nodes are in this process, without connections."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from common import progress

from control_plane.nodes import Node
from control_plane.ranks import NODE, Ranks, grid
from megatron_elastic.cluster.coordination import coordinator as shell
from megatron_elastic.cluster.coordination.coordinator import Coordinator
from megatron_elastic.cluster.coordination.server import hear
from megatron_elastic.cluster.messages import FromAgent, FromRank
from megatron_elastic.cluster.node import relay
from megatron_elastic.cluster.protocol import Job, Settings, advance
from megatron_elastic.cluster.protocol.effects import Effect
from megatron_elastic.cluster.protocol.events import Begun, Event, NodeCame, NodeLost, TookOver

# No limit runs out but that of a connection that has ended: a thousand nodes share a process, which another program may
# keep from its processor. Who counted as lost for that would be one loss more, of which the figures say nothing.
SETTINGS = Settings(
    elastic=True, respawn=False, replay="gradient", profile_file=None, start_timeout=1200.0, suspect_timeout=1.0,
    report_timeout=1200.0, wait_timeout=2400.0, heartbeat_timeout=120.0, hang_timeout=1200.0,
)  # fmt: skip


PATIENCE = 120.0
"""Seconds that nodes have to come to a new coordinator: all come, or the benchmark has failed."""


def took_over(written: int) -> TookOver:
    """Another coordinator begins, apart from all nodes, that finds this step as the last on record."""
    return TookOver(now=time.time(), term=2, address="apart:1", name="n", members=(), epoch=0, written=written,
                    before="", limit=PATIENCE)


def settled(job: Job) -> bool:
    """Whether the layout is as good as it can be, and true everywhere."""
    return job.idle and job.told and not job.unsettled


class Clock:
    """How often and how long ``advance`` has run."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.events = 0
        self.longest = 0.0

    def advance(self, job: Job, event: Event) -> tuple[Job, tuple[Effect, ...]]:
        """The function, timed."""
        began = time.thread_time()
        result = advance(job, event)
        took = time.thread_time() - began
        self.seconds += took
        self.events += 1
        self.longest = max(self.longest, took)
        return result


class _Run:
    def __init__(self, ranks: int) -> None:
        layout = grid(ranks)
        self.size = len(layout.ranks)
        self.coordinator = Coordinator(Job.new(SETTINGS, self.size), None, lambda line, tells: None)
        self.ranks = Ranks(layout)
        self.clock = Clock()
        self.phases: dict[str, dict[str, Any]] = {}
        self._nodes: dict[int, Node] = {}
        """By their numbers among nodes."""
        self._names: dict[int, int] = {}

    def run(self) -> dict[str, Any]:
        """All phases."""
        nodes = self.size // NODE
        with self.phase("start"):
            self.coordinator.post(Begun(now=time.time(), torch_port=1, key=bytes(32)))
            for number in range(nodes):
                self.come(number)
            self.flush()
            assert self.ranks.started == self.size
            self.until_even()
        with self.phase("rank_lost"):
            self._nodes[1].kill(NODE + 5)
            self.flush()
            self.commit()
            assert self.coordinator.job.recovery is None
        with self.phase("rank_lost_even"):
            self.until_even()
        with self.phase("node_lost"):
            self.lose(2)
            self.flush()
            self.commit()
            assert self.coordinator.job.recovery is None
        with self.phase("node_lost_even"):
            self.until_even()
        with self.phase("node_joins"):
            self.come(nodes)
            self.flush()
            self.until_even()
        with self.phase("steps"):
            for _ in range(100):
                self.commit()
        with self.phase("resume"):
            self.ranks.working = True
            self._nodes[3].kill(3 * NODE + 5)
            self.flush()
            assert self.ranks.decision == "Resume"
            self.commit()
            assert self.coordinator.job.recovery is None
        self.until_even()
        with self.phase("takeover"):
            self.ranks.working = True
            self.take_over()
            self.flush()
            self.commit()
            assert self.coordinator.job.recovery is None
        assert self.coordinator.job.outcome is None
        return {"ranks": self.size, **self.phases}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        gc.collect()
        gc.freeze()  # the ranks' own memory is none of the coordinator's
        before = self.clock.seconds, self.clock.events
        self.clock.longest = 0.0
        began = time.perf_counter()
        yield
        wall = time.perf_counter() - began
        took, events = self.clock.seconds - before[0], self.clock.events - before[1]
        self.phases[name] = {"processor_s": round(took, 4), "events": events, "longest_s": round(self.clock.longest, 4)}
        progress(f"pure, {self.size} ranks: {name}: {took:.3f} s in {events} events, the longest "
                 f"{self.clock.longest:.3f} s (all with the ranks: {wall:.1f} s)")

    def come(self, number: int) -> None:
        """A node comes."""
        self._nodes[number] = Node(number, self.ranks, self.size)
        self._introduce(number)

    def _introduce(self, number: int) -> None:
        coordinator, node = self.coordinator, self._nodes[number]
        name = self._names[number] = coordinator.name(node)

        def tell(message: FromAgent) -> None:
            hear(coordinator, name, message)

        node.tell = tell
        self.coordinator.post(NodeCame(now=time.time(), node=name, hello=node.hello(SETTINGS.heartbeat_timeout)))

    def take_over(self) -> None:
        """Another coordinates, and all nodes come to it."""
        written = self.ranks.step - 1
        self.coordinator = Coordinator(Job.new(SETTINGS, self.size), None, lambda line, tells: None)
        self.coordinator.post(took_over(written))
        for number in self._nodes:
            self._introduce(number)

    def lose(self, number: int) -> None:
        """A node is lost."""
        self._nodes.pop(number).vanish()
        name = self._names.pop(number)
        self.coordinator.post(NodeLost(now=time.time(), node=name, cause="lost", since=time.time()))

    def commit(self) -> None:
        """A step ends, and the planned layout comes into force if there is one that everybody knows of."""
        change = self.coordinator.job.change
        switch = change.layout.epoch if change is not None and change.announced else None
        assert switch is None or self.ranks.informed[switch] == self.ranks.members
        self.ranks.commit(self._say, switch)
        self.flush()

    def flush(self) -> None:
        """What waits for others that say the same is told: no time passes here."""
        while any([node.flush() for node in self._nodes.values()]):
            pass

    def until_even(self) -> None:
        """Steps, until nothing is planned any more."""
        while not settled(self.coordinator.job):
            assert self.coordinator.job.outcome is None, self.coordinator.job.outcome
            self.ranks.settle(self._say)
            self.flush()
            if not settled(self.coordinator.job):
                self.commit()

    def _say(self, rank: int, message: FromRank) -> None:
        self._nodes[rank // NODE].say(rank, message)


def measure(ranks: int) -> dict[str, Any]:
    """Processor time of ``advance`` in each phase, with about so many ranks."""

    async def all_of_it() -> dict[str, Any]:
        run, shared = _Run(ranks), [(name, getattr(relay, name)) for name in ("decode", "restored")]
        setattr(shell, "advance", run.clock.advance)  # noqa: B010
        for name, real in shared:  # what each node would do for itself
            setattr(relay, name, lru_cache(4)(real))
        try:
            return run.run()
        finally:
            setattr(shell, "advance", advance)  # noqa: B010
            for name, real in shared:
                setattr(relay, name, real)

    return asyncio.run(all_of_it())
