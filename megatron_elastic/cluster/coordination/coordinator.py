"""Coordinator: holds the job of ``cluster.protocol``, tells it what happens, and carries out what it decides.

Everything runs in one event loop. Events are worked off one after the other, each with all its effects; what an effect
makes happen at once (an agent of the same process answers) waits its turn. Nothing here raises: what cannot be carried
out comes back as an event.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol

from megatron_elastic.cluster.coordination.outgoing import Outgoing
from megatron_elastic.cluster.coordination.timers import Timers
from megatron_elastic.cluster.messages import Answer, Decision, Start, Stop, ToAgent
from megatron_elastic.cluster.protocol import Job, Outcome, advance
from megatron_elastic.cluster.protocol.effects import (
    CancelTimer,
    Effect,
    End,
    PlanClocks,
    ReadCosts,
    Record,
    Reply,
    Say,
    Search,
    Send,
    SetTimer,
    Show,
    Tabulate,
    Tell,
    WriteDigest,
    WriteEvent,
    WriteLayout,
    WriteMetrics,
    WriteProfile,
    WriteScaleTable,
)
from megatron_elastic.cluster.protocol.events import (
    Clocked,
    Costed,
    Ended,
    Event,
    Expired,
    Found,
    NodeCame,
    NodeLost,
    Recorded,
    Sent,
    Troubled,
    Unheard,
)
from megatron_elastic.cluster.recording.recorder import Recorder
from megatron_elastic.cluster.wire import Unsendable
from megatron_elastic.layout import Layout
from megatron_elastic.plan import Costs, ProfileError
from megatron_elastic.plan.predict import Case
from megatron_elastic.plan.predict.outlook import around, outlook
from megatron_elastic.plan.predict.past import Past
from megatron_elastic.plan.work import order
from megatron_elastic.plan.work.clocking import plan_clocks
from megatron_elastic.plan.work.order import Order


class Agent(Protocol):
    """How an agent is reached."""

    def obey(self, message: ToAgent) -> None:
        """Send it a message, or have it act on it; ``Stop`` is the last. Does not raise."""


class Coordinator:
    """The shell around one job's protocol.

    Args:
        job: as it begins.
        records: where an elastic job is written down; None for a plain one.
        say: prints one line for people, about an event of a kind that is written down, or none; does not block.
        remember: lets a later coordinator know that an epoch was begun; to answer with ``Recorded``. None if there can
            be none.
    """

    def __init__(self, job: Job, records: Recorder | None, say: Callable[[str, str], None],
                 remember: Callable[[Record], None] | None = None) -> None:
        self.job = job
        self.outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._records = records
        self._say = say
        self._remember = remember or (lambda record: self.post(Recorded(now=time.time(), epoch=record.epoch)))
        self._deposed = False
        self._timers = Timers()
        self._agents: dict[int, Agent] = {}
        self._told: dict[int, Layout] = {}
        """The layout that each node was sent last."""
        self._had: dict[int, int] = {}
        """Epoch of the one that another coordinator has sent last to each node that has come meanwhile."""
        self._people: dict[int, asyncio.Future[Answer]] = {}
        self._names = 0
        self._events: deque[Event] = deque()
        self._busy = False
        self._broke = False
        self._defects: set[str] = set()
        """What people were told of."""

    # ---- what happens ----------------------------------------------------------------------

    def post(self, event: Event) -> None:
        """Something has happened."""
        self._events.append(event)
        if self._busy or self._deposed:
            return
        self._busy = True
        try:
            while self._events:
                self._work(self._events.popleft())
        finally:
            self._busy = False

    def name(self, agent: Agent) -> int:
        """A number for an agent, by which events and effects call it."""
        self._names += 1
        self._agents[self._names] = agent
        return self._names

    def asking(self) -> tuple[int, asyncio.Future[Answer]]:
        """A number for a person, and where the answer will be."""
        self._names += 1
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._people[self._names] = answer
        return self._names, answer

    def depose(self) -> None:
        """Another coordinates: nothing is decided here any more."""
        self._deposed = True
        self._timers.cancel_all()

    @property
    def recorded(self) -> int:
        """Steps up to this one are on record."""
        return 0 if self._records is None else self._records.recorded

    # ---- what is to be done ------------------------------------------------------------------

    def _work(self, event: Event) -> None:
        gathering = self.job.gathering is not None
        try:
            self.job, effects = advance(self.job, event)
        except Exception:
            if isinstance(event, Unheard | Ended):
                self._broken()
            else:
                self._events.appendleft(Unheard(now=time.time(), event=event, traceback=traceback.format_exc()))
            return
        if gathering:
            self._learn(event)
        for effect in effects:
            try:
                self._do(effect)
            except Unsendable as error:
                self.trouble(str(error), fatal=True)
            except Exception:
                self.defect(f"{type(effect).__name__} was not carried out:\n{traceback.format_exc()}")

    def _learn(self, event: Event) -> None:
        """What agents have of the layout that a coordinator before has sent them need not be sent again."""
        if isinstance(event, NodeCame) and (past := event.hello.past) is not None and past.told:
            self._had[event.node] = past.in_force
        if self.job.gathering is None and (layout := self.job.layout) is not None:
            self._told.update((node, layout) for node, epoch in self._had.items() if epoch == layout.epoch)
            self._had.clear()

    def _broken(self) -> None:
        """A defect of ours, and what is to be done about defects fails, too: the job ends, with what is known."""
        reason = f"error in the coordinator, please report it:\n{traceback.format_exc()}"
        if self.job.outcome is None and not self._broke:
            self._broke = True
            self._events.append(Ended(now=time.time(), ok=False, reason=reason))
        if not self.outcome.done():
            self.outcome.set_result(Outcome(False, reason))

    def _do(self, effect: Effect) -> None:
        match effect:
            case Send():
                self._send(effect)
            case Tell():
                self._tell(effect.node, effect.message)
                if isinstance(effect.message, Stop):  # the last that an agent is told
                    self._agents.pop(effect.node, None)
                    self._told.pop(effect.node, None)
            case SetTimer():
                expired = effect
                self._timers.set(effect.name, effect.delay, lambda: self.post(
                    Expired(now=time.time(), name=expired.name, serial=expired.serial)))
            case CancelTimer():
                self._timers.cancel(effect.name)
            case Say():
                self._say(effect.line, effect.tells)
            case Show():
                if self._records is not None:
                    self._records.show(effect.figures)
            case Reply():
                if (answer := self._people.pop(effect.person, None)) is not None and not answer.done():
                    answer.set_result(effect.answer)
            case ReadCosts():
                self._in_thread("profile", partial(self._read_costs, effect))
            case PlanClocks():
                self._in_thread("clocks", partial(self._plan_clocks, effect))
            case Search():
                self._search(effect)
            case Tabulate():
                self._tabulate(effect)
            case Record():
                self._remember(effect)
            case End():
                self._timers.cancel_all()
                if not self.outcome.done():
                    self.outcome.set_result(Outcome(effect.ok, effect.reason, effect.code))
            case (
                WriteMetrics() | WriteEvent() | WriteLayout() | WriteProfile() | WriteScaleTable() | WriteDigest()
            ):
                if self._records is not None:
                    self._records.write(effect)

    def _in_thread(self, name: str, work: Callable[[], Callable[[], None]]) -> None:
        """Do what ``work`` returns when a thread has done that. It ends with this process at the latest: training, and
        the lease, do not wait for it.
        """
        loop = asyncio.get_running_loop()

        def run() -> None:
            done = work()
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody cares any more
                loop.call_soon_threadsafe(done)

        threading.Thread(target=run, name=name, daemon=True).start()

    def _plan_clocks(self, effect: PlanClocks) -> Callable[[], None]:
        try:
            found = plan_clocks(effect.layout, effect.costs, effect.schedule, effect.present)
        except Exception:
            return partial(self.trouble, f"clocks cannot be planned, please report it:\n{traceback.format_exc()}")
        return partial(self.post, Clocked(now=time.time(), epoch=effect.layout.epoch, clocks=dict(found.clocks),
                                          step_ms=found.step_ms, base_ms=found.base_ms))  # fmt: skip

    def _read_costs(self, effect: ReadCosts) -> Callable[[], None]:
        costs, problem = None, ""
        try:
            costs = Costs.read(Path(effect.path), effect.units)
        except ProfileError as error:
            problem = str(error)
        except Exception:
            problem = f"{effect.path}: it cannot be read, please report it:\n{traceback.format_exc()}"
        return partial(self.post, Costed(now=time.time(), costs=costs, problem=problem))

    def _tell(self, node: int, message: ToAgent) -> None:
        """What one agent cannot do, because of a defect, is its node's fault: others are told all the same."""
        if (agent := self._agents.get(node)) is None:
            return
        try:
            agent.obey(message)
        except Unsendable:
            raise
        except Exception:
            self.defect(f"an agent cannot do what it is told ({type(message).__name__}):\n{traceback.format_exc()}")
            if not isinstance(message, Stop):
                self.post(NodeLost(now=time.time(), node=node, cause="cannot obey", since=time.time()))

    def _send(self, effect: Send) -> None:
        """One message for each node, whatever the number of its ranks; encoded once."""
        by_node: dict[int, list[int]] = {}
        for rank in effect.ranks:
            node = self.job.ranks[rank].node
            if node in self._agents:
                assert node is not None
                by_node.setdefault(node, []).append(rank)
        outgoing = Outgoing(effect.message, self.job)
        for node, ranks in by_node.items():
            self._tell(node, outgoing.to(ranks, self._told.get(node)))
            if outgoing.leaves is not None:
                self._told[node] = outgoing.leaves
        if isinstance(effect.message, Start):
            gc.freeze()  # what all ranks said at the start stays: looking through it would take longer than a recovery
        if isinstance(effect.message, Decision):
            self.post(Sent(now=time.time(), epoch=effect.message.epoch))

    def _search(self, effect: Search) -> None:
        """In a thread: it may take a second."""
        begun, epoch = time.monotonic(), effect.layout.epoch

        def done(searched: asyncio.Future[Order | None]) -> None:
            if searched.cancelled():
                return
            error = searched.exception()
            self.post(Found(
                now=time.time(), epoch=epoch, order=None if error is not None else searched.result(),
                seconds=time.monotonic() - begun, problem="" if error is None else repr(error),
            ))

        arguments = effect.layout, effect.costs, effect.present, effect.tied
        asyncio.get_running_loop().run_in_executor(None, order.search, *arguments).add_done_callback(done)

    def _tabulate(self, effect: Tabulate) -> None:
        """In a thread, too; where it cannot be told, there is none."""
        def done(made: asyncio.Future[str]) -> None:
            if made.cancelled() or self._records is None or self._deposed:
                return
            if (error := made.exception()) is not None:
                self._say(f"there is no scale table: {error!r}", "")
            else:
                self._records.write(WriteScaleTable(made.result()))

        seen = partial(self._records.past, effect.layout) if self._records is not None else dict
        arguments = effect.layout, effect.costs, effect.tokens, effect.sizes, seen
        asyncio.get_running_loop().run_in_executor(None, _table, *arguments).add_done_callback(done)

    def trouble(self, what: str, fatal: bool = False) -> None:
        """Something could not be carried out."""
        self.post(Troubled(now=time.time(), what=what, fatal=fatal))

    def defect(self, what: str) -> None:
        """Something of this process has failed in a way that nobody has foreseen. The job goes on; people are told
        once.
        """
        if what not in self._defects:
            self._defects.add(what)
            self.trouble(f"error in the launcher, please report it: {what}")

    def end(self, ok: bool, reason: str) -> None:
        """The job is to end. Later calls change nothing."""
        self.post(Ended(now=time.time(), ok=ok, reason=reason))


def _table(layout: Layout, costs: Costs, tokens: int, sizes: Case | None, seen: Callable[[], Past]) -> str:
    return outlook(layout, costs, tokens, around(layout), sizes, seen()).to_json()
