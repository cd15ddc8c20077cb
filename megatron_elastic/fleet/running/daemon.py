"""Daemon: looks at jobs and devices, asks the policy, and acts, again and again. Jobs go on without it.

It decides by the same ``Policy.decide`` as the simulation. Nothing that it waits for holds it up: jobs are asked in
threads, a manager's answers have limits, and what takes steps of a job is looked at again in the next turn.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megatron_elastic.cluster.asking.ask import NoAnswer, NoJob, answer_to
from megatron_elastic.cluster.messages import Answer, Drain
from megatron_elastic.fleet.controller import Controller
from megatron_elastic.fleet.job import Job
from megatron_elastic.fleet.managers.manager import Manager, ManagerError, Pool, Standing
from megatron_elastic.fleet.observation import Observation, Overhead, Resize
from megatron_elastic.fleet.policies import LIVE
from megatron_elastic.fleet.policies.fifo import fifo
from megatron_elastic.fleet.running import submission as submissions
from megatron_elastic.fleet.running.journal import Entry, Fleet, Journal, Node, Phase
from megatron_elastic.fleet.running.submission import SubmissionError
from megatron_elastic.fleet.running.ward import Ward
from megatron_elastic.fleet.speed_table import SpeedTable
from megatron_elastic.observe.records import RecordsError

POLICIES = ("elastic", "fifo")
_REMEMBERED = 20
"""Growths and starts whose median says how long one takes."""
_PATIENCE_S = 2.0
"""Between two times that a job is asked for the same, which it has refused."""


class Daemon:
    """The fleet whose ``journal`` this is, on a manager's devices.

    Args:
        policy: one of ``POLICIES``.
        limit: seconds that a node may take to join, to leave, and to end, before it is said so.
        say: takes lines for people.

    Raises JournalError if the journal cannot be read.
    """

    def __init__(
        self, journal: Journal, manager: Manager, policy: str, limit: float, say: Callable[[str], None]
    ) -> None:
        self._journal, self._manager, self._limit, self._say = journal, manager, limit, say
        self._policy = policy
        self._fleet = journal.read_fleet() or Fleet(0, policy, manager.kind, 0, time.time())
        self._fleet.policy, self._fleet.manager, self._fleet.pid = policy, manager.kind, os.getpid()
        self._began = max(self._fleet.now, time.time()) - time.monotonic()
        """The time of day goes on from there, whatever becomes of this machine's clock: limits go by it."""
        self._wards: dict[str, Ward] = {}
        self._seen: set[str] = set()
        self._asked: dict[str, tuple[list[int], Future[Answer]]] = {}
        """Of a job: which nodes it was asked to let go, and its answer."""
        self._one_by_one: set[str] = set()
        """Jobs that could not let all nodes go together that they were asked for."""
        self._refused: dict[tuple[str, int], float] = {}
        self._threads = ThreadPoolExecutor(max_workers=16, thread_name_prefix="ask")
        self._deaf: str | None = None
        self._arrived: list[int] = []
        self._ended = 0
        self._looked = False
        """Whether the turn before this one looked at all: else nobody knows since when things are as they are."""
        self._journal.tell("began", policy=policy, manager=manager.kind, pid=os.getpid())

    @property
    def idle(self) -> bool:
        """Whether nobody waits, and nobody has devices."""
        return not any(ward.entry.nodes or not ward.entry.over for ward in self._wards.values())

    def turn(self) -> None:
        """Look once, decide, and act. Raises OSError where the journal cannot be written: nothing is done unwritten."""
        now = self._fleet.now = self._began + time.monotonic()
        self._take_in()
        for ward in self._wards.values():
            self._read(ward)
        pool = self._look()
        if pool is not None:
            self._fleet.total = pool.total
            for ward in list(self._wards.values()):
                self._follow(ward, pool, now)
            self._decide(pool, now)
            for ward in self._wards.values():
                self._press(ward, now)
        self._looked = pool is not None
        self._journal.keep(self._fleet)

    def close(self) -> None:
        """Ask nobody any more."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    # ---- what there is ---------------------------------------------------------------------------

    def _take_in(self) -> None:
        """Jobs that were submitted since, in that order, and, in the first turn, those that are known."""
        fresh: list[submissions.Submission] = []
        names = self._journal.names()
        for name in self._wards.keys() - {*names}:
            del self._wards[name]
            self._seen.discard(name)
            self._say(f"{name}: its folder is gone, so nobody looks after it any more")
        for name in names:
            if name in self._seen:
                continue
            entry = self._journal.read_entry(name)
            if entry is None:
                try:
                    fresh.append(submissions.read(self._journal.job(name)))
                    continue
                except SubmissionError as error:
                    self._refuse(Entry(name, self._index()), str(error))
            elif entry.nodes or not entry.over:
                self._wards[name] = Ward(entry, self._journal.job(name))
            self._seen.add(name)
        for asked in sorted(fresh, key=lambda asked: (asked.submitted, asked.name)):
            ward = Ward(Entry(asked.name, self._index(), asked), self._journal.job(asked.name))
            self._journal.keep(ward.entry)
            self._seen.add(asked.name)
            self._wards[asked.name] = ward
            self._arrived.append(asked.devices)
            self._tell("submitted", ward, devices=asked.devices, max_devices=asked.max_devices)

    def _index(self) -> int:
        self._fleet.next_index += 1
        self._journal.keep(self._fleet)
        return self._fleet.next_index

    def _refuse(self, entry: Entry, reason: str) -> None:
        entry.phase, entry.reason, entry.ended = "refused", reason, self._fleet.now
        self._journal.keep(entry)
        self._journal.tell("refused", job=entry.name, reason=reason)
        self._say(f"{entry.name}: refused: {reason}")

    def _read(self, ward: Ward) -> None:
        """Read a running job's records on."""
        if ward.entry.phase != "running" or not ward.submission.elastic:
            return
        steps = ward.progress.steps
        try:
            ward.progress.refresh()
            ward.known, ward.unreadable = True, ""
        except RecordsError as error:
            if str(error) != ward.unreadable:
                self._say(f"{ward.name}: its records cannot be read, so it stays as it is: {error}")
            ward.known, ward.unreadable = False, str(error)
        begun = self._looked and not steps and ward.progress.steps and not ward.entry.changes
        if begun and (runs := next((node.runs for node in ward.entry.nodes if not node.rank), None)) is not None:
            _remember(self._fleet.starts, self._fleet.now - runs)

    def _look(self) -> Pool | None:
        """What the manager says; None if it does not: then nothing is decided, and jobs go on."""
        launches = [ward.launch(node) for ward in self._wards.values() for node in ward.entry.nodes]
        try:
            pool = self._manager.look(launches)
            if missing := [launch.name for launch in launches if launch.name not in pool.standings]:
                raise ManagerError(f"it says nothing of {', '.join(missing)}")
        except ManagerError as error:
            if self._deaf is None:
                self._journal.tell("manager_failed", reason=str(error))
                self._say(f"{self._manager.kind}: {error}; all jobs go on as they are")
            self._deaf = str(error)
            return None
        if self._deaf is not None:
            self._deaf = None
            self._journal.tell("manager_back")
            self._say(f"{self._manager.kind}: answers again")
        return pool

    def _follow(self, ward: Ward, pool: Pool, now: float) -> None:
        """What has become of a job's launches."""
        entry = ward.entry
        for node in list(entry.nodes):
            standing = pool.standings[f"{ward.name}/{node.rank}"]
            if standing.state == "running" and node.runs is None:
                node.runs = now
                self._journal.keep(entry)
            if standing.state == "ended":
                self._launch_ended(ward, node, standing, now)
            elif standing.state == "absent":
                self._start_again(ward, node, pool)
            elif node.joined is None and node.rank and ward.known and ward.progress.trains(node.rank):
                node.joined, entry.failures = now, 0
                if self._looked:
                    _remember(self._fleet.leads, now - node.since)
                self._journal.keep(entry)
                self._tell("joined", ward, node=node.rank, devices=entry.target)
        if entry.over and not entry.nodes:
            self._journal.keep(entry)  # how it ended may not have been written when there was no room
            del self._wards[ward.name]
        elif entry.phase == "waiting" and ward.submission.devices > pool.most:
            self._refuse(entry, f"it asks for {ward.submission.devices} devices, and there are {pool.most}")
            del self._wards[ward.name]
        elif ward.cancelled and not entry.over:
            if entry.phase == "waiting":
                self._end(ward, "cancelled", "before it had started", now)
                del self._wards[ward.name]
            else:
                self._end(ward, "cancelled", "", now)

    def _launch_ended(self, ward: Ward, node: Node, standing: Standing, now: float) -> None:
        entry = ward.entry
        entry.nodes.remove(node)
        self._refused.pop((ward.name, node.rank), None)
        if node.rank == 0:
            if not entry.over:
                good = standing.code == 0
                how = "killed" if standing.code is None else f"exit code {standing.code}"
                last = "" if good else ward.last_line(node)
                self._end(ward, "done" if good else "failed", "" if good else f"{how}: {last}" if last else how, now)
                self._ended += 1
        elif not entry.over:
            if node.leaves is not None:
                entry.trouble = "" if all(each.leaves is None for each in entry.nodes) else entry.trouble
                self._tell("left", ward, node=node.rank, devices=entry.target)
            else:
                entry.failures += node.joined is None
                self._tell("lost", ward, node=node.rank, devices=entry.target, joined=node.joined is not None,
                           reason=ward.last_line(node))  # fmt: skip
        self._journal.keep(entry)

    def _end(self, ward: Ward, phase: Phase, reason: str, now: float) -> None:
        """A job is over; its launches may still have devices."""
        ward.entry.phase, ward.entry.reason, ward.entry.ended = phase, reason, now
        self._journal.keep(ward.entry)
        self._tell(phase, ward, reason=reason)

    def _start_again(self, ward: Ward, node: Node, pool: Pool) -> None:
        """It is in the journal, and was not started before this fleet was."""
        if ward.entry.over or node.leaves is not None:
            ward.entry.nodes.remove(node)
            self._journal.keep(ward.entry)
            return
        self._start(ward, node, pool)

    # ---- decisions -------------------------------------------------------------------------------

    def _decide(self, pool: Pool, now: float) -> None:
        """Ask the policy, and do what it says."""
        tables: dict[int, SpeedTable] = {}
        members: dict[int, Ward] = {}
        seen = self._observe(pool, now, members, tables)

        def table(job: Job) -> SpeedTable:
            return tables.get(job.index) or SpeedTable.rigid(job.devices)

        if self._policy == "fifo":
            _, decisions = fifo().decide(None, seen)
        else:
            controller = Controller("elastic", table, self._overhead(), keeps_work=True)
            self._fleet.rates, decisions = controller.decide(self._fleet.rates, seen)
        self._arrived, self._ended = [], 0
        for change in decisions.changes:
            ward = members.get(change.job)
            if ward is None:
                continue  # the manager's own
            if isinstance(change, Resize):
                self._resize(ward, change.devices, pool, now)
            else:
                self._begin(ward, change.devices, pool, now)

    def _observe(
        self, pool: Pool, now: float, members: dict[int, Ward], tables: dict[int, SpeedTable]
    ) -> Observation:
        """As the policy sees it. ``members`` get the jobs by index, ``tables`` those of elastic ones that run."""
        running, rigid, queue = {}, {}, []
        held = 0
        for ward in self._wards.values():
            entry = ward.entry
            members[entry.index] = ward
            held += entry.held
            if entry.phase == "waiting":
                queue.append(ward.job)
            elif (run := ward.running) is not None:
                running[entry.index] = run
                tables[entry.index] = ward.table()
            elif entry.held:
                rigid[entry.index] = (ward.ends, entry.held)
        for number, other in enumerate(pool.others, start=1):
            if other.started is None:
                queue.append(Job(-number, other.name, other.submitted, 1.0, other.devices, float("inf")))
            else:
                rigid[-number] = (other.ends, other.devices)
                held += other.devices
        queue.sort(key=lambda job: (job.submitted, job.index))
        total = max(pool.total, held)  # of devices that have gone nobody has been told yet
        return Observation(
            now, total, total - held, rigid, sum(devices for _, devices in rigid.values()),
            running, queue, self._arrived, self._ended,
        )  # fmt: skip

    def _overhead(self) -> Overhead:
        """Of a growth: as long as new ranks took here, or as jobs took to begin, as far as that was seen."""
        seen = self._fleet.leads or self._fleet.starts
        return Overhead(LIVE.pause_s, statistics.median(seen)) if seen else LIVE

    def _begin(self, ward: Ward, devices: int, pool: Pool, now: float) -> None:
        """Start a waiting job."""
        entry = ward.entry
        if ward.submission.elastic:
            entry.port = self._manager.port()
        node = ward.add(devices, self._slots(devices), now)
        entry.phase, entry.started = "running", now
        self._tell("started", ward, devices=devices)
        self._start(ward, node, pool)

    def _resize(self, ward: Ward, devices: int, pool: Pool, now: float) -> None:
        """Begin to grow or to shrink a running job, by whole nodes of a cell each."""
        entry = ward.entry
        before, cell = entry.target, ward.progress.cell
        nodes: list[Node] = []
        while entry.target + cell <= devices:
            nodes.append(ward.add(cell, self._slots(cell), now))
        for node in sorted(entry.nodes, key=lambda node: (node.joined is None, node.rank), reverse=True):
            if node.rank and node.leaves is None and entry.target - node.devices >= devices:
                node.leaves = now
        if entry.target == before:
            return
        entry.changes += 1
        self._fleet.scalings += 1
        self._journal.keep(entry)
        self._tell("grows" if nodes else "shrinks", ward, devices=entry.target, before=before,
                   expected=round(ward.table().speed(entry.target), 3))  # fmt: skip
        for node in nodes:
            self._start(ward, node, pool)

    def _slots(self, devices: int) -> list[int]:
        held = {slot for ward in self._wards.values() for node in ward.entry.nodes for slot in node.slots}
        return self._manager.choose(devices, held)

    def _start(self, ward: Ward, node: Node, pool: Pool) -> None:
        """Start a launch, which is in the journal before that. Where it fails it is tried again in the next turn."""
        self._journal.keep(ward.entry)
        first, before = pool.standings.get(f"{ward.name}/0"), node.unstarted
        try:
            self._manager.start(ward.launch(node, None if first is None or not node.rank else first.host))
            node.unstarted = ""
        except ManagerError as error:
            node.unstarted = str(error)
        if node.unstarted != before:
            self._journal.keep(ward.entry)
            if node.unstarted:
                self._say(f"{ward.name}: node {node.rank} cannot be started: {node.unstarted}")

    # ---- what takes long ---------------------------------------------------------------------------

    def _press(self, ward: Ward, now: float) -> None:
        """Ask nodes that are to leave to do so, end those that must end, and say who does not obey."""
        entry = ward.entry
        going: list[Node] = []
        for node in entry.nodes:
            if entry.over:
                # Launchers of a job that has ended do so as well, in time, but one that has come too late would wait.
                patience = 0.0 if entry.phase == "cancelled" or (node.rank and node.joined is None) else self._limit
                self._stop(ward, node, now, from_=(entry.ended or now) + patience)
            elif node.leaves is not None and node.joined is None:  # it has not come, so it just ends
                self._stop(ward, node, now, from_=node.leaves)
            elif node.leaves is not None:
                going.append(node)
            elif node.rank and node.joined is None and now - node.since > self._limit:
                self._tell("disobeys", ward, node=node.rank, what=f"it has not joined within {self._limit:g} s")
                node.leaves = now
                entry.failures += 1
                self._journal.keep(entry)
        if going:
            self._let_go(ward, going, now)
        else:
            self._one_by_one.discard(ward.name)

    def _let_go(self, ward: Ward, nodes: Sequence[Node], now: float) -> None:
        """Nodes leave by the job's own ways: together, or, if it refuses that, one after the other."""
        name, problem = ward.name, ""
        asked, future = self._asked.get(name, ([], None))
        if future is not None and future.done():
            del self._asked[name]
            try:
                answer = future.result()
                told, problem = answer.ok, "" if answer.ok else answer.text
            except (NoJob, NoAnswer) as error:
                told, problem = False, str(error)
            if not told and len(asked) > 1:
                self._one_by_one.add(name)
            for node in nodes:
                if node.rank in asked:
                    node.told, self._refused[name, node.rank] = told, now
            self._journal.keep(ward.entry)
        elif future is None:
            due = [node.rank for node in nodes
                   if not node.told and now - self._refused.get((name, node.rank), 0.0) >= _PATIENCE_S]  # fmt: skip
            if name in self._one_by_one:
                due = sorted(due, key=lambda rank: self._refused.get((name, rank), 0.0))[:1]
            if due:
                drain = Drain(node_ranks=tuple(due))
                self._asked[name] = due, self._threads.submit(answer_to, drain, ward.run_dir)
        for node in nodes:
            if now - (node.leaves or now) > self._limit and not ward.entry.trouble:
                said = f": {problem}" if problem else ""
                ward.entry.trouble = f"node {node.rank} has not left within {self._limit:g} s{said}"
                self._journal.keep(ward.entry)
                self._tell("disobeys", ward, node=node.rank, what=ward.entry.trouble)

    def _stop(self, ward: Ward, node: Node, now: float, from_: float) -> None:
        """End a launch, from that time on: politely, and after the limit at once."""
        if now < (from_ if node.stopped is None else node.stopped + self._limit):
            return
        with contextlib.suppress(ManagerError):  # in the next turn, then
            self._manager.stop(ward.launch(node), at_once=node.stopped is not None)
            node.stopped = now
            self._journal.keep(ward.entry)

    def _tell(self, kind: str, ward: Ward, **fields: Any) -> None:
        self._journal.tell(kind, job=ward.name, **fields)
        told = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in fields.items() if value)
        self._say(f"{ward.name}: {kind}" + (f" ({told})" if told else ""))


def _remember(values: list[float], value: float) -> None:
    values.append(value)
    del values[:-_REMEMBERED]


def run(
    folder: Path, manager: Manager, policy: str, every: float, limit: float, until_idle: bool,
    say: Callable[[str], None], stopped: Callable[[float], bool],
) -> None:  # fmt: skip
    """Look after the fleet of ``folder`` every ``every`` seconds, until ``stopped(every)``, which waits, says so.

    ``until_idle``: also end when no job waits or runs. Raises JournalError.
    """
    journal = Journal(folder)
    with journal.alone():
        daemon = Daemon(journal, manager, policy, limit, say)
        try:
            told = ""
            while True:
                try:
                    daemon.turn()
                    told = ""
                except OSError as error:  # the disk is full, for instance: jobs go on, and so does this
                    if str(error) != told:
                        say(f"cannot write in {folder}: {error}")
                    told = str(error)
                if (until_idle and daemon.idle and not told) or stopped(every):
                    return
        finally:
            daemon.close()
