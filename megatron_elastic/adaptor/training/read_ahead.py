"""Read-ahead: samples that a thread reads before they are asked for.

Who asks waits only for what is being read just then; what nobody has begun it reads itself. Only one thread reads at a
time, so data sets need not bear more. Which samples are wanted next is said before each step; what a layout that has
gone wanted, and this one does not, is dropped.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from megatron_elastic.device.device import Arrival

_LOOK = 0.02
"""Seconds between two looks whether a wait must end."""
_END = 5.0
"""Seconds that a read may go on when nobody wants it any more."""


class Wish(NamedTuple):
    """Samples that a chunk is about to ask for, if it asks for any."""

    chunk: int
    first: int
    samples: int


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
        read: reads samples, in whatever thread.
        depth: how many wishes may be fulfilled ahead; 0: no thread is started.
        check: raises if a wait must end.
    """

    def __init__(self, read: Callable[[Wish], Arrival], depth: int, check: Callable[[], None]) -> None:
        self._read = read
        self._depth = depth
        self._check = check
        self._changed = threading.Condition()
        self._wanted: dict[Wish, None] = {}
        """In this order, and not taken yet."""
        self._ready: dict[Wish, _Read] = {}
        self._reading: Wish | None = None
        """What a thread reads."""
        self._asking: Collection[int] = ()
        self._thread: threading.Thread | None = None
        self._closed = False

    def want(self, wishes: Iterable[Wish], asking: Collection[int]) -> None:
        """From now on these are wanted, and nothing else. ``asking``: the chunks that do ask; it may grow later."""
        if not self._depth:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="samples", daemon=True)
            self._thread.start()
        with self._changed:
            self._wanted, self._asking = dict.fromkeys(wishes), asking
            self._ready = {wish: read for wish, read in self._ready.items() if wish in self._wanted}
            self._changed.notify_all()

    def take(self, wish: Wish) -> Arrival:
        """Samples, whether they were wanted or not. Raises what reading them raises, and what ``check`` does."""
        with self._changed:
            while wish not in self._ready and self._reading is not None:
                self._changed.wait(_LOOK)
                self._check()
            self._wanted.pop(wish, None)
            read = self._ready.pop(wish, None)
            if read is None:
                self._reading = wish
            self._changed.notify_all()
        if read is None:
            read = self._get(wish)
            with self._changed:
                self._reading = None
                self._changed.notify_all()
        return read.open()

    def close(self) -> None:
        """End the thread. What it reads just then it may read to its end, for a while."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_END)

    def _run(self) -> None:
        while (wish := self._next()) is not None:
            read = self._get(wish)
            with self._changed:
                self._reading = None
                if wish in self._wanted:
                    self._ready[wish] = read
                self._changed.notify_all()

    def _next(self) -> Wish | None:
        """What to read, when there is something; None: nothing more."""
        with self._changed:
            while not self._closed:
                if self._reading is None and len(self._ready) < self._depth:
                    for wish in self._wanted:
                        if wish.chunk in self._asking and wish not in self._ready:
                            self._reading = wish
                            return wish
                self._changed.wait()
            return None

    def _get(self, wish: Wish) -> _Read:
        try:
            return _Read(self._read(wish), None)
        except BaseException as error:  # of whoever asks for it
            return _Read(None, error)
