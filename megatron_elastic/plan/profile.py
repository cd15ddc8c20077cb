"""Profile: costs of units from the times that stages were measured to take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import median

from megatron_elastic.layout import Layout
from megatron_elastic.plan.cost import Costs


def measured(layout: Layout, times: Mapping[int, tuple[float, float]]) -> Costs:
    """Costs of the units of ``layout``, whose stages take ``times``: stage -> (forward, backward) of a grain, in ms.

    Layers are alike, so a layer takes what the stages that have little else take for each of theirs; what the others
    take beyond their layers is the embedding's or the head's. Needs the time of every stage.
    """
    own = {
        index: [unit for unit in stage.units if layout.home(unit) == index]
        for index, stage in enumerate(layout.stages)
    }
    layers = {
        index: [unit for unit in units if layout.units[unit].startswith("layer.")] for index, units in own.items()
    }
    plain = [index for index in own if len(layers[index]) == len(own[index])] or [0]
    costs = list(Costs.assumed(layout.units).units)
    for part in range(2):
        each = median(times[index][part] / len(layers[index]) for index in plain)
        for index, units in own.items():
            rest = [unit for unit in units if unit not in layers[index]]
            beyond = max(times[index][part] - each * len(layers[index]), 0.0)
            for unit in units:
                ms = each if unit in layers[index] else beyond / len(rest)
                costs[unit] = replace(costs[unit], backward_ms=ms) if part else replace(costs[unit], forward_ms=ms)
    return replace(Costs.assumed(layout.units), units=tuple(costs))
