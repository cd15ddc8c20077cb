"""Sweep: tokens a second of many layouts by their number of devices, as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from megatron_elastic.plan.predict.axes import Axes, ticks

_AXES = Axes(left=72, width=720, height=420)


class Point(NamedTuple):
    """A layout."""

    name: str
    devices: int
    tokens_per_s: float
    fits: bool


def svg(points: Sequence[Point], title: str) -> str:
    """One point a layout, both axes logarithmic; a line through the fastest that fit, and one in proportion."""
    fastest: dict[int, Point] = {}
    for point in sorted(points, key=lambda point: point.tokens_per_s):
        if point.fits:
            fastest[point.devices] = point
    counts = sorted({point.devices for point in points})
    speeds = [point.tokens_per_s for point in points]
    left, right = math.log2(counts[0]) - 0.2, math.log2(counts[-1]) + 0.2
    low, high = math.log10(min(speeds)) - 0.1, math.log10(max(speeds)) + 0.1

    def x(devices: float) -> float:
        return _AXES.left + (math.log2(devices) - left) / (right - left) * _AXES.width

    def y(speed: float) -> float:
        return _AXES.top + (high - math.log10(speed)) / (high - low) * _AXES.height

    parts = [_AXES.below(x(count), str(count)) for count in counts]
    parts += [_AXES.beside(y(tick), f"{tick:,.0f}") for tick in ticks(low, high)]
    if fastest:
        best = [fastest[count] for count in sorted(fastest)]
        first = best[0]
        ends = [(count, first.tokens_per_s * count / first.devices) for count in (counts[0], counts[-1])]
        parts.append(_line([(x(a), y(b)) for a, b in ends], 'stroke="#adb5bd" stroke-dasharray="4 4"'))
        parts.append(_line([(x(p.devices), y(p.tokens_per_s)) for p in best], 'stroke="#2f6fde" stroke-width="1.5"'))
    for point in points:
        colour = "#6ea8fe" if point.fits else "#dee2e6"
        told = f"{point.name}: {point.tokens_per_s:,.0f} tokens/s" + ("" if point.fits else ", does not fit")
        parts.append(
            f'<circle cx="{x(point.devices):.1f}" cy="{y(point.tokens_per_s):.1f}" r="3" fill="{colour}">'
            f"<title>{escape(told)}</title></circle>"
        )
    return _AXES.document(title, "devices", "tokens/s", parts)


def _line(points: Sequence[tuple[float, float]], style: str) -> str:
    corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline clip-path="url(#plot)" points="{corners}" fill="none" {style}/>'
