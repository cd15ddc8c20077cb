"""Fit: whether a layout fits the memory of devices by costs, and so does what lies between it and the present one.

On a device are the weights and gradients of all units that a rank holds, those that are on their way to it among them;
the optimizer state that it owns; and activations, as many as the schedule keeps. Copies are in host memory.
"""

from __future__ import annotations

from collections.abc import Collection

from megatron_elastic.layout import Layout
from megatron_elastic.plan.costs.cost import Costs
from megatron_elastic.plan.costs.keeping import Keeping, of_chunks
from megatron_elastic.plan.growth import approach


def device_bytes(layout: Layout, rank: int, costs: Costs) -> float:
    """Bytes of a device that a rank's units and slices take: weights, gradients, and the optimizer's state."""
    held = sum(costs.units[unit].parameter_bytes for unit in layout.held_by(rank))
    owned = sum(costs.units[unit].optimizer_bytes / layout.num_slices for unit, _ in layout.owned(rank))
    return held + owned


def live_bytes(
    layout: Layout, rank: int, costs: Costs, split: bool, keeping: Keeping | None = None
) -> float:
    """Bytes of the activations that are kept at a time; ``split``: under that schedule. ``keeping``: of the layout."""
    stage = layout.stage_of(rank)
    keeping = keeping or Keeping(layout.way, layout.units)
    return keeping.most(stage, len(layout.cell_of(rank).share), split, *of_chunks(layout, stage, costs))


def overflow(layout: Layout, ranks: Collection[int], costs: Costs, split: bool = False) -> str | None:
    """Why the memory of these ranks' devices is not enough for a step; None if it is, or not known."""
    if costs.memory_bytes is None:
        return None
    keeping = Keeping(layout.way, layout.units)
    kept: dict[tuple[int, int], float] = {}  # cells of a stage with as many grains keep as much
    for rank in ranks:
        alike = layout.stage_of(rank), len(layout.cell_of(rank).share)
        if alike not in kept:
            kept[alike] = live_bytes(layout, rank, costs, split, keeping)
        held, live = device_bytes(layout, rank, costs), kept[alike]
        if held + live > costs.memory_bytes:
            return (f"the device of rank {rank} would hold {held / 1e9:.1f} GB of weights, gradients and optimizer "
                    f"state, and {live / 1e9:.1f} GB of activations, but has {costs.memory_bytes / 1e9:.1f} GB: use "
                    "more stages, more ranks, smaller micro-batches or a smaller model")
    return None


def overflow_on_the_way(layout: Layout, goal: Layout, costs: Costs, split: bool = False) -> str | None:
    """The same for ``goal``, and for what is there while all that it needs is copied to cells of ``layout``."""
    if costs.memory_bytes is None:
        return None
    between = approach(layout, goal, layout.epoch)
    return overflow(goal, goal.ranks, costs, split) or overflow(between, between.ranks, costs, split)
