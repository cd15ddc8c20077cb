"""Exact: the best orders of a small problem, by constraint programming (OR-Tools, the extra ``search``).

What a device computes does not overlap; what it keeps, from a forward's beginning until the backward's parts are over,
fits its memory at any time. All backwards are in two parts: one at once is never better unless it takes less than both.
A position can be recomputed where the problem says what is kept of it then.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import NamedTuple

from ortools.sat.python import cp_model

from megatron_elastic.pipeline.search.bound import lower_bound
from megatron_elastic.pipeline.search.problem import FORWARD, INPUT, WEIGHT, Orders, Problem

_PARTS = 100_000
"""A step is cut into so many units of time, in which all times are rounded down, unless fewer do for whole times."""


class Solved(NamedTuple):
    """What the solver has found.

    Attributes:
        orders: the best ones known.
        recomputed: the positions that are recomputed in them.
        makespan: of them, in milliseconds.
        bound: no orders are below this many milliseconds.
        proved: whether none are better, to the solver's resolution.
    """

    orders: Orders
    recomputed: tuple[int, ...]
    makespan: float
    bound: float
    proved: bool


def solve(
    problem: Problem, hint: Orders, seconds: float, workers: int = 1, recomputed: tuple[int, ...] = ()
) -> Solved:
    """Begin with ``hint``, which fits the memory if these positions are ``recomputed``, and look for better orders, and
    other positions, for so long.

    Raises ValueError if a whole backward takes less than its two parts.
    """
    if any(
        whole < (first + second) * (1 - 1e-9)
        for whole, first, second in zip(problem.backward, problem.input, problem.weight, strict=True)
    ):
        raise ValueError("a backward at once takes less than in two parts, which is not looked at here")
    span = problem.recomputing(recomputed).makespan(hint)
    unit = _unit(problem, span)
    model = _Model(problem, unit, span)
    model.hint(hint, recomputed)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = workers
    solver.parameters.cp_model_presolve = model.least * unit < span * (1 - 1e-9)  # else there is nothing to look for
    status = solver.solve(model.model)
    bound = solver.best_objective_bound * unit
    orders, chosen, found = hint, recomputed, span
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        made, again = model.orders(solver), model.recomputed(solver)
        with_these = problem.recomputing(again)
        if with_these.makespan(made) <= span and with_these.fits(made):  # times were rounded
            orders, chosen, found = made, again, with_these.makespan(made)
    return Solved(orders, chosen, found, min(bound, found), status == cp_model.OPTIMAL)


def _unit(problem: Problem, span: float) -> float:
    """Milliseconds in which times are counted: what divides them all, if they are whole, so that nothing is rounded."""
    times = {ms for each in (*problem.durations, problem.link) for ms in each}
    if all(ms.is_integer() for ms in times) and (whole := math.gcd(*map(int, times))) and span <= whole * _PARTS:
        return float(whole)
    return span / _PARTS


class _Span(NamedTuple):
    """Bytes that are kept from the beginning of one operation until another is over, or begins, where a position is
    ``recomputed``, or where it is not.
    """

    size: float
    first: int
    last: int
    recomputed: bool = False
    until_end: bool = True


class _Model:
    """Orders of no more than ``span`` milliseconds, in times of ``unit``."""

    def __init__(self, problem: Problem, unit: float, span: float) -> None:
        self.model = model = cp_model.CpModel()
        self._problem, self._unit = problem, unit
        grains, positions = problem.grains, problem.positions
        durations = [[int(ms / unit) for ms in times] for times in problem.durations]
        links = [int(ms / unit) for ms in problem.link]
        horizon = math.ceil(span / unit) + 1
        self._again: dict[int, cp_model.IntVar] = {
            position: model.new_bool_var(f"r{position}")
            for position in range(positions if problem.inlet else 0)
            if problem.kept[position] > problem.inlet[position]
        }
        """Whether a position is recomputed, of those that can be."""
        self.starts: dict[int, cp_model.IntVar] = {}
        self._lengths: list[tuple[cp_model.IntVar, _Span]] = []
        """How long something is kept."""
        self.least = math.ceil(lower_bound(problem) / unit * (1 - 1e-9))
        self._end = end = model.new_int_var(self.least, horizon, "end")
        self._ends: dict[int, cp_model.LinearExprT] = {}
        ends = self._ends
        on_device: list[list[cp_model.IntervalVar]] = [[] for _ in range(problem.devices)]
        number = problem.numbers.of
        for grain in range(grains):
            for position in range(positions):
                device = problem.route[grain][position]
                for kind in (FORWARD, INPUT, WEIGHT):
                    op = number(kind, grain, position)
                    ms = durations[device][kind * positions + position]
                    start = model.new_int_var(0, horizon, f"s{op}")
                    self.starts[op], ends[op] = start, start + ms
                    if kind == INPUT and position in self._again:
                        ends[op] = model.new_int_var(0, horizon, f"e{op}")
                        more = durations[device][FORWARD * positions + position] * self._again[position]
                        interval = model.new_interval_var(start, ms + more, ends[op], f"i{op}")
                    else:
                        interval = model.new_fixed_size_interval_var(start, ms, f"i{op}")
                    on_device[device].append(interval)
                    model.add(end >= ends[op])
        for intervals in on_device:
            model.add_no_overlap(intervals)
        for grain, way in enumerate(problem.route):
            for position in range(positions):
                forward, back, weight = (number(kind, grain, position) for kind in (FORWARD, INPUT, WEIGHT))
                model.add(self.starts[back] >= ends[forward])
                model.add(self.starts[weight] >= ends[back])
                if position + 1 < positions:
                    link = links[position] if way[position] != way[position + 1] else 0
                    model.add(self.starts[number(FORWARD, grain, position + 1)] >= ends[forward] + link)
                    model.add(self.starts[back] >= ends[number(INPUT, grain, position + 1)] + link)
        self._memory(horizon)
        if problem.regular:  # then grains are alike, and may as well come in order
            for position in range(positions):
                for kind in (FORWARD, INPUT, WEIGHT):
                    for grain in range(grains - 1):
                        before, after = number(kind, grain, position), number(kind, grain + 1, position)
                        model.add(self.starts[after] >= ends[before])
        model.minimize(end)

    def _memory(self, horizon: int) -> None:
        problem, model, number, ends = self._problem, self.model, self._problem.numbers.of, self._ends
        for device, share in enumerate(problem.shares):
            total = sum(problem.kept[position] for _, position in share)
            if total <= problem.limits[device]:
                continue
            intervals: list[cp_model.IntervalVar] = []
            demands: list[int] = []
            for grain, position in share:
                forward, back, weight = (number(kind, grain, position) for kind in (FORWARD, INPUT, WEIGHT))
                again, late = self._again.get(position), problem.late[position]
                early = problem.kept[position] - late
                spans = [_Span(late, forward, weight), _Span(early, forward, back)]
                if again is not None:
                    spans += [
                        _Span(problem.inlet[position], forward, back, recomputed=True, until_end=False),
                        _Span(early, back, back, recomputed=True), _Span(late, back, weight, recomputed=True),
                    ]  # fmt: skip
                for span in spans:
                    if span.size > 0:
                        length = model.new_int_var(0, horizon, "")
                        self._lengths.append((length, span))
                        start = self.starts[span.first]
                        until = ends[span.last] if span.until_end else self.starts[span.last]
                        if again is None:
                            interval = model.new_interval_var(start, length, until, "")
                        else:
                            there = again if span.recomputed else ~again
                            interval = model.new_optional_interval_var(start, length, until, there, "")
                        intervals.append(interval)
                        demands.append(round(span.size))
            model.add_cumulative(intervals, demands, int(problem.limits[device]))

    def hint(self, orders: Orders, recomputed: Collection[int]) -> None:
        """Let the solver begin with these orders, and these positions recomputed."""
        problem = self._problem.recomputing(recomputed)
        split, unit = _split(problem, orders), self._unit
        ends = problem.ends(split)
        durations, stride = problem.durations, 4 * problem.positions
        for position, again in self._again.items():
            self.model.add_hint(again, position in recomputed)
        at: dict[int, tuple[int, int]] = {}
        """When operations begin and end."""
        for device, (ops, of) in enumerate(zip(split, ends, strict=True)):
            for op, ms in zip(ops, of, strict=True):
                at[op] = int((ms - durations[device][op % stride]) / unit), int(ms / unit)
                self.model.add_hint(self.starts[op], at[op][0])
                if isinstance(end := self._ends[op], cp_model.IntVar):
                    self.model.add_hint(end, at[op][1])
        for length, span in self._lengths:
            self.model.add_hint(length, at[span.last][span.until_end] - at[span.first][0])
        self.model.add_hint(self._end, max(end for _, end in at.values()))

    def recomputed(self, solver: cp_model.CpSolver) -> tuple[int, ...]:
        """The positions that are, in what was found."""
        return tuple(position for position, again in self._again.items() if solver.value(again))

    def orders(self, solver: cp_model.CpSolver) -> Orders:
        """What was found."""
        problem = self._problem
        found: Orders = [[] for _ in range(problem.devices)]
        for op in sorted(self.starts, key=lambda op: (solver.value(self.starts[op]), op)):
            _, grain, position = problem.numbers.parts(op)
            found[problem.route[grain][position]].append(op)
        return found


def _split(problem: Problem, orders: Orders) -> Orders:
    """With every backward in two parts, one right after the other."""
    found: Orders = []
    for ops in orders:
        halves: list[int] = []
        for op in ops:
            kind, grain, position = problem.numbers.parts(op)
            if kind in (FORWARD, INPUT, WEIGHT):
                halves.append(op)
            else:
                halves += [problem.numbers.of(half, grain, position) for half in (INPUT, WEIGHT)]
        found.append(halves)
    return found
