"""ElasticFlow: every job gets the least that meets its deadline, and who gains most gets what is left.

Source: ElasticFlow (Gu et al., 2023). The minimum satisfactory share of a job is the least number q of devices with

    sum over slots t until the deadline of  Thr(min(q, free(t))) dt  >=  work left,

taken in the order of deadlines, each job's share being used up for those after it. Devices come in powers of two and
are placed by buddy allocation. In the paper a job whose deadline cannot be met is declined; here it runs, with what is
left.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from megatron_elastic.fleet.admission import Member, fill
from megatron_elastic.fleet.observation import Observation, Overhead
from megatron_elastic.fleet.policies.rule import Rule
from megatron_elastic.fleet.policies.tables import powers_of_two
from megatron_elastic.fleet.speed_table import SpeedTable

Slots = list[tuple[float, int]]
"""(begin of a slot in seconds, devices free in it); the last one has no end."""
_FIRST_SLOT_S, _SLOTS = 60.0, 20
"""The last slot begins in half a year."""


def satisfactory_share(table: SpeedTable, work: float, deadline: float, slots: Slots) -> tuple[int, float] | None:
    """The least number of devices with which ``work`` is done by ``deadline``, and when; None where none is enough."""
    for devices in table.devices:
        left = work
        for index, (begin, free) in enumerate(slots):
            if begin >= deadline:
                break
            end = min(slots[index + 1][0] if index + 1 < len(slots) else deadline, deadline)
            speed = table.speed(min(devices, free))
            if speed > 0 and speed * (end - begin) >= left - 1e-9:
                return devices, begin + left / speed
            left -= speed * (end - begin)
    return None


def without(slots: Slots, table: SpeedTable, devices: int, until: float) -> Slots:
    """What is left of ``slots`` when a job uses up to ``devices`` of each until then."""
    left: Slots = []
    for index, (begin, free) in enumerate(slots):
        if begin >= until:
            left.append((begin, free))
            continue
        left.append((begin, free - table.fit(min(devices, free))))
        if until < (slots[index + 1][0] if index + 1 < len(slots) else float("inf")):
            left.append((until, free))
    return left


def slots_of(seen: Observation, capacity: int) -> Slots:
    """Devices that elastic jobs can have from now on, as other jobs end; ``capacity`` now.

    Slots double in length, and devices count as free from the slot on that begins after their job has ended.
    """
    begins = [seen.now, *(seen.now + _FIRST_SLOT_S * 2**doubled for doubled in range(_SLOTS - 1))]
    freed = [0] * _SLOTS
    for end, devices in seen.rigid.values():
        freed[min(bisect_left(begins, end), _SLOTS - 1)] += devices
    return list(zip(begins, (capacity + free for free in accumulate(freed)), strict=True))


def share(seen: Observation, members: Sequence[Member], capacity: int) -> Mapping[int, int]:
    slots = slots_of(seen, capacity)
    spare = capacity - sum(member.floor for member in members)
    shares: list[Member] = []
    for member in sorted(members, key=lambda member: (member.job.deadline, member.job.index)):
        found = satisfactory_share(member.table, member.remaining, member.job.deadline, slots)
        devices = member.floor
        if found is not None:
            least, end = found
            until = next((begin for begin, _ in slots if begin >= end), end)
            slots = without(slots, member.table, least, until)
            devices = member.table.fit(min(max(least, member.floor), member.floor + spare))
        spare -= devices - member.floor
        shares.append(replace(member, floor=devices))
    return fill(shares, capacity, lambda member, devices: member.table.speed(devices))


def elasticflow(overhead: Overhead) -> Rule:
    """``overhead``: of a scaling."""
    return Rule("elasticflow", powers_of_two, share, overhead, lowest=True, buddy=True)
