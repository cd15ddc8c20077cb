"""Simulation: a cluster under a policy, from event to event: jobs come, end, fail, and devices become free."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Sequence
from math import inf
from typing import Any, Literal

from megatron_elastic.fleet.faults import NONE, Faults
from megatron_elastic.fleet.job import Job
from megatron_elastic.fleet.observation import Decisions, Observation, Policy, Resize, Running, Start
from megatron_elastic.fleet.placement import NODE, Buddies, Nodes, Placement
from megatron_elastic.fleet.simulated.course import Course
from megatron_elastic.fleet.simulated.outcome import Outcome
from megatron_elastic.fleet.simulated.usage import Usage

_CHECKPOINT_S = 1800.0
"""Work between two checkpoints: a job that is not ours and loses a device begins again from the last one."""
_RESTART_S = 60.0
"""That such a job then stands still."""
_EPS = 1e-6

_AWAY = -1
"""Holds the devices of nodes that are being repaired, in the placement."""

Kind = Literal["end", "free", "ask", "fail", "repaired"]


class Simulation:
    """A cluster of ``total`` devices, whose ``jobs`` (by submission, indexed from 0) a policy lets run.

    ``faults``: of nodes (default: none). One that is not replaced at once leaves its place to idle devices, or, where
    there are none, to the next that come free. ``seed`` draws what there is to draw of them. ``watch`` is called with
    the simulation after each step, for progress and checks. Raises ValueError if a job asks for more devices than there
    are, or the policy decides what cannot be.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        total: int,
        policy: Policy[Any],
        faults: Faults = NONE,
        seed: int = 0,
        watch: Callable[[Simulation], None] | None = None,
    ) -> None:
        largest = max(jobs, key=lambda job: job.devices, default=None)
        if largest is not None and largest.devices > total:
            raise ValueError(
                f"job {largest.name} asks for {largest.devices} devices, and there are {total}: set --devices higher"
            )
        self.jobs, self.total, self.policy = jobs, total, policy
        self.now = 0.0
        self.placement: Placement = Buddies(total) if policy.buddy else Nodes(total)
        self.courses: dict[int, Course] = {}
        self.queue: list[Job] = []
        self.leaving = 0
        """Devices that jobs have given back and still hold."""
        self.usage = Usage()
        self.outcome = Outcome()
        self.away = 0
        """Devices of nodes that are being repaired, and that nobody can hold."""
        self._owed = 0
        """Devices that are to be away, and that jobs still hold."""
        self._faults = faults.of(-(-total // NODE), seed)
        self._watch = watch
        self._events: list[tuple[float, int, Kind, int, int]] = []
        self._order = 0
        self._next = 0
        self._rigid: dict[int, tuple[float, int]] = {}
        self._rigid_devices = 0
        self._elastic_devices = 0
        self._elastic_given = 0
        self._elastic: dict[int, Running] = {}
        self._arrived: list[int] = []
        self._ended = 0
        self._asked_at = inf

    def run(self) -> Outcome:
        """Until every job has ended."""
        begun = time.perf_counter()
        state = self.policy.begin()
        self._next_fault()
        while self._next < len(self.jobs) or self.courses or self.queue:
            self._advance()
            self._withdraw()
            state, decisions = self.policy.decide(state, self._seen())
            self._apply(decisions)
            self._note()
            if self._watch is not None:
                self._watch(self)
        self.outcome.moved = self.placement.moved
        self.outcome.capacity = self.total * self.outcome.makespan
        self.outcome.elapsed = time.perf_counter() - begun
        return self.outcome

    @property
    def ended(self) -> int:
        """Jobs that have ended."""
        return self.outcome.jobs

    @property
    def free(self) -> int:
        """Devices that nobody holds."""
        return self.total - self._rigid_devices - self._elastic_devices - self.leaving - self.away

    # ---- events ---------------------------------------------------------------------------

    def _post(self, at: float, kind: Kind, job: int = -1, version: int = 0) -> None:
        self._order += 1
        heapq.heappush(self._events, (at, self._order, kind, job, version))

    def _advance(self) -> None:
        """To the next moment at which something happens that a policy should see, and let it happen."""
        self._arrived, self._ended = [], 0
        while True:
            arrival = self.jobs[self._next].submitted if self._next < len(self.jobs) else inf
            at = min(arrival, self._events[0][0] if self._events else inf)
            if at == inf:
                raise ValueError(f"policy {self.policy.name}: job {self.queue[0].name} waits for ever")
            self.outcome.held += (self.total - self.free - self.away) * (at - self.now)
            self.now = at
            happened = False
            while self._next < len(self.jobs) and self.jobs[self._next].submitted <= at:
                job = self.jobs[self._next]
                self._next += 1
                self.queue.append(job)
                self._arrived.append(job.devices)
                happened = True
            while self._events and self._events[0][0] <= at:
                _, _, kind, job_index, version = heapq.heappop(self._events)
                happened |= self._happen(kind, job_index, version)
            if happened:
                break
        for run in self._elastic.values():
            course = self.courses[run.job.index]
            course.proceed(at)
            run.remaining = course.remaining

    def _happen(self, kind: Kind, index: int, version: int) -> bool:
        """Whether something has changed."""
        if kind == "end":
            course = self.courses.get(index)
            if course is None or course.version != version:
                return False
            self._end(course)
        elif kind == "free":
            self.placement.resize(index, 0)
            self.leaving -= version
        elif kind == "ask":
            if self._asked_at != self.now:
                return False
            self._asked_at = inf
        elif kind == "repaired":
            back = max(0, version - self._owed)
            self._owed -= version - back
            self.away -= back
            self.placement.resize(_AWAY, self.away)
        else:
            self._fail(index)
            self._owed += version
            self._next_fault()
        return True

    def _end(self, course: Course) -> None:
        job, outcome = course.job, self.outcome
        course.proceed(self.now)
        assert abs(course.remaining) < _EPS * max(1.0, job.duration), (job, course.remaining)
        del self.courses[job.index]
        self.placement.resize(job.index, 0)
        self._ended += 1
        outcome.jobs += 1
        outcome.work += job.duration * job.devices
        outcome.jct += self.now - job.submitted
        outcome.makespan = self.now
        met = self.now <= job.deadline + _EPS
        outcome.deadlines += met
        if job.elastic:
            outcome.elastic_jobs += 1
            outcome.elastic_jct += self.now - job.submitted
            outcome.elastic_queue += course.started - job.submitted
            outcome.elastic_deadlines += met
            self._elastic_devices -= course.devices
            self._elastic_given -= min(job.devices, course.devices)
            del self._elastic[job.index]
        else:
            outcome.other_queue += course.started - job.submitted
            self._rigid_devices -= course.devices
            del self._rigid[job.index]

    def _next_fault(self) -> None:
        fault = next(self._faults, None)
        if fault is None:
            return
        devices = min(NODE, self.total - fault.node * NODE) if fault.repair_s else 0
        self._post(fault.at, "fail", fault.node, devices)
        if devices:
            self._post(fault.at + fault.repair_s, "repaired", version=devices)

    def _withdraw(self) -> None:
        """What is to be away and is free is away."""
        if taken := min(self._owed, self.free):
            self._owed -= taken
            self.away += taken
            self.placement.resize(_AWAY, self.away)

    def _fail(self, node: int) -> None:
        """A node fails: its jobs stop, and begin again from their checkpoints on other devices, or, ours, go on."""
        for index in self.placement.holders(node):
            course = self.courses.get(index)
            if course is None:
                continue
            course.proceed(self.now)
            job = course.job
            ours = job.elastic and self.policy.keeps_work
            pause = self.policy.overhead.pause_s if ours else _RESTART_S
            lost = 0.0 if ours else (job.duration - course.remaining) % _CHECKPOINT_S
            course.stop(pause, lost, self.policy.speed(job, course.devices) if job.elastic else 1.0)
            self.outcome.failures += 1
            self.outcome.lost += lost
            self.outcome.stopped += pause
            self._foresee(course)

    def _foresee(self, course: Course) -> None:
        end = course.end()
        self._post(end, "end", course.job.index, course.version)
        if not course.job.elastic:
            self._rigid[course.job.index] = (end, course.devices)

    # ---- decisions ------------------------------------------------------------------------

    def _seen(self) -> Observation:
        return Observation(
            self.now,
            self.total - self.away - self._owed,
            self.free,
            self._rigid,
            self._rigid_devices,
            self._elastic,
            self.queue,
            self._arrived,
            self._ended,
        )

    def _apply(self, decisions: Decisions) -> None:
        for change in decisions.changes:
            if isinstance(change, Start):
                self._start(change)
            else:
                self._resize(change)
        if decisions.again_s is not None and (self._events or self._next < len(self.jobs)):
            self._asked_at = self.now + decisions.again_s
            self._post(self._asked_at, "ask")

    def _start(self, start: Start) -> None:
        job = next((job for job in self.queue if job.index == start.job), None)
        if (
            job is None
            or start.devices > self.free
            or start.devices < 1
            or (not job.elastic and start.devices != job.devices)
        ):
            raise ValueError(f"policy {self.policy.name}: {start} cannot be, with {self.free} devices free")
        self.queue.remove(job)
        self.placement.resize(job.index, start.devices)
        speed = self.policy.speed(job, start.devices) if job.elastic else 1.0
        course = Course(job, start.devices, self.now, job.duration, self.now, [(inf, speed)])
        self.courses[job.index] = course
        if job.elastic:
            self._elastic[job.index] = Running(job, start.devices, job.duration, self.now)
            self._elastic_devices += start.devices
            self._elastic_given += min(job.devices, start.devices)
        else:
            self._rigid_devices += start.devices
        self._foresee(course)

    def _resize(self, resize: Resize) -> None:
        run = self._elastic.get(resize.job)
        if run is None or resize.devices < 1 or resize.devices - run.devices > self.free:
            raise ValueError(f"policy {self.policy.name}: {resize} cannot be, with {self.free} devices free")
        course, overhead = self.courses[resize.job], self.policy.overhead
        fewer = run.devices - resize.devices
        if fewer > 0 and overhead.pause_s > 0:
            self._order += 1
            leaver = -self._order
            self.placement.part(resize.job, resize.devices, leaver)
            self.leaving += fewer
            heapq.heappush(self._events, (self.now + overhead.pause_s, self._order, "free", leaver, fewer))
        else:
            self.placement.resize(resize.job, resize.devices)
            if fewer > 0:
                self._post(self.now, "ask")
                self._asked_at = self.now
        self._elastic_devices -= fewer
        self._elastic_given += min(run.job.devices, resize.devices) - min(run.job.devices, run.devices)
        course.change(resize.devices, self.policy.speed(run.job, resize.devices), overhead)
        run.devices, run.changes = resize.devices, course.changes
        self.outcome.scalings += 1
        self.outcome.stopped += overhead.pause_s
        self._foresee(course)

    def _note(self) -> None:
        extra = self._elastic_devices - self._elastic_given
        self.usage.note(self.now, self._rigid_devices, self._elastic_given, extra)
