"""Capacity: how many devices a cluster has whose trace does not say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from math import ceil

from megatron_elastic.fleet.job import Job
from megatron_elastic.fleet.placement import NODE
from megatron_elastic.fleet.policies.fifo import fifo
from megatron_elastic.fleet.simulation import Simulation

_ENOUGH = 0.95
"""Of the time, that an ample cluster serves everybody at once."""
_LOOKS = 12
"""Sizes that are simulated before the one that is looked for is searched between two of them."""


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


def used_by_fifo(jobs: Sequence[Job], share: float, watch: Callable[[Simulation], None] | None = None) -> int:
    """The most devices, in whole nodes, of which FIFO has ``share`` in use from the first submission to the last end.

    Use falls with the size, but for small clusters, where all wait for a large job: so some sizes are simulated from
    above, and those between the first that suffices and the one before. Where none suffices it is the size of which
    FIFO uses most; no cluster is smaller than the largest job. ``watch`` is called as in simulations.
    """
    least = _nodes(_largest(jobs))
    shares: dict[int, float] = {}

    def use(nodes: int) -> float:
        if nodes not in shares:
            outcome = Simulation(jobs, nodes * NODE, fifo(), watch=watch).run()
            shares[nodes] = outcome.held / outcome.capacity
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


def _largest(jobs: Sequence[Job]) -> int:
    return max(job.devices for job in jobs)


def _nodes(devices: int) -> int:
    return ceil(devices / NODE)
