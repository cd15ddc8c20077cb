"""Controller: elastic jobs use idle devices when that is expected to pay, and give them back when somebody needs them.

A job never has fewer devices than it was submitted with. Who loses least gives back first, and only as much as is
needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_elastic.fleet.admission import Admission, Member, admit, settle
from megatron_elastic.fleet.arrivals import Rates
from megatron_elastic.fleet.benefit import gain
from megatron_elastic.fleet.job import Job
from megatron_elastic.fleet.observation import Decisions, Observation, Overhead
from megatron_elastic.fleet.speed_table import SpeedTable

_AGAIN_S = 60.0
"""How soon to look again at idle devices that a job could use: the longer nobody comes, the more it pays."""
_NOTHING = Overhead(0.0)
"""What it costs a job that is not running yet to have more."""


@dataclass(frozen=True, slots=True)
class Controller:
    """A policy (see ``Policy``): with which tables, and what a change costs."""

    name: str
    table: Callable[[Job], SpeedTable]
    overhead: Overhead
    keeps_work: bool = False
    buddy: bool = False

    def begin(self) -> Rates | None:
        """Nothing was seen."""
        return None

    def speed(self, job: Job, devices: int) -> float:
        """As its table says."""
        return self.table(job).speed(devices)

    def decide(self, state: Rates | None, seen: Observation) -> tuple[Rates, Decisions]:
        """The rates with what was seen, and who starts, grows and shrinks."""
        rates = (state or Rates(seen.now, seen.now)).seen(seen.now, seen.arrived, seen.ended)
        admitted = admit(seen, self.table, lambda job: job.devices)
        if not admitted.members:
            return rates, Decisions(settle(seen, admitted, {}))
        targets, again = self._share(rates, seen.now, admitted)
        return rates, Decisions(settle(seen, admitted, targets), _AGAIN_S if again else None)

    def _share(self, rates: Rates, now: float, admitted: Admission) -> tuple[dict[int, int], bool]:
        """Devices of each member, and whether more could be given later."""
        # What a job was found to be no faster with is given back: its table has learnt that since it grew.
        targets = {member.job.index: max(member.table.fit(member.devices), member.floor) for member in admitted.members}
        idle = admitted.capacity - sum(targets.values())
        if idle < 0:
            give_back(admitted.members, targets, -idle)
            return targets, False
        while (found := self._best(rates, now, admitted, targets, idle)) is not None:
            job, devices = found
            idle -= devices - targets[job]
            targets[job] = devices
        again = any(
            member.table.above(targets[member.job.index], targets[member.job.index] + idle)
            for member in admitted.members
        )
        return targets, again

    def _best(
        self, rates: Rates, now: float, admitted: Admission, targets: dict[int, int], idle: int
    ) -> tuple[int, int] | None:
        """(job, devices) of the growth that is expected to bring most device-seconds; None where none brings any."""
        best, found = 0.0, None
        for member in admitted.members:
            devices, given = targets[member.job.index], member.job.devices
            speed = member.table.speed(devices)
            overhead = self.overhead if member.devices else _NOTHING
            for more in member.table.above(devices, devices + idle):
                rate = rates.ending(now) if admitted.blocked else rates.above(idle - (more - devices), now)
                faster = member.table.speed(more)
                worth = given * gain(speed, faster, member.remaining, rate, overhead, rates.usual_devices, given)
                if worth > best:
                    best, found = worth, (member.job.index, more)
        return found


def give_back(members: Sequence[Member], targets: dict[int, int], need: int) -> None:
    """Lower ``targets`` by at least ``need`` devices in all: step by step, from whoever loses least speed a device.

    Speeds count by the devices that jobs were submitted with. What was taken beyond the need is left to who would lose
    most.
    """
    given_back: list[tuple[Member, int, int]] = []
    while need > 0:
        steps = [
            (member, now, lower)
            for member in members
            if (lower := member.table.below(now := targets[member.job.index], member.floor)) is not None
        ]
        if not steps:
            raise ValueError(f"{need} more devices were promised than elastic jobs have beyond their floors")
        member, now, lower = min(steps, key=lambda step: _loss(*step))
        targets[member.job.index] = lower
        need -= now - lower
        given_back.append((member, now, lower))
    for member, now, lower in reversed(given_back):
        if now - lower <= -need and targets[member.job.index] == lower:
            targets[member.job.index] = now
            need += now - lower


def _loss(member: Member, now: int, lower: int) -> float:
    """Of speed, for each device."""
    return member.job.devices * (member.table.speed(now) - member.table.speed(lower)) / (now - lower)
