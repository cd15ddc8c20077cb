"""Station: one launcher's part in a job: its agent, its line to whoever coordinates, and the coordinator if it is here.

The first node coordinates until training begins. From then on a store says who does (``cluster.leadership``), where
there is one: every node that may stands for it, and who wins takes over (``protocol.takeover``).
"""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import socket
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_elastic.cluster import leadership, seats
from megatron_elastic.cluster.agent import END_LIMIT, Agent, AgentError
from megatron_elastic.cluster.agent import Job as AgentsJob
from megatron_elastic.cluster.coordinator import Coordinator
from megatron_elastic.cluster.exit_signal import ExitSignal
from megatron_elastic.cluster.leadership import Choice, Deposed, Durable, Leader, Member, Place, Store, StoreError
from megatron_elastic.cluster.messages import FromAgent, Heartbeat, Stop
from megatron_elastic.cluster.protocol import Job, Outcome, Settings
from megatron_elastic.cluster.protocol.effects import Record
from megatron_elastic.cluster.protocol.events import Begun, Led, Recorded, TookOver
from megatron_elastic.cluster.recorder import Recorder, Screen
from megatron_elastic.cluster.server import Server
from megatron_elastic.cluster.session import Letter
from megatron_elastic.cluster.uplink import Uplink
from megatron_elastic.cluster.wire import AsyncWire, Credentials, Unsendable, WireError
from megatron_elastic.cluster.wire.address import Address, leave_address, remove_address
from megatron_elastic.config import ElasticConfig
from megatron_elastic.observe.records import RecordsError, read_metrics


@dataclass(frozen=True, slots=True)
class Part:
    """What a node was told of the job. ``port`` 0 means any free one."""

    agent: AgentsJob
    config: ElasticConfig
    credentials: Credentials
    choice: Choice
    """Of the store."""
    port: int
    """Where the first node coordinates, on ``agent.host``."""


class Station:
    """Takes part in a job until that is over for this node.

    Args:
        part: what this node was told.
        exit_signal: learns of the ranks that it is passed on to.
        screen: for lines to people.
        note: prints a line about this node.
    """

    def __init__(self, part: Part, exit_signal: ExitSignal, screen: Screen, note: Callable[[str], None]) -> None:
        self._part = part
        self._config = part.config
        self._exit_signal = exit_signal
        self._screen = screen
        self._note = note
        # Where there is a store, it lets nobody lead who is silent for that long.
        silence = part.config.cut_off if part.choice.kind == "alone" else part.config.heartbeat_timeout
        self._uplink = Uplink(part.config, part.credentials, silence)
        self._server = Server(part.config, part.credentials, screen.say)
        self._agent: Agent | None = None
        self._coordinator: Coordinator | None = None
        self._following: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        """Set when this node begins or ceases to coordinate, or opens another store."""
        self._records: Recorder | None = None
        self._store: asyncio.Future[Store] = asyncio.get_running_loop().create_future()
        """The newest, once training has begun, unless there is none."""
        self._opened: list[Store] = []
        self._listening: socket.socket | None = None
        """Where this node is a member of an embedded store, or could be one."""
        self._term = 0
        """Of the newest coordinator that this node has heard of."""
        self._followed = ""
        """Where the coordinator is that this node has been in touch with last."""
        self._leader = ""
        """Where that one is, if this node has not been in touch with it."""
        self._record: asyncio.Queue[Record] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self) -> Outcome:
        """Take part. Raises CancelledError when this process is to end."""
        outcome = Outcome(False, "interrupted; ending all ranks (interrupt again to kill them at once)")
        try:
            outcome = await self._serve()
        except asyncio.CancelledError:
            pass  # what is left to do is to end in order
        except (AgentError, WireError) as error:
            outcome = Outcome(False, str(error))
        return outcome

    async def end(self, outcome: Outcome) -> None:
        """End this node's ranks, and all else that was begun here."""
        if self._coordinator is not None:
            self._coordinator.end(outcome.ok, outcome.reason)
        if self._agent is not None:
            self._agent.stop(Stop(ok=outcome.ok, reason=outcome.reason))
            if stubborn := await self._agent.end(patient=outcome.ok):
                self._note(f"ranks {sorted(stubborn)} had not ended although the job was over, and were killed")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.close(END_LIMIT + 1)
        for store in self._opened:
            await store.close()
        if self._listening is not None:
            self._listening.close()
        if self._records is not None:
            if self._coordinator is not None:
                remove_address(self._part.agent.run_dir)
            if left := self._records.close(END_LIMIT):
                self._note(f"{left} records could not be written to {self._part.agent.run_dir}")

    # ---- the way of a job -------------------------------------------------------------------

    async def _serve(self) -> Outcome:
        part, config = self._part, self._config
        first = part.agent.node_rank == 0
        if part.choice.kind == "embedded":
            self._listening = leadership.reserve()
        if first:
            self._begin()
            self._agent = await self._prepare()
            assert self._coordinator is not None
            self._uplink.attach(self._coordinator, self._agent)
        else:
            outcome = await self._join()
            if outcome is not None:
                return outcome
        assert self._agent is not None
        agent = self._agent
        while not agent.over.done():
            if self._coordinator is not None:
                await self._first(self._coordinator.outcome, agent.over, self._changed.wait())
                if self._coordinator is not None and self._coordinator.outcome.done():
                    return self._coordinator.outcome.result()
            elif part.choice.kind == "alone" or not agent.members.done():
                return Outcome(False, f"lost the coordinator at {part.agent.host}:{part.port}")
            elif self._leader and self._leader != self._uplink.address:
                leader, self._leader = self._leader, ""
                await self._follow(leader)
            elif not await self._look():
                since = self._uplink.alone_since or time.time()
                if time.time() - since > config.start_timeout:
                    return Outcome(False, f"nobody coordinates for {config.start_timeout:g} s "
                                          "(--elastic-start-timeout); ending this node's ranks")
                self._leader = self._followed  # it may still be there, and has something to say to this node
        return Outcome(agent.over.result().ok, agent.over.result().reason)

    async def _join(self) -> Outcome | None:
        """Another node: come to the first one, and do what it says. An outcome if the job is over with it."""
        part, host, port = self._part, self._part.agent.host, self._part.port
        try:
            wire = await self._uplink.connect(host, port, self._config.start_timeout)
        except TimeoutError as error:
            return Outcome(False, f"{error}; is node 0 started, and its address right?")
        if part.choice.kind != "alone":
            self._listen(wire.local_host)
        if self._listening is not None:
            self._uplink.member = f"{wire.local_host}:{self._listening.getsockname()[1]}"
        try:
            self._agent = await self._prepare()
        except BaseException:
            wire.close()
            raise
        why = await self._follow(f"{host}:{port}", wire)
        if self._agent.over.done() or (part.choice.kind != "alone" and self._agent.members.done()):
            return None
        return Outcome(False, f"lost the coordinator at {host}:{port}: {why}")

    async def _prepare(self) -> Agent:
        agent = self._agent = Agent(self._part.agent, self._tell)
        self._exit_signal.pass_on = agent.kill_all
        ready = await agent.prepare(self._config.start_timeout)
        if ready.threads > 1:
            self._note(f"the imported modules started {ready.threads - 1} threads; forking ranks may hang. "
                       "MEGATRON_ELASTIC_PRELOAD (module names, commas between) chooses what is imported first")
        if self._part.choice.kind != "alone":
            self._tasks.append(asyncio.create_task(self._stand(agent)))
        return agent

    def _tell(self, message: FromAgent) -> None:
        """Tell whoever coordinates what an agent has to say."""
        assert self._agent is not None
        try:
            self._uplink.tell(message)
        except Unsendable as error:
            self._agent.stop(Stop(ok=False, reason=f"this node cannot tell the coordinator what it has to: {error}"))
        if (recorded := self._uplink.recorded) > 0:
            self._agent.obey(Heartbeat(recorded=recorded))

    async def _follow(self, address: str, wire: AsyncWire[Letter] | None = None) -> str:
        """Do what the coordinator at ``address`` says until it is gone, or another is there. Returns why it is gone."""
        agent = self._agent
        assert agent is not None
        self._followed = address
        host, _, port = address.rpartition(":")
        why = "another coordinates"

        async def follow(wire: AsyncWire[Letter] | None) -> None:
            nonlocal why
            try:
                wire = wire or await self._uplink.connect(host, int(port), self._config.heartbeat_timeout)
                why = await self._uplink.follow(wire, host, int(port), agent)
            except (TimeoutError, WireError) as error:
                why = str(error)

        self._following = asyncio.create_task(follow(wire))
        waits: list[asyncio.Future[Any] | Coroutine[Any, Any, Any]] = [self._following, agent.over]
        if self._part.choice.kind != "embedded" or self._listening is not None:
            # Others would have to ask again and again: they look for another when they have lost this one.
            waits.append(self._another(address))
        await self._first(*waits)
        return why

    async def _another(self, address: str) -> Leader:
        """Somebody coordinates who is not at ``address``. Who coordinates there anew has closed its connections."""
        while True:
            store = await asyncio.shield(self._store)
            following = asyncio.ensure_future(store.followed(self._term))
            await self._first(following, self._changed.wait())
            if following.cancelled():
                continue
            leader = following.result()
            self._term = leader.term
            if leader.address != address:
                self._leader = leader.address
                return leader

    async def _look(self) -> bool:
        """Wait until somebody else coordinates. Returns whether somebody does, within some seconds."""
        assert self._agent is not None
        limit = asyncio.ensure_future(asyncio.sleep(2 * self._config.heartbeat_timeout))
        await self._first(self._another(""), limit, self._agent.over, self._changed.wait())
        return limit.cancelled()

    async def _first(self, *waits: asyncio.Future[Any] | Coroutine[Any, Any, Any]) -> None:
        """Wait until one of these is done; tasks among them that are not are cancelled."""
        futures = [asyncio.ensure_future(each) for each in waits]
        try:
            await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        finally:
            tasks = [each for each in futures if isinstance(each, asyncio.Task) and not each.done()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # ---- coordinating ------------------------------------------------------------------------

    def _begin(self) -> None:
        """The first node: coordinate a job that begins. Raises AgentError if the port is in use."""
        part, config = self._part, self._config
        # To a job of one node others can come only if it was started with an address that they can reach.
        local = part.agent.nodes == 1 and part.agent.host == "127.0.0.1"
        port = self._listen(part.agent.host, "127.0.0.1" if local else "0.0.0.0", part.port)
        if self._listening is not None:
            self._uplink.member = f"{part.agent.host}:{self._listening.getsockname()[1]}"
        self._open_records(port)
        job = Job.new(_settings(config), part.agent.world_size)
        self._coordinate(Coordinator(job, self._records, self._screen.say,
                                     None if part.choice.kind == "alone" else self._record.put_nowait))
        self._screen.say(f"{part.agent.world_size} ranks of {part.agent.program.target}, logs in "
                         f"{_shown(part.agent.log_dir)}")
        assert self._coordinator is not None
        self._coordinator.post(Begun(now=time.time(), torch_port=_free_port(), key=secrets.token_bytes(32),
                                     name=secrets.token_hex(8), seats=self._seats()))

    def _listen(self, host: str, interface: str = "0.0.0.0", port: int = 0) -> int:
        """Listen for when this node coordinates. Raises AgentError."""
        try:
            port = self._server.listen(interface, port, self._part.agent.nodes)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise AgentError(f"cannot listen on {interface}:{port}: {error.strerror}") from None
            fix = "choose another --master-port" + (
                ", or leave it out" if self._part.agent.nodes == 1 else " on every node"
            )
            raise AgentError(f"port {port} is in use by another program; {fix}") from None
        self._uplink.address = f"{host}:{port}"
        return port

    def _open_records(self, port: int) -> None:
        if self._config.elastic:
            run_dir = self._part.agent.run_dir
            self._records = self._records or Recorder(run_dir, self._trouble)
            try:
                leave_address(run_dir, Address(self._uplink.address.rpartition(":")[0], port, self._part.credentials))
            except OSError as error:
                self._note(f"cannot write down where the job can be asked: {error}")

    def _trouble(self, what: str, fatal: bool = False) -> None:
        if self._coordinator is not None:
            self._coordinator.trouble(what, fatal)

    def _coordinate(self, coordinator: Coordinator) -> None:
        self._coordinator = self._server.coordinator = coordinator
        asyncio.get_running_loop().set_exception_handler(lambda _, context: coordinator.end(
            False, f"error in the launcher, please report it: {context.get('exception') or context['message']!r}"))

    async def _stand(self, agent: Agent) -> None:
        """Stand for coordinating, from when training has begun to the end of the job."""
        told = await asyncio.shield(agent.members)
        self._term = max(self._term, told.term)
        if self._coordinator is None:
            # So that the first node, which coordinates already, is the first to be asked.
            await asyncio.sleep(self._limit)
        try:
            store = await self._open(told.name, told.addresses)
            if self._part.choice.kind == "embedded" and self._uplink.member not in told.addresses:
                seat = await asyncio.shield(agent.seat)
                store = await self._open(told.name, seat.addresses)
                self._screen.say("this node has a lost member's seat in the store")
        except StoreError as error:
            if self._coordinator is None:
                self._note(f"--elastic-store: {error}; this node cannot coordinate")
            else:
                self._coordinator.trouble(f"--elastic-store: {error}", fatal=True)
            return
        while True:
            term = await store.lead(self._uplink.address)
            if self._coordinator is None:
                self._record = asyncio.Queue()  # what was to be written down before is another coordinator's
            remembering = asyncio.create_task(self._remember(store, term, self._record))
            try:
                if self._coordinator is None:
                    await self._take_over(store, term)
                else:
                    self._coordinator.post(Led(now=time.time(), term=term))
                await self._first(remembering, store.deposed(term), self._keep_seats(store))
            finally:
                remembering.cancel()
                await asyncio.gather(remembering, return_exceptions=True)
            self._step_down()

    async def _open(self, name: str, members: Sequence[str]) -> Store:
        """Open the store of the job with this name, from now on the one that is followed. Raises StoreError."""
        part, place = self._part, None
        if part.choice.kind == "embedded":
            me = self._uplink.member
            place = Place(tuple(members), part.credentials.token, me, self._listening if me in members else None)
        store = leadership.make(part.choice, name, self._limit, place=place)
        self._opened.append(store)
        await store.open()
        if self._store.done():
            self._store = asyncio.get_running_loop().create_future()
        self._store.set_result(store)
        self._change()
        return store

    async def _keep_seats(self, store: Store) -> None:
        if isinstance(store, Member) and self._coordinator is not None:
            await seats.keep(store, self._coordinator, self._seats(), self._limit)
        else:
            await asyncio.get_running_loop().create_future()

    def _seats(self) -> int:
        return leadership.seats(self._part.agent.nodes) if self._part.choice.kind == "embedded" else 0

    @property
    def _limit(self) -> float:
        """Seconds without a leader after which another may lead."""
        return self._config.heartbeat_timeout / 2.5

    async def _take_over(self, store: Store, term: int) -> None:
        assert self._agent is not None
        durable = await store.recall()
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
        port = int(self._uplink.address.rpartition(":")[2])
        self._open_records(port)
        coordinator = Coordinator(Job.new(_settings(self._config), self._part.agent.world_size), self._records,
                                  self._screen.say, self._record.put_nowait)
        coordinator.post(TookOver(now=time.time(), term=term, address=self._uplink.address,
                                  epoch=0 if durable is None else durable.epoch,
                                  written=_written(self._part.agent.run_dir), before=self._followed,
                                  limit=self._patience(), name=self._agent.members.result().name,
                                  members=tuple(store.members()) if isinstance(store, Member) else ()))
        self._coordinate(coordinator)
        self._uplink.attach(coordinator, self._agent)
        self._change()

    def _patience(self) -> float:
        """Seconds that the other nodes have to come: those that are no members of the store look for it less often."""
        few = self._part.agent.nodes <= leadership.seats(self._part.agent.nodes)
        return self._config.suspect_timeout + (0 if few else 2 * self._config.heartbeat_timeout)

    def _step_down(self) -> None:
        if self._coordinator is not None:
            self._coordinator.depose()
            self._coordinator = None
            if self._records is not None:
                self._records.drop()
            self._server.depose()
            self._uplink.detach()
            self._screen.say("this node coordinates no longer")
            self._change()

    def _change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _remember(self, store: Store, term: int, records: asyncio.Queue[Record]) -> None:
        """Write down what a later coordinator must know, the newest of it. Returns when another leads."""
        while True:
            record = await records.get()
            while not records.empty():
                record = records.get_nowait()
            layout = "" if record.layout is None else record.layout.to_json()
            try:
                await store.record(Durable(term, record.epoch, record.step, layout))
            except Deposed:
                return
            except StoreError as error:
                self._trouble(f"--elastic-store: {error}", fatal=True)
                return
            if self._coordinator is not None:
                self._coordinator.post(Recorded(now=time.time(), epoch=record.epoch))


def _settings(config: ElasticConfig) -> Settings:
    return Settings(
        elastic=config.elastic, respawn=config.respawn, replay=config.replay, redo=config.redo,
        on_error=config.on_error, profile=config.profile,
        start_timeout=config.start_timeout, suspect_timeout=config.suspect_timeout,
        report_timeout=config.report_timeout, wait_timeout=config.wait_timeout,
        heartbeat_timeout=config.heartbeat_timeout,
    )  # fmt: skip


def _written(run_dir: Path) -> int:
    """The last step on record in a run directory that all nodes share; -1 if this one has no records."""
    try:
        return max(read_metrics(run_dir), default=-1)
    except RecordsError:
        return -1


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("", 0))
        return int(sock.getsockname()[1])


def _shown(path: Path) -> str:
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
