"""The robust mutex, and what is made of it: a holder's death is seen, and an orderly end is none."""

from __future__ import annotations

import mmap
import multiprocessing
import multiprocessing.connection
import os
import queue
import signal
import threading

import pytest

from megatron_elastic.cluster.rank.deathwatch import Deathwatch
from megatron_elastic.cluster.robust_mutex import SIZE, RobustMutex

fork = multiprocessing.get_context("fork")


def test_a_death_is_handed_over_once() -> None:
    memory = mmap.mmap(-1, 2 * SIZE)
    mutex = RobustMutex(memory, SIZE, make=True)

    def hold() -> None:
        RobustMutex(memory, SIZE).lock()
        os.kill(os.getpid(), signal.SIGKILL)

    assert not mutex.lock()
    mutex.unlock()
    process = fork.Process(target=hold)
    process.start()
    process.join()
    assert mutex.orphaned
    assert mutex.lock()
    assert not mutex.orphaned
    mutex.unlock()
    assert not mutex.lock()
    failures: queue.Queue[BaseException | None] = queue.Queue()
    thread = threading.Thread(target=lambda: failures.put(_unlock(mutex)))
    thread.start()
    thread.join()
    assert isinstance(failures.get(), PermissionError)
    mutex.unlock()


def _unlock(mutex: RobustMutex) -> BaseException | None:
    try:
        mutex.unlock()
    except PermissionError as error:
        return error
    return None


@pytest.mark.parametrize("dies", [True, False], ids=["dies", "ends"])
def test_the_watch_tells_of_deaths_only(dies: bool) -> None:
    """And another can hold the slot afterwards."""
    watch = Deathwatch(2)
    told: queue.Queue[float] = queue.Queue()
    for _ in range(2):
        ours, theirs = fork.Pipe()

        def live(pipe: multiprocessing.connection.Connection = theirs) -> None:
            rank = Deathwatch(2, watch.fd)
            rank.hold(1)
            pipe.send("held")
            pipe.recv()
            if dies:
                os.kill(os.getpid(), signal.SIGKILL)
            rank.release(1)
            os._exit(0)

        process = fork.Process(target=live)
        process.start()
        assert ours.recv() == "held"
        watch.watch(1, told.put)
        ours.send("go")
        process.join()
        for thread in threading.enumerate():
            if thread.name == "deathwatch 1":
                thread.join(30)
        if dies:
            assert told.get(timeout=30) > 0
        assert told.empty()
