"""FIFO: jobs start in the order of submission, with the devices that they ask for, and keep them. The baseline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_elastic.fleet.admission import Member
from megatron_elastic.fleet.job import Job
from megatron_elastic.fleet.observation import Observation, Overhead
from megatron_elastic.fleet.policies.rule import Rule
from megatron_elastic.fleet.speed_table import SpeedTable


def _table(job: Job) -> SpeedTable:
    return SpeedTable.rigid(job.devices)


def _share(seen: Observation, members: Sequence[Member], capacity: int) -> Mapping[int, int]:
    return {member.job.index: member.job.devices for member in members}


def fifo() -> Rule:
    """No job ever changes."""
    return Rule("fifo", _table, _share, Overhead(0.0))
