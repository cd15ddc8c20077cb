"""Coordinator: owns the epoch of a job. It starts the ranks, and after a death gives the survivors a new layout.

A recovery is: interrupt everybody who trains, collect a report from each, plan, send the new layout. Another death at
any point starts the next epoch, from the last layout that was sent and with all ranks lost so far, so it converges.
When all is well, it looks for a better layout (ranks that came, slices that are uneven) and lets the ranks switch to it
between two steps. Everything runs in one event loop and every handler is synchronous: there is nothing to lock.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from megatron_elastic.cluster.arrangement import Arrangement
from megatron_elastic.cluster.changes import Changes, difference
from megatron_elastic.cluster.course import Course
from megatron_elastic.cluster.ledger import Diverged, Ledger
from megatron_elastic.cluster.messages import (
    AgentHello,
    Answer,
    AnyMessage,
    Built,
    Committed,
    Damaged,
    Event,
    Failed,
    Finished,
    Hello,
    Injected,
    Profile,
    RankDying,
    RankExited,
    RankNews,
    RankResumed,
    RankStopped,
    Ready,
    Recovered,
    Report,
    Scale,
    Settled,
    Start,
    Stop,
    Suspect,
    Switched,
)
from megatron_elastic.cluster.nodes import Node, RemoteNode
from megatron_elastic.cluster.reconfiguration import Reconfiguration
from megatron_elastic.cluster.recovery import cause_of
from megatron_elastic.cluster.roster import Roster
from megatron_elastic.cluster.suspicion import Suspicion
from megatron_elastic.cluster.timers import Timers
from megatron_elastic.cluster.trust import Trust
from megatron_elastic.cluster.wire import AsyncWire, WireError
from megatron_elastic.config import ElasticConfig
from megatron_elastic.layout import Layout
from megatron_elastic.observe import digest
from megatron_elastic.observe.records import RunRecords
from megatron_elastic.plan import ProfileError

_LOCAL_DRAIN = 0.002
"""Seconds for reading what a dead rank of this machine said last: it is all here, only not read yet."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended; ``reason`` is for people."""

    ok: bool
    reason: str


class Coordinator:
    """Leads the ranks and agents of one job until ``outcome`` is known.

    Args:
        config: limits, and whether the job is elastic. A plain job is only launched: any failure ends it.
        world_size: ranks of the job.
        records: where an elastic job is written down; None for a plain one.
        say: prints one line for people.
    """

    def __init__(self, config: ElasticConfig, world_size: int, records: RunRecords | None,
                 say: Callable[[str], None]) -> None:
        self.outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self.world_size = world_size
        self._config = config
        self._records = records
        self._say = say
        self._ranks = Roster(world_size)
        self._course = Course()
        self._early: dict[Node, int] = {}
        """Nodes that are to join and came before training began, with the ranks of each."""
        self._trust = Trust()
        self._timers = Timers()
        self._suspicion = Suspicion(self._ranks, self._timers, config.suspect_timeout, self._event, say, self._lose)
        self._arrangement = Arrangement(self._course, self._write_profile)
        self._changes = Changes(
            self._course, self._ranks, self._timers, self._suspicion, self._arrangement, config,
            idle=lambda: not self.outcome.done() and self._reconfiguration.idle, use=self._use,
            newest_save=lambda: self._trust.newest_save, event=self._event, say=say,
        )
        self._reconfiguration = Reconfiguration(
            self._course, self._ranks, self._timers, self._suspicion, self._arrangement, self._changes, self._trust,
            config, use=self._use, fail=lambda reason: self.stop(Outcome(False, reason)), event=self._event, say=say,
        )

    @property
    def epoch(self) -> int:
        """The one that was begun last."""
        return self._course.epoch

    # ---- life ----------------------------------------------------------------------------

    def begin(self, torch_port: int) -> None:
        """From now on nodes may be added. ``torch_port``: MASTER_PORT of the ranks."""
        self._ranks.torch_port = torch_port
        self._timers.set("start", self._config.start_timeout, self._start_late)

    def add_node(self, ranks: Sequence[int], node: Node) -> None:
        """An agent is ready to start ``ranks``. When every rank has one, all are launched.

        The ranks of a node that comes to a running job join it, under new ids.
        """
        if self._config.elastic and (self._ranks.launched or min(ranks) >= self.world_size):
            if self._course.layout is None:
                self._early[node] = len(ranks)
            else:
                self._join_node(len(ranks), node)
            return
        taken = [rank for rank in ranks if rank not in self._ranks or self._ranks[rank].node is not None]
        if taken:
            self.stop(Outcome(False, f"an agent wants to start ranks {taken}, which are another node's or outside the "
                                     "world size; give every node the same --nnodes and --nproc-per-node and its own "
                                     "--node-rank"))
            return
        self._ranks.add_node(ranks, node)
        if self._ranks.launched and not self._config.elastic:
            self._timers.cancel("start")

    def _join_node(self, count: int, node: Node) -> None:
        new = self._ranks.join_node(count, node)
        self._event("spawned", ranks=new)
        self._say(f"ranks {new} are started on a node that has come")

    def stop(self, outcome: Outcome) -> None:
        """Decide how the job ends, and tell every rank and agent. Later calls change nothing."""
        if self.outcome.done():
            return
        self._timers.cancel_all()
        self._event("finished" if outcome.ok else "failed", reason=outcome.reason)
        self._ranks.send(Stop(ok=outcome.ok, reason=outcome.reason), self._ranks)
        for node in (*self._ranks.nodes, *self._early):
            if isinstance(node, RemoteNode):
                node.stop(outcome.ok, outcome.reason)
        self.outcome.set_result(outcome)

    # ---- ranks and agents come and go ------------------------------------------------------

    def rank_connected(self, hello: Hello, wire: AsyncWire[AnyMessage]) -> None:
        """A rank introduces itself. Raises WireError if there is no such rank, or it has been here before."""
        state = self._ranks.get(hello.rank)
        if state is None or state.hello is not None:
            raise WireError(f"rank {hello.rank} is outside the world of {len(self._ranks)} or has said Hello before")
        state.wire, state.hello = wire, hello
        if self.outcome.done():
            wire.send(Stop(ok=self.outcome.result().ok, reason=self.outcome.result().reason))
        if state.standby:
            self._changes.newcomer_connected(hello)
        else:
            self._start_if_complete()

    def rank_disconnected(self, rank: int) -> None:
        """Nothing more will come from a rank."""
        state = self._ranks[rank]
        state.wire = None
        if self.outcome.done():
            return
        if state.lost:
            self._reconfiguration.decide_if_complete()
        elif state.returncode is None:
            self._suspicion.suspect(rank, "fenced", "it closed its connection to the coordinator")

    def runs_on(self, rank: int, node: Node) -> bool:
        """Whether ``rank`` was started by this node's agent."""
        return rank in self._ranks and self._ranks[rank].node is node

    def node_lost(self, hello: AgentHello, node: Node, cause: str, when: float) -> None:
        """The agent of a node is gone, or silent, since ``when``: its ranks are lost with it."""
        if node in self._ranks.nodes:
            self._ranks.nodes.remove(node)
        self._early.pop(node, None)
        alive = [rank for rank in self._ranks.of(node)
                 if self._ranks[rank].returncode is None and not self._ranks[rank].lost]
        if self.outcome.done() or not alive:
            return
        if not self._config.elastic:
            self.stop(Outcome(False, f"lost the agent of node {hello.node_rank} ({hello.host}): {cause}"))
            return
        for rank in alive:
            if (wire := self._ranks[rank].wire) is not None:
                # One that is only cut off from its agent must end; and no decision may wait for what it has to say.
                wire.send(Stop(ok=False, reason=f"{cause}: its ranks are no longer part of the job"))
                wire.abort()
        self._lose(alive, cause, when)

    def _write_profile(self, text: str) -> None:
        assert self._records is not None
        self._records.profile(text)

    def _event(self, kind: str, **fields: object) -> None:
        if self._records is not None:
            self._records.event(kind, self.epoch, **fields)

    # ---- start ---------------------------------------------------------------------------

    def _start_late(self) -> None:
        missing = [rank for rank, state in self._ranks.items() if state.hello is None]
        unlaunched = [rank for rank in missing if self._ranks[rank].node is None]
        what = f"no agent came for ranks {unlaunched}" if unlaunched else f"ranks {missing} did not come up"
        self.stop(Outcome(False, f"{what} within {self._config.start_timeout:g} s; see their logs, "
                                 "or raise --elastic-start-timeout"))

    def _start_if_complete(self) -> None:
        hellos = [state.hello for state in self._ranks.values() if state.hello is not None]
        if len(hellos) < len(self._ranks) or self.outcome.done() or self._course.layout is not None:
            return
        first = hellos[0]
        for hello in hellos:
            wrong = difference(hello, first)
            if wrong is None and hello.start_step != first.start_step:
                wrong = f"its newest checkpoint is that of step {hello.start_step} instead of {first.start_step}"
            if wrong is not None:
                self.stop(Outcome(False, f"rank {hello.rank} is not like rank 0: {wrong}; "
                                         "all ranks must get the same flags and the same checkpoint"))
                return
        self._timers.cancel("start")
        layout = Layout.from_json(first.layout)
        try:
            self._arrangement.read(self._config.profile, layout)
        except (OSError, ProfileError) as error:
            self.stop(Outcome(False, f"--elastic-profile {self._config.profile}: {error}"))
            return
        self._use(layout)
        assert self._records is not None
        self._course.ledger = Ledger(self._records, start_step=first.start_step, total=first.train_iters,
                                     started=time.time(), say=self._say)
        self._course.first = first
        self._trust.saves = [first.start_step] if first.start_step else []
        self._event("started", world_size=len(self._ranks), step=first.start_step, train_iters=first.train_iters)
        self._say(f"{len(hellos)} ranks are up; training from step {first.start_step + 1} to {first.train_iters}")
        start = Start(layout=first.layout, addresses=self._ranks.addresses(self._ranks))
        self._ranks.send(start, self._ranks)
        for node, count in self._early.items():
            self._join_node(count, node)
        self._early.clear()

    def _use(self, layout: Layout) -> None:
        self._course.layout = layout
        self._arrangement.new_layout()
        if self._records is not None:
            self._records.layout(layout)

    # ---- messages ------------------------------------------------------------------------

    def handle(self, message: AnyMessage) -> None:
        """Act on what a rank says. Raises WireError if a rank may not say this."""
        try:
            match message:
                case Committed():
                    self._on_committed(message)
                case Report():
                    self._reconfiguration.report(message)
                case Recovered():
                    self._reconfiguration.recovered(message)
                case Suspect():
                    for rank in message.suspects if message.epoch >= self.epoch else ():
                        if rank in self._ranks:
                            self._suspicion.suspect(rank, "fenced", f"rank {message.rank}: {message.reason}")
                case Injected():
                    self._reconfiguration.injected(message.rank, message.time)
                    self._event("injected", rank=message.rank, spec=message.spec, injected_at=message.time)
                case Event():
                    self._on_event(message)
                case Built():
                    self._course.shapes |= message.shapes
                case Damaged():
                    self._on_damaged(message)
                case Profile():
                    self._changes.profiled(message)
                case Ready():
                    self._changes.ready(message)
                case Switched():
                    self._changes.switched(message)
                case Settled():
                    self._changes.settled(message)
                case Failed():
                    self._on_failed(message)
                case Finished():
                    self._on_finished(message)
                case _:
                    raise WireError(f"a rank may not send {type(message).__name__}")
        except Diverged as error:
            self._event("diverged", reason=str(error))
            self.stop(Outcome(False, f"the ranks have diverged: {error}; the last steps are not to be trusted"))

    def _on_committed(self, message: Committed) -> None:
        layout = self._course.layout
        assert layout is not None and self._course.ledger is not None
        # A line of an older epoch may arrive late, from a rank that is dead by now: the step is committed all the same.
        world = len(layout.ranks)
        self._course.ledger.commit(message.vote, epoch=message.epoch, world_size=world, time=message.time)
        self._reconfiguration.committed(message)

    def _on_event(self, message: Event) -> None:
        self._event(message.kind, rank=message.rank, **message.fields)
        if message.kind == "saved":
            step = message.fields["step"]
            assert isinstance(step, int)
            self._trust.saves.append(step)

    def _on_failed(self, message: Failed) -> None:
        if self.outcome.done():
            return  # the program and the process that runs it may both tell
        self._event("error", rank=message.rank, traceback=message.traceback)
        if self._ranks[message.rank].standby:
            self._suspicion.fence(message.rank, "failed", "the program raised before this rank had joined; see its log")
            return
        text = message.traceback.rstrip()
        separator = "\n" if "\n" in text else " "
        self.stop(Outcome(False, f"the program raised on rank {message.rank}:{separator}{text}"))

    def _on_finished(self, message: Finished) -> None:
        assert self._course.layout is not None
        if self._reconfiguration.collecting:
            return  # sent before the interrupt: it will finish again, in the new layout
        self._ranks[message.rank].finished = message
        waiting = [rank for rank in self._course.layout.ranks if self._ranks[rank].finished is None]
        if waiting:
            self._timers.set("finish", self._config.wait_timeout, self._finish_late)
            return
        self._reconfiguration.finished()
        finished = [self._ranks[rank].finished for rank in self._course.layout.ranks]
        steps = {each.step for each in finished if each is not None}
        if len(steps) > 1:
            raise Diverged(f"ranks finished at different steps {sorted(steps)}")
        if self._records is not None:
            digests = [item for each in finished if each is not None for item in each.digests]
            self._records.digest(digest.combine(self._course.layout, digests, message.step))
        self.stop(Outcome(True, f"training finished at step {message.step}"))

    def _finish_late(self) -> None:
        assert self._course.layout is not None
        waiting = [rank for rank in self._course.layout.ranks if self._ranks[rank].finished is None]
        self.stop(Outcome(False, f"ranks {waiting} did not finish within {self._config.wait_timeout:g} s "
                                 "of another (--elastic-wait-timeout); see their logs"))

    # ---- loss and recovery ---------------------------------------------------------------

    def rank_news(self, message: RankNews) -> None:
        """An agent tells what happened to the process of one of its ranks."""
        if isinstance(message, RankExited):
            self._rank_exited(message)
        elif self._config.elastic and not self.outcome.done() and not self._ranks[message.rank].lost:
            match message:
                case RankDying():
                    self._rank_dying(message)
                case RankStopped():
                    self._suspicion.stopped(message)
                case RankResumed():
                    self._suspicion.resumed(message)

    def _rank_dying(self, message: RankDying) -> None:
        state = self._ranks[message.rank]
        if state.fenced is not None:
            self._lose([message.rank], state.fenced, state.stopped or message.time)
        else:
            state.dying = message.time
            self._lose([message.rank], None, message.time)

    def _rank_exited(self, message: RankExited) -> None:
        rank, code = message.rank, message.returncode
        state = self._ranks[rank]
        state.returncode = code
        if self.outcome.done():
            return
        if state.dying is not None:
            when, state.dying = state.dying, None
            if code < 0:
                if not state.standby or self._reconfiguration.concerns(rank):
                    self._name_loss([rank], cause_of(code), when)
                self._changes.respawn(rank)
                return
        elif state.lost:
            self._changes.respawn(rank)
            return
        if not self._config.elastic:
            self._plain_exit(rank, code)
        elif code < 0 or state.standby:
            since = state.stopped if state.fenced == "stopped" else None
            self._lose([rank], state.fenced or cause_of(code), since or message.time)
            self._changes.respawn(rank)
        elif code == 0:
            self.stop(Outcome(False, f"rank {rank} ended with exit code 0 before training was finished; "
                                     "the script must train through megatron_elastic when --elastic is given"))
        else:
            self.stop(Outcome(False, f"rank {rank} ended with exit code {code}; see rank{rank}.log"))

    def _plain_exit(self, rank: int, code: int) -> None:
        if code:
            how = f"exit code {code}" if code > 0 else cause_of(code)
            self.stop(Outcome(False, f"rank {rank} ended with {how}; see rank{rank}.log"))
        elif all(state.returncode == 0 for state in self._ranks.values()):
            self.stop(Outcome(True, "all ranks ended with exit code 0"))

    def _lose(self, ranks: Collection[int], cause: str | None, when: float) -> None:
        """``ranks`` are dead since ``when``: begin the next epoch. A ``cause`` that is None will be named later."""
        ranks = [rank for rank in ranks if not self._ranks[rank].lost]
        if self.outcome.done() or not ranks:
            return
        for rank in ranks:
            self._ranks[rank].lost = True
            self._suspicion.clear(rank)
        if self._course.layout is not None and all(self._changes.unneeded(rank) for rank in ranks):
            self._changes.drop(ranks, cause or "killed")
            return
        if self._course.layout is None:
            if cause is not None:
                self._name_loss(ranks, cause, when)
            return
        self._reconfiguration.interrupt(ranks, cause, when)
        local = not any(isinstance(state.node, RemoteNode) for state in self._ranks.values() if state.lost)
        self._timers.set("drain", _LOCAL_DRAIN if local else self._config.suspect_timeout, self._cut_lost)
        if cause is not None:
            self._name_loss(ranks, cause, when)
        if not self._ranks.alive:
            self.stop(Outcome(False, "every rank is dead; restart the job from its newest checkpoint"))

    def _on_damaged(self, message: Damaged) -> None:
        assert self._course.layout is not None
        for damage in message.found:
            self._event("damaged", rank=damage.rank, unit=self._course.layout.units[damage.unit], slice=damage.slice,
                        tp=damage.tp, what=damage.what, step=message.step)
            self._say(f"WARNING: damaged memory: {damage.what} of slice {damage.slice} of "
                      f"{self._course.layout.units[damage.unit]} on rank {damage.rank}; it is healed from a good copy")
        self._trust.damaged(message)
        if not self._reconfiguration.collecting:
            damaged = {damage.rank for damage in message.found}
            self._reconfiguration.interrupt(damaged, "damaged memory", time.time())

    def _name_loss(self, ranks: Collection[int], cause: str, when: float) -> None:
        """What killed ``ranks`` is known."""
        if self._course.layout is None:
            self.stop(Outcome(False, f"ranks {list(ranks)} died before training began ({cause}); see their logs"))
            return
        for rank in ranks:
            self._event("fault", rank=rank, signal=cause, exited_at=when)
        self._say(f"lost ranks {list(ranks)} ({cause}); epoch {self.epoch} begins with {len(self._ranks.alive)} ranks")
        self._reconfiguration.name(ranks, cause)

    def _cut_lost(self) -> None:
        for state in self._ranks.values():
            if state.lost and state.wire is not None:
                state.wire.abort()

    def scale(self, request: Scale) -> Answer:
        """Somebody asks for another shape of the job."""
        if self.outcome.done():
            return Answer(ok=False, text="the job is over")
        return self._changes.scale(request)
