"""The exact solver, and how far searched orders are from the optimum."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from megatron_elastic.pipeline.search import Problem, best, lower_bound
from megatron_elastic.pipeline.search.exact import solve
from tests.schedules.test_search import alike


def drawn(seed: int, memory: float) -> Problem:
    """Three stages of unlike times and sizes, four grains."""
    rng = random.Random(seed)
    problem = alike(3, 4, 3.0)
    size = [rng.uniform(1, 2) for _ in range(3)]
    back = rng.uniform(0.8, 1.4)
    kept = tuple(float(round(100 * each)) for each in size)
    return replace(
        problem, forward=tuple(size), input=tuple(back * each for each in size),
        weight=tuple((2 - back) * each for each in size), backward=tuple(2 * each for each in size),
        kept=kept, late=tuple(float(rng.choice([1, 2]) * each // 2) for each in kept),
        link=(rng.choice([0.0, 0.1, 0.5]),) * 3, limits=(memory * 300,) * 3,
    )  # fmt: skip


def test_by_hand() -> None:
    """One grain at a time on three stages: three forwards, three inputs' gradients and one of weights each."""
    problem = alike(3, 4, 1.0)
    found = best(problem, {})
    solved = solve(problem, found.orders, 20)
    assert solved.makespan == pytest.approx(4 * 7) == found.ms
    assert solved.bound <= 28 and solved.bound == pytest.approx(28, rel=1e-3)
    assert solved.proved


def test_searched_orders_are_near_the_optimum() -> None:
    """Small pipelines of all kinds; what the solver finds is valid, and between the bound and the search. Most of these
    optima are proved in the time that it has.
    """
    gaps = []
    for seed in range(3):
        for memory in (1.0, 1.6):
            problem = drawn(seed, memory)
            found = best(problem, {})
            solved = solve(problem, found.orders, 3)
            assert problem.fits(solved.orders)
            assert solved.makespan == pytest.approx(problem.makespan(solved.orders))
            assert lower_bound(problem) <= solved.makespan * (1 + 1e-6) and solved.bound <= solved.makespan
            gaps.append(found.ms / solved.makespan)
    assert min(gaps) >= 1 - 1e-9
    assert max(gaps) < 1.05 and sum(gaps) / len(gaps) < 1.015, gaps


def test_whole_backwards_that_take_less_are_not_looked_at() -> None:
    problem = replace(alike(2, 2, 2.0), backward=(1.0, 1.0))
    with pytest.raises(ValueError, match="takes less than in two parts"):
        solve(problem, best(problem, {}).orders, 1)
