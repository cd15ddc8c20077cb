"""Deathwatch: tells that a process is dying before the kernel has taken it down.

The kernel frees a dying process's memory first and closes its files last, which takes tens of milliseconds where
ranks outnumber cores. Before either it looks through the robust mutexes that the process holds. So each rank holds
one, in memory that it shares with its agent, and a thread of the agent waits for it: the kernel hands it over, marked,
when the rank begins to die.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
import time
from collections.abc import Callable

_SLOT = 64
"""Bytes for each mutex: a ``pthread_mutex_t`` has 40 or 48, by architecture."""
_ROBUST = _SHARED = 1
_libc = ctypes.CDLL(None)


class Deathwatch:
    """One mutex for each of a node's ranks. The agent makes it; the zygote and its ranks open it by ``fd``."""

    def __init__(self, slots: int, fd: int = -1) -> None:
        self.slots = slots
        self.fd = os.memfd_create("megatron-elastic-deathwatch") if fd < 0 else fd
        if fd < 0:
            os.ftruncate(self.fd, slots * _SLOT)
        self._memory = mmap.mmap(self.fd, slots * _SLOT)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        if fd < 0:
            self._make_mutexes()

    def hold(self, slot: int) -> None:
        """In the rank, on its main thread: from now on its death is told."""
        code = _libc.pthread_mutex_lock(self._mutex(slot))
        if code == errno.EOWNERDEAD:  # faster than the thread that was to tell of the last holder's death
            code = _libc.pthread_mutex_consistent(self._mutex(slot))
        _check(code)

    def release(self, slot: int) -> None:
        """In the rank: it ends in order, which is not to be told."""
        _check(_libc.pthread_mutex_unlock(self._mutex(slot)))

    def watch(self, slot: int, tell: Callable[[float], None]) -> None:
        """In the agent, once the rank holds: call ``tell`` with the time, from another thread, if the rank dies.

        Another rank can hold the slot afterwards.
        """

        def wait() -> None:
            code = _libc.pthread_mutex_lock(self._mutex(slot))
            if code == errno.EOWNERDEAD:
                tell(time.time())
                _check(_libc.pthread_mutex_consistent(self._mutex(slot)))
            _check(_libc.pthread_mutex_unlock(self._mutex(slot)))

        threading.Thread(target=wait, daemon=True, name=f"deathwatch {slot}").start()

    def _make_mutexes(self) -> None:
        attributes = ctypes.create_string_buffer(64)
        _check(_libc.pthread_mutexattr_init(attributes))
        _check(_libc.pthread_mutexattr_setrobust(attributes, _ROBUST))
        _check(_libc.pthread_mutexattr_setpshared(attributes, _SHARED))
        for slot in range(self.slots):
            _check(_libc.pthread_mutex_init(self._mutex(slot), attributes))

    def _mutex(self, slot: int) -> ctypes.c_void_p:
        return ctypes.c_void_p(self._base + slot * _SLOT)


def _check(code: int) -> None:
    if code:
        raise OSError(code, os.strerror(code))
