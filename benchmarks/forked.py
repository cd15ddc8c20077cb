"""Forked: ranks of a benchmark that are processes forked after the imports, and the times that they measure."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.synchronize import Event
from pathlib import Path

import torch
import torch.distributed as dist
from common import JobFailed

from megatron_elastic.comm.distributed import backend

FORK = multiprocessing.get_context("fork")
"""Makes what ranks share besides their times."""
LIMIT = timedelta(seconds=300)
"""How long a rank waits for others at most."""
_PR_SET_PDEATHSIG = 1


class Times:
    """A row for each measurement, with what each rank measured, in memory that ranks share; 0 where it did not."""

    def __init__(self, rows: int, ranks: int) -> None:
        self._ranks = ranks
        self._values = FORK.RawArray(ctypes.c_double, rows * ranks)

    def __setitem__(self, at: tuple[int, int], value: float) -> None:
        """Keep what a rank measured: ``times[row, rank] = value``."""
        row, rank = at
        self._values[row * self._ranks + rank] = value

    def slowest(self, row: int) -> float:
        """The most that any rank measured."""
        return float(max(self._values[row * self._ranks : (row + 1) * self._ranks]))


def run_ranks(ranks: int, body: Callable[[int, Path], None]) -> None:
    """Call ``body`` in so many processes, with the number of the rank and a folder for all of them; wait for them.

    When a rank fails, the others are killed. Raises JobFailed then, after the traceback of the first that failed.
    """
    failed = FORK.Event()
    processes = []
    with tempfile.TemporaryDirectory(prefix="megatron-elastic-bench-") as folder:
        try:
            for me in range(ranks):
                process = FORK.Process(name=f"rank {me}", target=_live, args=(me, body, Path(folder), failed))
                process.start()
                processes.append(process)
            running = list(processes)
            while running:
                ready = wait([process.sentinel for process in running])
                for process in [each for each in running if each.sentinel in ready]:
                    process.join()
                    running.remove(process)
                    if code := process.exitcode:
                        raise JobFailed(f"{process.name} ended with exit code {code}, maybe due to another; see above")
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()


@contextmanager
def world(me: int, ranks: int, folder: Path) -> Iterator[None]:
    """Be a rank of a world over gloo, in which groups over ``elastic`` can be made; all leave it together."""
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=me, world_size=ranks, timeout=LIMIT)
    backend.register()
    yield
    dist.barrier()
    dist.destroy_process_group()


def _live(me: int, body: Callable[[int, Path], None], folder: Path, failed: Event) -> None:
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        torch.set_num_threads(1)
        body(me, folder)
    except BaseException:
        if not failed.is_set():  # what the others meet then only follows from it
            failed.set()
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)
