"""Capacity: how many devices a cluster has whose trace does not say."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import ceil

from megatron_elastic.fleet.job import Job
from megatron_elastic.fleet.placement import NODE

_ENOUGH = 0.95
"""Of the time, that an ample cluster serves everybody at once."""
_LOOKS = 12
"""Sizes that are looked at before the one that is looked for is searched between two of them."""


def ample(jobs: Sequence[Job]) -> int:
    """Devices, in whole nodes, that serve all jobs at once for 95 % of the time, and at least the largest job."""
    changes: Counter[float] = Counter()  # of devices in use, at each moment
    for job in jobs:
        changes[job.submitted] += job.devices
        changes[job.submitted + job.duration] -= job.devices
    spent: dict[int, float] = {}
    used = 0
    for moment, following in pairwise(sorted(changes)):
        used += changes[moment]
        spent[used] = spent.get(used, 0.0) + following - moment
    needs = sorted(spent)
    shares = accumulate(spent[need] for need in needs)
    enough = _ENOUGH * sum(spent.values())
    need = next((need for need, share in zip(needs, shares, strict=True) if share >= enough), 0)
    return NODE * _nodes(max(need, _largest(jobs)))


def used_by_fifo(jobs: Sequence[Job], share: float) -> int:
    """The most devices, in whole nodes, of which FIFO has ``share`` in use from the first submission to the last end.

    Use falls with the size, but for small clusters, where all wait for a large job: so some sizes are looked at from
    above, and those between the first that suffices and the one before. Where none suffices it is the size of which
    FIFO uses most; no cluster is smaller than the largest job.
    """
    least = _nodes(_largest(jobs))
    shares: dict[int, float] = {}

    def use(nodes: int) -> float:
        if nodes not in shares:
            shares[nodes] = fifo_use(jobs, nodes * NODE)
        return shares[nodes]

    work = sum(job.devices * job.duration for job in jobs)
    shortest = max(job.submitted + job.duration for job in jobs)
    most = max(least, int(work / shortest / share / NODE))  # a larger cluster cannot be in use so much
    step = max(1, (most - least) // _LOOKS)
    larger = most
    for nodes in dict.fromkeys((*range(most, least, -step), least)):
        if use(nodes) >= share:
            while larger - nodes > 1:
                between = (nodes + larger) // 2
                nodes, larger = (between, larger) if use(between) >= share else (nodes, between)
            return NODE * nodes
        larger = nodes
    return NODE * max(shares, key=lambda nodes: (shares[nodes], nodes))


def fifo_use(jobs: Sequence[Job], total: int) -> float:
    """The share of ``total`` devices in use under FIFO: what its simulation says, without a policy to ask."""
    ends: list[tuple[float, int]] = []
    now = last = 0.0
    free = total
    for job in jobs:
        now = max(now, job.submitted)
        while ends and (ends[0][0] <= now or free < job.devices):
            end, devices = heapq.heappop(ends)
            now, free = max(now, end), free + devices
        free -= job.devices
        heapq.heappush(ends, (now + job.duration, job.devices))
        last = max(last, now + job.duration)
    return sum(job.devices * job.duration for job in jobs) / (total * last)


def _largest(jobs: Sequence[Job]) -> int:
    return max(job.devices for job in jobs)


def _nodes(devices: int) -> int:
    return ceil(devices / NODE)
