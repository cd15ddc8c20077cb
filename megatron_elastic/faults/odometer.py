"""Odometer: how far a rank has come, in memory that its agent reads without asking.

A rank counts the hook points that it passes and the waits that it comes out of, and notes where it is and whom it waits
for. Who hangs counts no more, and need not be able to say so. After each step it notes what its share of it has taken.
In the same memory are its dials (``observe.dials``).
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from megatron_elastic.faults.injection import HOOK_POINTS
from megatron_elastic.observe import dials
from megatron_elastic.observe.dials import Dials, Figures
from megatron_elastic.observe.tracing.tracer import Tracer

ODOMETER_VARIABLE = "MEGATRON_ELASTIC_ODOMETER"
"""Environment variable with the memory's path and this rank's slot in it, with a colon between."""
COORDINATOR, DISK = -1, -2
"""What a rank may wait for besides other ranks."""
_OWN = 16
"""Words of an odometer, which those of the dials follow."""
_WORDS = _OWN + dials.WORDS
_COUNT, _POINT, _STEP, _GRAIN, _WAITS, _PATIENT, _EPOCH, _SINCE, _BUSY, _GRAINS, _WORKER = range(11)
_NOBODY = min(COORDINATOR, DISK) - 1
_POINTS = {point: number for number, point in enumerate(HOOK_POINTS, start=1)}


class Reading(NamedTuple):
    """What an odometer shows."""

    moves: int
    """How often it has come further."""
    point: str
    """The hook point that was passed last; empty before the first."""
    step: int
    grain: int | None
    waits: int | None
    """The rank that is waited for, ``COORDINATOR`` or ``DISK``; None for who does not wait, or not for long."""
    patient: bool
    """Whether what it does may take long: it begins, or builds."""
    worker: int
    """Number of a thread of which it waits for the result, and with which it comes further; 0: of none."""


class Effort(NamedTuple):
    """What the steps have taken in which a rank has done the same with each grain."""

    epoch: int
    """Of the layout in which it did the newest of them."""
    since: int
    """Of the first layout in which it has done so."""
    busy: float
    """Seconds in which it has not waited."""
    grains: float


class Odometer:
    """A rank's own. Its methods cost less than a microsecond each, and never fail.

    Args:
        memory: shared with the agent.
        slot: this rank's in it.
    """

    def __init__(self, memory: mmap.mmap, slot: int) -> None:
        words = memoryview(memory).cast("q")[slot * _WORDS : (slot + 1) * _WORDS]
        self._words = words[:_OWN]
        self.dials = Dials(words[_OWN:])
        self.tracer = Tracer.of_nothing()
        """Is told, while it is on, of waits for others than ranks."""

    @classmethod
    def alone(cls) -> Odometer:
        """One that nobody reads."""
        return cls(mmap.mmap(-1, _WORDS * 8), 0)

    @classmethod
    def of(cls, env: Mapping[str, str]) -> Odometer:
        """The one that the agent reads, as the environment says; ``alone`` if there is no agent."""
        path, _, slot = env.get(ODOMETER_VARIABLE, "").partition(":")
        try:
            with open(path, "r+b") as file:
                return cls(mmap.mmap(file.fileno(), 0), int(slot))
        except (OSError, ValueError):
            return cls.alone()

    def at(self, point: str, step: int, grain: int | None) -> None:
        """A hook point (``faults.hooks.Observer``)."""
        words = self._words
        words[_POINT], words[_STEP], words[_GRAIN] = _POINTS[point], step, -1 if grain is None else grain
        words[_COUNT] += 1

    def moved(self) -> None:
        """It has come further, and does not wait."""
        words = self._words
        words[_WAITS] = 0
        words[_COUNT] += 1

    def wait(self, whom: int) -> None:
        """It waits, until it has ``moved``."""
        self._words[_WAITS] = whom - _NOBODY

    @contextlib.contextmanager
    def waiting(self, whom: int) -> Iterator[None]:
        """Around a wait."""
        self.wait(whom)
        traced = self.tracer.waits_for(whom) if self.tracer.on else None
        try:
            yield
        finally:
            if traced is not None:
                traced.over(True)
            self.moved()

    @contextlib.contextmanager
    def patient(self) -> Iterator[None]:
        """Around what may take long."""
        before = self._words[_PATIENT]
        self._words[_PATIENT] = 1
        try:
            yield
        finally:
            self._words[_PATIENT] = before
            self.moved()

    @contextlib.contextmanager
    def through(self, worker: int) -> Iterator[None]:
        """Around a wait for what another thread of this process makes: it comes further as that uses a processor, also
        if it keeps the interpreter to itself. ``worker``: its ``native_id``.
        """
        self._words[_WORKER] = worker
        try:
            yield
        finally:
            self._words[_WORKER] = 0
            self.moved()

    def worked(self, effort: Effort) -> None:
        """A step is done."""
        words = self._words
        # In this order: what is read meanwhile is never taken for more than was done.
        words[_BUSY], words[_GRAINS] = round(effort.busy * 1e9), round(effort.grains * 1e3)
        words[_EPOCH], words[_SINCE] = effort.epoch, effort.since

    def settle(self) -> None:
        """From now on nothing takes long that it does not say so of."""
        self._words[_PATIENT] = 0


class Odometers:
    """Those of a node's ranks, as its agent has them.

    Args:
        slots: how many there are.
    """

    def __init__(self, slots: int) -> None:
        self._fd = os.memfd_create("megatron-elastic-odometers")
        os.ftruncate(self._fd, slots * _WORDS * 8)
        self._words = memoryview(mmap.mmap(self._fd, slots * _WORDS * 8)).cast("q")

    def environment(self, slot: int) -> dict[str, str]:
        """What a rank must find in its environment to have the odometer of a slot."""
        return {ODOMETER_VARIABLE: f"/proc/{os.getpid()}/fd/{self._fd}:{slot}"}

    def begin(self, slot: int) -> None:
        """Another rank gets the slot, which begins patiently."""
        self._of(slot)[:] = memoryview(bytes(_WORDS * 8)).cast("q")
        self._of(slot)[_PATIENT] = 1

    def read(self, slot: int) -> Reading:
        """What one shows now. (It may change meanwhile; who hangs changes nothing.)"""
        words = self._of(slot)
        point, grain, waits = words[_POINT], words[_GRAIN], words[_WAITS]
        return Reading(
            moves=words[_COUNT], point=HOOK_POINTS[point - 1] if point else "", step=words[_STEP],
            grain=None if grain < 0 or not point else grain, waits=waits + _NOBODY if waits else None,
            patient=bool(words[_PATIENT]), worker=words[_WORKER],
        )  # fmt: skip

    def effort(self, slot: int) -> Effort:
        """What a rank has worked. (Of a step that ends meanwhile there may be only a part.)"""
        words = self._of(slot)
        return Effort(words[_EPOCH], words[_SINCE], words[_BUSY] / 1e9, words[_GRAINS] / 1e3)

    def figures(self, slot: int, resident: int) -> Figures:
        """What the dials of a rank show, whose process has so many bytes in memory."""
        return dials.read(self._of(slot)[_OWN:], resident)

    def _of(self, slot: int) -> memoryview:
        return self._words[slot * _WORDS : (slot + 1) * _WORDS]
