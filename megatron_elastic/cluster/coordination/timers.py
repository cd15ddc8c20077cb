"""Timers: limits of waits in progress that do not run out while this very process stands still."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

_LATE = 0.05
"""Seconds by which a timer may fire late before this process counts as having stood still."""
_ANEW = 5
"""How often a limit may begin anew."""
_GRACE = 10.0
"""Seconds that it has then at most: messages that are there are read by then, and silent nodes have told of
themselves.
"""


class Timers:
    """Named limits in an event loop.

    A process that was stopped, or got no processor, finds all its limits passed when it goes on, and the messages that
    would have ended the waits still unread. So a timer that fires late begins anew, a few times and not for long: a
    process that always is late has limits, too.
    """

    def __init__(self) -> None:
        self._handles: dict[str, asyncio.TimerHandle] = {}

    def set(self, name: str, delay: float, action: Callable[[], None]) -> None:
        """Call ``action`` after ``delay`` seconds; replaces the timer of that name."""
        self._set(name, delay, action, _ANEW)

    def _set(self, name: str, delay: float, action: Callable[[], None], anew: int) -> None:
        self.cancel(name)
        self._handles[name] = asyncio.get_running_loop().call_later(delay, self._fire, name, delay, action, anew)

    def cancel(self, name: str) -> None:
        """Forget a timer; nothing happens if there is none of that name."""
        if (handle := self._handles.pop(name, None)) is not None:
            handle.cancel()

    def cancel_all(self) -> None:
        """Forget every timer."""
        for name in list(self._handles):
            self.cancel(name)

    def _fire(self, name: str, delay: float, action: Callable[[], None], anew: int) -> None:
        late = asyncio.get_running_loop().time() - self._handles.pop(name).when() > _LATE
        if late and anew:
            self._set(name, min(delay, _GRACE), action, anew - 1)
        else:
            action()
