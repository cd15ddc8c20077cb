"""Keeper: sets clocks, and sets them back however a job ends.

What was set before is in a file before anything is changed. A job that ends well restores it; the next one, or a
person, restores what one that crashed has left there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from megatron_elastic.power.actuator import Actuator

_SAME = 0.98
"""Of the clock that was set; what is more than that is the same."""


class Keeper:
    """Of the devices of one machine.

    Args:
        file: where it is noted what to restore; on this machine's disk.
        warn: prints one line for people.
    """

    def __init__(self, actuator: Actuator, file: Path, warn: Callable[[str], None]) -> None:
        self._actuator = actuator
        self._file = file
        self._warn = warn
        self._before: dict[str, str] = {}
        self._now: dict[str, float] = {}

    def set(self, clocks: Mapping[str, float]) -> None:
        """Set the clocks of devices, and set others back that were set before. Raises OSError."""
        new = {device: self._actuator.read(device) for device in clocks if device not in self._before}
        if new:
            _note(self._file, self._actuator.name, self._before | new)
            self._before |= new
        for device in [device for device in self._now if device not in clocks]:
            self._actuator.restore(device, self._before[device])
            del self._now[device]
        for device, clock in clocks.items():
            if self._now.get(device) != clock:
                self._now[device] = clock
                self._actuator.write(device, clock)

    def throttled(self) -> dict[str, float]:
        """Devices that run at a lower clock than was set, and at which. Raises OSError."""
        found = ((device, clock, self._actuator.actual(device)) for device, clock in self._now.items())
        return {device: now for device, clock, now in found if now is not None and now < clock * _SAME}

    def restore(self) -> None:
        """Set back all that was set."""
        _restore(self._actuator, self._before, self._file, self._warn)
        self._before.clear()
        self._now.clear()


def restore_left(file: Path, actuators: Iterable[Actuator], warn: Callable[[str], None]) -> None:
    """Set back what a job has left that could not do so itself, as ``file`` says; nothing where there is none."""
    try:
        name, before = read_note(file)
    except FileNotFoundError:
        return
    except UNREADABLE as error:
        warn(f"{file} does not say what clocks to restore ({error}): set them by hand, and remove it")
        return
    found = next((actuator for actuator in actuators if actuator.name == name), None)
    if found is None:
        warn(f"{file} says to restore clocks by {name!r}, which there is none of: set them by hand: {before}")
        return
    _restore(found, before, file, warn)


def _restore(actuator: Actuator, before: Mapping[str, str], file: Path, warn: Callable[[str], None]) -> None:
    failed = {}
    for device, value in before.items():
        try:
            actuator.restore(device, value)
        except OSError as error:
            failed[device] = value
            warn(f"the clock of {actuator.name} {device} is not set back to {value!r}: {error}")
    if failed:
        _note(file, actuator.name, failed)
    else:
        file.unlink(missing_ok=True)


UNREADABLE = (OSError, ValueError, KeyError, TypeError)
"""What ``read_note`` raises."""


def read_note(file: Path) -> tuple[str, dict[str, str]]:
    """The actuator's name, and device -> what to restore, of a note. Raises one of ``UNREADABLE``."""
    noted = json.loads(file.read_text())
    return noted["actuator"], dict(noted["before"])


def _note(file: Path, name: str, before: Mapping[str, str]) -> None:
    """Written so that it is there whole after a crash, or as it was."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    beside = file.with_suffix(".new")
    with beside.open("w", encoding="utf-8") as out:
        json.dump({"actuator": name, "before": dict(before)}, out)
        out.flush()
        os.fsync(out.fileno())
    beside.replace(file)
