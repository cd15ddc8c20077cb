"""Keeper: sets clocks, and sets them back however a job ends.

What was set before is in a file before anything is changed. A job that ends well restores it; the next one, or a
person, restores what one that crashed has left there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
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
        self._now: dict[str, tuple[float | None, float | None]] = {}
        """Clock and watts of devices, as far as they are set."""
        self._touched: set[str] = set()
        """Devices that may be otherwise than before."""

    def set(self, clocks: Mapping[str, float], watts: Mapping[str, float] | None = None) -> None:
        """Set the clocks of devices, and what devices may draw at most, and set all else back that was set before.
        Raises OSError.
        """
        limits = watts or {}
        wanted = {device: (clocks.get(device), limits.get(device)) for device in {**clocks, **limits}}
        new = {device: self._actuator.read(device) for device in wanted if device not in self._before}
        if new:
            _note(self._file, self._actuator.name, self._before | new)
            self._before |= new
        for device, now in list(self._now.items()):
            of_device = wanted.get(device, (None, None))
            if any(then is None and was is not None for then, was in zip(of_device, now, strict=True)):
                self._actuator.restore(device, self._before[device])
                del self._now[device]
        for device, (clock, limit) in wanted.items():
            if (now := self._now.get(device, (None, None))) == (clock, limit):
                continue
            self._now[device] = clock, limit
            if clock is not None and clock != now[0]:
                self._change(device, partial(self._actuator.write, device, clock))
            if limit is not None and limit != now[1]:
                self._change(device, partial(self._actuator.limit, device, limit))

    def throttled(self) -> dict[str, float]:
        """Devices that run at a lower clock than was set, and at which. Raises OSError."""
        set_ = [(device, clock) for device, (clock, _) in self._now.items() if clock is not None]
        found = ((device, clock, self._actuator.actual(device)) for device, clock in set_)
        return {device: now for device, clock, now in found if now is not None and now < clock * _SAME}

    def restore(self) -> None:
        """Set back all that was set. What fails is noted, and tried again with the next call."""
        touched = {device: self._before[device] for device in self._before if device in self._touched}
        self._before = _restore(self._actuator, touched, self._file, self._warn)
        self._touched = set(self._before)
        self._now.clear()

    def _change(self, device: str, action: Callable[[], None]) -> None:
        new = device not in self._touched
        self._touched.add(device)
        try:
            action()
        except PermissionError:
            if new:  # who may not change it need not set it back
                self._touched.discard(device)
            raise


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


def _restore(
    actuator: Actuator, before: Mapping[str, str], file: Path, warn: Callable[[str], None]
) -> dict[str, str]:
    """Returns what could not be set back, which is noted."""
    failed = {}
    for device, value in before.items():
        try:
            actuator.restore(device, value)
        except Exception as error:  # whatever it is, others are set back
            failed[device] = value
            warn(f"the clock of {actuator.name} {device} is not set back to {value!r}: {error}")
    try:
        if failed:
            _note(file, actuator.name, failed)
        else:
            file.unlink(missing_ok=True)
    except OSError as error:
        warn(f"{file} cannot be changed ({error}): the next job here sets clocks back once more")
    return failed


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
