"""Outcome: what a policy made of a trace, in figures that can be added up over clusters."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(slots=True)
class Outcome:
    """Sums over jobs and time. Times are in seconds."""

    jobs: int = 0
    elastic_jobs: int = 0
    jct: float = 0.0
    """Job completion times, from the submission to the end."""
    elastic_jct: float = 0.0
    elastic_queue: float = 0.0
    other_queue: float = 0.0
    """What jobs that are not elastic wait before they start."""
    work: float = 0.0
    """Device-seconds that the jobs would have taken as submitted."""
    held: float = 0.0
    """Device-seconds that jobs held devices."""
    capacity: float = 0.0
    """Device-seconds from the first submission to the last end."""
    makespan: float = 0.0
    """Of the longest cluster."""
    deadlines: int = 0
    """Jobs that ended in time."""
    elastic_deadlines: int = 0
    scalings: int = 0
    stopped: float = 0.0
    """Seconds that jobs stood still for scalings and failures."""
    lost: float = 0.0
    """Work done again after failures, in seconds of running as submitted."""
    failures: int = 0
    """That hit a job."""
    moved: int = 0
    """Devices that others left so that somebody's block fits."""
    elapsed: float = field(default=0.0)
    """Seconds that the simulation took."""

    def __add__(self, other: Outcome) -> Outcome:
        total = Outcome(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})
        total.makespan = max(self.makespan, other.makespan)
        return total

    def figures(self) -> dict[str, Any]:
        """For the line of JSON. What no job stands for is None."""
        others = self.jobs - self.elastic_jobs
        return {
            "mean_jct_s": _mean(self.jct, self.jobs),
            "mean_elastic_jct_s": _mean(self.elastic_jct, self.elastic_jobs),
            "mean_other_queue_s": _mean(self.other_queue, others),
            "mean_elastic_queue_s": _mean(self.elastic_queue, self.elastic_jobs),
            "mean_other_jct_s": _mean(self.jct - self.elastic_jct, others),
            "utilisation": round(self.held / self.capacity, 4) if self.capacity else None,
            "goodput": round(self.work / self.held, 4) if self.held else None,
            "makespan_s": round(self.makespan, 1),
            "scale_operations": self.scalings,
            "deadlines_met": _mean(self.deadlines, self.jobs, 4),
            "elastic_deadlines_met": _mean(self.elastic_deadlines, self.elastic_jobs, 4),
            "stopped_s": round(self.stopped, 1),
            "failures": self.failures,
            "lost_work_s": round(self.lost, 1),
            "migrated_devices": self.moved,
            "simulated_in_s": round(self.elapsed, 2),
        }


def _mean(total: float, count: int, digits: int = 1) -> float | None:
    return round(total / count, digits) if count else None
