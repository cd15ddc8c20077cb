"""Alike: pipelines of layers that all cost the same, under every known schedule and searched."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from megatron_elastic.layout.way import joined, way
from megatron_elastic.pipeline.search import NotFitting, Orders, Problem, choose, lower_bound
from megatron_elastic.pipeline.search.candidates import v_shaped
from megatron_elastic.plan.work.placing import ways
from planned.searched.pipelines import schedules

NAMES = ("1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "search")
_CHUNKS = 2
_KEPT, _INLET = 17.0, 1.0
"""What a forward keeps of a layer, and of its input alone where it is recomputed: 34 and 2 bytes for each element of
the input in bf16, attention's scores not counted (Korthikanti et al. 2022, arXiv 2205.05198).
"""
_SMALL = 2000
"""Operations of a pipeline up to which the optimum is looked for."""


class Case(NamedTuple):
    """What is asked. ``memory`` is a device's, as a multiple of what 1F1B keeps where it keeps most."""

    stages: int
    grains: int
    memory: float
    layers: int


@dataclass(frozen=True)
class _Placed:
    """What is known of one placement of chunks: a pipeline, and the least that its passes are known to take, if any."""

    problem: Problem
    bound: float
    step: float = float("inf")
    orders: Orders | None = None
    recomputed: tuple[int, ...] = ()

    @property
    def peak(self) -> float:
        """The most that a device keeps."""
        return max(self.problem.recomputing(self.recomputed).peaks(self.orders or []))


def row(case: Case, seconds: float) -> dict[str, Any]:
    """A case, and what comes of it (docs/schedules.md). ``seconds``: for the optimum, where the pipeline is small."""
    stages, grains, memory, layers = case
    found: dict[str, Any] = {**case._asdict(), "schedules": dict.fromkeys(NAMES), "optimum": None, "bound": None,
                             "search_s": None}  # fmt: skip
    if stages > layers:
        return found
    plain = problem_of(layers, range(stages), grains)
    unit = max(plain.peaks(schedules(stages, grains, 1)["1f1b"]))

    def figures(placed: _Placed) -> dict[str, float] | None:
        if placed.peak > memory * unit * (1 + 1e-9):
            return None
        return {"step": round(placed.step, 3), "bubble": round(1 - 3 * layers * grains / (stages * placed.step), 4),
                "peak": round(placed.peak / unit, 4)}  # fmt: skip

    problems = {through: problem_of(layers, through, grains).within([memory * unit] * stages)
                for through in map(joined, ways(stages, layers))}  # fmt: skip
    known = {through: _known(through, problem) for through, problem in problems.items()}
    for through, orders in known.items():
        whole = problems[through].recomputing(())
        for name in orders.keys() & set(NAMES):
            found["schedules"][name] = figures(_Placed(whole, 0.0, whole.makespan(orders[name]), orders[name]))
    begun = time.process_time()
    each = list(_searched([(problem, known[through]) for through, problem in problems.items()]))
    found["search_s"] = round(time.process_time() - begun, 3)
    best = min(each, key=lambda placed: placed.step)
    if best.orders is not None:
        found["schedules"]["search"] = figures(best)
        found |= _optimum(each, seconds)
    return found


def problem_of(layers: int, through: Sequence[int], grains: int) -> Problem:
    """A pipeline without a limit of memory: a layer's forward takes 1, its backward 2, links and ends nothing."""
    sizes = [float(size) for size in split(layers, through)]
    kept, stages = tuple(_KEPT * size for size in sizes), max(through) + 1
    return Problem(
        route=(tuple(through),) * grains, forward=tuple(sizes), backward=tuple(2 * size for size in sizes),
        input=tuple(sizes), weight=tuple(sizes), kept=kept, late=kept, link=(0.0,) * len(sizes),
        limits=(float("inf"),) * stages, speed=(1.0,) * stages,
        inlet=tuple(_INLET * (position > 0) for position in range(len(sizes))),
    )  # fmt: skip


def split(layers: int, through: Sequence[int]) -> list[int]:
    """How many layers each position has: those of a stage as many as those of any other, or one more in the stages in
    front; each of them as many as the others of its stage, or one more in the later ones.
    """
    stages, chunks = max(through) + 1, Counter(through)
    totals = [layers // stages + (stage < layers % stages) for stage in range(stages)]
    seen, sizes = Counter[int](), []
    for stage in through:
        begin, end = (totals[stage] * at // chunks[stage] for at in (seen[stage], seen[stage] + 1))
        sizes.append(end - begin)
        seen[stage] += 1
    return sizes


def _known(through: tuple[int, ...], problem: Problem) -> Mapping[str, Orders]:
    """The known schedules of a placement."""
    stages, grains = problem.devices, problem.grains
    chunks = len(through) // stages
    if through == way("loop", stages, chunks):
        return schedules(stages, grains, chunks)
    if through == joined(way("v", stages, _CHUNKS)):
        return {"zb-v": v_shaped(problem.recomputing(()))}
    return {}


def _searched(pipelines: Sequence[tuple[Problem, Mapping[str, Orders]]]) -> Iterator[_Placed]:
    """The best of each placement. Those that cannot be better than what was found before are not searched."""
    least = float("inf")
    for bound, _, (problem, known) in sorted(
        (lower_bound(problem), at, (problem, known)) for at, (problem, known) in enumerate(pipelines)
    ):
        placed = _Placed(problem, bound)
        if placed.bound < least * (1 - 1e-9):
            try:
                best, recomputed = choose(problem, known)
            except NotFitting:
                pass
            else:
                placed = replace(placed, step=best.ms, orders=best.orders, recomputed=recomputed)
                least = min(least, placed.step)
        yield placed


def _optimum(each: Sequence[_Placed], seconds: float) -> dict[str, float | None]:
    """The optimum over all placements, if the solver can prove it in time, and what none can be below."""
    begun, proved = time.monotonic(), False
    steps: list[float] = []
    bounds: list[float] = []
    for placed in sorted(each, key=lambda placed: placed.step):
        step, bound = placed.step, placed.bound
        least = min([*steps, step])
        problem, left = placed.problem, seconds - (time.monotonic() - begun)
        small = 3 * problem.grains * problem.positions <= _SMALL
        if left > 0 and small and placed.orders is not None and (not steps or bound < least * (1 - 1e-9)):
            from megatron_elastic.pipeline.search.exact import solve  # needs OR-Tools

            solved = solve(problem, placed.orders, left, workers=2, recomputed=placed.recomputed)
            step, bound, proved = solved.makespan, max(bound, solved.bound), proved or solved.proved
        steps.append(step)
        bounds.append(bound)
    least = min(steps)
    return {"optimum": round(least, 3) if proved and min(bounds) >= least * (1 - 1e-9) else None,
            "bound": round(min(bounds), 3)}  # fmt: skip
