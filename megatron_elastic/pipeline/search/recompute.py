"""Recompute: which positions keep only their input and make their forward again when their backward begins.

That costs a forward, and leaves room for more grains on their way. Where what is kept is no hindrance, nothing is
recomputed. Else sets are tried of which the least are known with which a known schedule fits, and then what they are
with a position more or less.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

from megatron_elastic.pipeline.search.bound import lower_bound
from megatron_elastic.pipeline.search.candidates import Best, NotFitting, best
from megatron_elastic.pipeline.search.problem import Orders, Problem
from megatron_elastic.plan.costs.recomputation import sets

_TRIED = 60_000
"""Operations that the orders of all sets that are tried may have together; one is tried in any case, or as many as it
takes to find one that fits.
"""
_EFFORT = 0.05
"""Of a search for each set that is tried; the best is then searched in full."""


class Chosen(NamedTuple):
    """The best orders that were found, and the positions that are recomputed in them."""

    best: Best
    recomputed: tuple[int, ...]


def choose(problem: Problem, known: Mapping[str, Orders]) -> Chosen:
    """The fastest orders that fit the memory, with any positions recomputed: never worse than without, nor than the
    ``known`` ones with the positions recomputed that they have to be to fit. Raises NotFitting.
    """
    if not problem.inlet:
        return Chosen(best(problem, known), ())
    found: Chosen | None = None
    with suppress(NotFitting):
        found = Chosen(best(problem.recomputing(()), known), ())
    if found is None or (_short(problem) and found.best.ms > _floor(problem) * (1 + 1e-9)):
        found = _Trials(problem, known, found).run()
    if found is None:
        raise NotFitting("the memory of a device is not enough for any order that is known, whatever is recomputed")
    return found._replace(best=found.best._replace(bound=lower_bound(problem)))


def also(problem: Problem, chosen: Chosen, positions: tuple[int, ...]) -> Chosen:
    """With these positions recomputed, those of ``chosen`` among them."""
    if positions == chosen.recomputed:
        return chosen
    # They fit, as what is recomputed keeps no more.
    return Chosen(best(problem.recomputing(positions), {chosen.best.name: chosen.best.orders}), positions)


def least(problem: Problem, orders: Orders) -> tuple[int, ...] | None:
    """The positions that take least to recompute, of those with which ``orders`` fit the memory; None if none do."""
    there: list[set[int]] = [set() for _ in orders]
    for way in dict.fromkeys(problem.route):
        for position, device in enumerate(way):
            there[device].add(position)
    chosen: set[int] = set()
    for device, ops in enumerate(orders):
        useful = sorted(_useful(problem) & there[device])
        for numbers in sets([problem.forward[position] for position in useful]):
            some = [useful[number] for number in numbers]
            if problem.recomputing(some).peak(ops) <= problem.room[device]:
                chosen.update(some)
                break
        else:
            return None
    return tuple(sorted(chosen))


def _useful(problem: Problem) -> set[int]:
    """Positions that keep more than their input."""
    return {at for at, (kept, inlet) in enumerate(zip(problem.kept, problem.inlet, strict=True)) if kept > inlet}


def _short(problem: Problem) -> bool:
    """Whether some device cannot keep all grains at a time."""
    return any(
        sum(problem.kept[position] for _, position in share) > room
        for share, room in zip(problem.shares, problem.room, strict=True)
    )


def _floor(problem: Problem) -> float:
    """Milliseconds that no orders are below, however much memory there is."""
    return lower_bound(problem.within([float("inf")] * problem.devices))


class _Trials:
    """What was tried, and the best of it. ``plain``: with nothing recomputed."""

    def __init__(self, problem: Problem, known: Mapping[str, Orders], plain: Chosen | None) -> None:
        self._problem, self._known = problem, known
        self._best = plain
        self._seen: set[tuple[int, ...]] = {()}
        size = 3 * problem.grains * problem.positions
        self._left, self._large = max(1, _TRIED // size), size > _TRIED

    def run(self) -> Chosen | None:
        """The best of all that are tried; None if none fit."""
        useful = tuple(sorted(_useful(self._problem)))
        for orders in self._known.values():
            self._try(least(self._problem, orders))
        self._try(useful)
        better = True
        while better and self._left > 0 and self._best is not None:
            present = set(self._best.recomputed)
            better = any([self._try(tuple(sorted(present ^ {position}))) for position in useful])
        if self._best is not None and self._best.recomputed and not self._large:
            self._search(self._best.recomputed, 1.0)
        return self._best

    def _try(self, positions: tuple[int, ...] | None) -> bool:
        """Whether it is better with these positions recomputed than with any before."""
        if positions is None or positions in self._seen or (self._best is not None and self._left <= 0):
            return False
        self._seen.add(positions)
        if self._best is not None and lower_bound(self._problem.recomputing(positions)) >= self._best.best.ms:
            return False
        self._left -= 1
        return self._search(positions, _EFFORT)

    def _search(self, positions: tuple[int, ...], effort: float) -> bool:
        try:
            found = best(self._problem.recomputing(positions), self._known, effort)
        except NotFitting:
            return False
        # Its orders may do with less.
        fewer = least(self._problem, found.orders)
        if fewer is not None and fewer != positions:
            self._seen.add(fewer)
            found = found._replace(ms=self._problem.recomputing(fewer).makespan(found.orders))
            positions = fewer
        if self._best is not None and found.ms >= self._best.best.ms:
            return False
        self._best = Chosen(found, positions)
        return True
