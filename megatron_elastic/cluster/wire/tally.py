"""Tally: one line about what may happen a thousand times a second."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

_EVERY = 10.0


class Tally:
    """Says the first of its kind at once, and how many came after it every ten seconds.

    Args:
        say: prints one line for people.
        what: what is counted, to be put between a number and "more".
    """

    def __init__(self, say: Callable[[str], None], what: str) -> None:
        self._print = say
        self._what = what
        self._count = 0
        self._last = ""
        self._timer: asyncio.TimerHandle | None = None

    def note(self, line: str) -> None:
        """It has happened again; ``line`` tells of this time."""
        if self._timer is None:
            self._say(line)
            self._wait()
        else:
            self._count += 1
            self._last = line

    def close(self) -> None:
        """Say what has not been said."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._count:
            self._say(f"{self._count} more {self._what}; the last one: {self._last}")
            self._count = 0

    def _say(self, line: str) -> None:
        with contextlib.suppress(OSError):  # nobody may be there to read it; that is no reason to stop counting
            self._print(line)

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_EVERY, self._pass)

    def _pass(self) -> None:
        if self._count:
            self.close()
            self._wait()
        else:
            self._timer = None
