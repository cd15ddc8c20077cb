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
from pathlib import Path

from megatron_elastic.cluster.ledger import Diverged, Ledger
from megatron_elastic.cluster.messages import (
    AgentHello,
    Answer,
    AnyMessage,
    Built,
    Commit,
    Committed,
    Damaged,
    Event,
    Failed,
    Finished,
    Hello,
    Injected,
    Interrupt,
    Invite,
    Plan,
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
from megatron_elastic.cluster.recovery import Decision, Part, Recovery, cause_of, decide, newest_complete
from megatron_elastic.cluster.reshape import Reshape
from megatron_elastic.cluster.roster import Roster
from megatron_elastic.cluster.suspicion import Suspicion
from megatron_elastic.cluster.timers import Timers
from megatron_elastic.cluster.wire import AsyncWire, WireError
from megatron_elastic.config import MEASURED, ElasticConfig
from megatron_elastic.layout import Layout, UnitShape
from megatron_elastic.observe import digest
from megatron_elastic.observe.records import RunRecords
from megatron_elastic.plan import (
    Costs,
    NoLayout,
    ProfileError,
    StateLost,
    improve,
    lose,
    measured,
    readable,
    replan,
)

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
        self.epoch = 0
        self.world_size = world_size
        self._config = config
        self._records = records
        self._say = say
        self._ranks = Roster(world_size)
        self._layout: Layout | None = None
        """The last one that was sent to the ranks; None until they all came up."""
        self._first: Hello | None = None
        """What the first rank said; all others must agree with it."""
        self._ledger: Ledger | None = None
        self._reports: dict[int, Report] = {}
        self._collecting = False
        self._recovery: Recovery | None = None
        self._reshape: Reshape | None = None
        self._goal: Layout | None = None
        """What the present layout is to lead to, if something is under way."""
        self._stages: int | None = None
        """Number of pipeline stages that somebody has asked for."""
        self._newest_epoch = 0
        """The highest one ever given to a layout; ``epoch`` stays behind it while a change is planned."""
        self._early: dict[Node, int] = {}
        """Nodes that are to join and came before training began, with the ranks of each."""
        self._settled: dict[int, int] = {}
        """Newest epoch for which everything that the layout asks for is live at a rank."""
        self._costs: Costs | None = None
        """What units take, if it is known."""
        self._arranged = False
        """Whether units have been where they cost least since ranks last came or went."""
        self._times: dict[int, tuple[float, float]] = {}
        """What each stage of the present layout was measured to take for a grain."""
        self._shapes: dict[int, UnitShape] = {}
        """Of the units that some rank has built."""
        self._saves: list[int] = []
        """Steps of the complete checkpoints, ascending."""
        self._damaged: set[tuple[int, tuple[int, int, int]]] = set()
        """(rank, part of a slice) of copies that are not to be trusted."""
        self._healing = False
        """Whether the weights of some rank are not to be trusted."""
        self._verified: int | None = None
        """Step of the newest state that can be trusted, if damage says that the present one cannot."""
        self._injected: dict[int, float] = {}
        self._timers = Timers()
        self._suspicion = Suspicion(self._ranks, self._timers, config.suspect_timeout, self._event, say, self._lose)

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
            if self._layout is None:
                self._early[node] = len(ranks)
            else:
                self._event("spawned", ranks=self._ranks.join_node(len(ranks), node))
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

    def rank_connected(self, hello: Hello, wire: AsyncWire) -> None:
        """A rank introduces itself. Raises WireError if there is no such rank, or it has been here before."""
        state = self._ranks.get(hello.rank)
        if state is None or state.hello is not None:
            raise WireError(f"rank {hello.rank} is outside the world of {len(self._ranks)} or has said Hello before")
        state.wire, state.hello = wire, hello
        if self.outcome.done():
            wire.send(Stop(ok=self.outcome.result().ok, reason=self.outcome.result().reason))
        if state.standby:
            self._newcomer_connected(hello)
        else:
            self._start_if_complete()

    def rank_disconnected(self, rank: int) -> None:
        """Nothing more will come from a rank."""
        state = self._ranks[rank]
        state.wire = None
        if self.outcome.done():
            return
        if state.lost:
            self._decide_if_complete()
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
        if len(hellos) < len(self._ranks) or self.outcome.done() or self._layout is not None:
            return
        first = hellos[0]
        for hello in hellos:
            difference = _difference(hello, first)
            if difference is None and hello.start_step != first.start_step:
                difference = f"its newest checkpoint is that of step {hello.start_step} instead of {first.start_step}"
            if difference is not None:
                self.stop(Outcome(False, f"rank {hello.rank} is not like rank 0: {difference}; "
                                         "all ranks must get the same flags and the same checkpoint"))
                return
        self._timers.cancel("start")
        layout = Layout.from_json(first.layout)
        try:
            self._costs = _given_costs(self._config.profile, layout)
        except (OSError, ProfileError) as error:
            self.stop(Outcome(False, f"--elastic-profile {self._config.profile}: {error}"))
            return
        self._use(layout)
        assert self._records is not None
        self._ledger = Ledger(self._records, start_step=first.start_step, total=first.train_iters, started=time.time(),
                              say=self._say)
        self._first = first
        self._saves = [first.start_step] if first.start_step else []
        self._event("started", world_size=len(self._ranks), step=first.start_step, train_iters=first.train_iters)
        self._say(f"{len(hellos)} ranks are up; training from step {first.start_step + 1} to {first.train_iters}")
        start = Start(layout=first.layout, addresses=self._ranks.addresses(self._ranks))
        self._ranks.send(start, self._ranks)
        for node, count in self._early.items():
            self._event("spawned", ranks=self._ranks.join_node(count, node))
        self._early.clear()

    def _use(self, layout: Layout) -> None:
        self._layout = layout
        self._times.clear()
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
                    self._on_report(message)
                case Recovered():
                    if self._recovery is not None and message.epoch == self.epoch:
                        self._recovery.recovered(message)
                case Suspect():
                    for rank in message.suspects if message.epoch >= self.epoch else ():
                        if rank in self._ranks:
                            self._suspicion.suspect(rank, "fenced", f"rank {message.rank}: {message.reason}")
                case Injected():
                    self._injected[message.rank] = message.time
                    self._event("injected", rank=message.rank, spec=message.spec, injected_at=message.time)
                case Event():
                    self._on_event(message)
                case Built():
                    self._shapes |= message.shapes
                case Damaged():
                    self._on_damaged(message)
                case Profile():
                    self._on_profile(message)
                case Ready():
                    self._on_ready(message)
                case Switched():
                    self._on_switched(message)
                case Settled():
                    self._on_settled(message)
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
        assert self._layout is not None and self._ledger is not None
        # A line of an older epoch may arrive late, from a rank that is dead by now: the step is committed all the same.
        self._ledger.commit(message.vote, epoch=message.epoch, world_size=len(self._layout.ranks), time=message.time)
        recovery = self._recovery
        if (recovery is not None and recovery.decision is not None and not self._collecting
                and message.epoch == self.epoch and message.vote.step >= recovery.decision.step):
            recovery.back_at = recovery.back_at or message.time
            if recovery.named:
                self._close_recovery()

    def _close_recovery(self) -> None:
        recovery, self._recovery = self._recovery, None
        assert recovery is not None and self._layout is not None
        fields = recovery.event(self._injected)
        self._event("recovered", **fields)
        what = "the loss of ranks" if set(recovery.exits) <= set(self._layout.lost) else "damage at ranks"
        self._say(f"recovered from {what} {fields['ranks']} in {fields['mttr_ms']:.0f} ms "
                  f"(step {fields['step']}, {fields['decision']}); {len(self._layout.ranks)} ranks train, "
                  f"{len(self._layout.spares)} spare")
        self._consider()

    def _on_event(self, message: Event) -> None:
        self._event(message.kind, rank=message.rank, **message.fields)
        if message.kind == "saved":
            step = message.fields["step"]
            assert isinstance(step, int)
            self._saves.append(step)

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
        assert self._layout is not None
        self._ranks[message.rank].finished = message
        waiting = [rank for rank in self._layout.ranks if self._ranks[rank].finished is None]
        if self._collecting:
            return  # it will be asked again in the new layout
        if waiting:
            self._timers.set("finish", self._config.wait_timeout, self._finish_late)
            return
        if self._recovery is not None:
            self._recovery.back_at = self._recovery.back_at or time.time()  # nothing was left to redo
            self._close_recovery()
        finished = [self._ranks[rank].finished for rank in self._layout.ranks]
        steps = {each.step for each in finished if each is not None}
        if len(steps) > 1:
            raise Diverged(f"ranks finished at different steps {sorted(steps)}")
        if self._records is not None:
            digests = [item for each in finished if each is not None for item in each.digests]
            self._records.digest(digest.combine(self._layout, digests, message.step))
        self.stop(Outcome(True, f"training finished at step {message.step}"))

    def _finish_late(self) -> None:
        assert self._layout is not None
        waiting = [rank for rank in self._layout.ranks if self._ranks[rank].finished is None]
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
                if not state.standby or (self._recovery is not None and rank in self._recovery.causes):
                    self._name_loss([rank], cause_of(code), when)
                self._respawn(rank)
                return
        elif state.lost:
            self._respawn(rank)
            return
        if not self._config.elastic:
            self._plain_exit(rank, code)
        elif code < 0 or state.standby:
            since = state.stopped if state.fenced == "stopped" else None
            self._lose([rank], state.fenced or cause_of(code), since or message.time)
            self._respawn(rank)
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
        if self._layout is not None and all(self._unneeded(rank) for rank in ranks):
            self._drop_newcomers(ranks, cause or "killed")
            return
        if self._layout is None:
            if cause is not None:
                self._name_loss(ranks, cause, when)
            return
        self._interrupt(ranks, cause, when)
        local = not any(isinstance(state.node, RemoteNode) for state in self._ranks.values() if state.lost)
        self._timers.set("drain", _LOCAL_DRAIN if local else self._config.suspect_timeout, self._cut_lost)
        if cause is not None:
            self._name_loss(ranks, cause, when)
        if not self._ranks.alive:
            self.stop(Outcome(False, "every rank is dead; restart the job from its newest checkpoint"))

    def _interrupt(self, ranks: Collection[int], cause: str | None, when: float) -> None:
        """Begin the next epoch, because of what happened to ``ranks`` at ``when``."""
        self._newest_epoch += 1
        self.epoch = self._newest_epoch
        self._reshape = self._goal = None
        self._arranged = False
        self._timers.cancel("ready")
        lost = [rank for rank, state in self._ranks.items() if state.lost]
        # First of all: everybody waits for this.
        self._ranks.send(Interrupt(epoch=self.epoch, lost=lost), self._ranks.alive)
        if self._recovery is not None and self._recovery.back_at is not None:
            self._close_recovery()
        if self._recovery is None:
            self._recovery = Recovery(noticed=time.time())
        self._recovery.epochs.append(self.epoch)
        self._recovery.exits.update(dict.fromkeys(ranks, when))
        self._recovery.causes.update(dict.fromkeys(ranks, cause))
        self._collecting = True
        self._reports.clear()
        self._timers.cancel("finish")
        for state in self._ranks.values():
            state.finished = None
        self._timers.set("report", self._config.report_timeout, self._reports_late)

    def _on_damaged(self, message: Damaged) -> None:
        assert self._layout is not None
        for damage in message.found:
            self._event("damaged", rank=damage.rank, unit=self._layout.units[damage.unit], slice=damage.slice,
                        tp=damage.tp, what=damage.what, step=message.step)
            self._say(f"WARNING: damaged memory: {damage.what} of slice {damage.slice} of "
                      f"{self._layout.units[damage.unit]} on rank {damage.rank}; it is healed from a good copy")
            if damage.what == "state":
                self._damaged.add((damage.rank, (damage.unit, damage.slice, damage.tp)))
        self._healing = True
        self._verified = min(message.verified, message.verified if self._verified is None else self._verified)
        if not self._collecting:
            self._interrupt({damage.rank for damage in message.found}, "damaged memory", time.time())

    def _name_loss(self, ranks: Collection[int], cause: str, when: float) -> None:
        """What killed ``ranks`` is known."""
        if self._layout is None:
            self.stop(Outcome(False, f"ranks {list(ranks)} died before training began ({cause}); see their logs"))
            return
        for rank in ranks:
            self._event("fault", rank=rank, signal=cause, exited_at=when)
        self._say(f"lost ranks {list(ranks)} ({cause}); epoch {self.epoch} begins with {len(self._ranks.alive)} ranks")
        if self._recovery is not None and not self._recovery.causes.keys().isdisjoint(ranks):
            self._recovery.causes.update(dict.fromkeys(ranks, cause))
            if self._recovery.back_at is not None and self._recovery.named:
                self._close_recovery()

    def _cut_lost(self) -> None:
        for state in self._ranks.values():
            if state.lost and state.wire is not None:
                state.wire.abort()

    def _on_report(self, message: Report) -> None:
        if message.epoch != self.epoch or self._ledger is None or self._layout is None:
            return
        self._suspicion.reported(message.rank)
        self._reports[message.rank] = message
        if message.last is not None:
            # The dead rank may have been the one whose word about that step we waited for.
            self._ledger.commit(message.last, epoch=self._layout.epoch, world_size=len(self._layout.ranks),
                                time=message.interrupted_at)
        if message.vote is not None:
            self._ledger.note(message.vote)
        self._decide_if_complete()

    def _reports_late(self) -> None:
        silent = [rank for rank in self._ranks.alive if rank not in self._reports]
        for rank in silent:
            self._suspicion.fence(rank, "fenced", f"it did not answer the interrupt of epoch {self.epoch} within "
                                        f"{self._config.report_timeout:g} s (--elastic-report-timeout)")

    def _decide_if_complete(self) -> None:
        # What a dead rank said before it died must be read first: it may have committed the step.
        unread = any(state.lost and state.wire is not None for state in self._ranks.values())
        if self._collecting and not unread and all(rank in self._reports for rank in self._ranks.alive):
            self._reconfigure()

    def _reconfigure(self) -> None:
        assert self._layout is not None and self._ledger is not None and self._recovery is not None
        reported = time.time()
        # Who has just been let in may not know it yet, and has no part in the step.
        reports = (self._reports.get(rank) for rank in self._layout.ranks)
        working = [report for report in reports if report is not None and report.member]
        if not working:
            self.stop(Outcome(False, "every rank of the layout is dead; restart the job from its newest checkpoint"))
            return
        try:
            decision, held = self._with_state(self._decide(working))
            known = {*self._layout.ranks, *self._layout.spares, *self._layout.lost}
            lost = [rank for rank, state in self._ranks.items() if state.lost and rank in known]
            if decision.decision != "reload":
                try:
                    layout = lose(self._layout, lost, held, self.epoch)
                except StateLost as lost_state:
                    decision = self._fall_back(decision, self._undecided() if self._damaged else str(lost_state))
            if decision.decision == "reload":
                # Those who have not gone back yet have told of votes that are not cast any more.
                self._ledger.rewind(decision.step - 1)
                layout = lose(self._layout, lost, readable(self._layout), self.epoch)
        except NoLayout as error:
            self.stop(Outcome(False, f"training cannot go on: {error}"))
            return
        except ValueError as error:
            self.stop(Outcome(False, f"the reports of epoch {self.epoch} contradict each other: {error}"))
            return
        self._recovery.gather |= self._healing or _units_move(self._layout, layout)
        plan_ms = (time.time() - reported) * 1e3
        commit = Commit(epoch=self.epoch, layout=layout.to_json(), decision=decision.decision, step=decision.step,
                        vote=decision.vote, held=held, shapes=self._shapes, gather=self._recovery.gather,
                        saved=self._newest_save)
        self._ranks.send(commit, self._ranks.alive)
        self._collecting = False
        self._damaged.clear()
        self._healing, self._verified = False, None
        self._timers.cancel("report")
        self._recovery.committed(decision, reported, plan_ms)
        self._use(layout)

    def _decide(self, working: Collection[Report]) -> Decision:
        assert self._ledger is not None and self._recovery is not None
        begun = self._recovery.decision
        if begun is not None and begun.decision == "reload" and self._recovery.back_at is None:
            return begun  # some have gone back to the checkpoint and some have not
        return decide(working, self._ledger.vote)

    def _with_state(self, decision: Decision) -> tuple[Decision, dict[int, list[Part]]]:
        """A decision that the state which is left allows, if there is one, and what each rank holds then."""
        assert self._layout is not None and self._ledger is not None and self._recovery is not None
        if self._config.replay == "state" and decision.decision != "reload":
            versions = {rank: {steps: [part for part in parts if (rank, part) not in self._damaged]
                               for steps, parts in report.versions.items()}
                        for rank, report in self._reports.items()}
            possible, steps = newest_complete(decision, self._layout.parts, versions)
            if possible is not decision:
                self._event("behind", step=possible.step)
                self._ledger.rewind(steps)
                self._recovery.gather = True
            return possible, {rank: each.get(steps, []) for rank, each in versions.items()}
        # A spare follows the job no more: what it holds is outdated once a step was voted without it.
        done = decision.step if decision.decision == "forward" else decision.step - 1
        return decision, {rank: [part for part in report.held if (rank, part) not in self._damaged]
                          if rank in self._layout.ranks or report.step > done else []
                          for rank, report in self._reports.items()}

    def _undecided(self) -> str:
        ranks = sorted({rank for rank, _ in self._damaged})
        return (f"the copies of a slice differ (ranks {ranks}) and nothing tells which is right; the state of step "
                f"{self._verified} was sound. With --elastic-replicas 2 the majority would be")

    def _fall_back(self, decision: Decision, reason: str) -> Decision:
        """Some state is gone for good: everybody goes back to the newest checkpoint. Raises NoLayout without one."""
        saves = [step for step in self._saves if self._verified is None or step <= self._verified]
        if not saves:
            raise NoLayout(reason)
        done = decision.step if decision.decision == "forward" else decision.step - 1
        self._saves = saves
        self._event("fallback", reason=reason, step=saves[-1], lost_steps=list(range(saves[-1] + 1, done + 1)))
        self._say(f"WARNING: {reason}. Going back to the checkpoint of step {saves[-1]}: "
                  f"{done - saves[-1]} steps are done again")
        return Decision("reload", saves[-1] + 1, None)

    @property
    def _newest_save(self) -> int:
        return self._saves[-1] if self._saves else 0

    # ---- planned changes -----------------------------------------------------------------

    def _consider(self) -> None:
        """Plan the next layout on the way to an even one over all ranks there are, if nothing else is going on."""
        layout = self._layout
        if layout is None or self.outcome.done() or self._collecting or self._recovery or self._reshape is not None:
            return
        settled = all(self._settled.get(rank) == self.epoch for rank in layout.ranks)
        if not settled or not all(self._ranks[rank].standby for rank in layout.spares):
            return
        newcomers = {rank: state.host for rank, state in self._ranks.items()
                     if state.standby and state.hello and not state.lost and rank not in layout.spares}
        asked = self._stages not in (None, layout.pipeline_size)
        self._arranged = self._arranged and not newcomers
        rearrange = self._rearrange if asked or not (self._costs is None or self._arranged) else None
        try:
            better = improve(layout, newcomers, self._newest_epoch + 1, self._goal, rearrange)
        except NoLayout as error:
            # Cells may have been lost since it was asked for.
            self._event("refused", reason=str(error))
            self._say(f"the number of stages stays as it is: {error}")
            self._stages = None
            better = improve(layout, newcomers, self._newest_epoch + 1, self._goal)
        if better is None:
            self._arranged = self._costs is not None
            return
        self._newest_epoch += 1
        self._reshape = Reshape(*better, frozenset(better[0].ranks) - frozenset(layout.ranks))
        if self._reshape.entrants:
            planned = self._reshape.layout
            invite = Invite(epoch=planned.epoch, layout=planned.to_json(),
                            addresses=self._ranks.addresses(planned.ranks), shapes=self._shapes)
            self._ranks.send(invite, self._reshape.entrants)
            self._timers.set("ready", self._config.start_timeout, self._ready_late)
        self._announce_if_ready()

    def scale(self, request: Scale) -> Answer:
        """Somebody asks for another shape of the job. Says whether it will be made; that takes some steps."""
        layout = self._layout
        if layout is None or self.outcome.done():
            return Answer(ok=False, text="the job is not training yet, or no more")
        before, self._stages = self._stages, request.stages
        try:
            self._rearrange(layout)
        except NoLayout as error:
            self._stages = before
            return Answer(ok=False, text=str(error))
        self._event("asked", stages=request.stages)
        self._consider()
        return Answer(ok=True, text=f"the pipeline will have {request.stages} stages, from {layout.pipeline_size}")

    def _rearrange(self, layout: Layout) -> Layout:
        assert self._first is not None
        costs = self._costs or Costs.assumed(layout.units)
        stages = {layout.pipeline_size if self._stages is None else self._stages}
        return replan(layout, costs, layout.epoch, stages=stages, tied=self._first.tied)

    def _on_profile(self, message: Profile) -> None:
        layout = self._layout
        if layout is None or message.epoch != layout.epoch or message.rank not in layout.ranks:
            return
        self._times[layout.stage_of(message.rank)] = message.forward_ms, message.backward_ms
        if len(self._times) == layout.pipeline_size:
            self._costs = measured(layout, self._times)
            self._consider()

    def _announce_if_ready(self) -> None:
        reshape = self._reshape
        assert reshape is not None and self._layout is not None
        if reshape.missing:
            return
        self._timers.cancel("ready")
        reshape.announced = True
        plan = Plan(epoch=reshape.layout.epoch, layout=reshape.layout.to_json(),
                    addresses=self._ranks.addresses(reshape.entrants), held=self._held(), shapes=self._shapes)
        self._ranks.send(plan, self._layout.ranks)

    def _held(self) -> dict[int, list[tuple[int, int, int]]]:
        """What every rank holds when all of the present layout is live."""
        layout = self._layout
        assert layout is not None
        return {rank: [(unit, k, layout.tp_index(rank)) for unit, k in (*layout.owned(rank), *layout.replicated(rank))]
                for rank in layout.ranks}

    def _ready_late(self) -> None:
        assert self._reshape is not None
        for rank in self._reshape.missing:
            self._suspicion.fence(rank, "fenced", f"it was not ready to join within {self._config.start_timeout:g} s "
                                        "(--elastic-start-timeout)")

    def _on_ready(self, message: Ready) -> None:
        if self._reshape is not None and self._reshape.layout.epoch == message.epoch:
            self._reshape.ready.add(message.rank)
            self._announce_if_ready()

    def _on_switched(self, message: Switched) -> None:
        reshape = self._reshape
        if reshape is None or reshape.layout.epoch != message.epoch:
            return  # a loss has overtaken it
        assert self._layout is not None
        held, stages = self._held(), self._layout.pipeline_size
        self._reshape, self._goal = None, reshape.goal
        self._arranged = self._costs is not None and reshape.goal is None
        self.epoch = reshape.layout.epoch
        self._use(reshape.layout)
        for rank in reshape.entrants:
            self._ranks[rank].standby, self._ranks[rank].joined = False, True
        commit = Commit(epoch=self.epoch, layout=reshape.layout.to_json(), decision="switch", step=message.step,
                        vote=None, held=held, shapes=self._shapes, gather=False, saved=self._newest_save)
        self._ranks.send(commit, reshape.entrants)
        shadows = [rank for stage in reshape.layout.stages for cell in stage.cells if cell.shadow
                   for rank in cell.ranks]
        self._event("switched", step=message.step, entered=sorted(reshape.entrants), shadows=shadows,
                    world_size=len(reshape.layout.ranks))
        if reshape.entrants:
            self._say(f"ranks {sorted(reshape.entrants)} follow from step {message.step} on, and will take part when "
                      "they have caught up")
        elif reshape.goal is not None:
            self._say(f"units and slices that are to move are being copied from step {message.step} on")
        elif reshape.layout.pipeline_size != stages:
            self._say(f"the pipeline has {reshape.layout.pipeline_size} stages instead of {stages} from step "
                      f"{message.step} on")
        if reshape.goal is None and not shadows:
            self._say(f"slices and grains are even over {len(reshape.layout.ranks)} ranks from step {message.step} on")
        self._consider()

    def _on_settled(self, message: Settled) -> None:
        assert self._layout is not None
        if message.rank in self._layout.ranks:
            # The word that they have switched may come later than this one, over another connection.
            self._settled[message.rank] = message.epoch
        elif message.epoch == self.epoch:
            self._ranks[message.rank].standby = True
        self._consider()

    # ---- newcomers -----------------------------------------------------------------------

    def _respawn(self, rank: int) -> None:
        """Start a rank in place of one whose process has ended, if that is wanted."""
        state = self._ranks[rank]
        # One that ended before it had joined would probably do so again.
        if self._config.respawn and self._layout is not None and state.node in self._ranks.nodes and state.joined:
            assert state.node is not None
            new = self._ranks.spawn(state.node, [state.local_rank], state.host)
            self._event("spawned", ranks=new)
            self._say(f"rank {new[0]} is started in place of rank {rank}")

    def _newcomer_connected(self, hello: Hello) -> None:
        assert self._first is not None
        difference = _difference(hello, self._first)
        if difference is not None:
            self._suspicion.fence(hello.rank, "refused", f"it is not like the running job: {difference}")
            return
        self._consider()

    def _unneeded(self, rank: int) -> bool:
        """Whether a rank can die without anybody noticing: it has not been let in, and is not about to be."""
        assert self._layout is not None
        entering = self._reshape is not None and self._reshape.announced and rank in self._reshape.entrants
        return self._ranks[rank].standby and rank not in self._layout.spares and not entering

    def _drop_newcomers(self, ranks: Collection[int], cause: str) -> None:
        for rank in ranks:
            self._event("fault", rank=rank, signal=cause, exited_at=time.time())
            self._say(f"rank {rank} ended ({cause}) before it had joined; see rank{rank}.log")
        if self._reshape is not None and not self._reshape.entrants.isdisjoint(ranks):
            self._timers.cancel("ready")
            self._reshape = None
            self._consider()


def _difference(hello: Hello, first: Hello) -> str | None:
    """What a rank was told otherwise than the first one, for people; None if they can work together."""
    for name in sorted({*hello.flags, *first.flags}):
        theirs, ours = hello.flags.get(name), first.flags.get(name)
        if theirs != ours:
            return f"its --{name.replace('_', '-')} is {theirs} instead of {ours}"
    if hello.layout != first.layout or hello.train_iters != first.train_iters:
        return "it would begin with another layout or number of steps; give it the same --nproc-per-node"
    return None


def _given_costs(profile: str | None, layout: Layout) -> Costs | None:
    return None if profile in (None, MEASURED) else Costs.from_json(Path(profile).read_text(), layout.units)


def _units_move(old: Layout, new: Layout) -> bool:
    """Whether some rank is to compute units whose parameters it may not have."""
    return any(
        rank in old.ranks and not set(new.held_by(rank)) <= set(old.stages[old.stage_of(rank)].units)
        for rank in new.ranks
    )
