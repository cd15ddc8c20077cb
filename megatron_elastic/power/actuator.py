"""Actuator: one way to set clocks of devices; as multiples of the base clock, at which costs were measured."""

from __future__ import annotations

from typing import Protocol


class Actuator(Protocol):
    """Sets clocks of devices of one kind, which are named by texts that outlive processes.

    What fails raises OSError, a missing right PermissionError, which is one.
    """

    name: str
    """In a file that says what to restore."""

    def steps(self, device: str) -> tuple[float, ...]:
        """The clocks that a device can have, ascending; none: any."""

    def read(self, device: str) -> str:
        """What is set now, for ``restore``."""

    def write(self, device: str, clock: float) -> None:
        """Set the clock of a device."""

    def limit(self, device: str, watts: float) -> None:
        """Let a device draw no more than this, or as little as it can be told to; nothing where it cannot be told."""

    def actual(self, device: str) -> float | None:
        """The highest clock at which a device can run now, of its own accord less than what is set, as where it is too
        hot; None: nothing is known of that.
        """

    def restore(self, device: str, before: str) -> None:
        """Set back what ``read`` has returned."""
