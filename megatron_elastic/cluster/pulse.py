"""Pulse: the heartbeats of a connection between an agent and the coordinator, and how long its other end is silent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

_TICKS = 8
"""Ticks in one heartbeat timeout; a heartbeat is sent at every second one, so four must be missing."""


class Pulse:
    """Sends heartbeats from now on, and calls ``on_silent`` once if nothing is heard for ``limit`` seconds.

    Silence is counted in our own ticks. A process that was stopped or got no processor for a while goes on with one
    tick, not with all that passed meanwhile, so it never takes its own absence for the other end's.

    Args:
        beat: sends a heartbeat; both ends must have a pulse of the same ``timeout``.
        timeout: a heartbeat is sent every quarter of these seconds.
        limit: seconds of silence that are too long, at least ``timeout``.
        on_silent: what to do then.
    """

    def __init__(
        self, beat: Callable[[], object], timeout: float, limit: float, on_silent: Callable[[], None]
    ) -> None:
        self.heard_at = time.time()
        """When the other end was last heard."""
        self._beat = beat
        self._interval = timeout / _TICKS
        self._most = round(limit / self._interval)
        self._on_silent = on_silent
        self._ticks = 0
        self._silent = 0
        self._handle = asyncio.get_running_loop().call_soon(self._tick)

    def heard(self) -> None:
        """Something came from the other end, whatever it was."""
        self._silent = 0
        self.heard_at = time.time()

    def stop(self) -> None:
        """Send nothing more and watch no longer. Stopping twice is fine."""
        self._handle.cancel()

    def _tick(self) -> None:
        if self._ticks % 2 == 0:
            self._beat()
        self._ticks += 1
        self._silent += 1
        if self._silent > self._most:  # not at: the first of these ticks may have followed the last word at once
            self._on_silent()
        else:
            self._handle = asyncio.get_running_loop().call_later(self._interval, self._tick)
