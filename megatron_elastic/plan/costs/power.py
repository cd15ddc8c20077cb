"""Power: watts of one device by its clock, and how a job chooses clocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

MODES = ("performance", "energy")
"""Values of ``--elastic-dvfs``."""


@dataclass(frozen=True, slots=True)
class PowerModel:
    """Watts of one device.

    Attributes:
        idle_w: while it waits.
        static_w: while it computes, whatever the clock.
        dynamic_w: besides that while it computes at the base clock; it grows with the third power of the clock.
        device_w: what it may draw at most, by which its clocks are limited; None: nothing is known of a limit.
        host_w: the same of all devices of a host together, while they compute.
    """

    idle_w: float
    static_w: float
    dynamic_w: float
    device_w: float | None = None
    host_w: float | None = None

    def watts(self, clock: float) -> float:
        """While it computes at ``clock``."""
        return self.static_w + self.dynamic_w * float(clock**3)

    def joules(self, busy_ms: float, idle_ms: float, clock: float) -> float:
        """Of so much computing at ``clock``, and so much waiting."""
        return (self.watts(clock) * busy_ms + self.idle_w * idle_ms) / 1e3


@dataclass(frozen=True, slots=True)
class Clocking:
    """That a job sets clocks of devices (``plan.work.clock``).

    Attributes:
        mode: one of ``MODES``.
        highest: clocks that devices of single ranks do not come above, where that is less than what others may.
    """

    mode: str
    highest: Mapping[int, float] = field(default_factory=dict)
