"""Oobleck (SOSP'23): pipelines are instances of templates that are computed beforehand, one for each size."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from megatron_elastic.layout import Layout
from megatron_elastic.plan.choice import SCHEDULES, splits
from megatron_elastic.plan.costs.cost import Costs
from megatron_elastic.plan.errors import ADVICE, NoLayout
from megatron_elastic.plan.graph import Graph, Planner
from megatron_elastic.plan.policies.column import columns
from megatron_elastic.plan.policies.grid import Grid
from megatron_elastic.plan.policies.policy import Outcome, Policy, apart
from megatron_elastic.plan.work.quotas import quotas


class Oobleck(Grid):
    """As far as it is a layout of ours: all pipelines are instances of the same template, the best for what is left.

    Planning takes milliseconds, so templates are computed when they are needed. Missing layers are copied from others
    that have them, as in the paper, before training goes on.
    """

    name = "oobleck"
    idea = "all pipelines are made anew from one template, the best for what is left (after Oobleck, SOSP'23)"


class MixedOobleck(Policy):
    """As published: pipelines are instances of several templates, and get micro-batches by their speed."""

    name = "oobleck-mixed"
    idea = "pipelines of several lengths, each from a template, share the batch by their speed (Oobleck, SOSP'23)"
    refusal = (
        "pipelines of unlike stages side by side are no layout: all cells of a stage hold the same units here. Use "
        "'oobleck', whose pipelines are of one template, or 'elastic'"
    )

    def foresee(
        self, layout: Layout, lost: Collection[int], costs: Costs, schedules: Collection[str] = SCHEDULES
    ) -> Outcome:
        """Each pipeline goes on with the cells that it has left; one that has too few gets some of the longest."""
        dead = {*lost, *layout.lost}
        left = [[cell for cell in column if dead.isdisjoint(cell.ranks)] for column in columns(layout)]
        templates = _templates(layout, sum(map(len, left)), costs, schedules)
        sizes = _sizes([len(cells) for cells in left], min(templates, default=0))
        graphs = [templates[max(fit for fit in templates if fit <= size)] for size in sizes]
        moved = _moved(layout, graphs, costs)
        given = quotas(layout.num_grains, [graph.slowest_ms for graph in graphs], [0] * len(graphs))
        pipelines = tuple(apart(layout, graph.stage_units, grains)
                          for graph, grains in zip(graphs, given, strict=True) if grains)  # fmt: skip
        return Outcome(pipelines, pause_ms=costs.transfer_ms(moved) if moved else 0.0)


def _templates(layout: Layout, longest: int, costs: Costs, schedules: Collection[str]) -> dict[int, Graph]:
    """The best stages for each number of cells in a row in which the model fits."""
    planner = Planner(layout.units, costs, layout.is_tied, 1, split=splits(schedules))
    found = {}
    for size in range(1, min(longest, planner.blocks) + 1):
        try:
            found[size] = planner.split([1] * size)
        except NoLayout:
            continue
    return found


def _sizes(left: Sequence[int], least: int) -> list[int]:
    """Lengths of the pipelines that those with so many cells left become, none shorter than ``least``."""
    if not least or sum(left) < least:
        raise NoLayout(f"no pipeline can be made of {sum(left)} cells: {ADVICE}")
    sizes = sorted(left)
    while sizes[0] < least:
        if sizes[-1] > least:  # it borrows
            sizes[0], sizes[-1] = sizes[0] + 1, sizes[-1] - 1
        else:  # two are merged
            sizes.append(sizes.pop(0) + sizes.pop(0))
        sizes.sort()
    return sizes


def _moved(layout: Layout, graphs: Sequence[Graph], costs: Costs) -> float:
    """Bytes that the cell receives that gets most, of units that it has not held."""
    stages = [set(stage.units) for stage in layout.stages]
    most = 0.0
    for graph in graphs:
        for index, units in enumerate(graph.stage_units):
            new = set(units) - stages[min(index, len(stages) - 1)]
            state = [costs.units[unit].optimizer_bytes / layout.num_slices for unit in new]
            most = max(most, sum(state) + sum(costs.units[unit].parameter_bytes for unit in new))
    return most

