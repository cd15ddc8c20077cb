"""Coordinator: owns the epoch of a job. It starts the ranks, and after a death gives the survivors a new layout.

A reconfiguration is: interrupt everybody alive, collect a report from each, plan, send the new layout. Another death at
any point starts the next epoch, from the last layout that was sent and with all ranks lost so far, so it converges.
Everything runs in one event loop and every handler is synchronous: there is nothing to lock.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from megatron_elastic.cluster.ledger import Diverged, Ledger
from megatron_elastic.cluster.messages import (
    AgentHello,
    AnyMessage,
    Commit,
    Committed,
    Event,
    Failed,
    Finished,
    Hello,
    Injected,
    Interrupt,
    Message,
    RankDying,
    RankExited,
    RankNews,
    RankResumed,
    RankStopped,
    Recovered,
    Report,
    Start,
    Stop,
    Suspect,
)
from megatron_elastic.cluster.nodes import Node, RemoteNode
from megatron_elastic.cluster.recovery import Recovery, cause_of, decide
from megatron_elastic.cluster.timers import Timers
from megatron_elastic.cluster.wire import AsyncWire, WireError
from megatron_elastic.config import ElasticConfig
from megatron_elastic.layout import Layout
from megatron_elastic.observe import digest
from megatron_elastic.observe.records import RunRecords
from megatron_elastic.plan import NoLayout, lose

_LOCAL_DRAIN = 0.002
"""Seconds for reading what a dead rank of this machine said last: it is all here, only not read yet."""
_FENCE_LIMIT = 10.0
"""Seconds until a killed rank counts as lost although nobody saw its process end."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended; ``reason`` is for people."""

    ok: bool
    reason: str


@dataclass(slots=True)
class _Rank:
    node: Node | None = None
    wire: AsyncWire | None = None
    hello: Hello | None = None
    returncode: int | None = None
    lost: bool = False
    dying: float | None = None
    """Since when it is being taken down by the kernel, while what killed it is not known yet."""
    stopped: float | None = None
    """Since when its process is there but does not run."""
    fenced: str | None = None
    """Why it was killed, in a word, if it was."""
    finished: Finished | None = None


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
        self._ranks = {rank: _Rank() for rank in range(world_size)}
        self._nodes: list[Node] = []
        self._torch_port = 0
        self._layout: Layout | None = None
        """The last one that was sent to the ranks; None until they all came up."""
        self._ledger: Ledger | None = None
        self._reports: dict[int, Report] = {}
        self._collecting = False
        self._recovery: Recovery | None = None
        self._injected: dict[int, float] = {}
        self._timers = Timers()

    # ---- life ----------------------------------------------------------------------------

    def begin(self, torch_port: int) -> None:
        """From now on nodes may be added. ``torch_port``: MASTER_PORT of the ranks."""
        self._torch_port = torch_port
        self._timers.set("start", self._config.start_timeout, self._start_late)

    def add_node(self, ranks: Collection[int], node: Node) -> None:
        """An agent is ready to start ``ranks``. When every rank has one, all are launched."""
        taken = [rank for rank in ranks if rank not in self._ranks or self._ranks[rank].node is not None]
        if taken:
            self.stop(Outcome(False, f"an agent wants to start ranks {taken}, which are another node's or outside the "
                                     "world size; give every node the same --nnodes and --nproc-per-node and its own "
                                     "--node-rank"))
            return
        self._nodes.append(node)
        for rank in ranks:
            self._ranks[rank].node = node
        if all(state.node is not None for state in self._ranks.values()):
            for each in self._nodes:
                each.launch(self._torch_port)
            if not self._config.elastic:
                self._timers.cancel("start")

    def stop(self, outcome: Outcome) -> None:
        """Decide how the job ends, and tell every rank and agent. Later calls change nothing."""
        if self.outcome.done():
            return
        self._timers.cancel_all()
        self._event("finished" if outcome.ok else "failed", reason=outcome.reason)
        self._send(Stop(ok=outcome.ok, reason=outcome.reason), self._ranks)
        for node in self._nodes:
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
            self._suspect(rank, "fenced", "it closed its connection to the coordinator")

    def node_lost(self, hello: AgentHello, cause: str, when: float) -> None:
        """The agent of a node is gone, or silent, since ``when``: its ranks are lost with it."""
        alive = [rank for rank in hello.ranks if self._ranks[rank].returncode is None and not self._ranks[rank].lost]
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

    def _send(self, message: Message, ranks: Collection[int]) -> None:
        for rank in ranks:
            if (wire := self._ranks[rank].wire) is not None:
                wire.send(message)

    def _event(self, kind: str, **fields: object) -> None:
        if self._records is not None:
            self._records.event(kind, self.epoch, **fields)

    @property
    def _alive(self) -> list[int]:
        return [rank for rank, state in self._ranks.items() if not state.lost]

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
        for name in ("layout", "start_step", "train_iters"):
            differ = [hello.rank for hello in hellos if getattr(hello, name) != getattr(first, name)]
            if differ:
                self.stop(Outcome(False, f"ranks {differ} propose another {name} than rank 0; "
                                         "all ranks must get the same flags and the same checkpoint"))
                return
        self._timers.cancel("start")
        layout = Layout.from_json(first.layout)
        self._use(layout)
        assert self._records is not None
        self._ledger = Ledger(self._records, start_step=first.start_step, total=first.train_iters, started=time.time(),
                              say=self._say)
        self._event("started", world_size=len(self._ranks), step=first.start_step, train_iters=first.train_iters)
        self._say(f"{len(hellos)} ranks are up; training from step {first.start_step + 1} to {first.train_iters}")
        self._send(Start(layout=first.layout, addresses={hello.rank: hello.address for hello in hellos}), self._ranks)

    def _use(self, layout: Layout) -> None:
        self._layout = layout
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
                    self._on_suspect(message)
                case Injected():
                    self._injected[message.rank] = message.time
                    self._event("injected", rank=message.rank, spec=message.spec, injected_at=message.time)
                case Event():
                    self._event(message.kind, rank=message.rank, **message.fields)
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
        self._say(f"recovered from the loss of ranks {fields['ranks']} in {fields['mttr_ms']:.0f} ms "
                  f"(step {fields['step']}, {fields['decision']}); {len(self._layout.ranks)} ranks train, "
                  f"{len(self._layout.spares)} spare")

    def _on_failed(self, message: Failed) -> None:
        if self.outcome.done():
            return  # the program and the process that runs it may both tell
        self._event("error", rank=message.rank, traceback=message.traceback)
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

    # ---- suspicion -----------------------------------------------------------------------

    def _on_suspect(self, message: Suspect) -> None:
        if message.epoch < self.epoch:
            return
        for rank in message.suspects:
            if rank in self._ranks:
                self._suspect(rank, "fenced", f"rank {message.rank}: {message.reason}")

    def _rank_stopped(self, message: RankStopped) -> None:
        if self._ranks[message.rank].stopped is None:
            self._ranks[message.rank].stopped = message.time
            self._suspect(message.rank, "stopped", f"its process is stopped ({message.how})")

    def _rank_resumed(self, message: RankResumed) -> None:
        state = self._ranks[message.rank]
        if state.stopped is None:
            return
        self._timers.cancel(f"stopped {message.rank}")
        self._event("resumed", rank=message.rank, stopped_ms=round((message.time - state.stopped) * 1e3, 3))
        self._say(f"rank {message.rank} runs again")
        state.stopped = None

    def _suspect(self, rank: int, cause: str, reason: str) -> None:
        """Kill ``rank`` unless what clears it comes in time: a report if it seemed dead, going on if it is stopped."""
        name = f"{cause} {rank}"
        state = self._ranks[rank]
        if not state.lost and state.fenced is None and name not in self._timers:
            self._event("suspected", rank=rank, reason=reason)
            self._say(f"rank {rank} is suspected: {reason}")
            self._timers.set(name, self._config.suspect_timeout, lambda: self._fence(rank, cause, reason))

    def _clear(self, rank: int) -> None:
        for name in ("fenced", "stopped", "killed"):
            self._timers.cancel(f"{name} {rank}")

    def _fence(self, rank: int, cause: str, reason: str) -> None:
        state = self._ranks[rank]
        if state.lost or state.node is None:
            return
        state.fenced = cause
        self._event("fenced", rank=rank, reason=reason)
        self._say(f"killing rank {rank}: {reason}")
        state.node.kill(rank)
        since = state.stopped or time.time()
        self._timers.set(f"killed {rank}", _FENCE_LIMIT, lambda: self._lose([rank], cause, since))

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
                    self._rank_stopped(message)
                case RankResumed():
                    self._rank_resumed(message)

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
                self._name_loss([rank], cause_of(code), when)
                return
        elif state.lost:
            return
        if not self._config.elastic:
            self._plain_exit(rank, code)
        elif code < 0:
            since = state.stopped if state.fenced == "stopped" else None
            self._lose([rank], state.fenced or cause_of(code), since or message.time)
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
        now = time.time()
        ranks = [rank for rank in ranks if not self._ranks[rank].lost]
        if self.outcome.done() or not ranks:
            return
        for rank in ranks:
            self._ranks[rank].lost = True
            self._clear(rank)
        lost = [rank for rank, state in self._ranks.items() if state.lost]
        if self._layout is None:
            if cause is not None:
                self._name_loss(ranks, cause, when)
            return
        self.epoch += 1
        self._send(Interrupt(epoch=self.epoch, lost=lost), self._alive)  # first of all: everybody waits for this
        if self._recovery is not None and self._recovery.back_at is not None:
            self._close_recovery()
        if self._recovery is None:
            self._recovery = Recovery(noticed=now)
        self._recovery.epochs.append(self.epoch)
        self._recovery.exits.update(dict.fromkeys(ranks, when))
        self._recovery.causes.update(dict.fromkeys(ranks, cause))
        self._collecting = True
        self._reports.clear()
        self._timers.cancel("finish")
        for state in self._ranks.values():
            state.finished = None
        self._timers.set("report", self._config.report_timeout, self._reports_late)
        local = not any(isinstance(self._ranks[rank].node, RemoteNode) for rank in lost)
        self._timers.set("drain", _LOCAL_DRAIN if local else self._config.suspect_timeout, self._cut_lost)
        if cause is not None:
            self._name_loss(ranks, cause, when)
        if not self._alive:
            self.stop(Outcome(False, "every rank is dead; restart the job from its newest checkpoint"))

    def _name_loss(self, ranks: Collection[int], cause: str, when: float) -> None:
        """What killed ``ranks`` is known."""
        if self._layout is None:
            self.stop(Outcome(False, f"ranks {list(ranks)} died before training began ({cause}); see their logs"))
            return
        for rank in ranks:
            self._event("fault", rank=rank, signal=cause, exited_at=when)
        self._say(f"lost ranks {list(ranks)} ({cause}); epoch {self.epoch} begins with {len(self._alive)} ranks")
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
        self._timers.cancel(f"fenced {message.rank}")  # who reports is alive
        self._reports[message.rank] = message
        if message.last is not None:
            # The dead rank may have been the one whose word about that step we waited for.
            self._ledger.commit(message.last, epoch=self._layout.epoch, world_size=len(self._layout.ranks),
                                time=message.interrupted_at)
        if message.vote is not None:
            self._ledger.note(message.vote)
        self._decide_if_complete()

    def _reports_late(self) -> None:
        silent = [rank for rank in self._alive if rank not in self._reports]
        for rank in silent:
            self._fence(rank, "fenced", f"it did not answer the interrupt of epoch {self.epoch} within "
                                        f"{self._config.report_timeout:g} s (--elastic-report-timeout)")

    def _decide_if_complete(self) -> None:
        # What a dead rank said before it died must be read first: it may have committed the step.
        unread = any(state.lost and state.wire is not None for state in self._ranks.values())
        if self._collecting and not unread and all(rank in self._reports for rank in self._alive):
            self._reconfigure()

    def _reconfigure(self) -> None:
        assert self._layout is not None and self._ledger is not None and self._recovery is not None
        reported = time.time()
        working = [self._reports[rank] for rank in self._layout.ranks if rank in self._reports]
        if not working:
            self.stop(Outcome(False, "every rank of the layout is dead; restart the job from its newest checkpoint"))
            return
        try:
            decision = decide(working, self._ledger.vote)
            # A spare follows the job no more: what it holds is outdated once a step was voted without it.
            done = decision.step if decision.decision == "forward" else decision.step - 1
            held = {rank: report.held if rank in self._layout.ranks or report.step > done else []
                    for rank, report in self._reports.items()}
            lost = [rank for rank, state in self._ranks.items() if state.lost]
            layout = lose(self._layout, lost, held, self.epoch)
        except NoLayout as error:
            self.stop(Outcome(False, f"training cannot go on: {error}"))
            return
        except ValueError as error:
            self.stop(Outcome(False, f"the reports of epoch {self.epoch} contradict each other: {error}"))
            return
        plan_ms = (time.time() - reported) * 1e3
        self._send(Commit(epoch=self.epoch, layout=layout.to_json(), decision=decision.decision, step=decision.step,
                          vote=decision.vote, held=held), self._alive)
        self._collecting = False
        self._timers.cancel("report")
        self._recovery.committed(decision, reported, plan_ms)
        self._use(layout)
