"""Speed table: how fast a job is on each number of devices that is worth having, relative to as submitted.

A job's scale table (``plan.predict.scale_table``) says which layout it would have there, and is one of its sources.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass

_SIGNIFICANT = 1.01
"""A larger number of devices is worth having if it is at least so many times as fast as the next smaller one."""


@dataclass(frozen=True, slots=True)
class SpeedTable:
    """Numbers of devices, rising, with the speed on each, in units of the speed as submitted."""

    devices: tuple[int, ...]
    speeds: tuple[float, ...]

    @classmethod
    def of(cls, given: int, seconds: Callable[[int], float], candidates: Iterable[int], given_s: float) -> SpeedTable:
        """From the time of a step on each of ``candidates`` devices, against ``given_s`` as submitted.

        Only what is at least 1 % faster than the next smaller one is kept; ``given`` is always there, at speed 1.
        """
        speeds = {given: 1.0}
        best = 0.0
        for devices in sorted({*candidates} - {given}):
            speed = given_s / seconds(devices)
            if devices > given:
                best = max(best, 1.0)
            if speed >= _SIGNIFICANT * best and (devices > given or speed < 1.0 / _SIGNIFICANT):
                speeds[devices] = best = speed
        return cls(tuple(sorted(speeds)), tuple(speeds[devices] for devices in sorted(speeds)))

    @classmethod
    def rigid(cls, given: int) -> SpeedTable:
        """Of a job that runs on as many devices as it was submitted with."""
        return cls((given,), (1.0,))

    def fit(self, devices: int) -> int:
        """The largest number of devices of the table that is at most ``devices``; 0 where there is none."""
        index = bisect_right(self.devices, devices)
        return self.devices[index - 1] if index else 0

    def speed(self, devices: int) -> float:
        """Speed with ``devices``, of which only the largest number in the table works; 0 below the smallest."""
        index = bisect_right(self.devices, devices)
        return self.speeds[index - 1] if index else 0.0

    def below(self, devices: int, floor: int) -> int | None:
        """The next smaller number of the table than ``devices`` and at least ``floor``; None where there is none."""
        index = bisect_right(self.devices, devices - 1)
        return self.devices[index - 1] if index and self.devices[index - 1] >= floor else None

    def above(self, devices: int, most: int) -> list[int]:
        """The numbers of the table above ``devices``, at most ``most``."""
        return list(self.devices[bisect_right(self.devices, devices) : bisect_right(self.devices, most)])
