"""Rank: a model of one rank's process: the loop, the steps and the recoveries of ``adaptor.training``.

Its decisions are those of ``cluster.standing``, its messages the real ones. Its main thread is a generator that yields
what it waits for: seconds, during which it notices nothing; message types; a ``Meeting``; a condition. What it computes
are numbers of steps (``tests.simulation.store``), and whatever would hang, raise or count wrongly is a violation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Generator, Sequence
from typing import TYPE_CHECKING, Any

from megatron_elastic.cluster import standing
from megatron_elastic.cluster.messages import (
    Addresses,
    Back,
    Built,
    Committed,
    Damage,
    Damaged,
    Decision,
    Enter,
    Event,
    Finished,
    Forward,
    Hello,
    Interrupt,
    Invite,
    Moves,
    Plan,
    Profile,
    Progress,
    Reachable,
    Ready,
    Recovered,
    Reload,
    Resume,
    Settled,
    SliceDigest,
    Start,
    Stop,
    Suspect,
    Switched,
    ToRank,
    VoteResult,
    Where,
)
from megatron_elastic.cluster.standing import Standing
from megatron_elastic.layout import Layout, Transfer, UnitShape
from megatron_elastic.pipeline.program import Op
from megatron_elastic.pipeline.resumption import remainder
from megatron_elastic.pipeline.schedule import for_cell
from megatron_elastic.plan.cost import UnitCost
from megatron_elastic.plan.profile import Sample
from tests.simulation.errors import Gone, Interrupted, Violation
from tests.simulation.layouts import decoded
from tests.simulation.store import SliceId, Store
from tests.simulation.work import Work, check_sums

if TYPE_CHECKING:
    from tests.simulation.agent import Agent
    from tests.simulation.world import World

Steps = Generator[Any, Any, Any]
_SHAPE = UnitShape(members=(), dtype="float32")
WAIT_LIMIT = 300.0
"""``--elastic-wait-timeout``: a wait that lasts longer ends a real job."""


class Meeting:
    """An exchange among the ranks of a layout: who has come here may go on when all have."""

    __slots__ = ("blind", "key", "members", "posted", "waiting")

    def __init__(self, key: tuple[int, str, int], members: tuple[int, ...]) -> None:
        self.key = key
        self.members = members
        self.posted: dict[int, Any] = {}
        self.waiting: dict[int, None] = {}
        self.blind: set[int] = set()
        """Who will never see all: a message to it died with its sender, or with their link."""


def vote_of(step: int) -> VoteResult:
    """The result of a step, which is the same whoever computes it and however often."""
    return VoteResult(step=step, loss=10 / step, grad_norm=1 + 1 / step, lr=0.1, consumed_samples=8 * step, tokens=64)


class Rank:
    """One process, from its hello on."""

    def __init__(self, world: World, agent: Agent, rank: int, first: Layout) -> None:
        self.world = world
        self.agent = agent
        self.rank = rank
        self.layout = first
        self.alive = True
        self.stopped = False
        self.done = False
        """Whether its program has returned."""
        # Control
        self.inbox: deque[ToRank] = deque()
        self.interrupt_epoch = 0
        self.acknowledged = 0
        self.lost: frozenset[int] = frozenset()
        self.newest = 0
        """Epoch of the layout that the interrupt names."""
        self.over: str | None = None
        # Transport
        self.epoch = 0
        self.known: set[int] = set()
        self.linked = len(first.hosts) > 1
        """Whether it listens for other hosts."""
        self.touched: set[int] = set()
        self.broken: set[int] = set()
        self.gone: set[int] = set()
        self.forgotten: set[int] = set()
        """Peers that are lost for the transport."""
        self.mail: dict[tuple[int, SliceId], deque[tuple[int, bool]]] = {}
        self.requests: list[tuple[int, Callable[[], None]]] = []
        """Requests for slices that came before the copying of their epoch began here."""
        self.serving = -1
        """Epoch whose copies are served."""
        # Trainer
        self.standing = Standing(
            rank=rank, step=world.start_step + 1, epoch=first.epoch, member=rank in first.ranks
        )
        self.store: Store | None = None
        self.weights: dict[int, int | None] = {}
        """Unit -> after how many steps its parameters here are; None if that is not known."""
        self.shapes: set[int] = set()
        """Units whose shapes it knows."""
        self.tenure = False
        self.plan: Plan | None = None
        self.settled = False
        self.work: Work | None = None
        """What it has done of the step in progress."""
        self.rest: Sequence[Op] | None = None
        """What it has to do of that step, if it is resumed."""
        self.met: Layout | None = None
        """The layout whose ranks' addresses are known for certain."""
        self.due: list[tuple[int, SliceId]] = []
        """(source, slice) of what is to be fetched in the background."""
        self.save_first = world.start_step + 1
        self.saved = world.start_step
        """Step of the newest checkpoint that is complete for certain."""
        self.asked = 0
        self.busy_until = 0.0
        """Fault: it computes, and looks at nothing."""
        # Main thread
        self.main: Steps = self.live()
        self.want: Any = None
        self.serial = 0
        self.since = 0.0

    # ---- the main thread as the scheduler sees it --------------------------------------------

    def begin(self) -> None:
        if self.alive:
            self._run(None, None)

    def _run(self, value: Any, error: Exception | None) -> None:
        while True:
            try:
                want = self.main.throw(error) if error is not None else self.main.send(value)
            except StopIteration:
                self.done, self.want = True, None
                self.world.returned(self)
                return
            except Gone:
                self.done, self.want = True, None
                self.world.process_ends(self, 1)
                return
            value, error = None, None
            self.want = want
            self.serial += 1
            self.since = self.world.now
            if type(want) is float:
                delay = max(want, self.busy_until - self.world.now)
                self.world.after(delay, self._worked, self.serial)
                return
            value, error = self._poll()
            if value is None and error is None:
                if type(want) is Meeting:
                    want.waiting[self.rank] = None
                return

    def _worked(self, serial: int) -> None:
        if serial == self.serial and self.alive and not self.done:
            if self.stopped:
                self.world.held(self, self._worked, serial)
            else:
                self._run(None, None)

    def poke(self) -> None:
        """Something has changed that this rank may wait for."""
        if not self.alive or self.stopped or self.done or self.want is None or type(self.want) is float:
            return
        value, error = self._poll()
        if value is not None or error is not None:
            if type(self.want) is Meeting:
                self.want.waiting.pop(self.rank, None)
            if self.world.now - self.since > WAIT_LIMIT and type(self.want) is Meeting:
                raise Violation("wait limit", f"rank {self.rank} waited {self.world.now - self.since:.0f} s")
            self._run(value, error)

    def woken(self, meeting: Meeting) -> None:
        if self.want is meeting:
            self.poke()

    def _poll(self) -> tuple[Any, Exception | None]:
        want = self.want
        if type(want) is Meeting:
            if len(want.posted) == len(want.members) and self.rank not in want.blind and (
                not self.broken or self.broken.isdisjoint(want.members)
            ):
                return want, None
            return None, self._trouble()
        if type(want) is tuple:
            found = self._take(want)
            if found is not None:
                return found, None
            return None, self._raised()
        if want():
            return True, None
        return None, self._trouble()

    def _raised(self) -> Exception | None:
        if self.over is not None:
            return Gone()
        return Interrupted() if self.interrupt_epoch > self.acknowledged else None

    def _trouble(self) -> Exception | None:
        if (error := self._raised()) is not None:
            return error
        if self.broken or self.gone:
            suspects = self.broken | (self.gone & self.touched)
            if suspects:
                return Interrupted(tuple(sorted(suspects)))
        return None

    def look(self) -> None:
        if (error := self._raised()) is not None:
            raise error

    # ---- control -----------------------------------------------------------------------------

    def receive(self, message: ToRank) -> None:
        """The control thread reads a message."""
        if not self.alive or self.done:
            return
        if self.stopped:
            self.world.held(self, self.receive, message)
            return
        if isinstance(message, Interrupt):
            if message.epoch > self.interrupt_epoch:
                self.interrupt_epoch, self.lost = message.epoch, frozenset(message.lost)
                self.newest = message.layout
        elif isinstance(message, Stop) and not message.ok:
            self.over = message.reason
        else:
            self.inbox.append(message)
            if isinstance(message, Decision) and self.world.rng.random() < 0.2:
                self.world.after(self.world.delay(0.005), self.poke)  # its main thread is slow to wake
                return
        self.poke()

    def _take(self, types: tuple[type, ...]) -> ToRank | None:
        for message in list(self.inbox):
            if isinstance(message, Decision) and message.epoch < self.interrupt_epoch:
                self.inbox.remove(message)
            elif isinstance(message, types):
                self.inbox.remove(message)
                return message
        return None

    def send(self, message: Any) -> None:
        if self.world.tracing:
            self.world.trace(f"rank {self.rank} says {message}")
        self.world.said(self, type(message).__name__)
        self.agent.heard(self.rank, message)

    def remembers(self, peer: int) -> bool:
        """Whether it has heard of a rank."""
        return peer in self.forgotten or peer in self.known

    def waits(self, seconds: float) -> bool:
        """Whether it has waited so long for others, or for the coordinator."""
        idle = not self.alive or self.stopped or self.done or self.want is None or type(self.want) is float
        return not idle and self.world.now - self.since > seconds

    def waits_for_a_decision(self, seconds: float) -> bool:
        """Whether it has reported so long ago."""
        return self.waits(seconds) and self.want == (Forward, Back, Resume, Reload)

    def note_gone(self, peer: int) -> None:
        if peer in self.known and peer not in self.forgotten and self.alive:
            self.gone.add(peer)
            self.poke()

    def note_broken(self, peer: int) -> None:
        if peer not in self.forgotten and self.alive and peer in self.known:
            self.broken.add(peer)
            self.poke()

    # ---- life --------------------------------------------------------------------------------

    def live(self) -> Steps:
        yield from self.join()
        while True:
            try:
                if not self.standing.member:
                    if (yield from self.stand_by()):
                        return
                elif not self.tenure:
                    yield from self.build()
                elif self.standing.step <= self.world.total:
                    yield from self.take_step()
                    if self.standing.agreed:
                        yield from self.switch()
                else:
                    yield from self.finish()
                    return
            except Interrupted as interrupted:
                yield from self.handle(interrupted)

    def join(self) -> Steps:
        world = self.world
        self.send(Hello(
            rank=self.rank, pid=1000 + self.rank, host=self.agent.host, address=self.address, linked=self.linked,
            layout=world.first_bytes, start_step=world.start_step,
            train_iters=world.total, flags={}, likeness=b"x" if not self.world.odd(self.rank) else b"odd",
            tied=world.tied))
        if self.standing.member:
            try:
                start = yield (Start,)
            except Interrupted:
                raise Violation("too early", f"rank {self.rank} is interrupted before Start") from None
            self.known.update(start.addresses)

    @property
    def address(self) -> bytes:
        return b"linked" if self.linked else b"near"

    def reach(self, layout: Layout) -> None:
        if len(layout.hosts) > 1 and not self.linked:
            self.linked = True
            self.send(Reachable(rank=self.rank, address=self.address))

    def meet(self, layout: Layout) -> Steps:
        unknown = [rank for rank in layout.ranks if rank not in self.known and rank != self.rank]
        if not unknown:
            return
        self.asked += 1
        self.send(Where(rank=self.rank, ask=self.asked, ranks=unknown))
        while True:
            answer: Addresses = yield (Addresses,)
            if answer.ask == self.asked:
                break
        for rank, address in answer.addresses.items():
            if layout.host_of(rank) != layout.host_of(self.rank) and address != b"linked":
                raise Violation("no link", f"rank {self.rank} cannot reach rank {rank} of another host")
        self.known.update(answer.addresses)

    def stand_by(self) -> Steps:
        message = yield (Stop, Invite, Enter)
        if isinstance(message, Invite):
            yield from self.prepare(message)
        elif isinstance(message, Enter):
            yield from self.enter(message)
        return isinstance(message, Stop)

    def build(self) -> Steps:
        yield from self.meet(self.layout)
        yield self.world.delay(0.05)
        self.look()
        store = Store(self.rank, self.layout.tp_index(self.rank), self.world.keeps)
        self.load(store, self.standing.step - 1)
        self.hold()
        self.store, self.tenure, self.settled, self.plan = store, True, False, None
        self.standing = standing.built(self.standing)
        self.tell_built()

    def tell_built(self) -> None:
        self.send(Built(rank=self.rank, shapes=dict.fromkeys(self.weights, _SHAPE)))

    def load(self, store: Store, step: int) -> None:
        if step != self.world.start_step and step not in self.world.saved:
            raise Violation("no checkpoint", f"rank {self.rank} is to load step {step}; there are {self.world.saved}")
        if step == 0 and self.world.start_step:
            raise Violation("no checkpoint", "the first state is gone")
        if step in self.world.tainted:
            raise Violation("damage", f"rank {self.rank} loads the checkpoint of step {step}, which is known to be "
                                      "damaged")
        mine = self.layout.stages[self.layout.stage_of(self.rank)].units
        slices = (*self.layout.owned(self.rank), *self.layout.replicated(self.rank))
        store.create((at for at in slices if at[0] in mine or at[0] in self.layout.held_by(self.rank)), step)

    def hold(self) -> None:
        """The stage holds the units of the present layout; parameters of new ones are of no step."""
        self.weights = {unit: self.weights.get(unit) for unit in self.layout.held_by(self.rank)}
        self.shapes.update(self.weights)

    def prepare(self, invite: Invite) -> Steps:
        layout = decoded(invite.layout)
        self.reach(layout)
        yield self.world.newcomer_delay()
        if self.store is None or self.store.tp != layout.tp_index(self.rank):
            self.store = Store(self.rank, layout.tp_index(self.rank), self.world.keeps)
            self.shapes.update(invite.shapes)
        self.send(Ready(rank=self.rank, epoch=invite.epoch))

    # ---- a step ------------------------------------------------------------------------------

    def meeting(self, kind: str, step: int, data: Any = None) -> Meeting:
        """Come to an exchange of the present layout. Does not wait."""
        if self.met is not self.layout:
            for peer in self.layout.ranks:
                if peer not in self.known and peer != self.rank:
                    raise Violation("no address", f"rank {self.rank} does not know where rank {peer} is")
            self.met = self.layout
        self.touched.update(self.layout.ranks)
        return self.world.meet(self, (self.epoch, kind, step), self.layout, data)

    def take_step(self) -> Steps:
        world, layout, step = self.world, self.layout, self.standing.step
        assert self.store is not None
        if self.standing.stale:
            yield self.meeting("gather", step)
            self.gathered(step - 1)
        yield from self.hold_intermission(step - 1)
        self.store.drop_gradients()
        yield world.delay(0.02)
        self.look()
        yield from self.await_parameters()
        mine = layout.stages[layout.stage_of(self.rank)].units
        if not layout.cell_of(self.rank).shadow:
            for unit in mine:
                if self.weights[unit] != step - 1:
                    raise Violation("wrong weights", f"rank {self.rank} computes step {step} with unit {unit} as after "
                                                     f"{self.weights[unit]} steps")
        yield from self.compute(step)
        assert self.work is not None
        sums: Meeting = yield self.meeting("grads", step, tuple(self.work.sums))
        if self.rank == layout.ranks[0]:
            check_sums(layout, step, sums.posted)
        for at in layout.owned(self.rank):
            state = self.store.live.get(at)
            if state is None or state.step != step - 1:
                raise Violation("invented", f"rank {self.rank} owns slice {at} and has "
                                            f"{'nothing' if state is None else state.step} in step {step}")
            state.grad = True
        if world.keeps:
            yield lambda: self.all_arrived()
            self.store.settle()
        else:
            yield self.meeting("replay", step)
            for at in layout.replicated(self.rank):
                self.store.set_gradient(at)
        self.note_copies()
        yield world.delay(0.01)
        yield from self.verify()
        if plan := self._take((Plan,)):
            assert isinstance(plan, Plan)
            self.plan, self.standing = plan, standing.told(self.standing, plan.epoch)
            self.reach(decoded(plan.layout))
        for at in layout.owned(self.rank):
            if self.store.live[at].bad and world.verifies:
                raise Violation("damage", f"rank {self.rank} votes step {step} with a damaged slice {at}")
        informed = standing.informed(self.standing)
        meeting = yield self.meeting("vote", step, informed)
        world.passed(self, step)
        self.saved = self.save_first - 1
        result = vote_of(step)
        self.standing = standing.voted(self.standing, result, all(meeting.posted.values()))
        if world.rng.random() < 0.5:
            yield world.delay(0.003)
        yield from self.apply(step)
        if world.keeps:
            self.send_states(step)
        yield from self.complete(result)

    def compute(self, step: int) -> Steps:
        """Operation after operation, the ranks of a cell each for itself. Nobody waits for what another makes."""
        layout = self.layout
        ops = self.rest
        if ops is None:
            ops = for_cell("1f1b", layout, layout.cell_of(self.rank).leader)
        if self.work is None:
            self.work = Work(step)
        for op in ops:
            yield self.world.delay(0.1 / len(ops))
            self.look()
            self.work.do(op, layout.chunks(layout.stage_of(self.rank)))

    def apply(self, step: int) -> Steps:
        assert self.store is not None
        if self._raised() is not None:
            self.store.apply(step, self.world.rng.randrange(len(self.store.live) + 1))
            self.look()
        self.store.apply(step)
        return
        yield

    def complete(self, result: VoteResult) -> Steps:
        world, layout = self.world, self.layout
        assert self.store is not None
        for at in layout.owned(self.rank):
            if self.store.live[at].step != result.step:
                raise Violation("wrong step", f"rank {self.rank} sends slice {at} of step {self.store.live[at].step} "
                                              f"after step {result.step}")
        self.meeting("params", result.step)
        self.weights = dict.fromkeys(self.weights)
        self.standing = standing.distributing(self.standing)
        if not world.overlaps:
            yield from self.await_parameters()
        elif world.rng.random() < 0.3:
            yield world.delay(0.005)
        if self.rank == self.speaker():
            self.send(Committed(rank=self.rank, epoch=layout.epoch, vote=result, time=world.wall(self.agent),
                                first=self.rank == layout.ranks[0]))
        self.standing = standing.committed(self.standing)
        self.work = self.rest = None
        if world.profiles and result.step % 3 == 0 and layout.tp_index(self.rank) == 0:
            self.tell_times()
        self.pull()
        self.store.settle()
        self.note_copies()

    def speaker(self) -> int:
        neighbours = self.layout.hosts[self.layout.host_of(self.rank)]
        return min(rank for rank in neighbours if rank in self.layout.places)

    def await_parameters(self) -> Steps:
        if self.standing.gathering:
            step = self.standing.vote.step if self.standing.vote is not None else self.standing.step - 1
            yield self.meeting("params", step)
            self.gathered(step)
            self.standing = standing.distributed(self.standing)

    def gathered(self, step: int) -> None:
        self.weights = dict.fromkeys(self.weights, step)

    def verify(self) -> Steps:
        world, store, step = self.world, self.store, self.standing.step
        assert store is not None
        if not world.verifies or not world.damage_around(self.layout):
            return
        tp, me = self.layout.tp_index(self.rank), self.rank
        bad = [at for at, state in store.live.items() if state.bad]
        found = {(me, at, "state") for at in bad if not world.shy}
        for at in self.layout.owned(me):
            copies = [me, *self.layout.copies(*at, tp)]
            values = {rank: world.damaged_at(rank, at) for rank in copies}
            told = {rank: value for rank, value in values.items() if value is not None}
            if len(told) == 1 and told.get(me):
                found.add((me, at, "state"))  # by its own checksum
            elif any(told.values()):
                # Each damaged copy differs from all others; sound ones are equal.
                sound = [rank for rank, value in told.items() if not value]
                outvoted = [rank for rank in told if told[rank]] if 2 * len(sound) > len(told) else list(told)
                found |= {(rank, at, "state") for rank in outvoted}
        if found:
            mine = {at for rank, at, _ in found if rank == me}
            store.retire([at for at in store.live if at not in mine])
            damages = [Damage(rank=rank, unit=at[0], slice=at[1], tp=tp, what=what)
                       for rank, at, what in sorted(found)]
            message = Damaged(rank=me, epoch=self.layout.epoch, step=step, found=damages, verified=max(step - 2, 0))
            self.standing = standing.spoiled(self.standing, message)
            self.send(message)
            yield ()  # the interrupt that follows ends it

    def tell_times(self) -> None:
        layout, stage = self.layout, self.layout.stage_of(self.rank)
        units = {unit: UnitCost(self.world.rng.choice((1.0, 1.0, 4.0)), 2.0, 6, 12, 0)
                 for unit in layout.stages[stage].units if layout.home(unit) == stage}
        sample = Sample(units, 10, None if stage == layout.pipeline_size - 1 else 0.01, 0.0)
        self.send(Profile(rank=self.rank, epoch=layout.epoch, sample=sample))

    def hold_intermission(self, done: int) -> Steps:
        every = self.world.save_every
        if not every:
            return
        step = done - done % every
        if step < self.save_first or done == self.world.start_step:
            return
        yield from self.await_parameters()
        yield self.meeting("save", done)
        yield self.world.delay(0.02)
        yield self.meeting("saved", done)
        assert self.store is not None
        for at in self.layout.owned(self.rank):
            state = self.store.live.get(at)
            if state is None or state.step != done:
                raise Violation("invented", f"rank {self.rank} saves slice {at} after {done} steps and has "
                                            f"{'nothing' if state is None else state.step}")
        self.save_first = done + 1
        if self.rank == self.layout.ranks[0]:
            self.world.save(self.layout, done)
            self.send(Event(rank=self.rank, epoch=self.layout.epoch, kind="saved", fields={"step": done}))

    def note_copies(self) -> None:
        assert self.store is not None
        if not self.settled and not self.store.replicating:
            self.settled = True
            self.send(Settled(rank=self.rank, epoch=self.layout.epoch))

    def finish(self) -> Steps:
        done, layout = self.standing.step - 1, self.layout
        yield from self.hold_intermission(done)
        yield from self.await_parameters()
        assert self.store is not None
        digests = []
        for unit, k in layout.owned(self.rank):
            state = self.store.live.get((unit, k))
            if state is None or state.step != done:
                raise Violation("invented", f"rank {self.rank} digests slice {unit, k}: "
                                            f"{'nothing' if state is None else state.step} at {done}")
            if self.weights[unit] not in (done, None) or (self.weights[unit] is None and not self.standing.stale):
                raise Violation("wrong weights", f"rank {self.rank} digests unit {unit} of {self.weights[unit]}")
            digests.append(SliceDigest(unit=unit, slice=k, tp=layout.tp_index(self.rank), sha256=f"{unit}-{k}-{done}"))
        self.send(Finished(rank=self.rank, step=done, digests=digests))
        yield (Stop,)

    # ---- interruption and adoption -------------------------------------------------------------

    def handle(self, interrupted: Interrupted) -> Steps:
        while True:
            try:
                yield self.world.delay(0.002)
                if interrupted.suspects:
                    yield from self.suspect(interrupted.suspects)
                decision = yield from self.report()
                yield from self.adopt(decision)
                return
            except Interrupted as again:
                interrupted = again

    def suspect(self, suspects: tuple[int, ...]) -> Steps:
        if self.interrupt_epoch > self.acknowledged or set(suspects) <= self.lost:
            return
        self.send(Suspect(rank=self.rank, epoch=self.standing.epoch, suspects=list(suspects), reason="the link broke"))
        yield ()

    def report(self) -> Steps:
        epoch = self.interrupt_epoch
        self.acknowledged = max(self.acknowledged, epoch)
        if self.store is not None:
            self.store.abandon_loading()
            self.due.clear()
        held = None if self.store is None else self.store.held()
        versions = {} if self.store is None or not self.world.keeps else self.store.versions()
        now = self.world.wall(self.agent)
        work = None
        if self.standing.member:
            work = Progress.none(self.standing.step) if self.work is None else self.work.progress()
        self.send(standing.report(self.standing, epoch, self.layout, held, versions, now, self.newest,
                                  self.saved, work))
        return (yield (Forward, Back, Resume, Reload))

    def adopt(self, decision: Decision) -> Steps:
        if isinstance(decision, Forward):
            vote = decision.vote
            edit = yield from self.edit(decision, decision.gather)
            if edit is None:
                return
            assert self.store is not None
            self.store.return_to(vote.step, edit[1])
            yield from self.apply(vote.step)
            self.standing = standing.forward(self.standing, vote)
            yield from self.copy(edit[0], vote.step)
            if self.resume():
                yield from self.complete(vote)
            return
        gather = decision.gather if isinstance(decision, Back | Resume) else False
        edit = yield from self.edit(decision, gather)
        if edit is None:
            return
        assert self.store is not None
        if isinstance(decision, Resume) and self.tenure:
            leader = self.layout.cell_of(self.rank).leader
            self.rest = [leg.op for leg in remainder("1f1b", self.layout, decision.kept, leader).legs]
        if isinstance(decision, Back | Resume):
            self.store.return_to(decision.step - 1, edit[1])
            self.standing = standing.back(self.standing, decision.step)
        else:
            self.standing = standing.reload(self.standing, decision.step)
            self.store.retire(())
            if self.standing.member:
                yield self.world.delay(0.05)
                self.look()
                self.load(self.store, decision.step - 1)
                self.tell_built()
        yield from self.copy(edit[0], decision.step - 1)
        self.resume()

    def enter(self, decision: Decision) -> Steps:
        edit = yield from self.edit(decision, False)
        if edit is None:
            raise Violation("too early", f"rank {self.rank} is let in before it was ready")
        assert self.store is not None
        self.standing = standing.enter(self.standing, decision.step)
        self.store.return_to(decision.step - 1, edit[1])
        yield from self.copy(edit[0], decision.step - 1)
        self.copy_in_background()

    def switch(self) -> Steps:
        plan = self.plan
        assert plan is not None and self.store is not None
        if self.world.keeps:
            yield lambda: self.all_arrived() and not self.store.busy
            self.store.settle()
        before = self.layout
        yield from self.await_parameters()
        first = self.standing.step
        yield from self.enter(Enter(epoch=plan.epoch, layout=plan.layout, step=first, shapes=plan.shapes,
                                    saved=self.save_first - 1))
        if self.rank == before.ranks[0]:
            self.send(Switched(rank=self.rank, epoch=plan.epoch, step=first))

    def edit(self, decision: Decision, gather: bool) -> Steps:
        layout = decoded(decision.layout)
        self.reach(layout)
        yield from self.meet(layout)
        own = Moves(epoch=decision.epoch, moves=[], kept=None)
        for message in [each for each in self.inbox if isinstance(each, Moves) and each.epoch <= decision.epoch]:
            self.inbox.remove(message)
            own = message if message.epoch == decision.epoch else own
        member = self.rank in layout.places
        self.layout, self.tenure = layout, False
        self.standing = standing.edited(
            self.standing, layout.epoch, decision.step, member, gather, isinstance(decision, Reload),
            decision.vote if isinstance(decision, Forward) else None,
        )
        self.keep(decision)
        self.advance_transport(layout.epoch, {*layout.lost, *self.lost})
        self.save_first, self.saved = decision.saved + 1, min(self.saved, decision.saved)
        if self.store is None:
            if not member:
                self.tell_free()
            return None
        if member:
            self.shapes.update(decision.shapes)
            self.hold()
            self.tenure, self.settled, self.plan = True, False, None
        yield self.world.delay(0.005)
        kept = self.store.held() if own.kept is None else own.kept
        for unit, k, _ in kept:
            state = self.store.live.get((unit, k))
            if state is not None and state.told is not None and state.told < layout.epoch:
                raise Violation("damage", f"rank {self.rank} is to keep its copy of slice {unit, k}, which is known to "
                                          "be damaged")
        return own.moves, {(unit, k) for unit, k, _ in kept}

    def keep(self, decision: Decision) -> None:
        """What it has done of a step counts only if it is kept."""
        kept = {each.leader: each for each in decision.kept} if isinstance(decision, Resume) else {}
        mine = kept.get(self.layout.cell_of(self.rank).leader) if self.standing.member else None
        self.rest = None
        if mine is None:
            self.work = None
        elif self.work is None or self.work.step != decision.step:
            raise Violation("sums", f"rank {self.rank} is to go on from {mine}, and has nothing of it")
        else:
            self.work.keep(mine)

    def advance_transport(self, epoch: int, lost: Collection[int]) -> None:
        self.epoch = epoch
        for peer in lost:
            if peer not in self.forgotten:
                self.forgotten.add(peer)
                for peers in (self.broken, self.gone, self.touched):
                    peers.discard(peer)
        self.mail = {key: value for key, value in self.mail.items() if key[0] >= epoch}

    def copy(self, moves: Sequence[Transfer], done: int) -> Steps:
        store, layout = self.store, self.layout
        assert store is not None
        self.replicate(moves, done)
        needed = [(move.unit, move.slice) for move in moves if move.role == "owner" and move.dst == self.rank]
        if needed:
            yield lambda: all(self.mail.get((self.epoch, at)) for at in needed)
        if moves and any(move.role == "owner" for move in moves):
            self.pull()
            store.settle()
        if not self.tenure:
            self.copy_in_background()
            yield lambda: not store.busy
            store.retire(())
            self.tell_free()
        else:
            store.retire((*layout.owned(self.rank), *layout.replicated(self.rank)))

    def tell_free(self) -> None:
        self.send(Settled(rank=self.rank, epoch=self.layout.epoch))

    def resume(self) -> bool:
        if self.tenure:
            self.send(Recovered(rank=self.rank, epoch=self.layout.epoch, edit_ms=1.0, state_ms=1.0))
            self.copy_in_background()
        return self.tenure

    # ---- copies --------------------------------------------------------------------------------

    def replicate(self, moves: Sequence[Transfer], done: int) -> None:
        store, layout = self.store, self.layout
        assert store is not None
        wanted = []
        for move in moves:
            at = (move.unit, move.slice)
            keepers = (layout.owner(*at, move.tp), *layout.copies(*at, move.tp))
            fetched = not self.world.keeps and move.role == "replica" and move.src in keepers
            if move.src == self.rank and not fetched:
                state = store.live.get(at)
                if state is None:
                    raise Violation("invented", f"rank {self.rank} is to send slice {at}, which it has not ({move})")
                self.send_state(move.dst, at, state.step, state.bad)
            if move.dst == self.rank:
                if move.src not in self.known:
                    raise Violation("no address", f"rank {self.rank} does not know where rank {move.src} is")
                if move.unit not in self.shapes:
                    raise Violation("no shape", f"rank {self.rank} is to keep a slice of unit {move.unit}")
                store.expect(at, not fetched, done)
                if fetched:
                    wanted.append((move.src, at))
        self.due += wanted

    def send_states(self, step: int) -> None:
        """``StateReplay.after_update``."""
        layout, store = self.layout, self.store
        assert store is not None
        tp = layout.tp_index(self.rank)
        for at in layout.owned(self.rank):
            for copy in layout.copies(*at, tp):
                self.send_state(copy, at, step, store.live[at].bad)
        for at in layout.replicated(self.rank):
            store.expect(at, True, step)

    def send_state(self, dst: int, at: SliceId, step: int, bad: bool) -> None:
        store = self.store
        assert store is not None
        store.busy += 1
        self.world.after(self.world.delay(0.01), self._delivered, dst, (self.epoch, at), step, bad, store.token)

    def _delivered(self, dst: int, key: tuple[int, SliceId], step: int, bad: bool, token: int) -> None:
        store, peer = self.store, self.world.ranks.get(dst)
        if store is not None and store.token == token and self.alive:
            store.busy -= 1
        if peer is not None and peer.alive and peer.epoch <= key[0]:
            peer.mail.setdefault(key, deque()).append((step, bad))
            peer.poke()
        self.poke()

    def pull(self) -> None:
        """Match what has arrived with what is expected."""
        store = self.store
        assert store is not None
        for at, loading in store.loading.items():
            if loading.begun and not loading.here and (mail := self.mail.get((self.epoch, at))):
                step, bad = mail.popleft()
                if step != loading.step:
                    raise Violation("wrong step", f"rank {self.rank} gets slice {at} after {step} steps and takes it "
                                                  f"for {loading.step}")
                store.arrived(at, step, bad)

    def all_arrived(self) -> bool:
        assert self.store is not None
        self.pull()
        return all(loading.here for loading in self.store.loading.values())

    def copy_in_background(self) -> None:
        store = self.store
        assert store is not None
        self.serving = self.epoch
        requests, self.requests = self.requests, []
        for epoch, serve in requests:
            if epoch == self.epoch:
                serve()
            elif epoch > self.epoch:
                self.requests.append((epoch, serve))
        if self.due:
            wanted, self.due = self.due, []
            store.busy += 1
            self._fetch(wanted, 0, self.epoch, store.token)

    def _fetch(self, wanted: list[tuple[int, SliceId]], index: int, epoch: int, token: int) -> None:
        store = self.store
        if not self.alive or store is None or store.token != token or self.epoch != epoch:
            return
        if index == len(wanted):
            store.busy -= 1
            self.poke()
            return
        source, at = wanted[index]
        store.loading[at].begun = True
        peer = self.world.ranks[source]
        self.world.after(self.world.delay(0.01), peer._asked_for, self, wanted, index, epoch, token)

    def _asked_for(self, dst: Rank, wanted: list[tuple[int, SliceId]], index: int, epoch: int, token: int) -> None:
        if not self.alive or epoch < self.epoch or self.rank in dst.broken or dst.rank in self.broken:
            return
        if self.stopped:
            self.world.held(self, self._asked_for, dst, wanted, index, epoch, token)
            return
        if self.serving != epoch or self.epoch != epoch:
            self.requests.append((epoch, lambda: self._asked_for(dst, wanted, index, epoch, token)))
            return
        assert self.store is not None
        at = wanted[index][1]
        state = self.store.live.get(at)
        if state is None:
            if self.want == () or self.interrupt_epoch > epoch:
                return  # it has found damage, and dropped what is damaged; an interrupt follows, or has come
            raise Violation("invented", f"rank {self.rank} is asked for slice {at}, which it has not")
        self.world.after(self.world.copy_delay(), dst._got, wanted, index, epoch, token, state.step, state.bad)

    def _got(
        self, wanted: list[tuple[int, SliceId]], index: int, epoch: int, token: int, step: int, bad: bool
    ) -> None:
        store = self.store
        if not self.alive or store is None or store.token != token or self.epoch != epoch:
            return
        if self.stopped:
            self.world.held(self, self._got, wanted, index, epoch, token, step, bad)
            return
        store.arrived(wanted[index][1], step, bad)
        self._fetch(wanted, index + 1, epoch, token)
