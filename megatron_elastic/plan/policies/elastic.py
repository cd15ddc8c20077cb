"""Elastic: ours. The others of a stage share a lost cell's grains at once, and units and cells move on the side; or, if
that gains more, they move at once.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import NamedTuple

from megatron_elastic.layout import Holdings, Layout
from megatron_elastic.plan.choice import HORIZON_MS, SCHEDULES, SEARCH, WORTH, Way, best, splits, step, ways
from megatron_elastic.plan.costs.cost import Costs
from megatron_elastic.plan.costs.fit import overflow
from megatron_elastic.plan.growth import admit, even
from megatron_elastic.plan.migration import pause_ms
from megatron_elastic.plan.policies.policy import Policy, without_shadows

_UNORDERED, _ORDERED = 2, 2
"""Steps from a loss until what was copied on the side is in force, besides those that copying takes: all hear of it,
switch, and have an order of work then that was searched meanwhile; say that all is there, hear of the next layout,
switch. Five to seven, with those of copying, were measured with 16 cells (docs/emulation.md)."""
_COMPARING_MS = 1000.0
"""For which all wait while ways are compared, at most, with 16 cells."""
_AGAIN = 0.5
"""Steps that are done again where units move at once: that in which ranks are lost, of which half was done."""


class _Meanwhile(NamedTuple):
    """How long steps are in the layout that stays: in a known order, and as soon as one has been searched."""

    known_ms: float
    ordered_ms: float

    def computed(self, way: Way, stays: Way) -> float:
        """Steps until the next event if all that a way needs is copied while training goes on as it ``stays``."""
        if way is stays:
            return HORIZON_MS / way.step_ms
        left = max(HORIZON_MS - _UNORDERED * self.known_ms, 0.0)
        ordered = min(_ORDERED * self.ordered_ms + way.moves_ms, left)
        return _UNORDERED + ordered / self.ordered_ms + (left - ordered) / way.step_ms

    def lost_ms(self, ideal_ms: float) -> float:
        """How much longer the steps take that are done in any case than those of so long."""
        return _UNORDERED * (self.known_ms - ideal_ms) + _ORDERED * (self.ordered_ms - ideal_ms)


def _at_once(way: Way, moves_ms: float) -> float:
    """Steps until the next event if training waits until all that a way needs has been copied."""
    return max(HORIZON_MS - moves_ms, 0.0) / way.step_ms - _AGAIN


class Elastic(Policy):
    """ElasWave's axes (arXiv 2510.00606): dataflow at once, graph in the background, clocks apart
    (``plan.work.clocking``).

    Where it is known what units cost, all ways to go on are compared (``plan.choice``), with cells as slow as they are.
    One may be to leave cells out, for regular pipelines; they come in again when that makes the others faster.
    """

    name = "elastic"
    idea = "dataflow at once, units and cells move in the background (ElasWave, arXiv 2510.00606)"

    def lose(
        self, layout: Layout, lost: Collection[int], held: Holdings, epoch: int, costs: Costs | None,
        schedules: Collection[str] = SCHEDULES,
    ) -> Layout:
        """Nothing moves, unless memory is short or a step much longer than it could be.

        Who gets slices of the lost ones may own far more than others until they are spread evenly, and there may be no
        room for what a better way needs to have copied on the side. And until that is in force, several steps are done
        in the layout that stays. Then the way is gone at once, training waiting for what moves, by which most is
        computed until the next event.
        """
        stay, split = super().lose(layout, lost, held, epoch, costs, schedules), splits(schedules)
        if costs is None:
            return stay
        roomy = costs if costs.memory_bytes is None else replace(costs, memory_bytes=costs.memory_bytes // 2)
        short = overflow(stay, stay.ranks, roomy, split) is not None
        known_ms = step(stay, costs, [each for each in schedules if each != SEARCH])
        meanwhile = _Meanwhile(known_ms, step(stay, costs, schedules) if SEARCH in schedules else known_ms)
        if not short and not self._may_hurry(stay, costs, meanwhile):
            return stay
        left = without_shadows(stay)
        found = ways(left, costs, left.is_tied, schedules, briefly=True)
        on_the_side = best(found)
        fits = overflow(stay, stay.ranks, costs, split) is None
        goes_on = fits and on_the_side.problem is None
        computed = meanwhile.computed(on_the_side, found[0]) if goes_on else 0.0
        chosen = stay
        for way in found[1:] if fits else found:
            spread = even(way.layout, epoch, costs.slow)
            at_once = _at_once(way, pause_ms(spread, held, costs))
            if at_once > computed and overflow(spread, spread.ranks, costs, split) is None:
                chosen, computed = spread, at_once
        return chosen

    def _may_hurry(self, stay: Layout, costs: Costs, meanwhile: _Meanwhile) -> bool:
        """Whether until then more could be lost than while all wait for ways to be compared and do a part of a step
        again: by a step in which all cells are busy all the time.
        """
        cells = sum(1 / costs.slow.get(cell.leader, 1.0) for cell in stay.cells.values() if not cell.shadow)
        ideal = stay.num_grains * sum(unit.forward_ms + unit.backward_ms for unit in costs.units) / cells
        return meanwhile.lost_ms(ideal) > _COMPARING_MS + _AGAIN * ideal

    def uses_all(self, costs: Costs | None) -> bool:
        """Where it is not known what units cost."""
        return costs is None

    def cells(
        self, layout: Layout, there: int, costs: Costs | None, schedules: Collection[str] = SCHEDULES
    ) -> int:
        """More than there are only if steps get shorter; never fewer, as it is ``arrange`` that leaves cells out."""
        now = len(layout.cells)
        if there <= now or costs is None:
            return there
        tied = layout.is_tied
        newest = max((*layout.ranks, *layout.spares, *layout.lost))
        missing = there - now - len(layout.spares) // layout.cell_size
        newcomers = {newest + i + 1: len(layout.hosts) for i in range(max(missing, 0) * layout.cell_size)}
        grown = admit(replace(layout, most_cells=None), newcomers, layout.epoch)
        found = best(ways(grown, costs, tied, schedules))
        present = step(layout, costs, schedules)
        return max(found.cells, now) if found.step_ms < present * (1 - WORTH) else now

    def considered(
        self, layout: Layout, costs: Costs, schedules: Collection[str] = SCHEDULES
    ) -> tuple[Way, ...]:
        """The ways to go on from ``layout``, in which all that it asks for is live, and with its spares."""
        there = len(layout.cells) + len(layout.spares) // layout.cell_size
        most = self.cells(layout, there, costs, schedules)
        grown = admit(replace(layout, most_cells=max(most, len(layout.cells))), {}, layout.epoch)
        return ways(grown, costs, layout.is_tied, schedules)

    def arranges(self, costs: Costs | None) -> bool:
        """Where it is known what units cost."""
        return costs is not None

    def ways(
        self, layout: Layout, costs: Costs | None, tied: bool, schedules: Collection[str] = SCHEDULES
    ) -> tuple[Way, ...]:
        """All that ``plan.choice`` knows."""
        return ways(layout, costs or Costs.assumed(layout.units), tied, schedules)

    def arrange(
        self, layout: Layout, costs: Costs | None, tied: bool, schedules: Collection[str] = SCHEDULES
    ) -> Layout:
        """The best of all ways."""
        return best(self.ways(layout, costs, tied, schedules)).layout
