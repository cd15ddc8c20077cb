"""Read-ahead: what is read before it is asked for is what would be read then, and nothing more."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_elastic.adaptor.samples.read_ahead import ReadAhead
from megatron_elastic.adaptor.samples.worker import Batch, Wish, Worker
from megatron_elastic.device.cpu import Cpu
from megatron_elastic.device.device import Arrival

LIMIT = 10.0
"""Seconds, none of which is needed."""


class Shelf:
    """Samples whose reading can be held up and watched."""

    def __init__(self) -> None:
        self.begun: list[tuple[int, str]] = []
        """What has been read, and by whom."""
        self.bad: set[int] = set()
        self.slow: dict[int, threading.Event] = {}
        self._begins = threading.Condition()
        self._at_once = threading.Lock()

    def read(self, wish: Wish) -> Batch:
        assert self._at_once.acquire(blocking=False), "two read at once"
        try:
            with self._begins:
                self.begun.append((wish.first, threading.current_thread().name))
                self._begins.notify_all()
            if wish.first in self.slow:
                assert self.slow[wish.first].wait(LIMIT)
            if wish.first in self.bad:
                raise OSError(f"sample {wish.first} cannot be read")
            return {"tokens": torch.arange(wish.first, wish.first + wish.samples), "by": os.getpid()}
        finally:
            self._at_once.release()

    def await_begun(self, first: int) -> None:
        with self._begins:
            assert self._begins.wait_for(lambda: first in [number for number, _ in self.begun], LIMIT), self.begun


class Interruption(Exception):
    """As a fault elsewhere."""


@contextmanager
def reader(shelf: Shelf, most: int, interrupted: threading.Event | None = None) -> Iterator[ReadAhead]:
    def check() -> None:
        if interrupted is not None and interrupted.is_set():
            raise Interruption

    ahead = ReadAhead(shelf.read, Cpu().bring, most, lambda: Worker(shelf.read, lambda: None), check)
    try:
        yield ahead
    finally:
        ahead.close()
    assert "samples" not in [thread.name for thread in threading.enumerate()]


def wishes(*numbers: int, chunk: int = 0) -> list[Wish]:
    return [Wish(chunk, number, 2) for number in numbers]


def tokens(arrival: Arrival) -> list[int]:
    batch: Mapping[str, torch.Tensor] = arrival.wait()
    return [int(token) for token in batch["tokens"]]


def test_it_reads_as_far_ahead_as_it_may() -> None:
    shelf = Shelf()
    with reader(shelf, 1) as ahead:
        ahead.want(wishes(0, 2, 4, 6, 8), {0})
        shelf.await_begun(2)
        assert tokens(ahead.take(Wish(0, 0, 2))) == [0, 1]
        shelf.await_begun(4)
        assert shelf.begun == [(0, "samples"), (2, "samples"), (4, "samples")]
        for first in (2, 4, 6, 8):
            assert tokens(ahead.take(Wish(0, first, 2))) == [first, first + 1]
    assert [first for first, _ in shelf.begun] == [0, 2, 4, 6, 8]


def test_without_workers_there_is_no_thread() -> None:
    shelf = Shelf()
    with reader(shelf, 0) as ahead:
        ahead.want(wishes(0, 2), {0})
        assert tokens(ahead.take(Wish(0, 2, 2))) == [2, 3]
        assert "samples" not in [thread.name for thread in threading.enumerate()]
    assert shelf.begun == [(2, "MainThread")]


def test_nothing_is_read_for_who_does_not_ask() -> None:
    """A chunk in the middle of the model; from when it has asked once, it is read for, too."""
    shelf, asking = Shelf(), {1}
    with reader(shelf, 2) as ahead:
        ahead.want([*wishes(0, 2), *wishes(20, chunk=1)], asking)
        shelf.await_begun(20)
        asking.add(0)
        assert tokens(ahead.take(Wish(0, 0, 2))) == [0, 1]
        shelf.await_begun(2)
    assert [first for first, _ in shelf.begun] == [20, 0, 2]


def test_what_another_layout_wants_is_read_in_its_place() -> None:
    """What both want is not read again; what is under way and not wanted any more is not kept."""
    shelf = Shelf()
    shelf.slow[2] = threading.Event()
    with reader(shelf, 1) as ahead:
        ahead.want(wishes(0, 2, 4), {0})
        shelf.await_begun(2)
        ahead.want(wishes(6, 0, 8), {0})
        shelf.slow[2].set()
        shelf.await_begun(6)
        assert [tokens(ahead.take(wish))[0] for wish in wishes(6, 0, 8)] == [6, 0, 8]
        assert tokens(ahead.take(Wish(0, 2, 2))) == [2, 3]
    assert [first for first, _ in shelf.begun] == [0, 2, 6, 8, 2]


def test_who_waits_for_what_is_being_read_can_be_interrupted() -> None:
    """And gets it afterwards."""
    shelf, interrupted = Shelf(), threading.Event()
    shelf.slow[0] = threading.Event()
    with reader(shelf, 1, interrupted) as ahead:
        ahead.want(wishes(0), {0})
        shelf.await_begun(0)
        interrupted.set()
        with pytest.raises(Interruption):
            ahead.take(Wish(0, 0, 2))
        interrupted.clear()
        shelf.slow[0].set()
        ahead.want(wishes(0), {0})
        assert tokens(ahead.take(Wish(0, 0, 2))) == [0, 1]
    assert [first for first, _ in shelf.begun] == [0]


@pytest.mark.parametrize("most", [0, 1])
def test_an_error_is_of_who_asks(most: int) -> None:
    """Nobody hears of what is read in vain; and it is tried again."""
    shelf = Shelf()
    shelf.bad = {2, 4}
    with reader(shelf, most) as ahead:
        ahead.want(wishes(0, 2, 4), {0})
        assert tokens(ahead.take(Wish(0, 0, 2))) == [0, 1]
        with pytest.raises(OSError, match="sample 2 cannot be read"):
            ahead.take(Wish(0, 2, 2))
        shelf.bad = set()
        assert tokens(ahead.take(Wish(0, 2, 2))) == [2, 3]


@given(st.integers(0, 2), st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=30))
def test_whoever_reads_what_when_it_is_the_same(most: int, course: list[tuple[bool, int]]) -> None:
    shelf = Shelf()
    with reader(shelf, most) as ahead:
        for wants, first in course:
            if wants:
                ahead.want(wishes(*range(first, first + 5)), {0})
            else:
                assert tokens(ahead.take(Wish(0, first, 2))) == [first, first + 1]


def test_where_a_step_waits_a_process_reads_as_well() -> None:
    """One more with each such step, as many as may be; and what it cannot read is read here."""
    shelf = Shelf()
    shelf.bad = {20}
    begun: list[Worker] = []

    def begin() -> Worker:
        begun.append(Worker(shelf.read, lambda: None))
        shelf.bad, shelf.slow[20] = set(), threading.Event()  # here, and not there
        return begun[-1]

    # Who reads in this process is held at 20 until the other one has read the rest, however long it takes.
    ahead = ReadAhead(shelf.read, Cpu().bring, 2, begin, check=lambda: shelf.slow[0].set())
    try:
        wait_for_one(ahead, shelf, 0)
        assert not begun
        ahead.want(wishes(20), {0})
        assert len(begun) == 1
        shelf.await_begun(20)
        ahead.want(wishes(20, 22, 24), {0})
        there = [ahead.take(wish).wait() for wish in wishes(24, 22)]
        assert [int(batch["tokens"][0]) for batch in there] == [24, 22]
        assert os.getpid() not in [batch["by"] for batch in there]
        release(shelf)
        assert ahead.take(Wish(0, 20, 2)).wait()["by"] == os.getpid()
        ahead.want(wishes(30), {0})
        assert len(begun) == 1
    finally:
        ahead.close()


def release(shelf: Shelf) -> None:
    for held in shelf.slow.values():
        held.set()


def wait_for_one(ahead: ReadAhead, shelf: Shelf, first: int) -> None:
    """A step that has to wait for what it could have had; ``release`` is who checks whether it must wait on."""
    shelf.slow[first] = threading.Event()
    for _ in range(2):
        ahead.want(wishes(first), {0})
        shelf.await_begun(first)
    assert tokens(ahead.take(Wish(0, first, 2))) == [first, first + 1]


def who_loses_processes(shelf: Shelf) -> tuple[ReadAhead, list[Worker]]:
    """One whose processes end as they begin, and these; it has had to wait for a sample."""
    begun: list[Worker] = []

    def begin() -> Worker:
        begun.append(Worker(shelf.read, lambda: None))
        begun[-1].kill()
        return begun[-1]

    ahead = ReadAhead(shelf.read, Cpu().bring, 2, begin, check=lambda: release(shelf))
    wait_for_one(ahead, shelf, 0)
    return ahead, begun


def test_who_has_lost_the_process_reads_on() -> None:
    shelf = Shelf()
    ahead, begun = who_loses_processes(shelf)
    for first in range(2, 40, 2):
        ahead.want(wishes(first, first + 2), {0})
        assert ahead.take(Wish(0, first, 2)).wait()["by"] == os.getpid()
    ahead.close()
    assert len(begun) == 1


def test_a_process_that_has_ended_is_not_signalled_any_more() -> None:
    """Its number may be another's."""
    shelf = Shelf()
    ahead, begun = who_loses_processes(shelf)
    shelf.slow[2] = threading.Event()  # keeps who reads in this process busy, so that the other one is asked, too
    ahead.want(wishes(2, 4), {0})
    (_, asking) = (thread for thread in threading.enumerate() if thread.name == "samples")
    asking.join(LIMIT)
    assert [worker.ended for worker in begun] == [True] and not asking.is_alive()
    release(shelf)
    ahead.close()
