"""Improve: changes orders a little, again and again, where it is that time is lost.

A step takes as long as its critical path: operations each of which begins as soon as another is over. To be shorter,
some operation of it has to change places with one that it follows on its device. Which, is drawn; what became worse is
taken back, unless it is no worse than some changes ago (late acceptance, Burke and Bykov 2017), so that small steps
upwards lead out of dead ends. The draws are the same each time, and there are so many as there are, whatever a clock
says: equal problems have equal results.
"""

from __future__ import annotations

import random
from math import inf

from megatron_elastic.pipeline.search.problem import (
    BACKWARD,
    FORWARD,
    INPUT,
    WEIGHT,
    Deadlock,
    Orders,
    Problem,
    TooLong,
)

_MEMORY = 40
"""Changes after which what became worse has to be no worse than before them."""
_FURTHEST = 12
"""Places by which a weights' gradient is put off at most in one change."""


def improve(problem: Problem, orders: Orders, evaluations: int, enough: float) -> tuple[Orders, float]:
    """Orders that are no worse and fit the memory if ``orders`` do, and how long they take.

    It ends after so many ``evaluations``, or when a step takes no longer than ``enough``.
    """
    run = _Run(problem, orders)
    best, best_ms = [list(ops) for ops in orders], run.ms
    recent = [run.ms] * _MEMORY
    for turn in range(evaluations):
        if best_ms <= enough:
            break
        change = run.draw()
        if change is None:
            continue
        before, slot = run.ms, turn % _MEMORY
        run.make(*change)
        try:
            run.evaluate(max(before, recent[slot]))
        except Deadlock:
            run.take_back(*change)
            continue
        except TooLong:
            run.take_back(*change)
        if run.ms < best_ms:
            best, best_ms = [list(ops) for ops in run.orders], run.ms
        recent[slot] = min(recent[slot], run.ms) if run.ms <= before else run.ms
    return best, best_ms


class _Run:
    def __init__(self, problem: Problem, orders: Orders) -> None:
        self.orders = [list(ops) for ops in orders]
        self._problem = problem
        self._random = random.Random(0)
        self._at: dict[int, tuple[int, int]] = {}
        """Operation -> its device and place there."""
        for device, ops in enumerate(self.orders):
            self._at.update({op: (device, place) for place, op in enumerate(ops)})
        stride = 4 * problem.positions
        self._work = [sum(of[op % stride] for op in ops)
                      for of, ops in zip(problem.durations, self.orders, strict=True)]  # fmt: skip
        """[device] = milliseconds of all its operations."""
        self.evaluate(inf)

    def evaluate(self, most: float) -> None:
        """How long a step takes in the present orders. Raises Deadlock, and TooLong if that is more than ``most``; then
        all is known that was known before.
        """
        rounding = 1e-9 * most if most < inf else 0.0
        ends = self._problem.ends(self.orders, [most + rounding - work for work in self._work])
        ms = max(each[-1] for each in ends if each)
        if ms > most:
            raise TooLong
        self._ends, self.ms = ends, ms
        self._pairs: list[tuple[int, int]] | None = None

    def draw(self) -> tuple[int, int, int] | None:
        """A device, a place there, and the later one that its operation is to come to; None: not this time."""
        if self._pairs is None:
            self._pairs = self._critical()
        if not self._pairs:
            return None
        device, place = self._random.choice(self._pairs)
        ops, stride, positions = self.orders[device], 4 * self._problem.positions, self._problem.positions
        to = place + 1
        if ops[place] % stride >= WEIGHT * positions:
            to = min(place + self._random.randint(1, _FURTHEST), len(ops) - 1)
        return (device, place, to) if self._may(device, place, to) else None

    def make(self, device: int, place: int, to: int) -> None:
        """Let an operation come later on its device."""
        ops = self.orders[device]
        ops.insert(to, ops.pop(place))
        self._number(device, place, to)

    def take_back(self, device: int, place: int, to: int) -> None:
        """Undo a change that came to nothing."""
        ops = self.orders[device]
        ops.insert(place, ops.pop(to))
        self._number(device, place, to)

    def _number(self, device: int, first: int, last: int) -> None:
        ops = self.orders[device]
        for place in range(first, last + 1):
            self._at[ops[place]] = device, place

    def _may(self, device: int, place: int, to: int) -> bool:
        """Whether the operations between do not need this one, and the memory is enough without what it frees."""
        ops, problem = self.orders[device], self._problem
        numbers, stride, allocated, rises = problem.numbers, 4 * problem.positions, problem.allocated, problem.rises
        kind, grain, position = numbers.parts(ops[place])
        for op in ops[place + 1 : to + 1]:
            later, other, at = numbers.parts(op)
            if other == grain and at == position and kind in (FORWARD, INPUT) and later in (BACKWARD, INPUT, WEIGHT):
                return False
        if kind == FORWARD:
            return True  # memory is needed later
        now = 0.0
        for op in ops[:place]:
            now += allocated[op % stride]
        for op in (*ops[place + 1 : to + 1], ops[place]):
            if now + rises[op % stride] > problem.room[device]:
                return False
            now += allocated[op % stride]
        return True

    def _critical(self) -> list[tuple[int, int]]:
        """(device, place) of operations of a critical path that the next one on the device waits for."""
        problem, ends = self._problem, self._ends
        stride = 4 * problem.positions
        device = max((device for device, each in enumerate(ends) if each), key=lambda device: ends[device][-1])
        place = len(ends[device]) - 1
        pairs: list[tuple[int, int]] = []
        while True:
            op = self.orders[device][place]
            begun = ends[device][place] - problem.durations[device][op % stride]
            if place and ends[device][place - 1] >= begun - 1e-9:
                place -= 1
                pairs.append((device, place))
                continue
            needed = self._needed(op)
            if needed is None or begun <= 1e-9:
                return pairs
            device, place = self._at[needed]

    def _needed(self, op: int) -> int | None:
        """Of what an operation needs, that which comes from another position."""
        numbers, at = self._problem.numbers, self._at
        kind, grain, position = numbers.parts(op)
        if kind == FORWARD:
            return numbers.of(FORWARD, grain, position - 1) if position else None
        if kind == WEIGHT or position + 1 == self._problem.positions:
            return None
        whole = numbers.of(BACKWARD, grain, position + 1)
        return whole if whole in at else numbers.of(INPUT, grain, position + 1)
