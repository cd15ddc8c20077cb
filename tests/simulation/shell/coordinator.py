"""Coordinator: a model of the shell around the protocol in one place: its links, timers and records."""

from __future__ import annotations

import traceback
from collections import deque
from typing import TYPE_CHECKING, Any

from megatron_elastic.cluster.messages import (
    AgentHello,
    Damaged,
    Decision,
    Fence,
    Heartbeat,
    Inspected,
    LayoutTold,
    Leaving,
    Members,
    Paced,
    Report,
    ToRank,
)
from megatron_elastic.cluster.messages import Said as FromAgentSaid
from megatron_elastic.cluster.protocol import Job, events
from megatron_elastic.cluster.protocol import advance as protocol_advance
from megatron_elastic.cluster.protocol.effects import (
    CancelTimer,
    Effect,
    End,
    ReadCosts,
    Record,
    Reply,
    Search,
    Send,
    SetTimer,
    Tell,
    WriteDigest,
    WriteEvent,
    WriteLayout,
    WriteMetrics,
)
from megatron_elastic.plan.work import order
from tests.simulation.errors import Violation
from tests.simulation.shell.disk import Recorder
from tests.simulation.shell.link import Link

if TYPE_CHECKING:
    from tests.simulation.shell.agent import Agent
    from tests.simulation.world import World

ADVANCE = protocol_advance
"""What is simulated; ``mutants`` put defects into it."""


class Coordinator:
    """``place``: the agent in whose process it is, if it is in one's. ``name`` is for traces."""

    def __init__(self, world: World, job: Job, place: Agent | None, recorder: Recorder, term: int) -> None:
        self.world = world
        self.job = job
        self.place = place
        self.term = term
        """In which it leads; 0 before it is elected."""
        self.address = place.address if place is not None else "apart:1"
        self.alive = True
        """Until its process ends, or it learns that another leads."""
        self.clock = 0.0
        """How far its clock is ahead."""
        self.links: dict[int, Link] = {}
        self.epoch = -1
        """Of the newest layout that it has written down."""
        self.newest = 0
        """The newest step whose line it wants to be written."""
        self._recorder = recorder
        if place is not None:
            place.coordinates = self
        self._events: deque[events.Event] = deque()
        self._busy = False
        self._timers: dict[str, int] = {}
        self._names = 0

    @property
    def time(self) -> float:
        """What its clock shows."""
        return self.world.base + self.world.now + self.clock

    @property
    def recorded(self) -> int:
        """Steps up to this one are on record, as it tells agents."""
        return self._recorder.recorded

    # ---- what happens ----------------------------------------------------------------------------

    def hear(self, link: Link, message: Any) -> None:
        """An agent says something."""
        if not self.alive:
            return
        now = self.time
        match message:
            case FromAgentSaid():
                told = message.message.damaged if isinstance(message.message, Report) else message.message
                if isinstance(told, Damaged) and self is self.world.leadership.coordinator:  # the next is not told
                    self.world.damage_told(told, self.job.newest_epoch)
                self.post(events.Said(now=now, node=link.node, message=message.message, also=tuple(message.also)))
            case AgentHello():
                link.node = self.name()
                self.links[link.node] = link
                self.post(events.NodeCame(now=now, node=link.node, hello=message))
            case Paced():
                self.post(events.Paced(now=now, node=link.node, epoch=message.epoch, paces=message.paces))
            case LayoutTold():
                self.post(events.LayoutTold(now=now, node=link.node, layout=message.layout))
            case Leaving():
                self.post(events.Leaves(now=now, node=link.node))
            case Inspected():
                self.post(events.Inspected(now=now, node=link.node, readings=tuple(message.readings),
                                           usual=message.usual))
            case _:
                self.post(events.News(now=now, node=link.node, news=message))

    def name(self) -> int:
        """A number for an agent or a person."""
        self._names += 1
        return self._names

    def lose(self, link: Link, cause: str) -> None:
        """An agent is gone, or has been silent for too long."""
        if self.alive and link.node:
            self.post(events.NodeLost(now=self.time, node=link.node, cause=cause, since=self.time))
            self.links.pop(link.node, None)

    def left(self, link: Link) -> None:
        """An agent has closed its connection, for good."""
        if self.alive and link.node:
            self.post(events.NodeAbsent(now=self.time, node=link.node))

    def post(self, event: events.Event) -> None:
        """Something has happened."""
        if not self.alive:
            return
        self._events.append(event)
        if self._busy:
            return
        self._busy = True
        while self._events and self.alive:
            self._work(self._events.popleft())
        self._busy = False

    def end(self) -> None:
        """Its process ends."""
        self.world.trace(f"the coordinator of term {self.term} ends")
        self._leave()

    def step_down(self) -> None:
        """It learns that another leads, or may, and decides nothing from then on."""
        if self.alive:
            self.world.trace(f"the coordinator of term {self.term} steps down")
            self._leave(says_so=True)

    def _leave(self, says_so: bool = False) -> None:
        """What is on its way is lost, and what was to be written; agents notice, and may still hear of it."""
        self.alive = False
        self._recorder.drop()
        self._timers.clear()
        for link in self.links.values():
            self.world.at(link.fade(says_so), link.agent.lost, link)

    # ---- what is done about it -------------------------------------------------------------------

    def _work(self, event: events.Event) -> None:
        world = self.world
        if world.tracing:
            world.trace(f"coordinator {self.term}: {_short(event)}")
        world.checks.told(event)
        before, snapshot = self.job, repr(self.job) if world.count % 997 == 0 else ""
        try:
            self.job, effects = ADVANCE(self.job, event)
        except Exception:
            raise Violation("raised", traceback.format_exc()) from None
        if snapshot and repr(before) != snapshot:
            raise Violation("changed", "advance has changed the job that it was given")
        for effect in effects:
            self._do(effect)
        if self.job.outcome is None:
            world.checks.after(self, before)

    def _do(self, effect: Effect) -> None:
        world = self.world
        match effect:
            case Send():
                self._send(effect.message, effect.ranks)
            case Tell():
                self._tell(effect)
            case SetTimer():
                self._timers[effect.name] = effect.serial
                world.after(effect.delay, self._expire, effect.name, effect.serial)
            case CancelTimer():
                self._timers.pop(effect.name, None)
            case WriteMetrics():
                world.checks.line(effect.record)
                self.newest = max(self.newest, effect.record["step"])
                self._recorder.write(self.newest)
                self._beat()
            case WriteLayout():
                world.checks.layout(self, effect.layout)
            case WriteDigest():
                world.checks.digest(effect.digest)
            case End():
                self._recorder.close()
                world.over(self, effect)
            case ReadCosts():
                self._events.append(events.Costed(now=self.time, costs=None, problem="there is none"))
            case Search():
                found = order.search(effect.layout, effect.costs, effect.present, effect.tied)
                world.after(world.delay(0.5), self._found, effect.layout.epoch, found)
            case Record():
                world.leadership.record(self, effect.epoch)
            case WriteEvent():
                world.checks.event(effect)
            case Reply():
                pass
            case _:
                if world.tracing:
                    world.trace(f"    {_short(effect)}")

    def _found(self, epoch: int, found: order.Order | None) -> None:
        self.post(events.Found(now=self.time, epoch=epoch, order=found, seconds=0.5))

    def _beat(self) -> None:
        for link in self.links.values():
            if self.world.rng.random() < 0.1:
                link.obey(Heartbeat())

    def _tell(self, effect: Tell) -> None:
        world, message = self.world, effect.message
        world.tell(message)
        if world.tracing:
            world.trace(f"    to node {effect.node}: {message}")
        if isinstance(message, Fence):
            world.checks.fenced(message.rank)
        elif isinstance(message, Members):
            world.leadership.opened(self)
        if (link := self.links.get(effect.node)) is not None:
            link.obey(message)

    def _expire(self, name: str, serial: int) -> None:
        if self._timers.get(name) == serial:
            del self._timers[name]
            self.post(events.Expired(now=self.time, name=name, serial=serial))

    def _send(self, message: ToRank, ranks: tuple[int, ...]) -> None:
        world = self.world
        world.tell(message)
        if world.tracing:
            world.trace(f"    to {list(ranks)}: {_short(message)}")
        world.checks.sent(self, message)
        by_node: dict[int, list[int]] = {}
        for rank in ranks:
            node = self.job.ranks[rank].node
            if node in self.links:
                assert node is not None
                by_node.setdefault(node, []).append(rank)
        for node, those in by_node.items():
            self.links[node].obey(message, tuple(those))
        if isinstance(message, Decision) and type(message).__name__ != "Enter":
            self._events.append(events.Sent(now=self.time, epoch=message.epoch))


def _short(value: object) -> str:
    text = str(value)
    layout = getattr(value, "layout", None)
    if isinstance(layout, bytes) and layout:
        text = text.replace(repr(layout), "LAYOUT")
    return text if len(text) < 400 else f"{text[:400]}..."
