"""Pollux: devices and batch sizes for the most goodput, which is throughput times statistical efficiency.

Source: Pollux (Qiao et al., 2021). With K devices and a batch of M sequences, M0 as submitted,

    goodput     = M / T x efficiency(M / M0)
    T           = s T_grad + (T_grad^g + T_sync^g)^(1/g)
    efficiency  = ((var + mean^2) / (var / m + mean^2)) / m,   m = M / M0

Shares maximise the power mean of speed-ups over a fair share, p = -1, each multiplied by (age - changes d) / (age + d)
where it differs from the present one, d being the overhead. Pollux searches them with a genetic algorithm; here whoever
gains most gets the next devices, which is exact where speed-ups are concave.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache

from megatron_elastic.fleet.admission import Member, fill
from megatron_elastic.fleet.job import Job
from megatron_elastic.fleet.observation import Observation, Overhead
from megatron_elastic.fleet.policies.rule import Rule, Share
from megatron_elastic.fleet.simulated.models import GROWTH, Model, layouts_of
from megatron_elastic.fleet.speed_table import SpeedTable

_NOISE = 1.0
"""var / mean^2 of gradients at the batch as submitted: it is taken to be the critical one, and to stay so."""
_OVERLAP = 1.6
"""g: between 1, nothing of the synchronisation is hidden, and 10, all of it."""
_LARGEST = 4.0
"""Times its batch as submitted that a job may use."""


def efficiency(m: float, noise: float) -> float:
    """Of a batch ``m`` times as large as submitted, against that; ``noise`` is var / mean^2 there."""
    return (noise + 1) / (noise / m + 1) / m


def step_s(grad_s: float, sync_s: float, accumulated: int, overlap: float) -> float:
    """T: ``accumulated`` passes without synchronisation, and one with."""
    return accumulated * grad_s + float((grad_s**overlap + sync_s**overlap) ** (1 / overlap))


@cache
def _table(model: Model, devices: int) -> SpeedTable:
    layouts = layouts_of(model, devices)

    def seconds(width: int, m: float) -> float:
        sync = model.sync_s(layouts.stages, width, layouts.cell)
        return step_s(layouts.even_s(layouts.stages, width, m * model.batch) - sync, sync, 0, _OVERLAP)

    def best(count: int) -> float:
        width = count // (layouts.stages * layouts.cell)
        scales = [1 + 0.25 * quarter for quarter in range(int(4 * (_LARGEST - 1)) + 1)]
        return min(seconds(width, m) / (m * efficiency(m, _NOISE)) for m in scales)

    widths = range(1, GROWTH * layouts.width + 1)
    given_s = seconds(layouts.width, 1.0)
    return SpeedTable.of(devices, best, [layouts.stages * layouts.cell * width for width in widths], given_s)


def goodputs(job: Job) -> SpeedTable:
    """Goodput of each number of devices, with the best batch for it, times that as submitted."""
    return SpeedTable.rigid(job.devices) if job.model is None else _table(job.model, job.devices)


def share(overhead_s: float) -> Share:
    """With ``overhead_s`` seconds for a reallocation."""

    def shares(seen: Observation, members: Sequence[Member], capacity: int) -> Mapping[int, int]:
        fair = capacity // len(members)
        return fill(members, capacity, _fitness(seen.now, fair, overhead_s))

    return shares


def _fitness(now: float, fair: int, overhead_s: float) -> Callable[[Member, int], float]:
    def value(member: Member, devices: int) -> float:
        speedup = member.table.speed(devices) / member.table.speed(max(member.table.fit(fair), member.table.devices[0]))
        age = now - member.started
        if member.devices != devices and (member.devices or age > 0):  # to start at once is no change
            lasting = age + overhead_s
            speedup *= max(0.0, age - member.changes * overhead_s) / lasting if lasting > 0 else 1.0
        return -1 / max(speedup, 1e-3)

    return value


def pollux(overhead: Overhead) -> Rule:
    """``overhead``: of a checkpoint and a restart."""
    return Rule("pollux", goodputs, share(overhead.pause_s), overhead, lowest=True)
