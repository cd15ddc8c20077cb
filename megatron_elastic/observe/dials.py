"""Dials: what a rank has sent, copies and holds, in memory that its agent reads without asking.

A rank counts there as it goes, which costs less than a tenth of a microsecond each time, and never fails.
"""

from __future__ import annotations

import msgspec

CHANNELS = ("shared_memory", "ucx", "device")
"""What carries bytes: between ranks of a host, between hosts, and a device's own collectives."""
SHARED_MEMORY, UCX, DEVICE = range(len(CHANNELS))
WORDS = 16
"""Of 8 bytes that the dials of a rank take."""
_SENT, _RECEIVED = 0, len(CHANNELS)
_EPOCH, _UNIT, _SOURCE, _DONE, _WHOLE, _BEHIND, _STATES, _DEVICE = range(2 * len(CHANNELS), 2 * len(CHANNELS) + 8)


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


class Dials:
    """A rank's own. ``words``: ``WORDS`` of them, shared with the agent."""

    def __init__(self, words: memoryview) -> None:
        self._words = words
        self.sent = words[_SENT : _SENT + len(CHANNELS)]
        """Bytes by channel, to be added to."""
        self.received = words[_RECEIVED : _RECEIVED + len(CHANNELS)]

    @classmethod
    def alone(cls) -> Dials:
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


def read(words: memoryview, resident: int) -> Figures:
    """What dials show now. (They may change meanwhile.) ``resident``: as in ``Figures``."""
    unit, source = words[_UNIT], words[_SOURCE]
    return Figures(
        sent=tuple(words[_SENT : _SENT + len(CHANNELS)]), received=tuple(words[_RECEIVED : _RECEIVED + len(CHANNELS)]),
        epoch=words[_EPOCH], unit=unit - 1 if unit else None, source=source - 1 if source else None,
        copied=words[_DONE], copies=words[_WHOLE], behind=words[_BEHIND], states=words[_STATES],
        device=words[_DEVICE], resident=resident,
    )  # fmt: skip
