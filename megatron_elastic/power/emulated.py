"""Clocks of devices that are emulated: files, which whoever emulates them reads before each step."""

from __future__ import annotations

import os
from pathlib import Path


class Emulated:
    """A device is the path of a file with its clock. Where there is none, it has the clock that it begins with.

    Beside it, in a file of the same name with ``.most``, is what its temperature allows, if that is less.
    """

    name = "emulated"

    def steps(self, device: str) -> tuple[float, ...]:
        """Any."""
        return ()

    def read(self, device: str) -> str:
        """The clock as it is written, or nothing."""
        try:
            return Path(device).read_text()
        except FileNotFoundError:
            return ""

    def write(self, device: str, clock: float) -> None:
        """From the next step on."""
        file = Path(device)
        file.parent.mkdir(parents=True, exist_ok=True)
        written = file.with_name(f"{file.name}.{os.getpid()}")
        written.write_text(repr(clock))
        written.rename(file)

    def limit(self, device: str, watts: float) -> None:
        """It cannot be told."""

    def actual(self, device: str) -> float | None:
        """What is written beside it."""
        try:
            return float(Path(f"{device}.most").read_text())
        except FileNotFoundError:
            return None

    def restore(self, device: str, before: str) -> None:
        """As it was."""
        if before:
            self.write(device, float(before))
        else:
            Path(device).unlink(missing_ok=True)
