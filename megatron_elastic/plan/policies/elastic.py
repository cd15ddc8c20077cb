"""Elastic: ours. The others of a stage share a lost cell's grains at once; then units and cells move on the side."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from megatron_elastic.layout import Holdings, Layout
from megatron_elastic.plan.choice import HORIZON_MS, SCHEDULES, WORTH, Way, best, splits, step, ways
from megatron_elastic.plan.costs.cost import Costs
from megatron_elastic.plan.costs.fit import overflow
from megatron_elastic.plan.growth import admit, even
from megatron_elastic.plan.policies.policy import Policy, without_shadows


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
        """Nothing moves, unless memory is short: who gets slices of the lost ones may own far more than others until
        they are spread evenly, and there may be no room for what a better way needs to have copied on the side. Then
        the best way is gone at once that devices have room for, if training has waited for that before long.
        """
        stay, split = super().lose(layout, lost, held, epoch, costs, schedules), splits(schedules)
        if costs is None or costs.memory_bytes is None:
            return stay
        roomy = replace(costs, memory_bytes=costs.memory_bytes // 2)
        if overflow(stay, stay.ranks, roomy, split) is None:
            return stay  # and there is room for whatever is copied
        left = without_shadows(stay)
        found = ways(left, costs, left.is_tied, schedules)
        on_the_side = best(found)
        fits = overflow(stay, stay.ranks, costs, split) is None
        gain = on_the_side.gain * (1 + WORTH) if fits and on_the_side.problem is None else 0.0
        chosen = stay
        for way in found:
            waited = (1 - min(way.moves_ms / HORIZON_MS, 1.0)) * found[0].step_ms / way.step_ms
            if waited > gain and (way.problem is not None or not fits):
                spread = even(way.layout, epoch, costs.slow)
                if overflow(spread, spread.ranks, costs, split) is None:
                    chosen, gain = spread, waited
        return chosen

    def uses_all(self, costs: Costs | None) -> bool:
        """Where it is not known what units cost."""
        return costs is None

    def cells(
        self, layout: Layout, there: int, costs: Costs | None, schedules: Collection[str] = SCHEDULES
    ) -> int:
        """More than there are only if steps get shorter."""
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
        return found.cells if found.step_ms < present * (1 - WORTH) else now

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
