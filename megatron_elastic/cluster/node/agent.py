"""Agent: starts the ranks of one node through a zygote, passes on what they and the coordinator say to each other, and
tells at once when one ends, is stopped or goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable

from megatron_elastic.cluster import wire
from megatron_elastic.cluster.launch.output import Echo
from megatron_elastic.cluster.messages import (
    AgentHello,
    ClocksRefused,
    Committed,
    Failed,
    Fence,
    FromAgent,
    FromRank,
    Given,
    Heartbeat,
    Hello,
    Inspect,
    Inspected,
    Launch,
    Leave,
    Leaving,
    Members,
    RankClosed,
    RankDying,
    RankExited,
    RankResumed,
    RankStopped,
    Recall,
    Relay,
    Seat,
    SetClocks,
    Stop,
    TellLayout,
    Throttled,
    ToAgent,
    Wanted,
)
from megatron_elastic.cluster.node.assignment import END_LIMIT, Assignment
from megatron_elastic.cluster.node.gauge import Gauge
from megatron_elastic.cluster.node.instruments import Instruments
from megatron_elastic.cluster.node.keeper import CannotStart, Keeper, OfRank
from megatron_elastic.cluster.node.line import AGENT_VARIABLE, FIRST_HOST_VARIABLE, Lines
from megatron_elastic.cluster.node.relay import Post
from megatron_elastic.cluster.node.speedometer import Speedometer
from megatron_elastic.cluster.node.stack import save_stack
from megatron_elastic.cluster.node.standstill import standstill
from megatron_elastic.cluster.rank.deathwatch import Deathwatch
from megatron_elastic.cluster.rank.zygote import Continued, Exited, Kill, Ready, Spawn, Spawned, Stopped
from megatron_elastic.power.devices import Place
from megatron_elastic.power.regulator import Regulator

_PATIENCE = 1.0
"""Seconds that ranks of a failed job have to end by themselves, before they get SIGTERM."""


class Agent:
    """One node's ranks.

    Args:
        assignment: what to run.
        tell: tells the coordinator what ranks say and what happens to their processes. Each end is told once, after
            all that the rank said.
    """

    def __init__(self, assignment: Assignment, tell: Callable[[FromAgent], object]) -> None:
        self._assignment = assignment
        self.over: asyncio.Future[Stop] = asyncio.get_running_loop().create_future()
        """How the job ended for this node, when the coordinator has said so. Raises what nobody has foreseen here."""
        self.members: asyncio.Future[Members] = asyncio.get_running_loop().create_future()
        """Where the store is, once training has begun."""
        self.seat: asyncio.Future[Seat] = asyncio.get_running_loop().create_future()
        """This node's place in an embedded store, if it was given one later on."""
        self._lines = Lines(self._heard, self._closed)
        self._tell = tell
        self._loop = asyncio.get_running_loop()
        self._post = Post(self._lines.send, tell, asyncio.get_running_loop().call_later)
        self._deathwatch = Deathwatch(assignment.ranks_per_node)
        self._keeper = Keeper(assignment, self._deathwatch, self._happened, self._all_ended, self._broke)
        self._gauge = Gauge(assignment.ranks_per_node, assignment.look_every)
        self._speedometer = Speedometer(self._gauge.odometers) if assignment.tells_paces else None
        self._instruments = Instruments(self._gauge.odometers)
        self._echo = Echo(assignment.console) if assignment.console.streams else None
        actuator = assignment.actuator
        self._regulator = None if actuator is None else Regulator(
            actuator, assignment.run_dir, self._warn, hot=self._throttled)
        self._running: set[int] = set()
        self._pids: dict[int, int] = {}
        self._slots: dict[int, int] = {}
        """Local rank of every rank that was started here."""
        self._broken: set[int] = set()
        """Local ranks whose devices have failed."""
        self._saving: set[asyncio.Future[None]] = set()
        """Stacks that are being written down."""
        self._still: set[int] = set()
        """Ranks that were at a standstill at the last look."""
        self._look: asyncio.TimerHandle | None = None
        self.leaving = False
        """Whether its ranks are to leave."""
        self._torch_port = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def prepare(self, timeout: float) -> Ready:
        """Start the zygote, which has so many seconds to import everything. Raises CannotStart."""
        self._assignment.log_dir.mkdir(parents=True, exist_ok=True)
        return await self._keeper.begin(timeout)

    # ---- what the coordinator says -------------------------------------------------------

    def hello(
        self, session: str, address: str, member: str, alone_since: float | None, resigned: bool
    ) -> AgentHello:
        """How this agent introduces itself; ``alone_since`` unless it has had no coordinator before."""
        running = {rank: slot for rank, slot in self._slots.items() if rank in self._running}
        if self._speedometer is not None:
            self._speedometer.forget()
        self._instruments.forget()
        return AgentHello(
            session=session, node_rank=self._assignment.node_rank, slots=self._assignment.ranks_per_node,
            host=socket.gethostname(), heartbeat_timeout=self._assignment.heartbeat_timeout, address=address,
            member=member, running=self._post.running(running), leaving=self.leaving, broken=sorted(self._broken),
            past=None if alone_since is None else self._post.past(
                self._torch_port, alone_since, resigned, self._slots),
        )  # fmt: skip

    def obey(self, message: ToAgent) -> None:
        """Do what the coordinator says."""
        match message:
            case Relay():
                self._post.relay(message)
            case Heartbeat():
                self._post.recorded(message.recorded)
            case Launch():
                self._launch(message)
            case Leave():
                self.leaving = True
            case Given():
                self._post.given(message.newest)
            case Wanted():
                self._post.want(message)
            case Fence():
                self._fence(message)
            case Inspect():
                self._tell(Inspected(readings=self._gauge.readings(self._pids, self._slots), usual=self._gauge.usual))
            case TellLayout():
                self._post.tell_layout()
            case SetClocks():
                if self._regulator is not None:
                    places = [Place(rank, self._slots[rank], pid) for rank, pid in self._pids.items()]
                    self._regulator.set(message.clocks, places, message.watts)
                    if self._speedometer is not None:
                        self._speedometer.restart()
            case Recall():
                self._post.recall(message)
            case Members():
                if not self.members.done():
                    self.members.set_result(message)
            case Seat():
                if not self.seat.done():
                    self.seat.set_result(message)
            case Stop():
                self.stop(message)

    def pass_on(self, number: int) -> bool:
        """Send the script's exit signal to the ranks that listen for it: they do when they have said hello, and those
        of plain jobs are taken to. Returns whether any do; else nothing has been trained here that could be saved.
        """
        listening = self._post.introduced if self._assignment.elastic else set(self._running)
        for rank in listening:
            self.kill(rank, number)
        return bool(listening)

    def leave(self) -> None:
        """This node's ranks are to leave; ``over`` says when they have."""
        self.leaving = True
        self._tell(Leaving())

    def stop(self, message: Stop) -> None:
        """The job is over for this node; its ranks are told, too."""
        frame = wire.encode(message)
        for rank in self._running:
            self._lines.send(rank, frame)
        if not self.over.done():
            self.over.set_result(message)

    async def begin_again(self) -> None:
        """End all ranks, whose part in the job others have taken over, and be ready to start new ones. Raises
        CannotStart.
        """
        await self._wait_idle(_PATIENCE)
        self.kill_all()
        await self._wait_idle(END_LIMIT)
        if self._running:
            raise CannotStart(f"ranks {sorted(self._running)} do not end")
        if self._regulator is not None:
            self._regulator.set({}, [])
        self.over = asyncio.get_running_loop().create_future()
        self._post = Post(self._lines.send, self._tell, asyncio.get_running_loop().call_later)
        self._slots.clear()
        self._torch_port = 0

    def _launch(self, message: Launch) -> None:
        told, begun = self._assignment.world_size, bool(message.first_host)
        if message.world_size != told and not begun:  # who comes later may have fewer or more ranks
            self.stop(Stop(ok=False, reason=f"node 0 runs {message.world_size} ranks, this node was told "
                                            f"{told}; give every node the same --nnodes and "
                                            "--nproc-per-node"))
            return
        self._torch_port = message.torch_port
        self._start(message)

    def _warn(self, reason: str) -> None:
        """Clocks cannot be set; said in another thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody cares any more
            self._loop.call_soon_threadsafe(self._tell, ClocksRefused(reason=reason))

    def _throttled(self, clocks: dict[int, float]) -> None:
        """Devices are held down; said in another thread."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._tell, Throttled(clocks=clocks))

    # ---- ranks ---------------------------------------------------------------------------

    def _heard(self, rank: int, message: FromRank) -> None:
        if isinstance(message, Committed):
            self._gauge.committed(message)
        if isinstance(message, Failed) and message.device:
            self._broken.add(self._slots[rank])
        if isinstance(message, Hello) and self.over.done():  # it has only begun when the others were told
            self._lines.send(rank, wire.encode(self.over.result()))
        self._post.heard(rank, message)

    def _closed(self, rank: int) -> None:
        if rank in self._running and not self.over.done():
            self._post.news(RankClosed(rank=rank, time=time.time()))

    def _start(self, message: Launch) -> None:
        assignment = self._assignment
        for local_rank, rank in message.ranks.items():
            self._running.add(rank)
            self._slots[rank] = local_rank
            self._idle.clear()
            self._gauge.odometers.begin(local_rank)
            environment = assignment.environment(rank, local_rank, message) | {
                AGENT_VARIABLE: self._lines.name,
                FIRST_HOST_VARIABLE: str(message.first_host or assignment.ranks_per_node),
                **self._gauge.odometers.environment(local_rank)}
            log, errors = assignment.log(rank), assignment.errors(rank, local_rank)
            if self._echo is not None:
                self._echo.follow(local_rank, rank, log, errors)
            self._keeper.send(Spawn(rank, environment, str(log), str(errors), assignment.program, self._ignored()))

    def _ignored(self) -> tuple[int, ...]:
        """Signals that are not for ranks, though a scheduler may send them to all processes of a step or a pod."""
        hangup = (signal.SIGHUP,) if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else ()
        return (*hangup, signal.SIGTERM) if self._assignment.elastic else hangup

    def _fence(self, message: Fence) -> None:
        if message.device and message.rank in self._slots:
            self._broken.add(self._slots[message.rank])
        pid = self._pids.get(message.rank)
        if message.stack and pid is not None:
            saving = asyncio.ensure_future(save_stack(pid, self._assignment.stack(message.rank)))
            self._saving.add(saving)
            saving.add_done_callback(self._saving.discard)
            saving.add_done_callback(lambda _: self.kill(message.rank))
        else:
            self.kill(message.rank)

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to one rank and whatever it started."""
        self._keeper.send(Kill(rank, number))

    def kill_all(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to every rank that still runs."""
        for rank in self._running:
            self.kill(rank, number)

    async def end(self, *, patient: bool) -> set[int]:
        """Wait until every rank has ended; then end the zygote, which kills the others.

        ``patient``: all is well, and ranks get the job's grace and no SIGTERM. Returns those that had to be killed.
        """
        # A cancellation here is somebody's second Ctrl-C: no more patience.
        with contextlib.suppress(asyncio.CancelledError):
            await self._wait_idle(self._assignment.grace if patient else _PATIENCE)
            if not patient and self._running:
                self.kill_all(signal.SIGTERM)
                await self._wait_idle(max(0.0, self._assignment.end_limit - _PATIENCE))
        stubborn = set(self._running)
        if self._look is not None:
            self._look.cancel()
        await self._keeper.end()
        if self._regulator is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._regulator.close, END_LIMIT)
        self._lines.close()
        if self._echo is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._echo.close, END_LIMIT)
        return stubborn

    async def _wait_idle(self, timeout: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout)

    # ---- their processes -----------------------------------------------------------------

    def _all_ended(self) -> None:
        """The zygote has ended, and with it all ranks, but not what these have started."""
        for pid in self._pids.values():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        for rank in list(self._running):
            self._ended(RankExited(rank=rank, returncode=-signal.SIGKILL, time=time.time(),
                                   cause="the process that starts this node's ranks has ended"))

    def _broke(self, error: BaseException) -> None:
        """No rank's end is heard any more: this node can go no further."""
        if not self.over.done():
            self.over.set_exception(error)

    def _happened(self, answer: OfRank) -> None:
        """Something has happened to the process of a rank."""
        match answer:
            case Spawned():
                self._pids[answer.rank] = answer.pid
                self._lines.expect(answer.rank, answer.pid)
                self._watch(answer.rank)
                if self._look is None:
                    self._look_for_standstills()
            case Exited():
                self._ended(RankExited(rank=answer.rank, returncode=answer.returncode, time=answer.time,
                                       cause=answer.cause))
            case Stopped():
                how = signal.Signals(answer.signal).name
                self._post.news(RankStopped(rank=answer.rank, how=how, time=answer.time))
            case Continued():
                self._post.news(RankResumed(rank=answer.rank, time=answer.time))

    def _watch(self, rank: int) -> None:
        loop = asyncio.get_running_loop()

        def dying(when: float) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody cares any more
                loop.call_soon_threadsafe(self._dying, RankDying(rank=rank, time=when))

        self._deathwatch.watch(self._slots[rank], dying)

    def _dying(self, news: RankDying) -> None:
        if news.rank in self._running:
            self._lines.drain(news.rank)
            self._post.news(news)

    def _look_for_standstills(self) -> None:
        self._gauge.look(self._pids, self._slots)
        if self._speedometer is not None:
            for paced in self._speedometer.look({rank: self._slots[rank] for rank in self._pids}):
                self._tell(paced)
        if self._regulator is not None:
            self._regulator.look()
        if (metered := self._instruments.look(self._pids, self._slots, time.monotonic())) is not None:
            self._tell(metered)
        for rank, pid in self._pids.items():
            how = standstill(pid)
            if how is not None and rank not in self._still:
                self._still.add(rank)
                self._post.news(RankStopped(rank=rank, how=how, time=time.time()))
            elif how is None and rank in self._still:
                self._still.remove(rank)
                self._post.news(RankResumed(rank=rank, time=time.time()))
        self._look = asyncio.get_running_loop().call_later(self._assignment.look_every, self._look_for_standstills)

    def _ended(self, exit_: RankExited) -> None:
        self._running.discard(exit_.rank)
        self._pids.pop(exit_.rank, None)
        self._still.discard(exit_.rank)
        if not self._running:
            self._idle.set()
        self._lines.forget(exit_.rank)
        if self._echo is not None:
            self._echo.ended(exit_.rank)
        self._post.news(exit_)
