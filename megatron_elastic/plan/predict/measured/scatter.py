"""Scatter: predicted against measured steps, as SVG."""

from __future__ import annotations

import math
from html import escape

from megatron_elastic.plan.predict.axes import Axes, ticks
from megatron_elastic.plan.predict.measured.check import Check

_AXES = Axes(left=64, width=560, height=560)
_COLOURS = ("#6ea8fe", "#75b798", "#ffda6a", "#ea868f", "#a98eda", "#79dfc1", "#feb272", "#adb5bd")
"""Of the numbers of devices, in turn."""


def svg(check: Check, title: str) -> str:
    """One point a row, logarithmic; on the line both are equal, and the band is 10 % around it."""
    times = [*check.measured, *check.predicted]
    low, high = math.log10(min(times)) - 0.05, math.log10(max(times)) + 0.05
    scale = _AXES.width / (high - low)

    def x(seconds: float) -> float:
        return _AXES.left + (math.log10(seconds) - low) * scale

    def y(seconds: float) -> float:
        return _AXES.bottom - (math.log10(seconds) - low) * scale

    ends = [10**low, 10**high]
    band = [(ends[0], ends[0] * 1.1), (ends[1], ends[1] * 1.1), (ends[1], ends[1] / 1.1), (ends[0], ends[0] / 1.1)]
    parts = [
        '<polygon clip-path="url(#plot)" fill="#f1f3f5" points="'
        + " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in band)
        + '"/>',
        f'<line clip-path="url(#plot)" x1="{x(ends[0]):.1f}" y1="{y(ends[0]):.1f}" x2="{x(ends[1]):.1f}" '
        f'y2="{y(ends[1]):.1f}" stroke="#868e96"/>',
    ]
    for tick in ticks(low, high):
        label = f"{tick * 1e3:g} ms" if tick < 1 else f"{tick:g} s"
        parts += _AXES.below(x(tick), label), _AXES.beside(y(tick), label)
    devices = sorted({case.devices for case in check.table.cases})
    colour = {count: _COLOURS[index % len(_COLOURS)] for index, count in enumerate(devices)}
    for case, measured, predicted in zip(check.table.cases, check.measured, check.predicted, strict=True):
        parts.append(
            f'<circle cx="{x(measured):.1f}" cy="{y(predicted):.1f}" r="2.5" fill="{colour[case.devices]}" '
            f'fill-opacity="0.7"><title>{escape(_described(case.tp, case.pp, case.dp, measured, predicted))}</title>'
            "</circle>"
        )
    for index, count in enumerate(devices[: len(_COLOURS)]):
        top = _AXES.top + 16 + 16 * index
        parts.append(f'<circle cx="{_AXES.left + 14}" cy="{top - 4}" r="4" fill="{colour[count]}"/>')
        parts.append(f'<text x="{_AXES.left + 24}" y="{top}">{count} devices</text>')
    return _AXES.document(title, "measured", "predicted", parts)


def _described(tp: int, pp: int, dp: int, measured: float, predicted: float) -> str:
    return f"TP{tp} PP{pp} DP{dp}: measured {measured * 1e3:.1f} ms, predicted {predicted * 1e3:.1f} ms"
