"""Dials: what a rank has sent, copies and holds, and what keeps it long, in memory that its agent reads without asking.

A rank counts there as it goes, which costs less than a tenth of a microsecond each time, and never fails.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Self

import msgspec

CHANNELS = ("shared_memory", "ucx", "device")
"""What carries bytes: between ranks of a host, between hosts, and a device's own collectives."""
SHARED_MEMORY, UCX, DEVICE = range(len(CHANNELS))
CHORES = ("load", "save", "data")
"""What may take a rank long besides training: it reads a checkpoint, writes one, makes data sets and their indices."""
LOAD, SAVE, DATA = range(len(CHORES))
WORDS = 24
"""Of 8 bytes that the dials of a rank take."""
_SENT, _RECEIVED = 0, len(CHANNELS)
_EPOCH, _UNIT, _SOURCE, _DONE, _WHOLE, _BEHIND, _STATES, _DEVICE, _CHORE, _FINISHED, _SIZE = range(
    2 * len(CHANNELS), 2 * len(CHANNELS) + 11
)


class Chore(msgspec.Struct, frozen=True):
    """How far one of the ``CHORES`` is."""

    what: str
    done: int
    """Bytes that are read or written."""
    size: int
    """All of them; 0 where that is not known."""


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What the dials of a rank show; all but steps in bytes."""

    sent: tuple[int, ...]
    """Since it was started, by channel."""
    received: tuple[int, ...]
    epoch: int
    """Of the layout that it gets copies for."""
    unit: int | None
    """Of which it fetches a slice now, in the background."""
    source: int | None
    """The rank that it fetches that from."""
    copied: int
    """Of the copies that the layout asks for here: what has arrived."""
    copies: int
    """All of them."""
    behind: int
    """Steps that the copy on its way that has done fewest lacks; 0: there is none."""
    states: int
    """Of states of slices that it holds, as owner or as replica."""
    device: int
    """In tensors on its device."""
    resident: int
    """Of its process, in host memory, as its agent sees it."""
    chore: Chore | None = None
    """What it does besides training."""


class Dials:
    """A rank's own. ``words``: ``WORDS`` of them, shared with the agent."""

    def __init__(self, words: memoryview) -> None:
        self._words = words
        self.sent = words[_SENT : _SENT + len(CHANNELS)]
        """Bytes by channel, to be added to."""
        self.received = words[_RECEIVED : _RECEIVED + len(CHANNELS)]

    @classmethod
    def alone(cls) -> Self:
        """Some that nobody reads."""
        return cls(memoryview(bytearray(8 * WORDS)).cast("q"))

    def expect(self, epoch: int, copies: int) -> None:
        """The layout of ``epoch`` asks for copies of so many bytes here; none has arrived."""
        words = self._words
        words[_UNIT] = words[_SOURCE] = words[_DONE] = 0
        words[_EPOCH], words[_WHOLE] = epoch, copies

    def fetch(self, unit: int, source: int) -> None:
        """It asks ``source`` for a slice of ``unit`` now."""
        self._words[_UNIT], self._words[_SOURCE] = unit + 1, source + 1

    def copied(self, size: int) -> None:
        """So much more of the copies is here."""
        words = self._words
        words[_DONE] += size
        if words[_DONE] == words[_WHOLE]:
            words[_UNIT] = words[_SOURCE] = 0

    def complete(self) -> None:
        """All copies are here. (Two threads that count may have lost something.)"""
        words = self._words
        words[_UNIT] = words[_SOURCE] = 0
        words[_DONE] = words[_WHOLE]

    def hold(self, states: int) -> None:
        """It holds states of so many bytes."""
        self._words[_STATES] = states

    def lag(self, steps: int) -> None:
        """The copy on its way that has done fewest lacks so many."""
        self._words[_BEHIND] = steps

    def use(self, device: int) -> None:
        """Tensors on its device have so many bytes."""
        self._words[_DEVICE] = device

    @contextlib.contextmanager
    def at(self, chore: int, size: int = 0) -> Iterator[None]:
        """Around one of the ``CHORES``, of so many bytes if that is known. Of two at a time the newer one is shown."""
        words = self._words
        words[_FINISHED], words[_SIZE], words[_CHORE] = 0, size, chore + 1
        try:
            yield
        finally:
            if words[_CHORE] == chore + 1:
                words[_CHORE] = 0

    def finish(self, chore: int, size: int) -> None:
        """So many more bytes of it are read or written."""
        if self._words[_CHORE] == chore + 1:
            self._words[_FINISHED] += size


def read(words: memoryview, resident: int) -> Figures:
    """What dials show now. (They may change meanwhile.) ``resident``: as in ``Figures``."""
    unit, source, chore = words[_UNIT], words[_SOURCE], words[_CHORE]
    return Figures(
        sent=tuple(words[_SENT : _SENT + len(CHANNELS)]), received=tuple(words[_RECEIVED : _RECEIVED + len(CHANNELS)]),
        epoch=words[_EPOCH], unit=unit - 1 if unit else None, source=source - 1 if source else None,
        copied=words[_DONE], copies=words[_WHOLE], behind=words[_BEHIND], states=words[_STATES],
        device=words[_DEVICE], resident=resident,
        chore=Chore(CHORES[chore - 1], words[_FINISHED], words[_SIZE]) if chore else None,
    )  # fmt: skip
