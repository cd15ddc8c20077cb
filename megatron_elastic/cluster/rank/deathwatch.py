"""Deathwatch: tells that a process is dying before the kernel has taken it down.

Each rank holds a robust mutex in memory that it shares with its agent, and a thread of the agent waits for it: the
kernel hands it over, marked, when the rank begins to die (``cluster.robust_mutex``).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
from collections.abc import Callable

from megatron_elastic.cluster.robust_mutex import SIZE, RobustMutex


class Deathwatch:
    """One mutex for each of a node's ranks. The agent makes it; the zygote and its ranks open it by ``fd``."""

    def __init__(self, slots: int, fd: int = -1) -> None:
        self.slots = slots
        self.fd = os.memfd_create("megatron-elastic-deathwatch") if fd < 0 else fd
        if fd < 0:
            os.ftruncate(self.fd, slots * SIZE)
        memory = mmap.mmap(self.fd, slots * SIZE)
        self._mutexes = [RobustMutex(memory, slot * SIZE, make=fd < 0) for slot in range(slots)]

    def hold(self, slot: int) -> None:
        """In the rank, on its main thread: from now on its death is told."""
        self._mutexes[slot].lock()  # maybe faster than the thread that was to tell of the last holder's death

    def release(self, slot: int) -> None:
        """In the rank: it ends in order, which is not to be told."""
        self._mutexes[slot].unlock()

    def watch(self, slot: int, tell: Callable[[float], None]) -> None:
        """In the agent, once the rank holds: call ``tell`` with the time, from another thread, if the rank dies.

        Another rank can hold the slot afterwards. Where no thread can be started nothing is told: the zygote tells of
        its end.
        """

        def wait() -> None:
            mutex = self._mutexes[slot]
            if mutex.lock():
                tell(time.time())
            mutex.unlock()

        with contextlib.suppress(RuntimeError):
            threading.Thread(target=wait, daemon=True, name=f"deathwatch {slot}").start()
