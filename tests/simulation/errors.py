"""Errors: what a simulated history can show."""

from __future__ import annotations


class Violation(Exception):
    """Something happened that must not. ``kind`` names the invariant."""

    def __init__(self, kind: str, what: str) -> None:
        super().__init__(f"{kind}: {what}")
        self.kind = kind


class Interrupted(Exception):
    """A model rank has to unwind, as ``cluster.rank.control.Interrupted``."""

    def __init__(self, suspects: tuple[int, ...] = ()) -> None:
        super().__init__(suspects)
        self.suspects = suspects


class Gone(Exception):
    """A model rank's process ends: the job is over for it."""
