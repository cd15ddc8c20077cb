"""Read-ahead: samples that are read before they are asked for.

The first that reads is a thread of the rank; what nobody has begun when it is asked for, who asks reads itself. In one
process one thread reads at a time, so data sets need not bear more. Where a step had to wait all the same, a process of
its own (``worker``) reads as well from then on, until there are as many as may be: most data sets need none. Which
samples are wanted next is said before each step; what a layout that has gone wanted, and this one does not, is dropped.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from megatron_elastic.adaptor.samples.worker import Batch, Wish, Worker
from megatron_elastic.device.device import Arrival

_LOOK = 0.02
"""Seconds between two looks whether a wait must end."""
_END = 5.0
"""Seconds that a read may go on when nobody wants it any more."""
_EACH = 2
"""Micro-batches ahead for each that reads, as torch's ``DataLoader`` has it."""


class _Read(NamedTuple):
    """What reading has given."""

    samples: Arrival | None
    error: BaseException | None

    def open(self) -> Arrival:
        if self.error is not None:
            raise self.error
        assert self.samples is not None
        return self.samples


class ReadAhead:
    """Reads what is wanted, in its order. ``want`` and ``take`` are one thread's, which computes.

    Args:
        read: reads samples, in whatever thread and process.
        bring: takes them to where they are computed, in whatever thread.
        most: so many may read at once; 0: nothing is read ahead.
        begin: begins a process that reads like this one.
        check: raises if a wait must end.
    """

    def __init__(
        self, read: Callable[[Wish], Batch], bring: Callable[[Batch], Arrival], most: int, begin: Callable[[], Worker],
        check: Callable[[], None],
    ) -> None:
        self._read = read
        self._bring = bring
        self._most = most
        self._begin = begin
        self._check = check
        self._changed = threading.Condition()
        self._wanted: dict[Wish, None] = {}
        """In this order, and not taken yet."""
        self._due: Collection[Wish] = ()
        """Those that were wanted before the step before, too."""
        self._waited = False
        """One of these was not there when it was asked for."""
        self._ready: dict[Wish, _Read] = {}
        self._reading: set[Wish] = set()
        """What threads read."""
        self._here = False
        """One reads in this process."""
        self._refused: set[Wish] = set()
        """What no other process can read."""
        self._asking: Collection[int] = ()
        self._threads: list[threading.Thread] = []
        self._workers: list[Worker] = []
        """Those that nobody has closed yet."""
        self._closed = False

    def want(self, wishes: Iterable[Wish], asking: Collection[int]) -> None:
        """From now on these are wanted, and nothing else. ``asking``: the chunks that do ask; it may grow later."""
        if not self._most:
            return
        if not self._threads:
            self._start()
        elif self._waited and len(self._threads) < self._most:
            self._start(self._another())
        with self._changed:
            wanted = dict.fromkeys(wishes)
            self._due, self._waited = self._wanted.keys() & wanted.keys(), False
            self._wanted, self._asking = wanted, asking
            self._ready = {wish: read for wish, read in self._ready.items() if wish in wanted}
            self._refused &= wanted.keys()
            self._changed.notify_all()

    def take(self, wish: Wish) -> Arrival:
        """Samples, whether they were wanted or not. Raises what reading them raises, and what ``check`` does."""
        with self._changed:
            self._waited |= wish in self._due and wish not in self._ready
            while wish not in self._ready and (wish in self._reading or self._here):
                self._wait()
            self._wanted.pop(wish, None)
            read = self._ready.pop(wish, None)
            self._here |= read is None
            self._changed.notify_all()
        if read is not None:
            return read.open()
        try:
            return self._bring(self._read(wish))
        finally:
            self._leave()

    def close(self) -> None:
        """End threads and processes. What is read in this one may be read to its end, for a while."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            for worker in self._workers:
                worker.kill()
        for thread in self._threads:
            thread.join(_END)

    def _wait(self) -> None:
        self._changed.wait(_LOOK)
        self._check()

    def _start(self, worker: Worker | None = None) -> None:
        self._threads.append(threading.Thread(target=self._run, args=(worker,), name="samples", daemon=True))
        self._threads[-1].start()

    def _another(self) -> Worker:
        with self._changed:
            while self._here:
                self._wait()
            self._here = True
        try:
            worker = self._begin()
        finally:
            self._leave()
        self._workers.append(worker)
        return worker

    def _leave(self) -> None:
        """Others may read in this process."""
        with self._changed:
            self._here = False
            self._changed.notify_all()

    def _run(self, worker: Worker | None) -> None:
        while (worker is None or not worker.ended) and (wish := self._next(worker)) is not None:
            read = self._get(wish, worker)
            with self._changed:
                self._reading.remove(wish)
                if read is None:
                    self._refused.add(wish)
                elif wish in self._wanted:
                    self._ready[wish] = read
                self._changed.notify_all()
            if worker is None:
                self._leave()
        if worker is not None:
            with self._changed:
                self._workers.remove(worker)  # once it is closed its number may be another process's
            if (code := worker.close()) and not self._closed:
                warnings.warn(f"a process that read samples has ended ({code}): others read on", stacklevel=1)

    def _next(self, worker: Worker | None) -> Wish | None:
        """What to read, when there is something; None: nothing more."""
        with self._changed:
            while not self._closed:
                if len(self._ready) + len(self._reading) < _EACH * self._most and not (worker is None and self._here):
                    refused = self._refused if worker is not None else ()
                    for wish in self._wanted:
                        if wish.chunk in self._asking and not any(
                            wish in others for others in (self._ready, self._reading, refused)
                        ):
                            self._reading.add(wish)
                            self._here |= worker is None
                            return wish
                self._changed.wait()
            return None

    def _get(self, wish: Wish, worker: Worker | None = None) -> _Read | None:
        """None: the worker cannot."""
        try:
            batch = self._read(wish) if worker is None else worker.read(wish)
            return None if batch is None else _Read(self._bring(batch), None)
        except BaseException as error:  # of whoever asks for it
            return _Read(None, error)
