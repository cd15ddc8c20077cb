"""Office: coordinating, as far as this node does or may.

The first node coordinates until training begins. From then on a store says who does (``cluster.leadership``), where
there is one: every node that may stands for it, and who wins takes over (``protocol.takeover``).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import secrets
import socket
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_elastic.cluster import leadership
from megatron_elastic.cluster.brief import Brief
from megatron_elastic.cluster.coordination import seats
from megatron_elastic.cluster.coordination.coordinator import Coordinator
from megatron_elastic.cluster.coordination.race import race
from megatron_elastic.cluster.coordination.server import Server
from megatron_elastic.cluster.launch.rendezvous import every_interface
from megatron_elastic.cluster.leadership import Deposed, Durable, Member, Place, Store, StoreError
from megatron_elastic.cluster.node.agent import Agent
from megatron_elastic.cluster.node.assignment import END_LIMIT
from megatron_elastic.cluster.node.keeper import CannotStart
from megatron_elastic.cluster.node.uplink import Uplink
from megatron_elastic.cluster.protocol import Job, Settings
from megatron_elastic.cluster.protocol.changes import drain
from megatron_elastic.cluster.protocol.effects import Record
from megatron_elastic.cluster.protocol.events import Begun, Led, Recorded, TookOver
from megatron_elastic.cluster.recording.board import Board, folder_of
from megatron_elastic.cluster.recording.curves import Curves
from megatron_elastic.cluster.recording.recorder import Recorder, Watcher
from megatron_elastic.cluster.recording.screen import Screen
from megatron_elastic.cluster.recording.spans import Spans
from megatron_elastic.cluster.recording.weights_and_biases import WeightsAndBiases, project_of
from megatron_elastic.cluster.title import entitle
from megatron_elastic.cluster.wire.address import Address
from megatron_elastic.config import ElasticConfig
from megatron_elastic.observe.records import newest_step

if TYPE_CHECKING:
    from megatron_elastic.observe.metrics import Metrics


class Office:
    """One node's.

    Args:
        brief: what this node was told.
        uplink: this node's line to whoever coordinates; learns where this node listens.
        screen: for lines to people.
        note: prints a line about this node.
        let_go: ends what this node does for the coordinator that it has been in touch with last; returns where that
            one is, or was.
    """

    def __init__(self, brief: Brief, uplink: Uplink, screen: Screen, note: Callable[[str], None],
                 let_go: Callable[[], Awaitable[str]]) -> None:
        self.coordinator: Coordinator | None = None
        """While this node coordinates."""
        self.store: asyncio.Future[Store] = asyncio.get_running_loop().create_future()
        """The newest, once training has begun, unless there is none."""
        self._brief = brief
        self._config = brief.config
        self._uplink = uplink
        self._screen = screen
        self._note = note
        self._let_go = let_go
        self._server = Server(brief.config, brief.credentials, brief.assignment.run_dir, screen.say)
        self._changed = asyncio.Event()
        """Set when this node begins or ceases to coordinate, or opens another store."""
        self._records: Recorder | None = None
        self._metrics: Metrics | None = None
        self._curves: list[Curves] = []
        self._spans: Spans | None = None
        self._record: asyncio.Queue[Record] = asyncio.Queue()
        self._opened: list[Store] = []
        self._listening: socket.socket | None = None
        """Where this node is a member of an embedded store, or could be one."""
        self._standing: asyncio.Task[None] | None = None
        self._resigning = asyncio.Event()
        """Set when another is to coordinate, because this node's ranks leave."""
        self._entitle("agent")

    def change(self) -> Coroutine[Any, Any, Any]:
        """Wait until this node begins or ceases to coordinate, or opens another store."""
        return self._changed.wait()

    def hears(self, store: Store) -> bool:
        """Whether a store tells this node who leads, or is made to be asked. An observer of an embedded one is not."""
        return self._brief.choice.kind != "embedded" or isinstance(store, Member)

    async def close(self) -> None:
        """End all that was begun here."""
        if self._standing is not None:
            self._standing.cancel()
            await asyncio.gather(self._standing, return_exceptions=True)
        await self._server.close(END_LIMIT + 1)
        for store in self._opened:
            await store.close()
        if self._listening is not None:
            self._listening.close()
        if self._records is not None:
            if self.coordinator is not None:
                self._records.tell_where(None)
            if self._metrics is not None:
                self._metrics.close()
            if left := self._records.close(END_LIMIT):
                self._note(f"{left} records could not be written to {self._brief.assignment.run_dir}")
        for curves in self._curves:
            curves.close(END_LIMIT)
        if self._spans is not None:
            self._spans.close(END_LIMIT)

    # ---- at the beginning --------------------------------------------------------------------

    def begin(self) -> Coordinator:
        """The first node: coordinate a job that begins. Raises CannotStart if the port is in use."""
        brief, config = self._brief, self._config
        # To a job of one node others can come only if it was started with an address that they can reach.
        local = brief.assignment.nodes == 1 and brief.assignment.host in ("127.0.0.1", "localhost")
        self.listen(brief.assignment.host, "127.0.0.1" if local else every_interface(brief.assignment.host), brief.port)
        self._open_records()
        job = Job.new(_settings(config), brief.assignment.world_size)
        coordinator = Coordinator(job, self._records, self._screen.say,
                                  None if brief.choice.kind == "alone" else self._record.put_nowait)
        self._coordinate(coordinator)
        self._screen.say(f"{brief.assignment.world_size} ranks of {brief.assignment.program.target}, logs in "
                         f"{_shown(brief.assignment.log_dir)}")
        if (last := brief.assignment.nodes - 1) > 0:
            others = "node 1" if last == 1 else f"nodes 1 to {last}"
            self._screen.say(f"waiting at {self._uplink.address} for {others} of {last + 1}")
        coordinator.post(Begun(now=time.time(), torch_port=_free_port(), key=secrets.token_bytes(32),
                               name=secrets.token_hex(8), seats=self._seats()))
        return coordinator

    def listen(self, host: str, interface: str = "", port: int = 0) -> None:
        """Listen for when this node coordinates, or is a member of an embedded store. Raises CannotStart.

        Args:
            host: this node's address, as others can reach it.
            interface: where to listen for agents and people, everywhere if empty; with port 0, on any free one.
        """
        interface = interface or every_interface(host)
        try:
            port = self._server.listen(interface, port, self._brief.assignment.nodes)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise CannotStart(f"cannot listen on {interface}:{port}: {error.strerror}") from None
            fix = "choose another --master-port" + (
                ", or leave it out" if self._brief.assignment.nodes == 1 else " on every node"
            )
            raise CannotStart(f"port {port} is in use by another program; {fix}") from None
        self._uplink.address = f"{host}:{port}"
        if self._brief.choice.kind == "embedded":
            self._listening = leadership.reserve(every_interface(host))
            self._uplink.member = f"{host}:{self._listening.getsockname()[1]}"

    def _open_records(self) -> None:
        if self._config.elastic:
            run_dir = self._brief.assignment.run_dir
            self._serve_metrics()
            self._records = self._records or Recorder(run_dir, self._trouble, self._watchers())
            host, _, port = self._uplink.address.rpartition(":")
            self._records.tell_where(Address(host, int(port), self._brief.credentials))

    def _watchers(self) -> list[Watcher]:
        """Who wants to know what is written down."""
        watchers: list[Watcher] = [] if self._metrics is None else [self._metrics]
        if self._screen.as_json:
            self._screen.watch()
            watchers.append(self._screen)
        arguments, run_dir = self._brief.assignment.program.arguments, self._brief.assignment.run_dir
        if (folder := folder_of(arguments)) is not None:
            self._curves.append(Board(folder, self._note))
        if (project := project_of(arguments, run_dir, self._note)) is not None:
            self._curves.append(WeightsAndBiases(project, run_dir.name, self._note))
        watchers += self._curves
        self._spans = Spans.wanted(run_dir.name, self._note)
        if self._spans is not None:
            watchers.append(self._spans)
        return watchers

    def _serve_metrics(self) -> None:
        port = self._config.metrics_port
        if not port:
            return
        if self._metrics is None:
            from megatron_elastic.observe.metrics import Metrics  # only who asks for them needs it

            self._metrics = Metrics(self._brief.assignment.run_dir.name)
        try:
            self._metrics.serve(port)
        except OSError as error:
            self._note(f"--elastic-metrics-port {port}: {error.strerror}; nobody can read metrics from this node")

    def _trouble(self, what: str, fatal: bool = False) -> None:
        if self.coordinator is not None:
            self.coordinator.trouble(what, fatal)

    def _coordinate(self, coordinator: Coordinator) -> None:
        self.coordinator = self._server.coordinator = coordinator
        self._entitle("coordinator")
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: coordinator.defect(_stray(context)))

    def _entitle(self, what: str) -> None:
        entitle(f"run (node {self._brief.assignment.node_rank}, {what})", self._brief.assignment.program.target)

    # ---- terms -------------------------------------------------------------------------------

    def stand(self, agent: Agent) -> None:
        """Stand for coordinating, from when training has begun to the end of the job."""
        self._standing = asyncio.create_task(self._stand(agent))
        self._standing.add_done_callback(self._stood)

    def _stood(self, standing: asyncio.Task[None]) -> None:
        if standing.cancelled() or (error := standing.exception()) is None:
            return
        if self.coordinator is not None:
            self.coordinator.trouble(_defect(error), fatal=True)
        else:
            self._note(f"{_defect(error)}; this node cannot coordinate any more")

    async def _stand(self, agent: Agent) -> None:
        told = await asyncio.shield(agent.members)
        if self.coordinator is None:
            # So that the first node, which coordinates already, is the first to be asked.
            await asyncio.sleep(self._limit)
        try:
            store = await self._open(told.name, told.addresses)
            if self._brief.choice.kind == "embedded" and self._uplink.member not in told.addresses:
                seat = await asyncio.shield(agent.seat)
                store = await self._open(told.name, seat.addresses)
                self._screen.say("this node has a lost member's seat in the store")
        except StoreError as error:
            if self.coordinator is None:
                self._note(f"--elastic-store: {error}; this node cannot coordinate")
            else:
                self.coordinator.trouble(f"--elastic-store: {error}", fatal=True)
            return
        while True:
            try:
                term = await store.lead(self._uplink.address)
            except StoreError as error:
                if self.coordinator is not None:  # nobody has led yet: it was never set up so that anybody can
                    self.coordinator.trouble(f"--elastic-store: {error}", fatal=True)
                    return
                self._note(f"--elastic-store: {error}; this node cannot coordinate now, and tries again")
                await asyncio.sleep(self._limit)
                continue
            if self.coordinator is None:
                self._record = asyncio.Queue()  # what was to be written down before is another coordinator's
            remembering = asyncio.create_task(self._remember(store, term, self._record))
            try:
                if self.coordinator is None:
                    await self._take_over(store, term, agent)
                else:
                    self.coordinator.post(Led(now=time.time(), term=term))
                with contextlib.suppress(StoreError):  # a store that refuses to say lets nobody be sure to lead
                    await race(remembering, store.deposed(term), self._keep_seats(store), self._resigning.wait())
            finally:
                remembering.cancel()
                await asyncio.gather(remembering, return_exceptions=True)
            if self._resigning.is_set() and await self._withdraw(store, told.name):
                return
            self._step_down()

    def resign(self) -> bool:
        """Let another node coordinate, so that this one's ranks can leave. Returns whether one will."""
        stands = self._standing is not None and not self._standing.done()
        if self.coordinator is None or not stands or not drain.can_resign(self.coordinator.job):
            return False
        self._resigning.set()
        return True

    async def _withdraw(self, store: Store, name: str) -> bool:
        """Only look on at the store from now on, and give back the lead at once, so that nobody waits for its end."""
        assert self.coordinator is not None
        try:
            await self._open(name, self.coordinator.job.members, looks_on=True)
        except StoreError as error:
            self._note(f"--elastic-store: {error}; this node cannot leave")
            self._resigning.clear()
            return False
        self.coordinator.depose()
        self._opened.remove(store)
        await store.close()
        self._step_down()
        return True

    async def _open(self, name: str, members: Sequence[str], looks_on: bool = False) -> Store:
        """Open the store of the job with this name, from now on the one that is followed. Raises StoreError.

        ``looks_on``: without being a member of an embedded one.
        """
        brief, place = self._brief, None
        if brief.choice.kind == "embedded":
            me = "" if looks_on else self._uplink.member
            place = Place(tuple(members), brief.credentials.token, me, self._listening if me in members else None)
        store = leadership.make(brief.choice, name, self._limit, place=place, note=self._note)
        self._opened.append(store)
        await store.open()
        if self.store.done():
            self.store = asyncio.get_running_loop().create_future()
        self.store.set_result(store)
        self._change()
        return store

    async def _keep_seats(self, store: Store) -> None:
        if isinstance(store, Member) and self.coordinator is not None:
            await seats.keep(store, self.coordinator, self._seats(), self._limit)
        else:
            await asyncio.get_running_loop().create_future()

    def _seats(self) -> int:
        return leadership.seats(self._brief.assignment.nodes) if self._brief.choice.kind == "embedded" else 0

    @property
    def _limit(self) -> float:
        """Seconds without a leader after which another may lead."""
        return self._config.heartbeat_timeout / 2.5

    async def _take_over(self, store: Store, term: int, agent: Agent) -> None:
        durable = await store.recall()
        # In a thread: the lease is renewed meanwhile, and the disk may be shared, and slow.
        written = await asyncio.to_thread(newest_step, self._brief.assignment.run_dir)
        before = await self._let_go()
        self._open_records()
        coordinator = Coordinator(Job.new(_settings(self._config), self._brief.assignment.world_size), self._records,
                                  self._screen.say, self._record.put_nowait)
        coordinator.post(TookOver(now=time.time(), term=term, address=self._uplink.address,
                                  epoch=0 if durable is None else durable.epoch,
                                  written=written, before=before,
                                  limit=self._patience(), name=agent.members.result().name,
                                  members=tuple(store.members()) if isinstance(store, Member) else ()))
        self._coordinate(coordinator)
        self._uplink.attach(coordinator, agent)
        self._change()

    def _patience(self) -> float:
        """Seconds that the other nodes have to come: those that are no members of the store look for it less often."""
        few = self._brief.assignment.nodes <= leadership.seats(self._brief.assignment.nodes)
        return self._config.suspect_timeout + (0 if few else 2 * self._config.heartbeat_timeout)

    def _step_down(self) -> None:
        if self.coordinator is not None:
            self.coordinator.depose()
            self.coordinator = None
            asyncio.get_running_loop().set_exception_handler(None)
            if self._records is not None:
                self._records.drop()
            if self._metrics is not None:
                self._metrics.close()
            self._server.depose()
            self._uplink.detach()
            self._entitle("agent")
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
            try:
                await store.record(Durable(term, record.epoch, record.step))
            except Deposed:
                return
            if self.coordinator is not None:
                self.coordinator.post(Recorded(now=time.time(), epoch=record.epoch))


def _settings(config: ElasticConfig) -> Settings:
    return Settings(
        elastic=config.elastic, respawn=config.respawn, spares=config.spares, replay=config.replay, redo=config.redo,
        on_error=config.on_error, slow=config.slow or "share",
        profile_file=config.profile_file, policy=config.policy, schedule=config.schedule, dvfs=config.dvfs,
        places=config.placement == "search",
        start_timeout=config.start_timeout, suspect_timeout=config.suspect_timeout,
        report_timeout=config.report_timeout, wait_timeout=config.wait_timeout,
        heartbeat_timeout=config.heartbeat_timeout, hang_timeout=config.hang_timeout,
    )  # fmt: skip


def _defect(what: object) -> str:
    return f"error in the launcher, please report it: {what!r}"


def _stray(context: Mapping[str, Any]) -> str:
    """What a callback or a task has raised that nobody waits for, as asyncio tells of it."""
    error = context.get("exception")
    return context["message"] if error is None else "".join(traceback.format_exception(error))


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("", 0))
        return int(sock.getsockname()[1])


def _shown(path: Path) -> str:
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
