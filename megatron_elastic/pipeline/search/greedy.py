"""Greedy: orders made by letting every device do, whenever it is free, the best of what it could do.

Backwards go first, because others wait for them and memory becomes free; then forwards, as far as memory and the policy
allow; weights' gradients fill the time in between, or come when their memory is needed. A device whose memory is full
always has room to bring the oldest grain that it has begun to its end, and to make any forward again that is not kept,
so nobody can wait for ever.
"""

from __future__ import annotations

from collections import deque
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from megatron_elastic.pipeline.search.problem import BACKWARD, FORWARD, INPUT, WEIGHT, Deadlock, Orders, Problem

_NEVER = float("inf")


class Policy(NamedTuple):
    """What a device prefers.

    Attributes:
        ahead: [device] = how many (grain, position) it may have between forward and backward; None: as many as fit.
        group: so many grains pass one position of a device before they pass its next one; 0: who is further goes first.
        patience: a weights' gradient is not begun if something else comes within this share of its time.
        put_off: [device] = how many weights' gradients it puts off at most; None: as many as fit.
        turns: forwards and backwards come in turn where both could be done, and memory is made for a forward at once.
    """

    ahead: tuple[int, ...] | None = None
    group: int = 0
    patience: float = 0.0
    put_off: tuple[int, ...] | None = None
    turns: bool = False


def greedy(problem: Problem, policy: Policy) -> Orders:
    """Orders that fit the memory. Raises Deadlock if a device's is not enough for one grain."""
    return _Run(problem, policy).run()


class _Run:
    """The step as it goes on."""

    def __init__(self, problem: Problem, policy: Policy) -> None:
        self._problem = problem
        positions, devices = problem.positions, problem.devices
        self._patience, self._turns = policy.patience, policy.turns
        self._went_back = [False] * devices
        """Whether a device's last pass was a backward."""
        everything = problem.grains * positions + 1
        self._ahead = policy.ahead or (everything,) * devices
        self._put_off = policy.put_off or (everything,) * devices
        self._orders: Orders = [[] for _ in range(devices)]
        self._memory = [0.0] * devices
        self._room = [room - most for room, most in zip(problem.room, problem.reserve, strict=True)]
        """What forwards may fill."""
        self._live = [0] * devices
        self._coming: list[list[tuple[float, int, int, int, int]]] = [[] for _ in range(devices)]
        """When a result that is on its way arrives; kind, priority, grain and position of what needs it."""
        self._forwards: list[list[tuple[int, int, int]]] = [[] for _ in range(devices)]
        self._backwards: list[list[tuple[int, int, int]]] = [[] for _ in range(devices)]
        self._weights: list[deque[tuple[int, int]]] = [deque() for _ in range(devices)]
        self._idle = [True] * devices
        self._next: list[tuple[float, int]] = [(0.0, 0)] * devices
        """When a device looks around next, and the number of that event; others of its events are out of date."""
        self._serial = 0
        self._events: list[tuple[float, int, int]] = []
        group = policy.group
        # Of what a device could do next: forwards by group, position and grain, or the furthest one; backwards
        # likewise, from behind.
        if group:
            self._forward_rank = [[grain // group * positions + position for position in range(positions)]
                                  for grain in range(problem.grains)]
            self._backward_rank = [[grain // group * positions - position for position in range(positions)]
                                   for grain in range(problem.grains)]
        else:
            furthest = [-position for position in range(positions)]
            self._forward_rank = [furthest] * problem.grains
            self._backward_rank = [furthest] * problem.grains
        self._several = any(len(set(way)) < positions for way in problem.route)
        """Whether some grain comes to a device more than once."""
        self._unbegun: list[dict[int, int]] = []
        """[device] = of the grains that it has not brought forward whole, how many positions are left, by grain."""
        self._needed: list[dict[int, float]] = []
        """Likewise, what these positions keep."""
        if self._several:
            for share in problem.shares:
                left: dict[int, int] = {}
                needed: dict[int, float] = {}
                for grain, position in share:
                    left[grain] = left.get(grain, 0) + 1
                    needed[grain] = needed.get(grain, 0.0) + problem.kept[position]
                self._unbegun.append(left)
                self._needed.append(needed)
        self._firsts: list[deque[int]] = [deque() for _ in range(devices)]
        """Grains that a device has yet to let into the model."""
        for grain, way in enumerate(problem.route):
            self._firsts[way[0]].append(grain)

    def run(self) -> Orders:
        problem = self._problem
        for device, firsts in enumerate(self._firsts):
            self._next[device] = (_NEVER, 0)
            if firsts:
                self._let_in(device, 0.0)
                self._look(device, 0.0)
        events = self._events
        while events:
            now, serial, device = heappop(events)
            if serial == self._next[device][1]:
                self._dispatch(device, now)
        done = sum(map(len, self._orders))
        if done < 3 * problem.grains * problem.positions:
            raise Deadlock("the memory of a device is not enough for one grain")
        return self._orders

    def _let_in(self, device: int, now: float) -> None:
        grain = self._firsts[device].popleft()
        heappush(self._coming[device], (now, FORWARD, self._forward_rank[grain][0], grain, 0))

    def _dispatch(self, device: int, now: float) -> None:
        coming, forwards, backwards = self._coming[device], self._forwards[device], self._backwards[device]
        while coming and coming[0][0] <= now:
            _, kind, rank, grain, position = heappop(coming)
            heappush(forwards if kind == FORWARD else backwards, (rank, grain, position))
        weights = self._weights[device]
        if weights and len(weights) > self._put_off[device]:
            self._start(device, now, WEIGHT, *weights.popleft())
        elif forwards and backwards and self._turns and self._went_back[device] and self._its_turn(device, now):
            pass
        elif backwards:
            if weights and self._memory[device] + self._again(backwards[0][2]) > self._problem.room[device]:
                self._start(device, now, WEIGHT, *weights.popleft())
            else:
                _, grain, position = heappop(backwards)
                self._start(device, now, INPUT, grain, position)
        elif forwards and (chosen := self._admitted(device)) is not None:
            self._start(device, now, FORWARD, *chosen)
        elif weights and (forwards or not coming or self._worth(device, weights[0][1], coming[0][0] - now)):
            self._start(device, now, WEIGHT, *weights.popleft())
        else:
            self._idle[device] = True
            if coming:
                self._look(device, coming[0][0])
            else:
                self._next[device] = (_NEVER, 0)

    def _again(self, position: int) -> float:
        """What a backward allocates when it begins."""
        again = self._problem.again
        return again[position] if again else 0.0

    def _its_turn(self, device: int, now: float) -> bool:
        """Begin a forward, or what makes memory for one; whether there was any."""
        if (chosen := self._admitted(device)) is not None:
            self._start(device, now, FORWARD, *chosen)
        elif self._weights[device] and self._live[device] < self._ahead[device]:
            self._start(device, now, WEIGHT, *self._weights[device].popleft())
        else:
            return False
        return True

    def _look(self, device: int, when: float) -> None:
        """Have a device look around then, and not before."""
        self._serial += 1
        self._next[device] = when, self._serial
        heappush(self._events, (when, self._serial, device))

    def _worth(self, device: int, position: int, gap: float) -> bool:
        """Whether to begin a weights' gradient when something else comes after ``gap``."""
        problem = self._problem
        return gap >= self._patience * problem.durations[device][WEIGHT * problem.positions + position]

    def _admitted(self, device: int) -> tuple[int, int] | None:
        """The forward to begin next, of those that could; None if there is no room."""
        forwards, problem = self._forwards[device], self._problem
        room = self._room[device] - self._memory[device]
        if not self._several:
            _, grain, position = forwards[0]
            if problem.kept[position] > room or self._live[device] >= self._ahead[device]:
                return None
            heappop(forwards)
            return grain, position
        unbegun, needed = self._unbegun[device], self._needed[device]
        oldest = next(iter(unbegun))
        free = self._live[device] < self._ahead[device]
        for entry in sorted(forwards):
            _, grain, position = entry
            if grain == oldest:
                fits = needed[oldest] <= room
            else:
                fits = free and problem.kept[position] + needed[oldest] <= room
            if fits:
                forwards.remove(entry)
                heapify(forwards)
                needed[grain] -= problem.kept[position]
                unbegun[grain] -= 1
                if not unbegun[grain]:
                    del unbegun[grain], needed[grain]
                return grain, position
        return None

    def _start(self, device: int, now: float, kind: int, grain: int, position: int) -> None:
        problem = self._problem
        positions = problem.positions
        local = kind * positions + position
        self._orders[device].append(grain * 4 * positions + local)
        end = now + problem.durations[device][local]
        self._memory[device] += problem.allocated[local]
        self._idle[device] = False
        self._look(device, end)
        way = problem.route[grain]
        if kind == FORWARD:
            self._went_back[device] = False
            self._live[device] += 1
            if position == 0 and self._firsts[device]:
                self._let_in(device, end)
            if position + 1 < positions:
                other = way[position + 1]
                rank = self._forward_rank[grain][position + 1]
                there = end if other == device else end + problem.link[position]
                self._tell(other, (there, FORWARD, rank, grain, position + 1))
            else:
                heappush(self._coming[device], (end, BACKWARD, self._backward_rank[grain][position], grain, position))
        elif kind == INPUT:
            self._went_back[device] = True
            self._live[device] -= 1
            self._weights[device].append((grain, position))
            if position:
                other = way[position - 1]
                rank = self._backward_rank[grain][position - 1]
                there = end if other == device else end + problem.link[position - 1]
                self._tell(other, (there, BACKWARD, rank, grain, position - 1))

    def _tell(self, device: int, what: tuple[float, int, int, int, int]) -> None:
        heappush(self._coming[device], what)
        if self._idle[device] and what[0] < self._next[device][0]:
            self._look(device, what[0])
