"""TorchElastic: ``--nnodes=MIN:MAX``. A job takes what is there up to MAX; every change restarts all of its workers.

Source: PyTorch's torchrun. It has no scheduler: whoever runs first takes first, and the last to have started gives back
first. MIN is what the job was submitted with, MAX four times that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_elastic.fleet.admission import Member
from megatron_elastic.fleet.observation import Observation, Overhead
from megatron_elastic.fleet.policies.rule import Rule
from megatron_elastic.fleet.policies.tables import data_parallel


def _share(seen: Observation, members: Sequence[Member], capacity: int) -> Mapping[int, int]:
    spare = capacity - sum(member.floor for member in members)
    targets: dict[int, int] = {}
    for member in sorted(members, key=lambda member: (member.started, member.job.index)):
        targets[member.job.index] = member.table.fit(member.floor + spare)
        spare -= targets[member.job.index] - member.floor
    return targets


def torchelastic(overhead: Overhead) -> Rule:
    """``overhead``: of a restart."""
    return Rule("torchelastic", data_parallel, _share, overhead)
