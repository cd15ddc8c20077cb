"""Recomputation: chunks that keep only their input and make their forward again, where memory is not enough."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, combinations

from megatron_elastic.layout import Layout
from megatron_elastic.plan.costs.cost import Costs
from megatron_elastic.plan.costs.fit import overflow

_FEW = 4
"""Up to so many, all sets of them are looked at."""


def sets(times: Sequence[float]) -> Iterator[tuple[int, ...]]:
    """Sets of what takes so long each, by index, those first that take least together; of many only some."""
    order = sorted(range(len(times)), key=times.__getitem__)
    sizes = range(len(times) + 1)
    if len(times) > _FEW:
        yield from (tuple(order[:size]) for size in sizes)
        return
    every = chain.from_iterable(combinations(order, size) for size in sizes)
    yield from sorted(every, key=lambda some: sum(times[index] for index in some))


def recomputing(layout: Layout, costs: Costs) -> Layout:
    """The layout with those chunks recomputed that take least time, of those with which it fits devices in the usual
    order; with none where it fits without, or in no way.
    """
    plain = replace(layout, recomputed=())
    if overflow(plain, plain.ranks, costs) is None:
        return plain
    units: list[int] = []
    for index, stage in enumerate(layout.stages):
        ranks = [rank for cell in stage.cells for rank in cell.ranks]
        chunks = [position.units for position in layout.way if position.stage == index]
        times = [sum(costs.units[unit].forward_ms for unit in chunk) for chunk in chunks]
        for some in sets(times):
            again = [unit for chunk in some for unit in chunks[chunk]]
            if overflow(replace(plain, recomputed=tuple(sorted(again))), ranks, costs) is None:
                units += again
                break
        else:
            return plain
    return replace(plain, recomputed=tuple(sorted(units)))
