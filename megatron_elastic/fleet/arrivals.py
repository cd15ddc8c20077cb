"""Arrivals: how often jobs come, by the devices that they ask for, and how often jobs end; estimated online."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import exp

_MEMORY_S = 6 * 3600.0
"""What was seen so long ago counts 1/e."""
_SHORTEST_S = 60.0
"""Nothing is concluded from less."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Counts of a Poisson process for each size class, which fade. Class k: more than 2^(k-1) and up to 2^k devices."""

    begun: float
    last: float
    arrivals: tuple[float, ...] = ()
    """By class: jobs that came, each counting ``exp(-age / memory)``."""
    devices: float = 0.0
    """Sum of what they asked for, fading likewise."""
    ends: float = 0.0

    def seen(self, now: float, arrived: Iterable[int], ended: int) -> Rates:
        """With what has happened by ``now``."""
        fade = exp((self.last - now) / _MEMORY_S)
        counts = [count * fade for count in self.arrivals]
        devices = self.devices * fade
        for asked in arrived:
            size_class = (asked - 1).bit_length()
            counts += [0.0] * (size_class + 1 - len(counts))
            counts[size_class] += 1
            devices += asked
        return Rates(self.begun, now, tuple(counts), devices, self.ends * fade + ended)

    def _span(self, now: float) -> float:
        """Seconds that the counts stand for."""
        return max(_SHORTEST_S, _MEMORY_S * (1 - exp((self.begun - now) / _MEMORY_S)))

    def above(self, devices: int, now: float) -> float:
        """Arrivals a second of jobs that ask for more than ``devices``.

        One more than were seen is counted, so that silence is not taken for never: (n + 1) / T.
        """
        fade = exp((self.last - now) / _MEMORY_S)
        count = sum(count for size, count in enumerate(self.arrivals) if 1 << size > devices)
        return (count * fade + 1) / self._span(now)

    def ending(self, now: float) -> float:
        """Ends of jobs a second, counted in the same way."""
        return (self.ends * exp((self.last - now) / _MEMORY_S) + 1) / self._span(now)

    @property
    def usual_devices(self) -> float:
        """Mean of what jobs ask for; 1 where none has come."""
        count = sum(self.arrivals)
        return self.devices / count if count > 1e-9 else 1.0
