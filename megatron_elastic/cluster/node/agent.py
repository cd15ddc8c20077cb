"""Agent: starts the ranks of one node through a zygote, passes on what they and the coordinator say to each other, and
tells at once when one ends, is stopped or goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from megatron_elastic.cluster import wire
from megatron_elastic.cluster.launch.output import Console, Echo
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
    Throttled,
    ToAgent,
)
from megatron_elastic.cluster.node.gauge import Gauge
from megatron_elastic.cluster.node.instruments import Instruments
from megatron_elastic.cluster.node.line import AGENT_VARIABLE, FIRST_HOST_VARIABLE, Lines
from megatron_elastic.cluster.node.relay import Post
from megatron_elastic.cluster.node.speedometer import Speedometer
from megatron_elastic.cluster.node.stack import save_stack
from megatron_elastic.cluster.node.standstill import standstill
from megatron_elastic.cluster.program import Program
from megatron_elastic.cluster.rank import zygote
from megatron_elastic.cluster.rank.deathwatch import Deathwatch
from megatron_elastic.cluster.rank.zygote import (
    Broken,
    Continued,
    Exited,
    Kill,
    Ready,
    Spawn,
    Spawned,
    Stopped,
)
from megatron_elastic.power.devices import Place
from megatron_elastic.power.regulator import Regulator

END_LIMIT = 10.0
"""Seconds that ranks of a failed job usually have to end, before they are killed, and that the zygote has."""
_PATIENCE = 1.0
"""Seconds that ranks of a failed job have to end by themselves, before they get SIGTERM."""

_Answer = Ready | Broken | Spawned | Exited | Stopped | Continued
_answers: msgspec.msgpack.Decoder[_Answer] = msgspec.msgpack.Decoder(_Answer)


class AgentError(Exception):
    """This node's ranks cannot be started."""


@dataclass(frozen=True, slots=True)
class Job:
    """What this node runs and where."""

    program: Program
    nodes: int
    node_rank: int
    ranks_per_node: int
    run_dir: Path
    host: str
    """Address of the first node, as every rank can reach it: MASTER_ADDR."""
    heartbeat_timeout: float
    grace: float
    """Seconds that ranks have to end once the job is over, before they are killed."""
    look_every: float
    """Seconds between two looks for ranks that are at a standstill which no signal caused."""
    elastic: bool = False
    """Whether others train on without its ranks."""
    tells_paces: bool = False
    """Whether the coordinator is told how fast ranks are."""
    spares: int = 0
    """Of the ranks of all nodes, the last ones: they join when they are needed."""
    actuator: str | None = None
    """What sets clocks, if they are planned."""
    console: Console = field(default_factory=Console)
    """What is shown of what ranks print."""
    name: str = "none"
    """torchrun's run id."""
    end_limit: float = END_LIMIT
    """Seconds that ranks of a failed job have to end, before they are killed."""

    @property
    def world_size(self) -> int:
        """Ranks that the job begins with."""
        return self.nodes * self.ranks_per_node - self.spares

    @property
    def ranks(self) -> list[int]:
        """Global ids of this node's first ranks."""
        first = self.node_rank * self.ranks_per_node
        return list(range(first, first + self.ranks_per_node))

    @property
    def log_dir(self) -> Path:
        """Where each rank's output goes."""
        return self.run_dir / "logs"

    def log(self, rank: int) -> Path:
        """Output of one rank."""
        return self.log_dir / f"rank{rank}.log"

    def errors(self, rank: int, local_rank: int) -> Path:
        """Where its stderr goes."""
        return self.log_dir / f"rank{rank}.err.log" if self.console.splits(local_rank) else self.log(rank)

    def stack(self, rank: int) -> Path:
        """Where is written down what a rank did that hung."""
        return self.run_dir / "stacks" / f"rank{rank}.txt"

    def environment(self, rank: int, local_rank: int, torch_port: int) -> dict[str, str]:
        """What a rank finds in its environment besides the launcher's; the names are torchrun's."""
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.ranks_per_node),
            "GROUP_RANK": str(self.node_rank),
            "GROUP_WORLD_SIZE": str(self.nodes),
            "ROLE_NAME": self.console.role,
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": str(self.world_size),
            "TORCHELASTIC_RUN_ID": self.name,
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "MASTER_ADDR": self.host,
            "MASTER_PORT": str(torch_port),
            "CUDA_DEVICE_MAX_CONNECTIONS": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "1"),
            "MEGATRON_ELASTIC_RUN_DIR": str(self.run_dir),
        }


class Agent:
    """One node's ranks.

    Args:
        job: what to run.
        tell: tells the coordinator what ranks say and what happens to their processes. Each end is told once, after
            all that the rank said.
    """

    def __init__(self, job: Job, tell: Callable[[FromAgent], object]) -> None:
        self.job = job
        self.over: asyncio.Future[Stop] = asyncio.get_running_loop().create_future()
        """How the job ended for this node, when the coordinator has said so."""
        self.members: asyncio.Future[Members] = asyncio.get_running_loop().create_future()
        """Where the store is, once training has begun."""
        self.seat: asyncio.Future[Seat] = asyncio.get_running_loop().create_future()
        """This node's place in an embedded store, if it was given one later on."""
        self._lines = Lines(self._heard, self._closed)
        self._tell = tell
        self._loop = asyncio.get_running_loop()
        self._post = Post(self._lines.send, tell, asyncio.get_running_loop().call_later)
        self._deathwatch = Deathwatch(job.ranks_per_node)
        self._gauge = Gauge(job.ranks_per_node, job.look_every)
        self._speedometer = Speedometer(self._gauge.odometers) if job.tells_paces else None
        self._instruments = Instruments(self._gauge.odometers)
        self._echo = Echo(job.console) if job.console.streams else None
        self._regulator = None if job.actuator is None else Regulator(
            job.actuator, job.run_dir, self._warn, hot=self._throttled)
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._import_limit = 0.0
        self._ready = False
        """Whether the zygote is there and has imported everything."""
        self._requests: list[Spawn | Kill] = []
        """What waits for it."""
        self._wanted = asyncio.Event()
        """Whether anything does."""
        self._tender: asyncio.Task[None] | None = None
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
        """Start the zygote and wait until it has imported everything. Raises AgentError.

        Another takes the place of one that ends, when ranks are to be started, and has as many seconds.
        """
        self.job.log_dir.mkdir(parents=True, exist_ok=True)
        self._import_limit = timeout
        ready = await self._start_zygote()
        self._tender = asyncio.create_task(self._tend())
        return ready

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
            session=session, node_rank=self.job.node_rank, slots=self.job.ranks_per_node, host=socket.gethostname(),
            heartbeat_timeout=self.job.heartbeat_timeout, address=address, member=member,
            running=self._post.running(running), leaving=self.leaving, broken=sorted(self._broken),
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
            case Fence():
                self._fence(message)
            case Inspect():
                self._tell(Inspected(readings=self._gauge.readings(self._pids, self._slots), usual=self._gauge.usual))
            case SetClocks():
                if self._regulator is not None:
                    places = [Place(rank, self._slots[rank], pid) for rank, pid in self._pids.items()]
                    self._regulator.set(message.clocks, places)
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
        AgentError.
        """
        await self._wait_idle(_PATIENCE)
        self.kill_all()
        await self._wait_idle(END_LIMIT)
        if self._running:
            raise AgentError(f"ranks {sorted(self._running)} do not end")
        if self._regulator is not None:
            self._regulator.set({}, [])
        self.over = asyncio.get_running_loop().create_future()
        self._post = Post(self._lines.send, self._tell, asyncio.get_running_loop().call_later)
        self._slots.clear()
        self._torch_port = 0

    def _launch(self, message: Launch) -> None:
        job = self.job
        if message.world_size != job.world_size:
            self.stop(Stop(ok=False, reason=f"node 0 runs {message.world_size} ranks, this node was told "
                                            f"{job.world_size}; give every node the same --nnodes and "
                                            "--nproc-per-node"))
            return
        self._torch_port = message.torch_port
        self._start(message.ranks, message.first_host)

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

    def _start(self, ranks: Mapping[int, int], first_host: int) -> None:
        for local_rank, rank in ranks.items():
            self._running.add(rank)
            self._slots[rank] = local_rank
            self._idle.clear()
            self._gauge.odometers.begin(local_rank)
            environment = self.job.environment(rank, local_rank, self._torch_port) | {
                AGENT_VARIABLE: self._lines.name, FIRST_HOST_VARIABLE: str(first_host or self.job.ranks_per_node),
                **self._gauge.odometers.environment(local_rank)}
            log, errors = self.job.log(rank), self.job.errors(rank, local_rank)
            if self._echo is not None:
                self._echo.follow(local_rank, rank, log, errors)
            self._send(Spawn(rank, environment, str(log), str(errors), self.job.program, self._ignored()))

    def _ignored(self) -> tuple[int, ...]:
        """Signals that are not for ranks, though a scheduler may send them to all processes of a step or a pod."""
        hangup = (signal.SIGHUP,) if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else ()
        return (*hangup, signal.SIGTERM) if self.job.elastic else hangup

    def _fence(self, message: Fence) -> None:
        if message.device and message.rank in self._slots:
            self._broken.add(self._slots[message.rank])
        pid = self._pids.get(message.rank)
        if message.stack and pid is not None:
            saving = asyncio.ensure_future(save_stack(pid, self.job.stack(message.rank)))
            self._saving.add(saving)
            saving.add_done_callback(self._saving.discard)
            saving.add_done_callback(lambda _: self.kill(message.rank))
        else:
            self.kill(message.rank)

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to one rank and whatever it started."""
        self._send(Kill(rank, number))

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
            await self._wait_idle(self.job.grace if patient else _PATIENCE)
            if not patient and self._running:
                self.kill_all(signal.SIGTERM)
                await self._wait_idle(max(0.0, self.job.end_limit - _PATIENCE))
        stubborn = set(self._running)
        if self._look is not None:
            self._look.cancel()
        self._ready = False
        if self._tender is not None:
            self._tender.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._tender
        await self._end_zygote()
        if self._regulator is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._regulator.close)
        self._lines.close()
        if self._echo is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._echo.close, END_LIMIT)
        return stubborn

    async def _wait_idle(self, timeout: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout)

    # ---- the zygote ----------------------------------------------------------------------

    async def _start_zygote(self) -> Ready:
        """Start one, if there is none, and wait until it has imported everything. Raises AgentError."""
        log = self.job.log_dir / f"zygote{self.job.node_rank}.log"
        env = {
            **os.environ,
            # Torch reads these when it is imported; ranks that share a machine must not all use every core.
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            # Counting devices must not initialise CUDA before the fork.
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        }
        env.pop(wire.TOKEN_VARIABLE, None)  # ranks have no use for it
        try:
            ours, theirs = socket.socketpair()
            with theirs, log.open("ab") as output:
                self._reader, self._writer = await asyncio.open_unix_connection(sock=ours)
                self._process = zygote.start(theirs, self._deathwatch, self.job.program.directory, output, env)
        except OSError as error:
            raise AgentError(f"the process that starts the ranks cannot be started: {error}") from None
        try:
            answer = await asyncio.wait_for(self._receive(), self._import_limit)
        except TimeoutError:
            raise AgentError(f"importing the modules that ranks need took longer than {self._import_limit:g} s "
                             f"(--elastic-start-timeout); see {log}") from None
        if isinstance(answer, Broken):
            raise AgentError(f"cannot import {answer.module}, which ranks need:\n{answer.traceback}")
        if not isinstance(answer, Ready):
            raise AgentError(f"the process that starts the ranks ended while importing; see {log}")
        self._ready = True
        return answer

    async def _tend(self) -> None:
        """Hear what the zygote says, and replace one that has ended as soon as there is anything to start."""
        while True:
            await self._listen()
            self._ready = False
            self._all_ended()
            while not self._ready:
                await self._wanted.wait()
                await self._end_zygote()
                try:
                    await self._start_zygote()
                except AgentError as error:
                    self._not_started(str(error).partition("\n")[0])
            for request in self._taken():
                self._send(request)

    def _all_ended(self) -> None:
        """The zygote has ended, and with it all ranks, but not what these have started."""
        for pid in self._pids.values():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        for rank in list(self._running):
            self._ended(RankExited(rank=rank, returncode=-signal.SIGKILL, time=time.time(),
                                   cause="the process that starts this node's ranks has ended"))

    def _not_started(self, cause: str) -> None:
        """No rank that waits for a zygote can be started. Whether to try again is the coordinator's to say."""
        for request in self._taken():
            if isinstance(request, Spawn):
                self._ended(RankExited(rank=request.rank, returncode=-signal.SIGKILL, time=time.time(), cause=cause))

    def _taken(self) -> list[Spawn | Kill]:
        """What has waited for the zygote."""
        requests, self._requests = self._requests, []
        self._wanted.clear()
        return requests

    def _send(self, request: Spawn | Kill) -> None:
        if self._ready:
            assert self._writer is not None
            self._writer.write(wire.encode(request))
        elif isinstance(request, Spawn) or self._requests:
            self._requests.append(request)
            self._wanted.set()

    async def _receive(self) -> _Answer | None:
        assert self._reader is not None
        with contextlib.suppress(wire.WireError):  # what speaks no sense is no better than one that has ended
            if (payload := await wire.read_frame(self._reader)) is not None:
                return wire.decode(payload, _answers)
        return None

    async def _listen(self) -> None:
        """Until it ends."""
        while (answer := await self._receive()) is not None:
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

    async def _end_zygote(self) -> None:
        """Let it end, if it has not; it kills and reaps what is left first."""
        if self._writer is not None:
            self._writer.close()
        if self._process is None:
            return
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        pidfd = os.pidfd_open(self._process.pid)
        loop.add_reader(pidfd, ended.set)
        try:
            await asyncio.wait_for(ended.wait(), END_LIMIT)
        except TimeoutError:
            self._process.kill()
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)
        self._process.wait()
        self._process = None

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
        self._look = asyncio.get_running_loop().call_later(self.job.look_every, self._look_for_standstills)

    def _ended(self, exit_: RankExited) -> None:
        self._running.discard(exit_.rank)
        self._pids.pop(exit_.rank, None)
        self._still.discard(exit_.rank)
        if not self._running:
            self._idle.set()
        self._lines.forget(exit_.rank)
        self._post.news(exit_)
