"""Candidates: the schedules that are known, and what a search makes of them and of greedy orders."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from megatron_elastic.pipeline.search.bound import lower_bound
from megatron_elastic.pipeline.search.greedy import Policy, greedy
from megatron_elastic.pipeline.search.improve import improve
from megatron_elastic.pipeline.search.problem import BACKWARD, INPUT, WEIGHT, Deadlock, Orders, Problem

_GREEDY = 250_000
"""Operations that greedy orders may be made of, all together; one is made in any case."""
_IMPROVED = 500_000
"""Operations that may be looked at to improve orders."""
_FEWEST = 10
"""Changes; fewer are not worth what it costs to begin."""
_CHANGES = 20
"""Changes to orders that are tried for each operation that they have, at most."""
_STARTS = 2
"""How many of the best orders are improved."""


class NotFitting(Exception):
    """No orders are known that fit the memory."""


class Best(NamedTuple):
    """The best orders that were found.

    Attributes:
        orders: of the devices.
        ms: that a step takes with them.
        name: of the known schedule, or ``search``.
        bound: milliseconds that no orders are below.
    """

    orders: Orders
    ms: float
    name: str
    bound: float


def best(problem: Problem, known: Mapping[str, Orders], effort: float = 1.0) -> Best:
    """The fastest orders that fit the memory: never worse than the best of the ``known`` ones that fit it.

    It takes some milliseconds for small problems, and less than a second for 64 stages and 512 grains; what it does
    depends on the problem alone, and on ``effort``, by which that time is multiplied. Raises NotFitting.
    """
    bound = lower_bound(problem)
    found = [
        (problem.makespan(orders), name, orders) for name, orders in known.items() if problem.fits(orders)
    ]  # fmt: skip
    size = 3 * problem.grains * problem.positions
    for policy in _policies(problem)[: max(1, int(effort * _GREEDY) // max(size, 1))]:
        if min((ms for ms, _, _ in found), default=bound + 1) <= bound * (1 + 1e-9):
            break
        try:
            orders = greedy(problem, policy)
        except Deadlock:
            break  # no policy has more memory
        found.append((problem.makespan(orders), "search", orders))
    if not found:
        raise NotFitting("the memory of a device is not enough for any order that is known")
    found.sort(key=lambda each: each[0])
    ms, name, orders = found[0]
    changes = min(int(effort * _IMPROVED) // _STARTS // max(size, 1), _CHANGES * size)
    for _, _, start in _different(found) if changes >= _FEWEST else ():
        better, better_ms = improve(problem, start, changes, bound * (1 + 1e-9))
        if better_ms < ms * (1 - 1e-9):
            orders, ms, name = better, better_ms, "search"
    return Best(_joined(problem, orders), ms, name, bound)


def _different(found: list[tuple[float, str, Orders]]) -> Iterator[tuple[float, str, Orders]]:
    """The best orders, of those that take as long only one."""
    count, before = 0, -1.0
    for each in found:
        if each[0] > before * (1 + 1e-9) and count < _STARTS:
            count, before = count + 1, each[0]
            yield each


def _joined(problem: Problem, orders: Orders) -> Orders:
    """Backwards in one part where nobody waits for the first one alone: at the beginning of the model."""
    if problem.backward[0] > problem.input[0] + problem.weight[0]:
        return orders
    number, stride, found = problem.numbers, 4 * problem.positions, []
    weight, behind = number.of(WEIGHT, 0, 0), number.of(WEIGHT, 0, 0) - number.of(INPUT, 0, 0)
    for ops in orders:
        joined: list[int] = []
        for op in ops:
            if op % stride == weight and joined[-1] == op - behind:
                joined[-1] = number.of(BACKWARD, op // stride, 0)
            else:
                joined.append(op)
        found.append(joined)
    return found


def _policies(problem: Problem) -> list[Policy]:
    """Those that were best for some problem, the more often the earlier."""
    stages, chunks = problem.devices, -(-problem.positions // problem.devices)
    if not problem.regular:
        return [Policy(turns=True, patience=1.0), Policy(turns=True), Policy(patience=0.5)]
    # By how far the device of the first position is from the end, as if each had one.
    rank = {device: at for at, device in enumerate(dict.fromkeys(problem.route[0]))}
    away = [stages - rank[device] for device in range(stages)]
    few = tuple((chunks - 1) * stages + each for each in away)
    many = tuple((chunks - 1) * 2 * stages + 2 * each - 1 for each in away)
    late = tuple(chunks * (stages - each) for each in away)
    policies = [
        Policy(turns=True, patience=1.0), Policy(many, patience=0.5, put_off=late, turns=True), Policy(turns=True),
        Policy(few, patience=0.5, turns=True), Policy(few, put_off=late, turns=True), Policy(patience=0.5),
        Policy(patience=0.5, put_off=(1,) * stages), Policy(few, put_off=(0,) * stages, turns=True),
    ]  # fmt: skip
    if chunks > 1:
        policies = [each for policy in policies for each in (policy, policy._replace(group=stages))]
    return policies


def v_shaped(problem: Problem) -> Orders:
    """ZB-V (Qi et al. 2024, arXiv 2405.15362): two chunks on each device, placed as a V, in the order in which a
    forward, an input's and a weights' gradient that take equally long leave no gaps, with as much memory as 1F1B has.

    The two at the turn may be one position.
    """
    way = problem.route[0]
    ones = tuple(2.0 / way.count(device) for device in way)
    alike = replace(
        problem, forward=ones, backward=tuple(2 * one for one in ones), input=ones, weight=ones, kept=ones, late=ones,
        link=(0.0,) * len(way), limits=(2.0 * problem.devices,) * problem.devices, speed=(1.0,) * problem.devices,
        inlet=(), again=(),
    )  # fmt: skip
    orders = [greedy(alike, policy) for policy in (Policy(), Policy(group=problem.devices), Policy(turns=True))]
    return min(orders, key=alike.makespan)
