"""``torch.utils.data`` worker: a process that reads samples beside what its rank computes.

It is forked, as ``DataLoader``'s are, so that it has the data set as the rank has it. Of what it inherits it keeps
memory and files, and nothing else: by links, others see whether the rank lives. It is in the rank's process group,
which is killed when the rank ends. They speak over a pair of sockets that nobody else can reach, so pickle will do.
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import stat
import sys
import warnings
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, Pipe
from typing import Any, NamedTuple, NoReturn

import torch

Batch = Mapping[str, Any]
"""One micro-batch, or what a chunk wants of it, in host memory: fields of [samples, ...]."""


_STANDARD = (0, 1, 2)
_FOR_RANKS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
"""What whole groups of processes get."""


class Wish(NamedTuple):
    """Samples that a chunk is about to ask for, if it asks for any."""

    chunk: int
    first: int
    samples: int


class Worker:
    """One process, which reads what one thread at a time asks it for.

    Args:
        read: reads samples.
        name: gives a process its name.

    It is begun while no other thread of this process reads: what such a thread holds, there nobody would let go.
    """

    def __init__(self, read: Callable[[Wish], Batch], name: Callable[[], None]) -> None:
        self.ended = False
        self._link, theirs = Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads: see above, and ``_let_go``
            self._pid = os.fork()
        if not self._pid:
            _serve(theirs, read, name)
        theirs.close()

    def read(self, wish: Wish) -> Batch | None:
        """None: it cannot, or has ``ended``; who reads it in the rank learns why."""
        try:
            self._link.send_bytes(pickle.dumps(wish))
            batch: Batch | None = pickle.loads(self._link.recv_bytes())
        except (EOFError, OSError):
            self.ended = True
            return None
        return batch

    def kill(self) -> None:
        """It ends, also while another thread reads."""
        os.kill(self._pid, signal.SIGKILL)

    def close(self) -> int:
        """When nothing is read any more: let it end. Returns its exit code."""
        self._link.close()
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])


def _serve(link: Connection, read: Callable[[Wish], Batch], name: Callable[[], None]) -> NoReturn:
    try:
        _let_go(link.fileno())
        gc.freeze()  # the collector would write to, and so unshare, every page that it has in common with the rank
        torch.set_num_threads(1)  # the rank's other threads are not here
        name()
        while True:
            wish = pickle.loads(link.recv_bytes())
            link.send_bytes(_answer(read, wish))
    except (EOFError, OSError):  # the rank has closed the link, or has ended
        os._exit(0)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
        os._exit(1)


def _answer(read: Callable[[Wish], Batch], wish: Wish) -> bytes:
    try:
        return pickle.dumps(read(wish), pickle.HIGHEST_PROTOCOL)
    except Exception:  # the rank tries it itself, and so tells it with its traceback
        return pickle.dumps(None)


def _let_go(kept: int) -> None:
    """Leave signals, links and the like to the rank. A data set's open files stay open."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)) or number in _FOR_RANKS:
            signal.signal(number, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor not in (*_STANDARD, kept, null) and not _is_file(descriptor):
            os.dup2(null, descriptor)  # not closed: Python's objects would close what gets its number


def _is_file(descriptor: int) -> bool:
    try:
        return stat.S_ISREG(os.fstat(descriptor).st_mode)
    except OSError:
        return True  # gone: it listed them
