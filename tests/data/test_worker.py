"""Worker: a process that reads as its rank does, and by which nobody takes the rank for alive."""

from __future__ import annotations

import os
import random
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_elastic.adaptor.samples.sample import Reader
from megatron_elastic.adaptor.samples.worker import Batch, Wish, Worker

WISH = Wish(0, 4, 2)


@contextmanager
def begun(read: Callable[[Wish], Batch]) -> Iterator[Worker]:
    worker = Worker(read, lambda: None)
    try:
        yield worker
    finally:
        worker.kill()
        worker.close()


class Drawn:
    """Samples that are drawn as they are read, by each of the generators that everybody has."""

    def __init__(self) -> None:
        self.own = np.random.RandomState(7)

    def __getitem__(self, number: int) -> dict[str, object]:
        own = float(self.own.random_sample())
        return {"drawn": (number, random.getrandbits(32), float(np.random.standard_normal()), own)}

    def __len__(self) -> int:
        return 100


def test_what_is_drawn_there_is_drawn_here() -> None:
    reader = Reader(Drawn(), seed=11)

    def read(wish: Wish) -> Batch:
        return {"samples": [reader[number]["drawn"] for number in range(wish.first, wish.first + wish.samples)]}

    with begun(read) as worker:
        for first in (4, 0, 4):
            wish = Wish(0, first, 2)
            assert worker.read(wish) == read(wish)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bfloat16, torch.bool], ids=str)
def test_tensors_come_as_they_are(dtype: torch.dtype) -> None:
    fields = {"tokens": torch.arange(6).reshape(2, 3).to(dtype), "none": torch.empty(0, dtype=dtype)}
    with begun(lambda _: fields) as worker:
        batch = worker.read(WISH)
    assert batch is not None and list(batch) == list(fields)
    assert all(torch.equal(batch[name], fields[name]) and batch[name].dtype == dtype for name in fields)


def test_what_cannot_be_read_there_is_left_to_the_rank() -> None:
    """It goes on with the next."""
    def read(wish: Wish) -> Batch:
        if wish.first == 4:
            raise OSError("damaged")
        return {"first": (lambda: None) if wish.first == 6 else wish.first}  # which no process can send to another

    with begun(read) as worker:
        assert worker.read(WISH) is None
        assert worker.read(Wish(0, 6, 2)) is None
        assert worker.read(Wish(0, 8, 2)) == {"first": 8}
        assert not worker.ended


def test_a_link_breaks_with_the_rank_whoever_reads_for_it() -> None:
    here, there = socket.socketpair()
    with begun(lambda wish: {}) as worker:
        assert worker.read(WISH) == {}
        here.close()
        assert there.recv(1) == b""
    there.close()


def test_a_data_set_keeps_its_files(tmp_path: Path) -> None:
    """And may open others."""
    (tmp_path / "data").write_bytes(b"abcdefgh")
    with (tmp_path / "data").open("rb", buffering=0) as file:
        def read(wish: Wish) -> Batch:
            file.seek(wish.first)
            return {"one": file.read(wish.samples), "other": (tmp_path / "data").read_bytes()}

        with begun(read) as worker:
            assert worker.read(WISH) == {"one": b"ef", "other": b"abcdefgh"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1], ids=str)
def test_signals_are_the_rank_s(number: signal.Signals) -> None:
    """Those of its group come here, too."""
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        with begun(lambda _: {"pid": os.getpid()}) as worker:
            batch = worker.read(WISH)
            assert batch is not None and batch["pid"] != os.getpid()
            os.kill(batch["pid"], number)
            assert worker.read(WISH) == batch
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_one_that_has_ended_is_known() -> None:
    worker = Worker(lambda _: {}, lambda: None)
    worker.kill()
    assert worker.read(WISH) is None and worker.ended
    assert worker.close() == -signal.SIGKILL


def test_it_ends_when_the_rank_has_closed_it() -> None:
    worker = Worker(lambda _: {}, lambda: None)
    assert worker.read(WISH) == {}
    assert worker.close() == 0
