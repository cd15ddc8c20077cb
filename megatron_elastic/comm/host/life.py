"""Life: a mark in shared memory that the kernel changes when its holder begins to die (``cluster.robust_mutex``).

A rank holds one, and who waits for the rank looks at it.
"""

from __future__ import annotations

import mmap
import threading

from megatron_elastic.cluster.robust_mutex import SIZE, RobustMutex

__all__ = ["SIZE", "Life", "LifeView"]

_held: set[Life] = set()
"""Marks of this process. Each thread's list of them runs through their memory, which must stay mapped."""


class Life:
    """This process's mark at ``offset`` in shared memory. Only a main thread lives as long as its process and can hold
    it; elsewhere there is none, and the end of the process is seen later.
    """

    def __init__(self, memory: mmap.mmap, offset: int) -> None:
        self._mutex = RobustMutex(memory, offset, make=True)
        if threading.current_thread() is threading.main_thread():
            self._mutex.lock()
            _held.add(self)

    def release(self) -> bool:
        """The rank ends in order. False if only the main thread could do that: the memory must stay mapped then."""
        if self in _held:
            try:
                self._mutex.unlock()
            except PermissionError:
                return False
            _held.remove(self)
        del self._mutex
        return True


class LifeView:
    """Another process's mark."""

    def __init__(self, memory: mmap.mmap, offset: int) -> None:
        self._mutex = RobustMutex(memory, offset)

    @property
    def ended(self) -> bool:
        """Whether its holder is dying or dead."""
        return self._mutex.orphaned
