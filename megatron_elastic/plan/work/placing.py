"""Placing: on which stages chunks could be instead, for a search of orders to compare (``plan.work.order``).

Besides one chunk a stage, two round robin and two as a V, there are ways on which the stages in front alone have a
second chunk: where layers are too few for two in every stage, and halfway between one and two.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

from megatron_elastic.layout import Layout
from megatron_elastic.pipeline.search import Found, NotFitting, bound_of, find
from megatron_elastic.plan.costs.cost import Costs
from megatron_elastic.plan.costs.fit import overflow_on_the_way
from megatron_elastic.plan.costs.recomputation import recomputing
from megatron_elastic.plan.errors import NoLayout
from megatron_elastic.plan.graph import Planner
from megatron_elastic.plan.growth import even
from megatron_elastic.plan.replan import fill

WORTH = 0.02
"""What another placement has to gain at least, as a share of the passes: units have to be copied for it."""


def ways(stages: int, blocks: int) -> tuple[tuple[int, ...], ...]:
    """The stages that a grain could pass in turn, in pipelines of so many stages, and blocks to be placed on them."""
    down, most = tuple(range(stages)), blocks - stages
    counts = [twice for twice in (stages, min(stages, most), stages // 2) if 0 < twice <= most]
    loops = [down + down[:twice] for twice in counts]
    vs = [down + tuple(reversed(down[: min(twice, stages - 1)])) for twice in counts]
    return tuple(dict.fromkeys([down, *loops, *vs]))


def elsewhere(
    layout: Layout, costs: Costs, speeds: Mapping[int, float], tied: bool, room: float, present_ms: float
) -> tuple[Layout, Found] | None:
    """The layout with chunks placed otherwise whose passes take least, if that is worth it, and in which order.

    ``room``: bytes that a device may have of activations where ``costs`` do not say how much memory there is.
    ``present_ms``: of the passes as chunks are placed now. Those that cannot be faster are not searched, nor are those
    that do not fit devices while units are copied, or in the usual order, which a layout begins with, with whatever is
    recomputed in that.
    """
    # How much memory there is, is looked at below, for what is placed.
    planner = Planner(layout.units, replace(costs, memory_bytes=None), tied, layout.num_grains, layout.samples)
    now = layout.through(layout.pipeline_size)
    best: tuple[Layout, Found] | None = None
    limit = present_ms * (1 - WORTH)
    for through in ways(layout.pipeline_size, planner.blocks):
        if through == now:
            continue
        with suppress(NoLayout, NotFitting):
            graph = planner.interleave([stage.width for stage in layout.stages], through)
            other = recomputing(even(fill(layout, costs, graph, layout.epoch), layout.epoch), costs)
            if overflow_on_the_way(layout, other, costs) is not None:
                continue
            if bound_of(other, costs, speeds, room) >= limit:
                continue
            found = find(other, costs, speeds, room)
            if found.ms < limit:
                best, limit = (other, found), found.ms
    return best
