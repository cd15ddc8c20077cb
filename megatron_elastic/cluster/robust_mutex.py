"""Robust mutex: a lock in shared memory whose holder's death the kernel tells.

The kernel frees a dying process's memory first and closes its files last, which takes tens of milliseconds where
processes outnumber cores. Before either it looks through the robust mutexes that the process's threads hold, marks
them, and hands each to a thread that waits for it. So who holds one is seen to die at once.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from typing import Any

SIZE = 64
"""Bytes for a mutex: a ``pthread_mutex_t`` has 40 or 48, by architecture, and begins with the word that is marked."""
_OWNER_DIED = 0x40000000
_ROBUST = _SHARED = 1
_libc = ctypes.CDLL(None)


class RobustMutex:
    """The mutex at ``offset`` in shared memory, which must stay mapped as long as a thread of this process holds it.

    Args:
        make: nobody has made it yet.
    """

    def __init__(self, memory: mmap.mmap, offset: int, make: bool = False) -> None:
        self._bytes: Any = (ctypes.c_char * SIZE).from_buffer(memory, offset)
        self._word = ctypes.c_uint32.from_buffer(memory, offset)
        if make:
            attributes = ctypes.create_string_buffer(SIZE)
            _check(_libc.pthread_mutexattr_init(attributes))
            _check(_libc.pthread_mutexattr_setrobust(attributes, _ROBUST))
            _check(_libc.pthread_mutexattr_setpshared(attributes, _SHARED))
            _check(_libc.pthread_mutex_init(self._bytes, attributes))

    def lock(self) -> bool:
        """Wait for it and hold it. Returns whether its last holder died. Raises OSError."""
        code = _libc.pthread_mutex_lock(self._bytes)
        if code != errno.EOWNERDEAD:
            _check(code)
            return False
        _check(_libc.pthread_mutex_consistent(self._bytes))
        return True

    def unlock(self) -> None:
        """Let go of it. Raises PermissionError in a thread that does not hold it."""
        _check(_libc.pthread_mutex_unlock(self._bytes))

    @property
    def orphaned(self) -> bool:
        """Whether its holder is dying or dead, and nobody has locked it since."""
        return bool(self._word.value & _OWNER_DIED)


def _check(code: int) -> None:
    if code:
        raise OSError(code, os.strerror(code))
