"""Checks: what must hold after every event, as far as the coordinator can be seen to break it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from megatron_elastic.cluster.messages import Back, Committed, Decision, Plan, Reload, Report, Resume, ToRank
from megatron_elastic.cluster.protocol import Job
from megatron_elastic.cluster.protocol.effects import End, WriteEvent
from megatron_elastic.cluster.protocol.events import Event, Said
from megatron_elastic.layout import Layout, LayoutError
from tests.simulation.errors import Violation
from tests.simulation.layouts import decoded

if TYPE_CHECKING:
    from tests.simulation.ranks.rank import Rank
    from tests.simulation.shell.agent import Agent
    from tests.simulation.shell.coordinator import Coordinator
    from tests.simulation.world import World


class Checks:
    """The invariants of one history."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._layouts: dict[int, bytes] = {}
        self._cells = 0
        """Of the layout in force."""
        self._redone = 0
        """Steps up to this one may be done again although they are on record: state was lost."""
        self._again: dict[int, int] = {}
        """Step -> epoch in which it was last decided to do it again."""
        self._told: dict[int, int] = {}
        """Step -> newest epoch from which a coordinator was told of its vote."""
        self._brought: set[int] = set()
        """Steps that agents knew of when they had come to who took over."""
        self._excuses: set[str] = set()
        self._digested = False
        self._links: list[set[int]] = []
        self._fenced: set[int] = set()

    def broken(self, one: int, other: int) -> None:
        """A link between two ranks has broken."""
        self._links.append({one, other})

    def launched(self, agent: Agent, ranks: Iterable[int]) -> None:
        """An agent is to start ranks. Nobody whom the coordinator has asked may take them for others.

        A node that comes after that, with ranks of the same numbers that no layout has seen, is sent away. One that
        hears so late that it counts as lost, and its ranks with it, is told to stop next.
        """
        assert agent.link is not None
        coordinator = agent.link.coordinator
        if agent.link.node not in coordinator.job.nodes or coordinator.job.layout is None:
            return  # before training begins nobody knows any rank: who dies is started again
        for rank in ranks:
            asked = [link.agent for link in coordinator.links.values()
                     if link.open and link.node in coordinator.job.nodes]
            knows = [each.node_rank for each in asked
                     if rank in each.launched or any(other.transport.remembers(rank) for other in each.running)]
            if knows:
                raise Violation("reused", f"rank {rank} is started a second time; nodes {knows} remember the first")

    def event(self, effect: WriteEvent) -> None:
        """Something is written down. Whoever is said to hang must, and no message is ever lost but with its sender."""
        if effect.kind == "tangle":
            raise Violation("tangle", f"all ranks wait for each other: {effect.fields}")
        if effect.kind == "hang":
            there = self._world.ranks[effect.fields["rank"]]
            slow = not there.settled  # it builds for so long that it counts as hung
            if there.busy_until < self._world.now - 1.0 and not there.stopped and not slow:
                raise Violation("no hang", f"rank {there.rank} is said to hang, and does not: {effect.fields}")

    def fenced(self, rank: int) -> None:
        """A rank is killed."""
        there = self._world.ranks.get(rank)
        if there is None or there.alive:  # else something else has killed it, and the coordinator does not know yet
            self._fenced.add(rank)
        if there is not None and there.waits_for_a_decision(30.0):
            raise Violation("fenced", f"rank {rank} is killed, which has reported and waits for a decision")
        away = {"stop", "busy", "hang", "partition", "suspect", "node lost", "coordinator", "depose", "fail"}
        quiet = not self._world.kinds.keys() & away
        if quiet and len(self._links) == 1 and self._links[0] <= self._fenced:
            raise Violation("both ends", f"both ends of a bad link are killed, ranks {sorted(self._links[0])}")

    def excuse(self, reason: str) -> None:
        """The job may end for this reason."""
        self._excuses.add(reason)

    # ---- while it goes on ------------------------------------------------------------------------

    def line(self, record: Mapping[str, Any]) -> None:
        """A line of metrics."""
        step = record["step"]
        if record["loss"] != 10 / step:
            raise Violation("ledger", f"the line of step {step} has another step's loss")

    def took_over(self) -> None:
        """Another coordinates, who has not been told what those before it were told."""
        self._excuses.add("another coordinates")
        self._world.damage_forgotten()

    def layout(self, coordinator: Coordinator, layout: Layout) -> None:
        """A layout came into force."""
        if layout.epoch <= coordinator.epoch:
            raise Violation("epoch", f"the layout of epoch {layout.epoch} comes after that of epoch "
                                     f"{coordinator.epoch}")
        coordinator.epoch = layout.epoch
        if layout.most_cells is not None and len(layout.cells) > max(layout.most_cells, self._cells):
            raise Violation("spares", f"{len(layout.cells)} cells were formed, {self._cells} there were, and there are "
                                      f"to be {layout.most_cells} at most")
        self._cells = len(layout.cells)
        for ranks in layout.hosts:
            if len({self._world.ranks[rank].agent for rank in ranks}) > 1:
                raise Violation("host", f"ranks {list(ranks)} are not of one host")

    def sent(self, coordinator: Coordinator, message: ToRank) -> None:
        """A coordinator says something to ranks."""
        if not isinstance(message, Plan | Decision):
            return
        leadership = self._world.leadership
        if coordinator is not leadership.coordinator and message.epoch > leadership.base:
            raise Violation("deposed", f"a coordinator that leads no more decides about epoch {message.epoch}")
        try:
            layout = decoded(message.layout)
        except LayoutError as error:
            raise Violation("layout", str(error)) from None
        if self._layouts.setdefault(layout.epoch, message.layout) != message.layout:
            raise Violation("epoch", f"two layouts of epoch {layout.epoch}")
        if message.epoch != layout.epoch:
            raise Violation("epoch", f"{type(message).__name__} of epoch {message.epoch} with layout {layout.epoch}")
        if isinstance(message, Reload):
            self._redone = max(self._world.written, coordinator.newest)
            self._world.passed_step = message.step - 1
        elif isinstance(message, Back | Resume):
            step, world = message.step, self._world
            if world.keeps:
                world.passed_step = step - 1
            # Whoever has told of a vote since it was decided to do the step again comes too late.
            elif (self._redone < step <= world.written and self._known(coordinator, step)
                    and world.passed_in[step] >= self._again.get(step, 0)):
                raise Violation("redone", f"step {step} is done again, but it is on record")
            self._again[step] = message.epoch

    def told(self, event: Event) -> None:
        """A coordinator is told something."""
        match event:
            case Said(message=Committed(vote=vote, epoch=epoch)):
                self._told[vote.step] = max(self._told.get(vote.step, 0), epoch)
            case Said(message=Report(layout=epoch) as report):
                for each in (report.vote, report.last):
                    if each is not None:
                        self._told[each.step] = max(self._told.get(each.step, 0), epoch)

    def _known(self, coordinator: Coordinator, step: int) -> bool:
        """Whether a coordinator can know of a step's vote since it was last decided to do the step again; one that has
        taken over hears it from those who are left.
        """
        since = self._again.get(step, 0)
        if "another coordinates" not in self._excuses and self._told.get(step, -1) >= since:
            return True
        votes = [vote for rank in _there(self._world, coordinator)
                 for vote in (rank.standing.vote, rank.standing.last) if vote is not None]
        votes += [each.vote for link in coordinator.links.values() for each in link.agent.post.committed
                  if each.epoch >= since]
        return any(vote.step == step for vote in votes)

    def wrote(self, step: int) -> None:
        """A line is on record. What comes before is as well, unless a coordinator was lost with it."""
        for missing in range(self._world.written + 1, step):
            told = any(each.vote.step == missing for agent in self._world.agents if agent.connected
                       for each in agent.post.committed)
            if told or missing in self._brought or "another coordinates" not in self._excuses:
                raise Violation("ledger", f"the line of step {step} follows that of step {self._world.written}")

    def after(self, coordinator: Coordinator, before: Job) -> None:
        """After each event: nobody is waited for without a limit, and nobody who is gone with a node. Who has taken
        over knows what was asked for, if anybody does who has come.
        """
        job = coordinator.job
        timers = job.timers
        if before.gathering is not None and job.gathering is None:
            for node, link in coordinator.links.items():
                if node in job.nodes:
                    self._brought.update(each.vote.step for each in link.agent.post.committed)
                wanted = link.agent.post.wanted if node in job.nodes else None
                if wanted is not None and wanted.number > job.arrangement.number:
                    raise Violation("forgotten", f"node {node} knows of {wanted}, and who coordinates does not")
        if job.nodes is not before.nodes and job.gathering is None and job.layout is not None:
            for rank, each in job.ranks.items():
                if not each.lost and each.returncode is None and each.node not in job.nodes:
                    raise Violation("no node", f"rank {rank} counts as alive, and its node is gone")
        if job.gathering is not None and "gather" not in timers:
            raise Violation("no limit", "agents are awaited without a timer")
        if job.recovery is not None and job.recovery.collecting and "report" not in timers:
            for rank in job.recovery.awaited:
                if f"killed {rank}" not in timers:
                    raise Violation("no limit", f"the report of rank {rank} is awaited without a timer")
        if job.change is not None and job.change.missing and not job.change.announced and "ready" not in timers:
            for rank in job.change.missing:
                if f"killed {rank}" not in timers:
                    raise Violation("no limit", f"rank {rank} is to get ready without a timer")
        if job.change is not None and job.change.unordered and "order" not in timers:
            raise Violation("no limit", "an order is awaited without a timer")
        for rank in job.suspicions:
            if f"suspect {rank}" not in timers:
                raise Violation("no limit", f"rank {rank} is suspected without a timer")

    def digest(self, digest: Mapping[str, Any]) -> None:
        """What was made is written down; ``combine`` has checked that all slices are there."""
        if digest["step"] != self._world.total or len(digest["units"]) != len(self._world.first.units):
            raise Violation("digest", f"the digest is of step {digest['step']} and {len(digest['units'])} units")
        self._digested = True

    # ---- at the end ------------------------------------------------------------------------------

    def over(self, coordinator: Coordinator, end: End) -> None:
        """The job is over. It must have been for a reason, and that must be true."""
        if end.ok:
            self._finished(coordinator)
        elif (untrue := self._untrue(coordinator, end.reason)) is not None:
            raise Violation("ended", f"{untrue}: {end.reason}")

    def _finished(self, coordinator: Coordinator) -> None:
        world = self._world
        for number, each in coordinator.job.ranks.items():
            rank = world.ranks.get(number)
            told = each.node in coordinator.job.nodes and rank is not None and rank.agent.cut_until < world.now
            if each.lost and told and rank is not None and rank.waits(1.0):
                raise Violation("alive", f"rank {number} is lost, and waits for others")
        if not self._digested:
            raise Violation("digest", "the job ended well without a digest")
        for step in range(world.written + 1, world.total + 1):
            for agent in world.agents:
                if agent.connected and any(each.vote.step == step for each in agent.post.committed):
                    raise Violation("ledger", f"the line of step {step} is missing; node {agent.node_rank} knows it")

    def _untrue(self, coordinator: Coordinator, reason: str) -> str | None:
        """What is wrong with an end, if anything."""
        reason = reason.partition("\n\n")[0]  # what ranks have raised lately follows
        world, job = self._world, coordinator.job
        there = _there(world, coordinator)
        if reason.startswith("training cannot go on"):
            assert job.layout is not None
            cells = [cell for stage in job.layout.stages for cell in stage.cells if not cell.shadow]
            if not any(all(world.ranks[rank] in there for rank in cell.ranks) for cell in cells):
                return None  # no cell is whole, so there is nobody who could go on, from whatever state
            if "the copies of a slice differ" in reason:
                return None if world.kinds["flip"] else "nothing was damaged"
            if self._saved(coordinator, there):
                return "there are checkpoints"
            return self._all_there(coordinator)
        if reason.startswith("every rank of the layout is dead"):
            assert job.layout is not None
            left = [rank.rank for rank in there if rank.rank in job.layout.ranks and rank.standing.member]
            return f"ranks {left} are there" if left else None
        if reason.startswith("every rank is dead"):
            left = [rank.rank for rank in there if not job.ranks[rank.rank].standby]
            return f"ranks {left} are there" if left else None
        if reason.startswith("no node that knows the job"):
            left = [rank.rank for rank in world.ranks.values()
                    if rank.alive and rank.standing.member and rank.agent.stands and rank.agent.cut_until == 0]
            return f"ranks {left} are there" if left else None
        if "died before training began" in reason:
            return None if job.layout is None else "training had begun"
        if "did not come up" in reason or "did not come within" in reason:
            return None if world.kinds.keys() & {"node lost", "partition", "busy", "stop"} else "nothing has happened"
        if "exit code" in reason:
            return None if "exit code" in self._excuses else "no rank has exited"
        if "raises again" in reason:
            return None if self._world.kinds["fail"] > 1 else "no step has been done by others"
        if "raised" in reason:
            return None if "raised" in self._excuses else "no program has raised"
        if reason.startswith("all nodes of the job are to leave"):
            agents = [link.agent for link in coordinator.links.values() if link.open]  # who is cut off counts as lost
            return None if all(agent.leaving or agent.over for agent in agents) else "some stay"
        if reason == "the disk is full":
            return None
        return "that must not be"

    def _saved(self, coordinator: Coordinator, there: list[Rank]) -> bool:
        """Whether there is a checkpoint that the coordinator should know and can trust."""
        trust = coordinator.job.trust
        if trust.verified is not None:
            return any(step <= trust.verified for step in trust.saves)
        return bool(trust.saves) or any(rank.saved for rank in there if rank.control.acknowledged)

    def _all_there(self, coordinator: Coordinator) -> str | None:
        """Whether all state is there after all, at one step."""
        world, job = self._world, coordinator.job
        assert job.layout is not None
        parts = set(job.layout.parts)
        for steps in (world.passed_step, world.passed_step - 1):
            found: set[tuple[int, int, int]] = set()
            for rank in _there(world, coordinator):
                if rank.store is None:
                    if rank.standing.member:
                        return "nothing has been trained"
                    continue
                for at, state in rank.store.live.items():
                    if not state.bad and (state.step == steps or (state.step == steps - 1 and state.grad)):
                        found.add(rank.store.part(at))
            if found >= parts:
                return f"all state after {steps} steps is there"
        return None


def _there(world: World, coordinator: Coordinator) -> list[Rank]:
    """Ranks that a coordinator can count on."""
    job = coordinator.job
    return [rank for rank in world.ranks.values()
            if rank.alive and rank.rank in job.ranks and not job.ranks[rank.rank].lost
            and job.ranks[rank.rank].node in coordinator.links and rank.agent.connected]
