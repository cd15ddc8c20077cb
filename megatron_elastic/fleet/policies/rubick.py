"""Rubick: devices go where they raise speed most, and a job's parallel plan is the best one for what it has.

Source: Rubick (Zhang et al., 2024). A job's sensitivity curve is the speed of its best plan for each number of devices.
A job keeps at least as many as make it as fast as it was submitted; what is left goes to the steepest slopes, and comes
from the flattest. A job is left as it is if it was changed so often that less than 97 % of its time would be training:
(age - changes x overhead) / age.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from megatron_elastic.fleet.admission import Member, fill
from megatron_elastic.fleet.observation import Observation, Overhead
from megatron_elastic.fleet.policies.rule import Rule, Share
from megatron_elastic.fleet.policies.tables import both
from megatron_elastic.fleet.speed_table import SpeedTable

_LEAST_TRAINING = 0.97


def share(overhead_s: float) -> Share:
    """With ``overhead_s`` seconds for a change."""

    def shares(seen: Observation, members: Sequence[Member], capacity: int) -> Mapping[int, int]:
        kept = sum(member.floor for member in members)
        held: list[Member] = []
        for member in members:
            age = seen.now - member.started
            extra = member.devices - member.floor
            if (
                member.devices
                and age - (member.changes + 1) * overhead_s < _LEAST_TRAINING * age
                and kept + extra <= capacity
            ):
                kept += extra
                held.append(_fixed(member))
            else:
                held.append(member)
        return fill(held, capacity, lambda member, devices: member.table.speed(devices))

    return shares


def _fixed(member: Member) -> Member:
    """The same with a table of what it has."""
    table = SpeedTable((member.devices,), (member.table.speed(member.devices),))
    return replace(member, table=table, floor=member.devices)


def rubick(overhead: Overhead) -> Rule:
    """``overhead``: of a checkpoint and a restart with another plan."""
    return Rule("rubick", both, share(overhead.pause_s), overhead)
