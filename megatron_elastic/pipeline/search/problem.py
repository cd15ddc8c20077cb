"""Problem: what is to be put in order: grains that pass positions, on devices with a memory.

A grain passes the positions of the model in turn, forward, and back again. ``route`` says on which device; so several
chunks on a device, placed round robin or as a V, cells side by side and grains that are re-routed are all the same.

Operations are numbers, ``grain * 4 * positions + kind * positions + position``, because an order is looked through
many times.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import NamedTuple

FORWARD, BACKWARD, INPUT, WEIGHT = range(4)
"""Kinds of operations: a backward is one ``BACKWARD``, or an ``INPUT`` and later a ``WEIGHT``."""

Orders = list[list[int]]
"""[device] = its operations, in order."""


class Deadlock(Exception):
    """In these orders some device waits for ever, or its memory is not enough."""


class TooLong(Exception):
    """In these orders some device waits longer than it may."""


class Numbers(NamedTuple):
    """How operations are numbered."""

    positions: int

    def of(self, kind: int, grain: int, position: int) -> int:
        """The number of an operation."""
        return (grain * 4 + kind) * self.positions + position

    def parts(self, op: int) -> tuple[int, int, int]:
        """Kind, grain and position of an operation."""
        rest, position = divmod(op, self.positions)
        grain, kind = divmod(rest, 4)
        return kind, grain, position


@dataclass(frozen=True)
class Problem:
    """What a step is made of. Times are in milliseconds, memory in bytes.

    Attributes:
        route: [grain][position] = the device that computes it.
        forward, backward, input, weight: [position] = time on a device of speed 1. ``backward`` is both of the others
            at once.
        kept: [position] = allocated when a forward begins, until the backward is over.
        late: [position] = of that, what is still there between an ``INPUT`` and its ``WEIGHT``.
        link: [position] = from there to the next one, and back, if they are on different devices.
        limits: [device] = for all that is kept there at a time; infinite where nothing is known.
        speed: [device] = by which its times are divided.
        inlet: [position] = bytes of its input, which is all that is kept of one that is recomputed; empty: none can be.
        again: [position] = allocated when a backward begins, because the forward is made again first; empty: nothing.
    """

    route: tuple[tuple[int, ...], ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    input: tuple[float, ...]
    weight: tuple[float, ...]
    kept: tuple[float, ...]
    late: tuple[float, ...]
    link: tuple[float, ...]
    limits: tuple[float, ...]
    speed: tuple[float, ...]
    inlet: tuple[float, ...] = ()
    again: tuple[float, ...] = ()

    @property
    def grains(self) -> int:
        """How many there are."""
        return len(self.route)

    @property
    def positions(self) -> int:
        """How many there are."""
        return len(self.forward)

    @property
    def devices(self) -> int:
        """How many there are."""
        return len(self.limits)

    @cached_property
    def numbers(self) -> Numbers:
        """How operations are numbered."""
        return Numbers(self.positions)

    @cached_property
    def durations(self) -> list[list[float]]:
        """[device][kind * positions + position]."""
        times = [*self.forward, *self.backward, *self.input, *self.weight]
        return [[ms / speed for ms in times] for speed in self.speed]

    @cached_property
    def allocated(self) -> list[float]:
        """[kind * positions + position] = by how much more there is after an operation than before it."""
        freed = [late - kept for late, kept in zip(self.late, self.kept, strict=True)]
        return [*self.kept, *(-kept for kept in self.kept), *freed, *(-late for late in self.late)]

    @cached_property
    def rises(self) -> list[float]:
        """[kind * positions + position] = what an operation allocates when it begins."""
        nothing = [0.0] * self.positions
        again = [*self.again] or nothing
        return [*self.kept, *again, *again, *nothing]

    @cached_property
    def reserve(self) -> list[float]:
        """[device] = the most that one of its backwards allocates when it begins."""
        found = [0.0] * self.devices
        for way in dict.fromkeys(self.route) if self.again else ():
            for device, size in zip(way, self.again, strict=True):
                found[device] = max(found[device], size)
        return found

    @cached_property
    def room(self) -> list[float]:
        """[device] = its limit, and what rounding may add to a sum."""
        return [limit * (1 + 1e-9) for limit in self.limits]

    @cached_property
    def shares(self) -> list[list[tuple[int, int]]]:
        """[device] = the (grain, position) that it computes, by grain."""
        found: list[list[tuple[int, int]]] = [[] for _ in self.limits]
        for grain, devices in enumerate(self.route):
            for position, device in enumerate(devices):
                found[device].append((grain, position))
        return found

    @cached_property
    def regular(self) -> bool:
        """Whether all grains take the same way."""
        return all(way == self.route[0] for way in self.route)

    def within(self, limits: Sequence[float]) -> Problem:
        """The same with other limits of memory, by device."""
        return replace(self, limits=tuple(limits))

    def recomputing(self, positions: Collection[int]) -> Problem:
        """The same, with the forwards of these positions, and of no others, made again when their backwards begin."""
        if not positions:
            return replace(self, inlet=())
        chosen = [position in positions for position in range(self.positions)]
        first = [ms if again else 0.0 for ms, again in zip(self.forward, chosen, strict=True)]
        kept = tuple(
            inlet if again else size for size, inlet, again in zip(self.kept, self.inlet, chosen, strict=True)
        )  # fmt: skip
        return replace(
            self, inlet=(), kept=kept, again=tuple(size - left for size, left in zip(self.kept, kept, strict=True)),
            backward=tuple(a + b for a, b in zip(first, self.backward, strict=True)),
            input=tuple(a + b for a, b in zip(first, self.input, strict=True)),
        )  # fmt: skip

    def ends(self, orders: Orders, idle: Sequence[float] = ()) -> list[list[float]]:
        """[device] = when each operation is over, if each begins as soon as it can.

        Raises Deadlock, and TooLong as soon as a device is known to wait longer than ``idle`` milliseconds: [device];
        empty: they may wait as long as they have to.
        """
        positions, route, links = self.positions, self.route, self.link
        stride, last = 4 * positions, positions - 1
        made: dict[int, float] = {}
        """When the result of a forward, or of a backward (as if it were one ``BACKWARD``), is there."""
        waiting: dict[int, int] = {}
        found: list[list[float]] = [[] for _ in orders]
        clock = [0.0] * len(orders)
        left = [*idle] or [inf] * len(orders)
        ready = list(range(len(orders)))
        while ready:
            device = ready.pop()
            ops, ends, times, now = orders[device], found[device], self.durations[device], clock[device]
            waits = left[device]
            for at in range(len(ends), len(ops)):
                op = ops[at]
                kind = op % stride
                if kind < positions:
                    if kind:
                        there = made.get(op - 1)
                        if there is None:
                            waiting[op - 1] = device
                            break
                        way = route[op // stride]
                        if way[kind - 1] != device:
                            there += links[kind - 1]
                        if there > now:
                            waits -= there - now
                            now = there
                    result = op
                elif kind < 3 * positions:
                    grain, position = op // stride, kind % positions
                    base = grain * stride
                    if base + position not in made:
                        raise Deadlock(f"device {device} goes back before it went forward")
                    result = base + positions + position
                    if position < last:
                        there = made.get(result + 1)
                        if there is None:
                            waiting[result + 1] = device
                            break
                        if route[grain][position + 1] != device:
                            there += links[position]
                        if there > now:
                            waits -= there - now
                            now = there
                else:
                    if op - 2 * positions not in made:
                        raise Deadlock(f"device {device} has weights' gradients before the input's")
                    now += times[kind]
                    ends.append(now)
                    continue
                now += times[kind]
                ends.append(now)
                made[result] = now
                other = waiting.pop(result, None)
                if other is not None:
                    ready.append(other)
            if waits < 0.0:
                raise TooLong(f"device {device} waits too long")
            clock[device], left[device] = now, waits
        if any(len(ends) < len(ops) for ends, ops in zip(found, orders, strict=True)):
            raise Deadlock("in these orders some devices wait for each other")
        return found

    def makespan(self, orders: Orders) -> float:
        """Milliseconds until all is done. Raises Deadlock."""
        return max((ends[-1] for ends in self.ends(orders) if ends), default=0.0)

    def peaks(self, orders: Orders) -> list[float]:
        """[device] = the most that is kept there at a time."""
        return [self.peak(ops) for ops in orders]

    def peak(self, ops: Sequence[int]) -> float:
        """The most that a device keeps at a time, with its operations in this order."""
        stride, allocated, rises = 4 * self.positions, self.allocated, self.rises
        now = most = 0.0
        for op in ops:
            most = max(most, now + rises[op % stride])
            now += allocated[op % stride]
        return most

    def fits(self, orders: Orders) -> bool:
        """Whether each device's memory is enough."""
        return all(peak <= room for peak, room in zip(self.peaks(orders), self.room, strict=True))
