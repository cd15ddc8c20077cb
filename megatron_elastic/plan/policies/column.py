"""Column (TorchFT): a whole data-parallel replica of the pipeline leaves when it loses a rank."""

from __future__ import annotations

from collections.abc import Collection

from megatron_elastic.layout import Cell, Holdings, Layout
from megatron_elastic.plan.choice import SCHEDULES
from megatron_elastic.plan.costs.cost import Costs
from megatron_elastic.plan.errors import ADVICE, NoLayout
from megatron_elastic.plan.graph import Graph
from megatron_elastic.plan.loss import lose
from megatron_elastic.plan.policies.policy import Outcome, Policy, apart
from megatron_elastic.plan.replan import fill


def columns(layout: Layout) -> list[tuple[Cell, ...]]:
    """The replicas of the pipeline: cells of all stages that compute the same; where there are no such, in order."""
    stages = [[cell for cell in stage.cells if not cell.shadow] for stage in layout.stages]
    by_share = [{(cell.grains, cell.parts): cell for cell in cells} for cells in stages]
    if all(each.keys() == by_share[0].keys() for each in by_share):
        return [tuple(each[share] for each in by_share) for share in by_share[0]]
    return list(zip(*stages, strict=False))


def whole(layout: Layout, dead: Collection[int]) -> list[tuple[Cell, ...]]:
    """The replicas of the pipeline that have none of the ``dead``."""
    return [column for column in columns(layout) if all(set(dead).isdisjoint(cell.ranks) for cell in column)]


class Column(Policy):
    """The others take over its micro-batches: the global batch stays, and so do the bits.

    Where no replica is whole, TorchFT cannot go on; here cells of broken ones make whole ones.
    """

    name = "column"
    idea = "the whole replica leaves, the others take over its micro-batches (TorchFT with a fixed batch)"

    def uses_all(self, costs: Costs | None) -> bool:
        """Not those of broken replicas."""
        return False

    def lose(
        self, layout: Layout, lost: Collection[int], held: Holdings, epoch: int, costs: Costs | None,
        schedules: Collection[str] = SCHEDULES,
    ) -> Layout:
        """Whole replicas stay, if there are any."""
        staying = {cell.leader for column in whole(layout, {*lost, *layout.lost}) for cell in column}
        leaving = [rank for leader, cell in layout.cells.items() if leader not in staying and not cell.shadow
                   for rank in cell.ranks]  # fmt: skip
        return lose(layout, lost, held, epoch, leaving, None if costs is None else costs.slow)

    def cells(
        self, layout: Layout, there: int, costs: Costs | None, schedules: Collection[str] = SCHEDULES
    ) -> int:
        """Of whole replicas. A broken one comes back when all its cells are there again.

        What it lacked is not known any more: of the cells that are in none, those that could be of so many broken
        replicas that each lacks one wait. So from as many broken replicas on as there are stages, some are made anew
        of others' cells.
        """
        stages, now = layout.pipeline_size, len(columns(layout))
        over = there - stages * now
        broken = -(-over // stages)
        return stages * (now + max(over - (stages - 1) * broken, 0) if over >= 0 else max(there // stages, 1))

    def arranges(self, costs: Costs | None) -> bool:
        """Where no replica was whole, cells have to change their stage."""
        return True

    def arrange(
        self, layout: Layout, costs: Costs | None, tied: bool, schedules: Collection[str] = SCHEDULES
    ) -> Layout:
        """The stages there are, of as many cells each."""
        even, over = divmod(len(layout.cells), layout.pipeline_size)
        if over or all(stage.width == even for stage in layout.stages):
            return layout
        graph = Graph.of(layout, (even,) * layout.pipeline_size)
        return fill(layout, costs or Costs.assumed(layout.units), graph, layout.epoch)


class ShrinkingColumn(Policy):
    """The others keep their own micro-batches: the global batch shrinks, as TorchFT does it by default."""

    name = "column-shrink"
    idea = "the whole replica leaves, and the global batch shrinks (TorchFT)"
    refusal = (
        "the global batch would become smaller, so losses and learning would differ from those of the undisturbed run: "
        "use 'column', where the others take over what the lost replica had"
    )

    def foresee(
        self, layout: Layout, lost: Collection[int], costs: Costs, schedules: Collection[str] = SCHEDULES
    ) -> Outcome:
        """What the whole replicas have left, each with the grains that it had."""
        left = whole(layout, {*lost, *layout.lost})
        if not left:
            raise NoLayout(f"each replica of the pipeline has lost a rank: {ADVICE}")
        grains = round(sum(layout.load(column[0]) for column in left))
        return Outcome((apart(layout, [stage.units for stage in layout.stages], grains, len(left)),))
