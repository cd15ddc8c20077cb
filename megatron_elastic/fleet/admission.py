"""Admission: jobs start in the order of submission, and what elastic jobs may keep is known before who starts."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megatron_elastic.fleet.job import Job
from megatron_elastic.fleet.observation import Observation, Resize, Start
from megatron_elastic.fleet.speed_table import SpeedTable


@dataclass(frozen=True, slots=True)
class Member:
    """An elastic job that has a share: it runs, or is to start (``devices`` 0)."""

    job: Job
    table: SpeedTable
    floor: int
    """Devices that it has at least."""
    devices: int
    remaining: float
    started: float
    changes: int


@dataclass(frozen=True, slots=True)
class Admission:
    """Who is to run, and how many devices elastic jobs can share."""

    starts: Sequence[Job]
    """In the order of the queue, elastic and other ones."""
    members: Sequence[Member]
    capacity: int
    """Devices for all members together, those of jobs that are to start not counted."""
    blocked: bool
    """Whether a job waits that cannot start even if all members have only their floors."""


def admit(seen: Observation, table: Callable[[Job], SpeedTable], floor: Callable[[Job], int]) -> Admission:
    """Let jobs start in order, as many as fit if every elastic job has only its floor.

    ``floor(job)``: the devices with which an elastic job may be left or started.
    """
    members = [
        Member(
            run.job,
            table(run.job),
            min(run.devices, floor(run.job)),
            run.devices,
            run.remaining,
            run.started,
            run.changes,
        )
        for run in seen.running.values()
    ]
    kept = sum(member.floor for member in members)
    capacity = max(kept, seen.total - seen.rigid_devices)  # less is left where nodes are being repaired
    starts: list[Job] = []
    blocked = False
    for job in seen.queue:
        need = floor(job) if job.elastic else job.devices
        if kept + need > capacity:
            blocked = True
            break
        starts.append(job)
        if job.elastic:
            members.append(Member(job, table(job), need, 0, job.duration, seen.now, 0))
            kept += need
        else:
            capacity -= need
    return Admission(starts, members, capacity, blocked)


def settle(seen: Observation, admitted: Admission, targets: Mapping[int, int]) -> list[Start | Resize]:
    """The changes that lead to ``targets`` (devices of each member) and can be made now.

    First devices are given back, then jobs start in order as long as enough are free, then members grow, if nobody
    waits for devices.
    """
    changes: list[Start | Resize] = []
    free = seen.free
    own = {member.job.index: member for member in admitted.members}
    for member in admitted.members:
        if targets[member.job.index] < member.devices:
            changes.append(Resize(member.job.index, targets[member.job.index]))
    for job in admitted.starts:
        devices = job.devices
        if job.elastic:
            member = own[job.index]
            devices = member.table.fit(min(targets[job.index], free))
            if devices < member.floor:
                return changes
        if devices > free:
            return changes
        changes.append(Start(job.index, devices))
        free -= devices
    for member in admitted.members:
        target = targets[member.job.index]
        if 0 < member.devices < target <= member.devices + free:
            changes.append(Resize(member.job.index, target))
            free -= target - member.devices
    return changes


def fill(members: Sequence[Member], capacity: int, value: Callable[[Member, int], float]) -> dict[int, int]:
    """Devices of each member: all get their floors, then whoever gains most for each further device.

    ``value(member, devices)`` is what its having so many is worth. A step goes to whatever larger number of devices of
    the member's table gains most a device, so that plateaus in a table do not stop it.
    """
    targets = {member.job.index: member.floor for member in members}
    spare = capacity - sum(targets.values())

    def step(member: Member) -> tuple[float, int, int, Member] | None:
        now = targets[member.job.index]
        base = value(member, now)
        best = max(
            (((value(member, n) - base) / (n - now), -n) for n in member.table.above(now, now + spare)),
            default=(0.0, 0),
        )
        return (-best[0], member.job.index, -best[1], member) if best[0] > 1e-12 else None

    heap = [found for member in members if (found := step(member))]
    heapq.heapify(heap)
    while heap:
        _, index, devices, member = heapq.heappop(heap)
        if devices - targets[index] <= spare:
            spare -= devices - targets[index]
            targets[index] = devices
        if found := step(member):
            heapq.heappush(heap, found)
    return targets
