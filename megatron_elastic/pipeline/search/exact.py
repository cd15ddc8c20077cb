"""Exact: the best orders of a small problem, by constraint programming (OR-Tools, the extra ``search``).

What a device computes does not overlap; what it keeps, from a forward's beginning until the backward's parts are over,
fits its memory at any time. All backwards are in two parts: one at once is never better unless it takes less than both.
A position can be recomputed where the problem says what is kept of it then.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from ortools.sat.python import cp_model

from megatron_elastic.pipeline.search.problem import FORWARD, INPUT, WEIGHT, Orders, Problem

_PARTS = 100_000
"""A step is cut into so many units of time, in which all times are rounded down."""


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
    unit = span / _PARTS
    model = _Model(problem, unit)
    model.hint(hint, recomputed)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = workers
    status = solver.solve(model.model)
    bound = solver.best_objective_bound * unit
    orders, chosen, found = hint, recomputed, span
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        made, again = model.orders(solver), model.recomputed(solver)
        with_these = problem.recomputing(again)
        if with_these.makespan(made) <= span and with_these.fits(made):  # times were rounded
            orders, chosen, found = made, again, with_these.makespan(made)
    return Solved(orders, chosen, found, min(bound, found), status == cp_model.OPTIMAL)


class _Model:
    def __init__(self, problem: Problem, unit: float) -> None:
        self.model = model = cp_model.CpModel()
        self._problem = problem
        grains, positions = problem.grains, problem.positions
        durations = [[int(ms / unit) for ms in times] for times in problem.durations]
        links = [int(ms / unit) for ms in problem.link]
        horizon = _PARTS + 1
        self._again: dict[int, cp_model.IntVar] = {
            position: model.new_bool_var(f"r{position}")
            for position in range(positions if problem.inlet else 0)
            if problem.kept[position] > problem.inlet[position]
        }
        """Whether a position is recomputed, of those that can be."""
        self.starts: dict[int, cp_model.IntVar] = {}
        end = model.new_int_var(0, horizon, "end")
        ends: dict[int, cp_model.LinearExpr] = {}
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
        self._memory(ends, horizon)
        if problem.regular:  # then grains are alike, and may as well come in order
            for position in range(positions):
                for kind in (FORWARD, INPUT, WEIGHT):
                    for grain in range(grains - 1):
                        before, after = number(kind, grain, position), number(kind, grain + 1, position)
                        model.add(self.starts[after] >= ends[before])
        model.minimize(end)

    def _memory(self, ends: dict[int, cp_model.LinearExpr], horizon: int) -> None:
        problem, model, number = self._problem, self.model, self._problem.numbers.of
        for device, share in enumerate(problem.shares):
            total = sum(problem.kept[position] for _, position in share)
            if total <= problem.limits[device]:
                continue
            intervals: list[cp_model.IntervalVar] = []
            demands: list[int] = []
            for grain, position in share:
                forward, back, weight = (number(kind, grain, position) for kind in (FORWARD, INPUT, WEIGHT))
                again, late = self._again.get(position), problem.late[position]
                spans: list[tuple[float, cp_model.LinearExprT, cp_model.LinearExprT, bool]] = [
                    (late, self.starts[forward], ends[weight], False),
                    (problem.kept[position] - late, self.starts[forward], ends[back], False),
                ]
                if again is not None:
                    inlet = problem.inlet[position]
                    spans += [
                        (inlet, self.starts[forward], self.starts[back], True),
                        (problem.kept[position] - late, self.starts[back], ends[back], True),
                        (late, self.starts[back], ends[weight], True),
                    ]
                for size, start, until, recomputed in spans:
                    if size > 0:
                        length = model.new_int_var(0, horizon, "")
                        if again is None:
                            interval = model.new_interval_var(start, length, until, "")
                        else:
                            there = again if recomputed else ~again
                            interval = model.new_optional_interval_var(start, length, until, there, "")
                        intervals.append(interval)
                        demands.append(round(size))
            model.add_cumulative(intervals, demands, int(problem.limits[device]))

    def hint(self, orders: Orders, recomputed: Collection[int]) -> None:
        """Let the solver begin with these orders, and these positions recomputed."""
        problem = self._problem.recomputing(recomputed)
        split, ends = _split(problem, orders), problem.ends(_split(problem, orders))
        unit = max(each[-1] for each in ends if each) / _PARTS
        durations, stride = problem.durations, 4 * problem.positions
        for position, again in self._again.items():
            self.model.add_hint(again, position in recomputed)
        for device, (ops, of) in enumerate(zip(split, ends, strict=True)):
            for op, ms in zip(ops, of, strict=True):
                self.model.add_hint(self.starts[op], int((ms - durations[device][op % stride]) / unit))

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
