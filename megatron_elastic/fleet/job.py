"""Job: what a cluster is asked to run."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_elastic.fleet.simulated.models import Model


@dataclass(frozen=True, slots=True)
class Job:
    """A job as submitted. Its work is counted in seconds of running as submitted: it has ``duration`` of them."""

    index: int
    """Its number, by submission."""
    name: str
    submitted: float
    """Seconds since the begin of the trace."""
    duration: float
    """Seconds that it takes on ``devices``."""
    devices: int
    deadline: float
    """Seconds since the begin of the trace."""
    model: Model | None = None
    """What an elastic job of a trace trains."""
    most: int | None = None
    """Devices that an elastic job can use at most, where no model says so."""

    @property
    def elastic(self) -> bool:
        """Whether it can run on other numbers of devices."""
        return self.model is not None or self.most is not None
