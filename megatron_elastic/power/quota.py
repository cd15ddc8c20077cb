"""Quotas of processor time, by control groups: a clock for ranks that compute on processors they share with others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")
"""Where the kernel has control groups."""
_PERIOD_US = 100_000
_STEPS = tuple(step / 20 for step in range(2, 41))
"""From a tenth of the base clock to twice as much, if so many processors are free."""


class Quota:
    """A device is the folder of a control group that holds the processes of one rank; of either version.

    At the base clock a rank may take as much as its group might when its clock was first set, or one processor where
    nothing limited it.
    """

    name = "quota"

    def __init__(self) -> None:
        self._bases: dict[str, float] = {}
        """Of each device, in processors."""

    def steps(self, device: str) -> tuple[float, ...]:
        """All that make sense: a quota can be anything."""
        return _STEPS

    def read(self, device: str) -> str:
        """Quota and period, in the words of its version."""
        return " ".join(self._words(device))

    def write(self, device: str, clock: float) -> None:
        """A share of every period."""
        base = self._bases.setdefault(device, self._limit(device) or 1.0)
        quota = max(round(_PERIOD_US * base * clock), 1_000)
        self._set(device, f"{quota}", f"{_PERIOD_US}")

    def limit(self, device: str, watts: float) -> None:
        """It cannot be told."""

    def actual(self, device: str) -> float | None:
        """Nothing but who writes it changes a quota."""
        return None

    def restore(self, device: str, before: str) -> None:
        """As it was."""
        quota, period = before.split()
        self._set(device, quota, period)

    def _limit(self, device: str) -> float | None:
        """Processors whose time the group may take; None: as many as there are."""
        quota, period = self._words(device)
        return int(quota) / int(period) if quota.isdecimal() else None

    def _words(self, device: str) -> list[str]:
        """Quota and period."""
        return " ".join(file.read_text() for file in self._files(device)).split()

    def _set(self, device: str, quota: str, period: str) -> None:
        file, *of_period = self._files(device)
        for other in of_period:
            file.write_text("-1\n")  # each is checked as it is written, and without a quota any period will do
            other.write_text(f"{period}\n")
        file.write_text(f"{quota}\n" if of_period else f"{quota} {period}\n")

    def _files(self, device: str) -> list[Path]:
        """One of both, or that of the quota and that of the period."""
        folder = Path(device)
        newer = folder / "cpu.max"
        return [newer] if newer.exists() else [folder / "cpu.cfs_quota_us", folder / "cpu.cfs_period_us"]


class Quotas:
    """Control groups for ranks of this machine, of either version, each with a part of one processor's time: so that
    ranks have processors of their own, if slow ones, where there are fewer. A process enters by writing its number to
    ``cgroup.procs`` of its rank's. Raises OSError where there can be none.

    Args:
        name: of the folder that holds them.
        root: where the kernel has control groups.
    """

    def __init__(self, name: str, root: Path = GROUPS) -> None:
        second = (root / "cgroup.controllers").is_file()
        self.folder = root / name if second else root / "cpu" / name
        self.folder.mkdir()
        if second:
            (self.folder / "cgroup.subtree_control").write_text("+cpu")

    def make(self, ranks: int, share: float) -> None:
        """A group for each rank."""
        for rank in range(ranks):
            (self.folder / str(rank)).mkdir()
        self.scale(range(ranks), share)

    def scale(self, ranks: Iterable[int], factor: float) -> None:
        """Make quotas so many times as large as they are, or as one processor where there is none."""
        for rank in ranks:
            Quota().write(str(self.folder / str(rank)), factor)  # a new one, for which what there is now is the base

    def remove(self) -> None:
        """When the processes have ended."""
        for folder in (*(each for each in self.folder.iterdir() if each.is_dir()), self.folder):
            with contextlib.suppress(OSError):
                folder.rmdir()
