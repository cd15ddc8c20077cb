"""Leadership: the store that says who coordinates, what it remembers, and how another comes to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_elastic.cluster.leadership.embedded import seats
from megatron_elastic.cluster.protocol import Job, events
from tests.simulation.shell.coordinator import Coordinator

if TYPE_CHECKING:
    from tests.simulation.shell.agent import Agent
    from tests.simulation.world import World

TORCH_PORT = 1234
_PATIENCE = 30.0
"""Seconds after which nobody stands any more who could."""


class Leadership:
    """``kind``: as in ``--elastic-store``. With "alone" nobody is elected, and nothing needs to be remembered."""

    def __init__(self, world: World, kind: str) -> None:
        self.world = world
        self.kind = kind
        self.term = 0
        self.epoch = 0
        """The highest one that was begun."""
        self.base = 0
        """The highest one that was begun when the newest leader looked: others cannot decide about later ones."""
        self.coordinator: Coordinator | None = None
        """Who was elected last, or began; None once that one is known to be gone."""
        self._unwritten: dict[int, int] = {}
        """Term of a coordinator -> the newest epoch that it wants to be remembered."""
        self._doubtful: set[int] = set()
        """Terms of coordinators that are losing touch with the store."""
        self._opened = False

    def begin(self, job: Job, place: Agent | None) -> None:
        """The first node coordinates, or a process apart from it."""
        self.coordinator = first = Coordinator(self.world, job, place, self.world.recorder(place), 0)
        places = seats(self.world.nodes) if self.kind == "embedded" else 0
        first.post(events.Begun(now=first.time, torch_port=TORCH_PORT, key=bytes(32), name="job", seats=places))

    # ---- what is remembered ----------------------------------------------------------------------

    def opened(self, coordinator: Coordinator) -> None:
        """Training has begun: whoever coordinates is elected."""
        if self.kind != "alone" and not self._opened:
            self._opened = True
            self.world.after(self.world.delay(0.05), self._led, coordinator)

    def _led(self, coordinator: Coordinator) -> None:
        if coordinator.alive and self.coordinator is coordinator:
            self.term = coordinator.term = 1
            coordinator.post(events.Led(now=coordinator.time, term=1))
            if 0 in self._unwritten:
                self.record(coordinator, self._unwritten.pop(0))

    def record(self, coordinator: Coordinator, epoch: int) -> None:
        """A coordinator wants an epoch to be remembered before it decides about it."""
        if self.kind == "alone":
            coordinator.post(events.Recorded(now=coordinator.time, epoch=epoch))
            return
        busy = coordinator.term in self._unwritten
        self._unwritten[coordinator.term] = epoch
        if coordinator.term and not busy:
            slow = coordinator.term in self._doubtful or self.world.rng.random() < 0.05
            self.world.after(self.world.delay(0.3 if slow else 0.004), self._write, coordinator)

    def _write(self, coordinator: Coordinator) -> None:
        epoch = self._unwritten.pop(coordinator.term)
        if not coordinator.alive and self.world.rng.random() < 0.7:
            return  # it did not get so far
        if coordinator.term == self.term:
            self.epoch = max(self.epoch, epoch)
            self.world.after(self.world.delay(0.002), self._wrote, coordinator, epoch)
        else:
            coordinator.step_down()

    def _wrote(self, coordinator: Coordinator, epoch: int) -> None:
        coordinator.post(events.Recorded(now=coordinator.time, epoch=epoch))

    # ---- who leads -------------------------------------------------------------------------------

    def vacant(self, delay: float, barred: Agent | None) -> None:
        """Nobody leads any more, or will soon: another does after ``delay``, who is not ``barred``."""
        world = self.world
        self._doubtful.add(self.term)
        world.after(delay, self._elect, self.term, barred, world.now + _PATIENCE)

    def _elect(self, term: int, barred: Agent | None, until: float) -> None:
        world = self.world
        if term != self.term or world.outcome is not None:
            return
        there = [agent for agent in world.agents if agent.stands and agent is not barred]
        able = [agent for agent in there if agent.cut_until <= world.now]
        if not able:
            if world.now > until or not any(agent.stands for agent in world.agents):
                world.abandoned()
            else:
                world.after(0.5, self._elect, term, barred if there else None, until)
            return
        self._take_over(world.rng.choice(able))

    def _take_over(self, place: Agent) -> None:
        world = self.world
        self.term += 1
        self.base = self.epoch
        followed = place.followed
        if place.coordinates is not None:  # its process stands again only after that
            place.coordinates.step_down()
        place.leave()
        self.coordinator = new = Coordinator(world, world.new_job(), place, world.recorder(place), self.term)
        if world.tracing:
            world.trace(f"=== node {place.node_rank} coordinates in term {self.term}, from epoch {self.epoch}")
        world.checks.took_over()
        few = len(world.agents) <= seats(len(world.agents))
        members = tuple(agent.member for agent in world.agents[: seats(world.nodes)])
        new.post(events.TookOver(
            now=new.time, term=self.term, address=new.address, epoch=self.epoch, written=world.disk(place).written,
            before=followed, limit=1.0 + (0.0 if few else 5.0), name="job",
            members=members if self.kind == "embedded" else (),
        ))  # fmt: skip
        place.come(new)
        for agent in world.agents:
            if agent is not place:
                slow = 3.0 if world.rng.random() < 0.05 else 0.05
                world.after(world.delay(slow), agent.hear_of, new)

