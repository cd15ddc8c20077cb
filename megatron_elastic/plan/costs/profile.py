"""Profile: costs from what ranks measured while they trained."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import linear_regression, median

from megatron_elastic.layout import Layout
from megatron_elastic.plan.costs.cost import Costs, UnitCost

_APART = 1.1
"""Ratio of two clocks from which on what is measured at them tells more than how steady measuring is."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What one rank measured.

    Attributes:
        units: costs of the units that are at home in its stage, by index.
        boundary_bytes: a grain's activation between two stages.
        boundary_ms: its time on the way to the next stage; None in the last.
        overhead_ms: the part of a step that was not the pipeline, with what the rank waited there for others.
    """

    units: Mapping[int, UnitCost]
    boundary_bytes: int
    boundary_ms: float | None
    overhead_ms: float


def measured(layout: Layout, samples: Iterable[Sample]) -> Costs | None:
    """Costs of a job from its ranks' samples; None while a unit is missing.

    A figure is the median of what ranks measured. Layers of equal sizes are alike, so they share one figure: single
    ones would tell more about the processors that they happen to be on. The rank that waited least knows the overhead.
    """
    samples = list(samples)
    known: dict[int, list[UnitCost]] = defaultdict(list)
    for sample in samples:
        for unit, cost in sample.units.items():
            known[unit].append(cost)
    if len(known) < len(layout.units):
        return None
    alike: dict[object, list[UnitCost]] = defaultdict(list)
    for unit, name in enumerate(layout.units):
        alike[_kind(name, known[unit][0])] += known[unit]
    boundary = [sample.boundary_ms for sample in samples if sample.boundary_ms is not None]
    costs = Costs(
        units=tuple(_typical(alike[_kind(name, known[unit][0])]) for unit, name in enumerate(layout.units)),
        boundary_bytes=samples[0].boundary_bytes,
        overhead_ms=min(sample.overhead_ms for sample in samples),
    )
    if not boundary:
        return costs
    # What an activation takes is known, not how much of it would be there for a message of no size.
    return replace(costs, latency_ms=0.0, bandwidth=1e3 * costs.boundary_bytes / median(boundary))


def clock_shares(layout: Layout, seen: Mapping[tuple[int, float], UnitCost]) -> dict[int, float]:
    """Which share of its time a clock divides, of each unit that has been measured at clocks that differ enough: by
    least squares, of all units of its kind together. ``seen``: what was measured of a unit at a clock.
    """
    points: dict[object, list[tuple[float, float]]] = defaultdict(list)
    kinds = {unit: _kind(layout.units[unit], cost) for (unit, _), cost in seen.items()}
    for (unit, clock), cost in seen.items():
        points[kinds[unit]].append((1 / clock, cost.grain_ms))
    shares = {}
    for kind, of in points.items():
        inverse, ms = zip(*of, strict=True)
        if max(inverse) >= _APART * min(inverse) and min(ms) > 0:
            clocked, fixed = linear_regression(inverse, ms)
            base = max(clocked + fixed, clocked)
            shares[kind] = min(clocked / base, 1.0) if clocked > 0 else 0.0
    return {unit: shares[kind] for unit, kind in kinds.items() if kind in shares}


def _kind(name: str, cost: UnitCost) -> object:
    return name.partition(".")[0], cost.parameter_bytes


def _typical(costs: list[UnitCost]) -> UnitCost:
    return UnitCost(
        forward_ms=median(cost.forward_ms for cost in costs),
        backward_ms=median(cost.backward_ms for cost in costs),
        parameter_bytes=costs[0].parameter_bytes,
        optimizer_bytes=costs[0].optimizer_bytes,
        activation_bytes=max(cost.activation_bytes for cost in costs),
        late_bytes=max((cost.late_bytes for cost in costs if cost.late_bytes is not None), default=None),
    )
