"""Rule: a policy that keeps no state, given by three functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megatron_elastic.fleet.admission import Member, admit, settle
from megatron_elastic.fleet.job import Job
from megatron_elastic.fleet.observation import Decisions, Observation, Overhead
from megatron_elastic.fleet.speed_table import SpeedTable

Share = Callable[[Observation, Sequence[Member], int], Mapping[int, int]]
"""(what is seen, elastic jobs, their devices together) -> devices of each, not below its floor."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A policy (see ``Policy``)."""

    name: str
    table: Callable[[Job], SpeedTable]
    share: Share
    overhead: Overhead
    lowest: bool = False
    """Whether elastic jobs may have as few devices as their tables say, or at least what they were submitted with."""
    buddy: bool = False
    """See ``Policy``."""

    @property
    def keeps_work(self) -> bool:
        """A job that loses a device begins again from its checkpoint."""
        return False

    def begin(self) -> None:
        """There is no state."""

    def speed(self, job: Job, devices: int) -> float:
        """As its table says."""
        return self.table(job).speed(devices)

    def decide(self, state: None, seen: Observation) -> tuple[None, Decisions]:
        """Whoever fits starts, in order; elastic jobs get what ``share`` says."""
        admitted = admit(seen, self.table, self._floor)
        targets = self.share(seen, admitted.members, admitted.capacity) if admitted.members else {}
        return None, Decisions(settle(seen, admitted, targets))

    def _floor(self, job: Job) -> int:
        return self.table(job).devices[0] if self.lowest else job.devices
