"""Frequencies of processors, by Linux' cpufreq: the most that a governor may choose."""

from __future__ import annotations

from pathlib import Path

_ROOT = Path("/sys/devices/system/cpu")
_STEP = 0.05
"""Between clocks where the driver does not list its own."""


class Cpufreq:
    """A device is a list of processors, as ``0,1``: those that one rank has for itself.

    Args:
        root: where the kernel has its processors.
    """

    name = "cpufreq"

    def __init__(self, root: Path = _ROOT) -> None:
        self._root = root

    def steps(self, device: str) -> tuple[float, ...]:
        """Those of the first of its processors; of them the base clock, or else the highest, is 1."""
        folder = self._folder(device.partition(",")[0])
        base = self._base(device)
        try:
            listed = [int(text) for text in (folder / "scaling_available_frequencies").read_text().split()]
        except FileNotFoundError:
            low, high = (int((folder / f"cpuinfo_{which}_freq").read_text()) for which in ("min", "max"))
            count = max(round((high - low) / (base * _STEP)), 1)
            listed = [low + (high - low) * at // count for at in range(count + 1)]
        return tuple(frequency / base for frequency in sorted(listed))

    def read(self, device: str) -> str:
        """The limits of all its processors."""
        return ",".join((self._folder(cpu) / "scaling_max_freq").read_text().strip() for cpu in device.split(","))

    def write(self, device: str, clock: float) -> None:
        """Limit all its processors."""
        limit = round(self._base(device) * clock)
        for cpu in device.split(","):
            (self._folder(cpu) / "scaling_max_freq").write_text(f"{limit}\n")

    def limit(self, device: str, watts: float) -> None:
        """It cannot be told."""

    def actual(self, device: str) -> float | None:
        """The least of its processors' limits, which the kernel lowers when it has to."""
        limits = (int((self._folder(cpu) / "scaling_max_freq").read_text()) for cpu in device.split(","))
        return min(limits) / self._base(device)

    def restore(self, device: str, before: str) -> None:
        """As they were."""
        for cpu, limit in zip(device.split(","), before.split(","), strict=True):
            (self._folder(cpu) / "scaling_max_freq").write_text(f"{limit}\n")

    def _folder(self, cpu: str) -> Path:
        return self._root / f"cpu{cpu}" / "cpufreq"

    def _base(self, device: str) -> int:
        folder = self._folder(device.partition(",")[0])
        base = folder / "base_frequency"  # not every driver knows one
        return int((base if base.exists() else folder / "cpuinfo_max_freq").read_text())
