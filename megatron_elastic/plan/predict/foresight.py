"""Foresight: a step of a layout as the model predicts it, or as what was measured on one layout says about others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypedDict

from megatron_elastic.layout import Layout, joined, positions, way
from megatron_elastic.plan.costs.cost import Costs, own
from megatron_elastic.plan.costs.keeping import Keeping
from megatron_elastic.plan.graph import Planner
from megatron_elastic.plan.predict.case import Case, Columns
from megatron_elastic.plan.predict.footprint import footprint
from megatron_elastic.plan.predict.predictor import Predictor


class Foreseen(NamedTuple):
    """A step in a layout, and the memory it takes on the device that needs most."""

    step_ms: float
    memory_bytes: int


Foresee = Callable[[Case], Foreseen | None]
"""Predicts a case; None where it cannot tell. Raises NoLayout where the case cannot be."""


def by_model(predictor: Predictor) -> Foresee:
    """Predicts from shapes and figures of the device."""

    def foresee(case: Case) -> Foreseen:
        columns = Columns.of([case])
        return Foreseen(1e3 * float(predictor.seconds(columns)[0]), round(float(footprint(columns)[0])))

    return foresee


def by_profile(costs: Costs, units: Sequence[str], tied: bool, measured: Case) -> Foresee:
    """Predicts from measured costs, for layouts in which a rank computes what was measured: same TP and micro-batches.

    Units are cut as ``plan.graph`` would; the step is that of ``Costs.pace``, which the simulator confirms. What is not
    the pipeline, ``overhead_ms``, is taken to stay.
    """
    planners: dict[int, Planner] = {}

    def foresee(case: Case) -> Foreseen | None:
        if (case.tp, case.micro_batch, case.recompute) != (measured.tp, measured.micro_batch, measured.recompute):
            return None
        grains = case.global_batch // case.micro_batch
        planner = planners.setdefault(grains, Planner(units, costs, tied, grains))
        widths = [case.dp] * case.pp
        graph = planner.interleave(widths, joined(way("v" if case.v else "loop", case.pp, case.chunks)))
        pace = costs.pace(graph.stage_units, widths, [float(case.grains)] * case.pp)
        step_ms = pace.step_ms
        if case.chunks > 1:  # the others' part of a grain is waited for in pieces
            ms = [sum(costs.units[unit].grain_ms for unit in own(graph.stage_units, s)) for s in range(case.pp)]
            step_ms -= (sum(ms) - max(ms)) * (1 - 1 / case.pieces)
        return Foreseen(step_ms, _memory(costs, units, graph.stage_units, case))

    return foresee


def _memory(costs: Costs, names: Sequence[str], stage_units: Sequence[Sequence[int]], case: Case) -> int:
    way, most = positions(stage_units), 0.0
    keeping = Keeping(way, names)
    for stage, held in enumerate(stage_units):
        units = [costs.units[unit] for unit in own(stage_units, stage)]
        fixed = sum(costs.units[unit].parameter_bytes for unit in held)
        activations = keeping.most(stage, case.grains, False, [
            sum(costs.units[unit].activation_bytes for unit in position.units)
            for position in way if position.stage == stage
        ])  # fmt: skip
        most = max(most, fixed + activations + sum(unit.optimizer_bytes for unit in units) / case.dp)
    return round(most)


class Placed(TypedDict):
    """What a case says of chunks."""

    chunks: int
    v: bool


def placed(layout: Layout) -> Placed:
    """Of a layout. Chunks that are placed neither as a loop nor as a V of two each count as one."""
    v = layout.placement == ("v", 2)
    return {"chunks": 2 if v else layout.loops, "v": v}


def stand_in(layout: Layout, tokens: int) -> Case:
    """A case for a job of which only the layout and the tokens of a step are known: a sample stands for a grain.

    ``by_profile`` can tell its layouts from costs; the model cannot, because it has no sizes.
    """
    ranks = len(layout.stages[0].cells[0].ranks)
    widths = [stage.width for stage in layout.stages]
    return Case(
        layers=sum(name.startswith("layer.") for name in layout.units), hidden=ranks, heads=ranks,
        seq_length=max(1, tokens // layout.num_grains), tp=ranks, pp=layout.pipeline_size, dp=min(widths),
        micro_batch=1, global_batch=layout.num_grains, **placed(layout),
    )  # fmt: skip
