"""EasyScale: a fixed number of logical workers takes turns on whatever devices there are; results stay the same.

Source: EasyScale (Li et al., 2023). A step takes as long as the device with most logical workers needs for them: N
workers on q devices take ``ceil(N / q)`` turns. A job waits for one replica only, and never uses more than N. N is what
makes a job four times as wide as submitted. Spare devices go to whoever gains most for each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_elastic.fleet.admission import Member, fill
from megatron_elastic.fleet.observation import Observation, Overhead
from megatron_elastic.fleet.policies.rule import Rule
from megatron_elastic.fleet.policies.tables import logical_workers


def _share(seen: Observation, members: Sequence[Member], capacity: int) -> Mapping[int, int]:
    return fill(members, capacity, lambda member, devices: member.table.speed(devices))


def easyscale(overhead: Overhead) -> Rule:
    """``overhead``: of an on-demand checkpoint and the start from it."""
    return Rule("easyscale", logical_workers, _share, overhead, lowest=True)
