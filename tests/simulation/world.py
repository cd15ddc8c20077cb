"""World: one history. A virtual clock, one queue of events, the coordinator's shell, and the faults of a scenario."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

from msgspec.structs import replace

from megatron_elastic.cluster.messages import Damaged, Scale, Suspect
from megatron_elastic.cluster.protocol import Job, Settings, events
from megatron_elastic.cluster.protocol.effects import End
from megatron_elastic.layout import Layout
from tests.simulation import faults
from tests.simulation.checks import Checks
from tests.simulation.errors import Violation
from tests.simulation.layouts import first_layout
from tests.simulation.ranks.meeting import Meeting
from tests.simulation.ranks.rank import Rank
from tests.simulation.scenario import Scenario
from tests.simulation.shell.agent import Agent
from tests.simulation.shell.coordinator import Coordinator
from tests.simulation.shell.disk import Disk, Recorder
from tests.simulation.shell.leadership import Leadership

_HORIZON = 1500.0
"""Seconds after the last fault within which a job must be over."""
_BASE = 1e9
"""What clocks show at the beginning."""
_SETTINGS = Settings(
    elastic=True, respawn=False, replay="gradient", profile_file=None, start_timeout=180.0, suspect_timeout=1.0,
    report_timeout=60.0, wait_timeout=300.0, heartbeat_timeout=2.5,
)  # fmt: skip


class World:
    """A scenario as it unfolds. ``lines``: where a trace goes, if one is wanted."""

    def __init__(self, scenario: Scenario, lines: list[str] | None = None) -> None:
        self.scenario = scenario
        self.rng = random.Random(scenario.seed ^ 0x5EED)
        self.lines = lines
        self.tracing = lines is not None
        self.now = 0.0
        self.count = 0
        self.kinds: Counter[str] = Counter()
        """Faults that happened."""
        self._heap: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._order = 0
        # The job
        self.first, self.first_bytes = first_layout(
            scenario.tp, scenario.pp, scenario.dp, scenario.layers, scenario.tied, scenario.slices, scenario.replicas,
            scenario.per_node, scenario.divided, scenario.spares,
        )
        self.tied, self.overlaps, self.verifies = scenario.tied, scenario.overlaps, scenario.verifies
        self.keeps, self.save_every = scenario.replay == "state", scenario.save_every
        self.profiles = scenario.profiles or scenario.searches
        self.start_step, self.total = scenario.start_step, scenario.start_step + scenario.steps
        self.shy = scenario.seed % 2 == 0
        """Whether damage is found by comparing copies only."""
        self.saved: dict[int, bool] = {self.start_step: False} if self.start_step else {}
        """Step of each checkpoint on disk -> whether it was damaged."""
        self.tainted: set[int] = set()
        """Steps of damaged checkpoints that the coordinator can know to be so."""
        # Who is there
        self.ranks: dict[int, Rank] = {}
        self.agents: list[Agent] = []
        self.meetings: dict[tuple[int, str, int], tuple[Layout, Meeting]] = {}
        self.doomed: set[int] = set()
        """Ranks that were fenced before they were there."""
        self._frozen: dict[int, list[tuple[Callable[..., None], tuple[Any, ...]]]] = {}
        self._damaged = False
        # Who coordinates
        self.leadership = Leadership(self, scenario.store)
        self.checks = Checks(self)
        self.written = self.start_step
        self.passed_step = self.start_step
        """The last step whose vote somebody is past."""
        self.passed_in: dict[int, int] = {}
        """Step -> newest epoch in which somebody was past its vote."""
        self.outcome: End | None = None
        self._disks: dict[Agent | None, Disk] = {}
        self._recorders: dict[Agent | None, Recorder] = {}
        self.pending = list(scenario.faults)
        self._seen: Counter[str] = Counter()
        self._after_fault = 0
        self.last_fault = 0.0
        self._built = False
        self.speaker: Rank | None = None
        """Who has said something last."""

    # ---- scheduling ------------------------------------------------------------------------------

    def at(self, when: float, function: Callable[..., None], *args: Any) -> None:
        self._order += 1
        heapq.heappush(self._heap, (when, self._order, function, args))

    def after(self, delay: float, function: Callable[..., object], *args: Any) -> None:
        self._order += 1
        heapq.heappush(self._heap, (self.now + delay, self._order, function, args))

    def delay(self, mean: float) -> float:
        """About ``mean``, sometimes much more."""
        dice = self.rng.random()
        return mean * 2 * dice if dice < 0.95 else mean * 40 * (dice - 0.94)

    def copy_delay(self) -> float:
        return self.delay(1.0 if self.scenario.slow_copies else 0.05)

    def spawn_delay(self) -> float:
        return self.delay(0.1)

    def newcomer_delay(self) -> float:
        """How long a newcomer builds; some never get ready."""
        return 1000.0 if self.rng.random() < 0.02 else self.delay(0.3)

    def mute(self, rank: int) -> bool:
        """Whether a newcomer hangs before it says anything."""
        return rank >= self.scenario.size and (rank * 104729 + self.scenario.seed) % 67 == 0

    def odd(self, rank: int) -> bool:
        """Whether a rank is unlike the others."""
        return rank >= self.scenario.size and (rank * 7919 + self.scenario.seed) % 61 == 0

    def wall(self, agent: Agent) -> float:
        return _BASE + self.now + agent.clock

    def run(self) -> None:
        """Until the job is over. Raises Violation."""
        scenario = self.scenario
        there = self.nodes + scenario.spares
        self.agents = [Agent(self, node_rank, scenario.per_node) for node_rank in range(there)]
        self.leadership.begin(self.new_job(), None if scenario.apart else self.agents[0])
        for agent in self.agents:
            self.after(0.0 if agent.node_rank == 0 else self.delay(0.1), agent.introduce)
        heap, limit = self._heap, 40_000 + 3000 * scenario.size
        while self.outcome is None:
            if not heap:
                raise Violation("stuck", self._standstill())
            self.now, _, function, args = heapq.heappop(heap)
            self.count += 1
            try:
                function(*args)
            except Violation:
                raise
            except Exception as error:  # so that its seed is told, as of all that must not happen
                raise Violation("raised", f"{error!r} in {function.__qualname__}") from error
            if self.pending and (scenario.early or self._all_built()):
                self._faults()
            if self.count > limit or self.now > self.last_fault + _HORIZON:
                raise Violation("stuck", self._standstill())
    def _all_built(self) -> bool:
        if not self._built:
            self._built = len(self.ranks) >= self.scenario.size and all(
                each.store for rank, each in self.ranks.items() if rank < self.scenario.size
            )
        return self._built

    def _standstill(self) -> str:
        where = {rank: f"{type(each.want).__name__} {each.want.key if isinstance(each.want, Meeting) else each.want}"
                 for rank, each in self.ranks.items() if each.alive and not each.done}
        coordinator = self.leadership.coordinator
        job = None if coordinator is None else coordinator.job
        what = "nobody coordinates" if job is None else (
            f"epoch {job.epoch}, collecting {job.collecting}, timers {dict(job.timers)}")
        return f"nothing ends it after {self.count} events, {self.now:.0f} s; written {self.written}; {what}; {where}"

    def trace(self, line: str) -> None:
        if self.lines is not None:
            self.lines.append(f"{self.now:10.4f} #{self.count:5d}  {line}")

    # ---- faults ----------------------------------------------------------------------------------

    def _faults(self) -> None:
        for index, fault in enumerate(self.pending):
            match fault.moment:
                case "":
                    due = self.count >= fault.count
                case "fault":
                    due = index == 0 and self.count >= self._after_fault + fault.count and bool(self.kinds)
                    due = due or (not self.kinds and self.count > 1000)
                case _:
                    due = self._seen[fault.moment] >= fault.count or self.count > 80 * self.scenario.size + 800
            if due:
                del self.pending[index]
                self._after_fault, self.last_fault = self.count, self.now
                self.kinds[fault.what] += 1
                if self.tracing:
                    self.trace(f"=== FAULT {fault}")
                faults.happen(self, fault)
                return

    def kill(self, rank: Rank, code: int = -9) -> None:
        """A process ends."""
        if not rank.alive:
            return
        if self.tracing:
            self.trace(f"rank {rank.rank} dies ({code})")
        rank.alive = False
        rank.agent.died(rank, code)
        if self.ranks[rank.rank] is not rank:
            return  # of a node that is sent away: nobody has ever dealt with it
        unsent = 1.0 if self.rng.random() < 0.5 else 0.2
        for other in self.ranks.values():
            if not other.alive or other is rank:
                continue
            if type(other.want) is Meeting and rank.rank in other.want.posted and self.rng.random() < unsent:
                other.want.blind.add(other.rank)
            near, transport = other.agent is rank.agent, other.transport
            if self.rng.random() < (0.5 if near else 0.2):
                self.after(self.delay(0.002), transport.note_gone if near else transport.note_broken, rank.rank)

    def fence_early(self, agent: Agent, rank: int) -> None:
        """A rank is to be killed that is only being started."""
        self.doomed.add(rank)

    def stop(self, rank: Rank, seconds: float) -> None:
        """SIGSTOP, and SIGCONT later."""
        if rank.alive and not rank.stopped:
            rank.stopped = True
            self._frozen[rank.rank] = []
            rank.agent.stopped(rank.rank)
            self.after(seconds, self._go_on, rank)

    def _go_on(self, rank: Rank) -> None:
        if not rank.alive:
            return
        rank.stopped = False
        rank.agent.resumed(rank.rank)
        for function, args in self._frozen.pop(rank.rank):
            self.after(0.0, function, *args)
        self.after(0.0, rank.poke)

    def held(self, rank: Rank, function: Callable[..., None], *args: Any) -> None:
        """Something that happens when a stopped process goes on."""
        self._frozen[rank.rank].append((function, args))

    def returned(self, rank: Rank) -> None:
        """A program has come to its end."""

    def process_ends(self, rank: Rank, code: int) -> None:
        self.kill(rank, code)

    # ---- what ranks share --------------------------------------------------------------------------

    def meet(self, rank: Rank, key: tuple[int, str, int], layout: Layout, data: Any) -> Meeting:
        """A rank comes to an exchange."""
        known = self.meetings.get(key)
        if known is None:
            if len(self.meetings) > 64:
                self.meetings = {old: each for old, each in self.meetings.items() if old[0] >= key[0] - 3}
            known = self.meetings[key] = layout, Meeting(key, layout.ranks)
        elif known[0] is not layout and known[0] != layout:
            raise Violation("two layouts", f"ranks {list(known[1].posted)} and {rank.rank} meet in {key} with "
                                           "different layouts")
        meeting = known[1]
        if rank.rank in meeting.posted and key[1] != "params":
            raise Violation("twice", f"rank {rank.rank} comes twice to {key}")
        meeting.posted[rank.rank] = data
        if len(meeting.posted) == len(meeting.members) and meeting.waiting:
            late = key[1] == "vote" and self.rng.random() < 0.3
            for number in meeting.waiting:
                if number != rank.rank:  # the lowest one is the first to know the result
                    slow = late and number != meeting.members[0]
                    self.after(self.delay(0.05 if slow else 0.002), self.ranks[number].woken, meeting)
        return meeting

    def said(self, rank: Rank, kind: str) -> None:
        """A rank says something."""
        self._seen[kind] += 1
        self.speaker = rank

    def passed(self, rank: Rank, step: int) -> None:
        """Somebody is past the vote of a step."""
        self.passed_step = max(self.passed_step, step)
        self.passed_in[step] = max(self.passed_in.get(step, 0), rank.transport.epoch)
        if self.tracing:
            self.trace(f"rank {rank.rank} is past the vote of step {step} in epoch {rank.transport.epoch}")

    def save(self, layout: Layout, step: int) -> None:
        """A checkpoint is complete."""
        stores = [self.ranks[rank].store for rank in layout.ranks]
        self.tainted.discard(step)
        self.saved[step] = any(state.bad for store in stores if store is not None for state in store.live.values())

    def damage(self, rank: Rank, which: int) -> None:
        """A bit flips."""
        if rank.store is not None and rank.store.live:
            at = sorted(rank.store.live)[which % len(rank.store.live)]
            rank.store.live[at].bad = True
            self._damaged = True

    def damage_around(self, layout: Layout) -> bool:
        return self._damaged

    def damaged_at(self, rank: int, at: tuple[int, int]) -> bool | None:
        """Whether a rank's copy is damaged; None if it has none."""
        store = self.ranks[rank].store
        state = store.live.get(at) if store is not None else None
        return None if state is None else state.bad

    # ---- who coordinates -----------------------------------------------------------------------------

    @property
    def nodes(self) -> int:
        """Nodes of the beginning."""
        return self.scenario.size // self.scenario.per_node

    @property
    def base(self) -> float:
        """What clocks show at the beginning."""
        return _BASE

    @property
    def coordinator(self) -> Coordinator | None:
        """Who was elected last, or began, if that one is there."""
        coordinator = self.leadership.coordinator
        return coordinator if coordinator is not None and coordinator.alive else None

    def new_job(self) -> Job:
        """The job as it begins for a coordinator."""
        settings = replace(_SETTINGS, respawn=self.scenario.respawn, replay=self.scenario.replay,
                           slow=("share", "evict")[self.scenario.seed % 2], policy=self.scenario.policy,
                           schedule="search" if self.scenario.searches else "1f1b",
                           places=self.scenario.searches and self.scenario.seed % 3 == 0)
        return Job.new(settings, self.scenario.size)

    def disk(self, place: Agent | None) -> Disk:
        """Where the records are that are written in ``place``."""
        return self._disks.setdefault(None if self.scenario.shared else place, Disk())

    def recorder(self, place: Agent | None) -> Recorder:
        """That of the process of ``place``."""
        if place not in self._recorders:
            self._recorders[place] = Recorder(self.disk(place), self._write_later, self._wrote)
        return self._recorders[place]

    def _write_later(self, write: Callable[[], None]) -> None:
        if self.scenario.store == "alone":
            write()
        else:
            self.after(self.delay(1.0 if self.rng.random() < 0.02 else 0.001), write)

    def _wrote(self, step: int) -> None:
        self.checks.wrote(step)
        self.written = max(self.written, step)

    def over(self, coordinator: Coordinator, end: End) -> None:
        """A coordinator says that the job is over. That counts if no other has been elected meanwhile."""
        if coordinator is self.leadership.coordinator and self.outcome is None:
            self.outcome = end
            self.checks.over(coordinator, end)

    def abandoned(self) -> None:
        """Nobody is left who could coordinate: every node ends its ranks."""
        self.outcome = End(False, "nobody coordinates")

    def tell(self, message: object) -> None:
        """A coordinator says something: it may be what a fault waits for."""
        self._seen[type(message).__name__] += 1

    def damage_told(self, message: Damaged, epoch: int) -> None:
        """From now on nobody may count on these copies."""
        self.tainted.update(step for step, bad in self.saved.items() if bad and step > message.verified)
        for each in message.found:
            store = self.ranks[each.rank].store
            state = store.live.get((each.unit, each.slice)) if store is not None else None
            if state is not None:
                state.told = epoch

    def damage_forgotten(self) -> None:
        """Another coordinates, who has not been told: verification finds it again."""
        self.tainted.clear()
        for rank in self.ranks.values():
            for state in rank.store.live.values() if rank.store is not None else ():
                state.told = None

    def ask(self, request: Scale) -> None:
        """A person asks for another shape."""
        if (coordinator := self.coordinator) is not None:
            person = coordinator.name()
            coordinator.post(events.Asked(now=coordinator.time, person=person, request=request))

    def trouble(self, fatal: bool) -> None:
        """An effect cannot be carried out."""
        if (coordinator := self.coordinator) is not None:
            coordinator.post(events.Troubled(now=coordinator.time, what="the disk is full", fatal=fatal))

    def accuse(self, rank: Rank, suspects: Collection[int]) -> None:
        """A rank says that it cannot reach others."""
        rank.control.send(
            Suspect(rank=rank.rank, epoch=rank.standing.epoch, suspects=list(suspects), reason="simulated")
        )
