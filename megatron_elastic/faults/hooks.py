"""Hooks: named points in the step and in recovery where faults are injected and detectors attach.

A point costs one attribute test when nothing is attached.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence

from megatron_elastic.faults.injection import HOOK_POINTS, Injection

Observer = Callable[[str, int, int | None], None]
"""Called with (hook point, step, grain)."""


class InjectedError(RuntimeError):
    """Raised by the ``raise`` action: stands for an error of the program."""


class Hooks:
    """The hook points of one rank.

    Args:
        rank: this rank.
        injections: faults to inject; those of other ranks are ignored.
        announce: called with an injection right before it fires, so that recovery can be timed from the fault.
        harm: does what takes more than the process: flips a bit of the rank's memory, cuts its links.
    """

    def __init__(
        self,
        rank: int,
        injections: Sequence[Injection],
        announce: Callable[[Injection], None],
        harm: Callable[[Injection], None],
    ) -> None:
        self.step = 0
        self._harm = harm
        self._rank = rank
        self._injections = [i for i in injections if i.rank == rank]
        self._announce = announce
        self._observers: list[Observer] = []
        self._active = bool(self._injections)

    @property
    def slowness(self) -> float:
        """How many times as long computing takes now, by an injection; for whoever only emulates computing."""
        return next((each.factor for each in self._observers if isinstance(each, _Slowness)), 1.0)

    def attach(self, observer: Observer) -> None:
        """Call ``observer`` at every point from now on."""
        self._observers.append(observer)
        self._active = True

    def at(self, point: str, grain: int | None = None) -> None:
        """The rank has reached a hook point of the current step."""
        if not self._active:
            return
        assert point in HOOK_POINTS, point
        for observer in self._observers:
            observer(point, self.step, grain)
        for injection in self._injections:
            if injection.matches(point, self._rank, self.step, grain):
                self._fire(injection)

    def _fire(self, injection: Injection) -> None:
        self._injections = [i for i in self._injections if i is not injection]
        self._announce(injection)
        match injection.action:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "hang":
                threading.Event().wait(injection.seconds)
            case "slow":
                self._observers = [observer for observer in self._observers if not isinstance(observer, _Slowness)]
                self.attach(_Slowness(injection))
            case "raise":
                raise InjectedError(f"injected: {injection}")
            case _:
                self._harm(injection)


class _Slowness:
    """Makes what a thread computes take longer, by sleeping at each point; waiting takes as long as before."""

    def __init__(self, injection: Injection) -> None:
        assert injection.factor is not None
        self._share = injection.factor - 1
        self._until = float("inf") if injection.seconds is None else time.monotonic() + injection.seconds
        self._computed = time.thread_time()

    @property
    def factor(self) -> float:
        """How many times as long computing takes now."""
        return 1 + self._share if time.monotonic() < self._until else 1.0

    def __call__(self, point: str, step: int, grain: int | None) -> None:
        before, self._computed = self._computed, time.thread_time()
        time.sleep((self._computed - before) * (self.factor - 1))
