"""Interrupts: what ends a wait before what is waited for is here."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

from megatron_elastic.cluster.rank.control import Interrupted
from megatron_elastic.comm.peers import Peers


class Interruptible(Protocol):
    """What a wait looks at besides its messages (``cluster.rank.control.InterruptFlag``)."""

    raised: bool
    since: float
    fd: int
    lost: frozenset[int]

    @property
    def over(self) -> bool: ...

    def check(self) -> None: ...


class _Whole(NamedTuple):
    partners: frozenset[int]
    alone: Callable[[], bool]


class Interrupts:
    """A rank's: the flag, the end of peers that the epoch depends on, and what lets both wait.

    Args:
        flag: its ``check()`` raises to unwind the caller.
        peers: says who has ended.
        patience: seconds that an interrupt may have to wait.
    """

    def __init__(self, flag: Interruptible, peers: Peers, patience: float) -> None:
        self._flag = flag
        self._patience = patience
        self._peers = peers
        self._whole: _Whole | None = None
        """What is computed, if it is to be finished."""

    def check(self) -> None:
        """In a wait: raises what the flag raises, or Interrupted naming the peers that have ended."""
        suspects, flag, whole = self._peers.suspects, self._flag, self._whole
        if whole is not None:
            suspects = tuple(peer for peer in suspects if peer in whole.partners)
        if flag.raised and (
            whole is None or flag.over or whole.partners & flag.lost or whole.alone()
            # A message that is lost never comes.
            or time.monotonic() - flag.since > self._patience
        ):  # fmt: skip
            flag.check()
        if suspects:
            raise Interrupted(0, suspects=suspects)

    def look(self) -> None:
        """While computing: raises what the flag raises."""
        if self._flag.raised and self._whole is None:
            self._flag.check()

    @property
    def put_off(self) -> bool:
        """Whether the flag is raised and may have to wait: it must not wake who sleeps."""
        return self._whole is not None and self._flag.raised

    @contextmanager
    def whole(self, partners: Sequence[int], alone: Callable[[], bool]) -> Iterator[None]:
        """Around what is to be finished if it can be: see ``Transport.whole``."""
        self._whole = _Whole(frozenset(partners), alone)
        try:
            yield
        finally:
            self._whole = None
