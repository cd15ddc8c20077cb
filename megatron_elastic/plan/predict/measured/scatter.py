"""Scatter: predicted against measured steps, as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from megatron_elastic.plan.predict.measured.check import Check

_SIZE, _MARGIN = 560, 64
_COLOURS = ("#6ea8fe", "#75b798", "#ffda6a", "#ea868f", "#a98eda", "#79dfc1", "#feb272", "#adb5bd")
"""Of the numbers of devices, in turn."""


def svg(check: Check, title: str) -> str:
    """One point a row, logarithmic; on the line both are equal, and the band is 10 % around it."""
    times = [*check.measured, *check.predicted]
    low, high = math.log10(min(times)) - 0.05, math.log10(max(times)) + 0.05
    scale = _SIZE / (high - low)

    def x(seconds: float) -> float:
        return _MARGIN + (math.log10(seconds) - low) * scale

    def y(seconds: float) -> float:
        return _MARGIN / 2 + _SIZE - (math.log10(seconds) - low) * scale

    ends = [10**low, 10**high]
    band = [(ends[0], ends[0] * 1.1), (ends[1], ends[1] * 1.1), (ends[1], ends[1] / 1.1), (ends[0], ends[0] / 1.1)]
    clip = f'<clipPath id="plot"><rect x="{_MARGIN}" y="{_MARGIN / 2}" width="{_SIZE}" height="{_SIZE}"/></clipPath>'
    parts = [
        clip,
        f'<text x="{_MARGIN}" y="20" font-size="14" font-weight="bold">{escape(title)}</text>',
        f'<rect x="{_MARGIN}" y="{_MARGIN / 2}" width="{_SIZE}" height="{_SIZE}" fill="none" stroke="#adb5bd"/>',
        '<polygon clip-path="url(#plot)" fill="#f1f3f5" points="'
        + " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in band)
        + '"/>',
        f'<line clip-path="url(#plot)" x1="{x(ends[0]):.1f}" y1="{y(ends[0]):.1f}" x2="{x(ends[1]):.1f}" '
        f'y2="{y(ends[1]):.1f}" stroke="#868e96"/>',
    ]
    for tick in _ticks(low, high):
        label = f"{tick * 1e3:g} ms" if tick < 1 else f"{tick:g} s"
        parts.append(f'<text x="{x(tick):.1f}" y="{_SIZE + _MARGIN / 2 + 16}" text-anchor="middle">{label}</text>')
        parts.append(f'<text x="{_MARGIN - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{label}</text>')
    devices = sorted({case.devices for case in check.table.cases})
    colour = {count: _COLOURS[index % len(_COLOURS)] for index, count in enumerate(devices)}
    for case, measured, predicted in zip(check.table.cases, check.measured, check.predicted, strict=True):
        parts.append(
            f'<circle cx="{x(measured):.1f}" cy="{y(predicted):.1f}" r="2.5" fill="{colour[case.devices]}" '
            f'fill-opacity="0.7"><title>{escape(_described(case.tp, case.pp, case.dp, measured, predicted))}</title>'
            "</circle>"
        )
    for index, count in enumerate(devices[: len(_COLOURS)]):
        top = _MARGIN / 2 + 16 + 16 * index
        parts.append(f'<circle cx="{_MARGIN + 14}" cy="{top - 4}" r="4" fill="{colour[count]}"/>')
        parts.append(f'<text x="{_MARGIN + 24}" y="{top}">{count} devices</text>')
    parts.append(f'<text x="{_MARGIN + _SIZE / 2}" y="{_SIZE + _MARGIN / 2 + 34}" text-anchor="middle">measured</text>')
    middle = _MARGIN / 2 + _SIZE / 2
    parts.append(f'<text transform="rotate(-90 14 {middle})" x="14" y="{middle}" text-anchor="middle">predicted</text>')
    size = f'width="{_SIZE + _MARGIN + 16}" height="{_SIZE + _MARGIN + 16}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">\n'
        f'<rect {size} fill="white"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _ticks(low: float, high: float) -> Sequence[float]:
    """1, 2 and 5 of each decade."""
    decades = range(math.floor(low), math.ceil(high) + 1)
    return [tick for tick in (m * 10.0**d for d in decades for m in (1, 2, 5)) if low <= math.log10(tick) <= high]


def _described(tp: int, pp: int, dp: int, measured: float, predicted: float) -> str:
    return f"TP{tp} PP{pp} DP{dp}: measured {measured * 1e3:.1f} ms, predicted {predicted * 1e3:.1f} ms"
