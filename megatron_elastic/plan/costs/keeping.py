"""Keeping: what the usual order keeps of activations on a device at a time, by the way that grains take."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from megatron_elastic.layout import Layout, Position, placement_of
from megatron_elastic.plan.costs.cost import Costs, live_activations
from megatron_elastic.plan.work.slots import Slots


class Keeping:
    """Of a way, with the names of all units."""

    def __init__(self, way: Sequence[Position], names: Sequence[str]) -> None:
        self._way, self._names = way, names
        self._stages = 1 + max(position.stage for position in way)
        self._placement = placement_of([position.stage for position in way])

    @cached_property
    def _live(self) -> list[list[int]]:
        """[stage][chunk] = grains that are between forward and backward there at a time, at most."""
        slots = Slots.along(self._way, self._names)
        found: list[list[int]] = [[] for _ in range(self._stages)]
        for number, position in enumerate(self._way):
            found[position.stage].append(slots.live(number))
        return found

    def most(
        self, stage: int, grains: int, split: bool, sizes: Sequence[float], left: Sequence[float] | None = None
    ) -> float:
        """Bytes that a cell of a stage keeps, which has so many grains. ``split``: with backwards in two.

        ``sizes``: of a grain, by chunk. ``left``: what is kept of it until its backward begins, which is less where a
        chunk is recomputed.
        """
        left = sizes if left is None else left
        # Of one grain all is there while its backward goes on, and of those whose weights' gradients are put off.
        again = max(size - rest for size, rest in zip(sizes, left, strict=True)) * (1 + stage * split)
        if self._placement is not None and self._placement[0] == "loop":
            live = live_activations(self._stages, stage, len(sizes), split)
            return min(min(grains * len(sizes), live) * sum(left) / len(sizes) + again, grains * sum(sizes))
        put_off = stage * max(left) if split else 0.0
        most = sum(min(live, grains) * rest for live, rest in zip(self._live[stage], left, strict=True)) + put_off
        return min(most + again, grains * sum(sizes))


def of_chunks(layout: Layout, stage: int, costs: Costs) -> tuple[list[float], list[float]]:
    """Bytes of a grain's activations in each chunk of a stage, and what is kept of them until its backward begins."""
    sizes, left = [], []
    for number, position in enumerate(layout.way):
        if position.stage == stage:
            size = float(sum(costs.units[unit].activation_bytes for unit in position.units))
            sizes.append(size)
            recomputed = layout.recomputes(stage, position.chunk)
            left.append(min(size, costs.inlet_bytes(number)) if recomputed else size)
    return sizes, left
