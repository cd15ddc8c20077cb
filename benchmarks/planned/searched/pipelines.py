"""Pipelines: models cut into positions of about equal time, on devices placed round robin or as a V."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from megatron_elastic.emulation.accelerators import ACCELERATORS
from megatron_elastic.emulation.derive import Batch, Grid, derive, layout_of
from megatron_elastic.emulation.models import MODELS
from megatron_elastic.layout import MTP, Layout, gpt_units
from megatron_elastic.pipeline.search import Orders, Problem
from megatron_elastic.pipeline.search.found import orders_of, programs
from megatron_elastic.plan.costs.cost import Costs
from megatron_elastic.plan.graph import Planner

EXPERT_PARALLEL = {"flextrain-small": 8, "flextrain-medium": 8, "flextrain-large": 16}
"""Of FlexTrain's three; other models have none."""
FURTHER = 2
"""Further predictions of FlexTrain's models."""


class Model(NamedTuple):
    """Units, and what each costs on one device."""

    names: tuple[str, ...]
    costs: Costs

    @property
    def layers(self) -> int:
        """How many there are."""
        return sum(name.startswith("layer.") for name in self.names)


def model_of(name: str, device: str, further: int = 0) -> Model:
    """A published model on a device, as ``megatron-elastic emulate`` derives it; ``further`` predictions are a layer
    with its experts each, and the output layer once more.
    """
    shape, teams = MODELS[name], EXPERT_PARALLEL.get(name, 1)
    grid, batch = Grid(tp=1, pp=2, dp=1, ep=teams), Batch(1, shape.sequence, 8)
    profile = derive(name, shape, device, ACCELERATORS[device], grid, batch, efficiency=0.5, time_scale=1.0,
                     step_seconds=1.0)  # fmt: skip
    layout = layout_of(shape, grid, batch)
    costs = profile.costs(layout.units)
    by_name = dict(zip(layout.units, costs.units, strict=True))
    names, _ = gpt_units(shape.layers, 1, tied=False, positions=False, mtp=further,
                         routed=range(shape.layers) if shape.experts else ())
    head = by_name["head"]
    units = []
    for unit in names:
        if unit.startswith(MTP):
            parts = [by_name[part] for part in (f"layer.{shape.layers - 1}", f"experts.{shape.layers - 1}")
                     if part in by_name]  # fmt: skip
            units.append(replace(
                head, forward_ms=sum(part.forward_ms for part in parts) + head.forward_ms,
                backward_ms=sum(part.backward_ms for part in parts) + head.backward_ms,
                activation_bytes=sum(part.activation_bytes for part in parts) + head.activation_bytes,
            ))  # fmt: skip
        else:
            units.append(by_name[unit])
    return Model(tuple(names), replace(costs, units=tuple(units), memory_bytes=None))


def balanced(model: Model, positions: int) -> list[Sequence[int]] | None:
    """The units of each position such that the slowest is as fast as can be; None if there are too few layers."""
    planner = Planner(model.names, model.costs, tied=False, grains=1)
    if positions > planner.blocks:
        return None
    return list(planner.split([1] * positions).stage_units)


def problem_of(model: Model, cut: Sequence[Sequence[int]], stages: int, grains: int, v: bool = False) -> Problem:
    """A pipeline of so many stages, without a limit of memory. Halves of a backward take equally long."""
    units = [[model.costs.units[unit] for unit in held] for held in cut]
    way = [position % stages for position in range(len(units))]
    if v:
        way = [*range(stages), *reversed(range(stages))]
    halves = tuple(sum(unit.backward_ms for unit in held) / 2 for held in units)
    kept = tuple(float(sum(unit.activation_bytes for unit in held)) for held in units)
    return Problem(
        route=(tuple(way),) * grains, forward=tuple(sum(unit.forward_ms for unit in held) for held in units),
        backward=tuple(2 * half for half in halves), input=halves, weight=halves, kept=kept, late=kept,
        link=(model.costs.boundary_ms,) * len(units), limits=(float("inf"),) * stages, speed=(1.0,) * stages,
    )  # fmt: skip


def schedules(stages: int, grains: int, chunks: int) -> Mapping[str, Orders]:
    """The known schedules of one pipeline, by the layouts' own generators."""
    units = [str(number) for number in range(stages * chunks)]
    layout = Layout.grid(tp=1, pp=stages, dp=1, units=units, num_grains=grains, num_slices=1, replicas=0,
                         stage_units=[list(range(stage, stages * chunks, stages)) for stage in range(stages)])
    return {name: orders_of(program, layout, list(layout.cells), range(grains))
            for name, program in programs(layout).items()}  # fmt: skip
