"""Life: a mark in shared memory that the kernel changes when its holder begins to die.

A process's end is told to others (``pidfd``, sockets) when its memory has been freed, which takes tens of milliseconds
where ranks outnumber cores. Before that the kernel looks through the robust mutexes that its threads hold and marks
them. So a rank holds one, and who waits for the rank looks at it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading

SIZE = 64
"""Bytes for a mark: a ``pthread_mutex_t`` has 40 or 48, by architecture, and begins with the word that is marked."""
_OWNER_DIED = 0x40000000
_ROBUST = _SHARED = 1
_libc = ctypes.CDLL(None)
_held: set[Life] = set()
"""Marks of this process. Each thread's list of them runs through their memory, which must stay mapped."""


class Life:
    """This process's mark at ``offset`` in shared memory. Only a main thread lives as long as its process and can hold
    it; elsewhere there is none, and the end of the process is seen later.
    """

    def __init__(self, memory: mmap.mmap, offset: int) -> None:
        self._mutex = (ctypes.c_char * SIZE).from_buffer(memory, offset)
        if threading.current_thread() is threading.main_thread():
            attributes = ctypes.create_string_buffer(SIZE)
            _check(_libc.pthread_mutexattr_init(attributes))
            _check(_libc.pthread_mutexattr_setrobust(attributes, _ROBUST))
            _check(_libc.pthread_mutexattr_setpshared(attributes, _SHARED))
            _check(_libc.pthread_mutex_init(self._mutex, attributes))
            _check(_libc.pthread_mutex_lock(self._mutex))
            _held.add(self)

    def release(self) -> bool:
        """The rank ends in order. False if only the main thread could do that: the memory must stay mapped then."""
        if self in _held:
            if _libc.pthread_mutex_unlock(self._mutex):
                return False
            _held.remove(self)
        del self._mutex
        return True


class LifeView:
    """Another process's mark."""

    def __init__(self, memory: mmap.mmap, offset: int) -> None:
        self._word = ctypes.c_uint32.from_buffer(memory, offset)

    @property
    def ended(self) -> bool:
        """Whether its holder is dying or dead."""
        return bool(self._word.value & _OWNER_DIED)


def _check(code: int) -> None:
    if code:
        raise OSError(code, os.strerror(code))
