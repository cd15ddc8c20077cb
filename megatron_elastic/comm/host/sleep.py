"""Sleep: how a wait passes the time until something happens."""

from __future__ import annotations

import os
import select
import time

SPINS, _WORTH = 60, 100e-6
"""Times that a wait looks before it sleeps, where every rank has a core, and about the seconds that takes. A sleep that
lasts longer halves the looks: the core has other work, or messages are rare. One that does not doubles them."""
YIELDS = 2
"""Times that a wait lets others have its core before it sleeps, where ranks outnumber cores: what it waits for has come
often when the core comes back, and a sleep and a wake-up cost more than that."""


class Sleep:
    """Looks a few times and sleeps then.

    Args:
        interrupt: descriptor that wakes a wait besides events; -1 for none.
        crowded: ranks outnumber cores: sleep in the kernel almost at once.
    """

    def __init__(self, interrupt: int, crowded: bool) -> None:
        self._crowded = crowded
        self.looks = YIELDS if crowded else SPINS
        """How often to look before the next sleep."""
        self.events = select.epoll()
        """Readable when there is something to do."""
        self._all = select.epoll()
        """The same, and interrupts."""
        self._all.register(self.events.fileno(), select.EPOLLIN)
        if interrupt >= 0:
            self._all.register(interrupt, select.EPOLLIN)

    def give_way(self) -> None:
        """Between two looks: let others have the core."""
        if self._crowded:
            os.sched_yield()

    def sleep(self, limit: float, deaf: bool = False) -> list[tuple[int, int]] | None:
        """Until there is something to do, an interrupt, or the limit, in seconds. Returns the events; None: nothing.

        ``deaf``: interrupts do not count.
        """
        if deaf:
            return self.events.poll(limit) or None
        begun = time.monotonic()
        awake = self._all.poll(limit)
        if not self._crowded:
            worth = time.monotonic() - begun < _WORTH
            self.looks = min(SPINS, 2 * self.looks) if worth else max(1, self.looks // 2)
        if not awake:
            return None
        return self.events.poll(0) if any(fd == self.events.fileno() for fd, _ in awake) else []

    def close(self) -> None:
        """Nobody sleeps any more."""
        self._all.close()
        self.events.close()
