"""Past: what a job's steps took in the layouts that it has had; corrects what is predicted of these and their kin."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from megatron_elastic.layout import Layout
from megatron_elastic.plan.predict.case import Case
from megatron_elastic.plan.predict.foresight import Foresee, Foreseen

_WARM = 2
"""First steps after a change, which also make groups and memory, and are not typical."""
_FEWEST, _RECENT = 3, 20
"""Steps whose median says how long a layout takes."""
_NEAR = 1.0
"""Doublings of stages or replicas within which layouts are alike."""
_NOISE = 0.01
"""Part of the variance of what is missed that is noise of steps."""

Past = Mapping[tuple[int, int], float]
"""(stages, replicas) -> milliseconds of a step, for layouts of the present kind of cells."""


def past(present: Layout, layouts: Iterable[Layout], metrics: Iterable[Mapping[str, Any]]) -> Past:
    """What metrics lines (by step: ``epoch``, ``step_ms``) tell of layouts whose stages are equally wide.

    Only those with cells and chunks like those of ``present`` count, and of each its last steps.
    """
    def kind(layout: Layout) -> object:
        return layout.tp, layout.cp, layout.ep, layout.placement, layout.num_grains

    shapes: dict[int, tuple[int, int]] = {}
    for layout in layouts:
        widths = {stage.width for stage in layout.stages}
        moving = any(cell.incoming for stage in layout.stages for cell in stage.cells)
        if len(widths) == 1 and not moving and kind(layout) == kind(present):
            shapes[layout.epoch] = layout.pipeline_size, widths.pop()
    times: dict[tuple[int, int], list[float]] = {}
    epoch, steps = -1, 0
    for line in metrics:
        now = line.get("epoch", -1)
        epoch, steps = now, steps + 1 if now == epoch else 1
        if steps > _WARM and epoch in shapes:
            times.setdefault(shapes[epoch], []).append(line["step_ms"])
    return {shape: statistics.median(each[-_RECENT:]) for shape, each in times.items() if len(each) >= _FEWEST}


def corrected(foresee: Foresee, seen: Past, present: Case) -> Foresee:
    """``foresee``, times what it misses on what was ``seen``.

    What it misses on the present layout it is taken to miss everywhere; what it misses besides on other ones is carried
    over to those near them, in stages and replicas (kriging), and is told apart no more some doublings away.
    """
    shapes: list[tuple[int, int]] = []
    missed: list[float] = []
    for (pp, dp), step_ms in seen.items():
        predicted = foresee(_like(present, pp, dp))
        if predicted is not None:
            shapes.append((pp, dp))
            missed.append(math.log(step_ms / predicted.step_ms))
    if not shapes:
        return foresee
    known = dict(zip(shapes, missed, strict=True))
    base = known.get((present.pp, present.dp), statistics.median(missed))
    places = np.log2(np.array(shapes, dtype=np.float64))
    alike = np.exp(-(((places[:, None] - places) / _NEAR) ** 2).sum(-1) / 2) + _NOISE * np.eye(len(shapes))
    weights = np.linalg.solve(alike, np.array(missed) - base)

    def better(case: Case) -> Foreseen | None:
        predicted = foresee(case)
        if predicted is None:
            return None
        away = (np.log2([case.pp, case.dp]) - places) / _NEAR
        factor = math.exp(base + float(np.exp(-(away**2).sum(-1) / 2) @ weights))
        return predicted._replace(step_ms=predicted.step_ms * factor)

    return better


def _like(present: Case, pp: int, dp: int) -> Case:
    return replace(present, pp=pp, dp=dp)
