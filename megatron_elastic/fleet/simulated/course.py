"""Course: how a running job proceeds: a speed now, others later, and work that becomes less."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from megatron_elastic.fleet.job import Job
from megatron_elastic.fleet.observation import Overhead


@dataclass(slots=True)
class Course:
    """A job that runs. ``legs`` are (until, speed) in order of time; the last one has no end."""

    job: Job
    devices: int
    started: float
    remaining: float
    """Work left at ``at``."""
    at: float
    legs: list[tuple[float, float]] = field(default_factory=list)
    changes: int = 0
    version: int = 0
    """One more with each change, so that an end that was foreseen before is known to be void."""

    def proceed(self, now: float) -> None:
        """Do the work until ``now``."""
        while self.at < now:
            until, speed = self.legs[0]
            end = min(until, now)
            self.remaining -= speed * (end - self.at)
            self.at = end
            if until <= now:
                self.legs.pop(0)

    def end(self) -> float:
        """When the work is done if nothing changes."""
        left, at = self.remaining, self.at
        for until, speed in self.legs:
            if speed > 0 and left <= speed * (until - at):
                return at + max(0.0, left) / speed
            left -= speed * (until - at)
            at = until
        return inf

    def change(self, devices: int, speed: float, overhead: Overhead) -> None:
        """Go on with other devices, at ``speed`` after the overhead."""
        pause = self.at + overhead.pause_s
        grown = devices > self.devices
        self.devices = devices
        self.changes += 1
        self.version += 1
        if grown and overhead.lead_s > 0:
            lead = self.at + overhead.lead_s
            before = [(min(until, lead), own) for until, own in self.legs if min(until, lead) > self.at]
            until_lead = [leg for index, leg in enumerate(before) if index == 0 or leg[0] > before[index - 1][0]]
            self.legs = [*until_lead, (lead + overhead.pause_s, 0.0), (inf, speed)]
        else:
            self.legs = [(pause, 0.0), (inf, speed)]

    def stop(self, pause_s: float, lost: float, speed: float) -> None:
        """Stand still for ``pause_s`` seconds, with ``lost`` work to be done again."""
        self.remaining += lost
        self.version += 1
        self.legs = [(self.at + pause_s, 0.0), (inf, speed)]
