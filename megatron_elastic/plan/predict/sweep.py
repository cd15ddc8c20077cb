"""Sweep: tokens a second of many layouts by their number of devices, as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

_WIDTH, _HEIGHT, _MARGIN = 720, 420, 72


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
        return _MARGIN + (math.log2(devices) - left) / (right - left) * _WIDTH

    def y(speed: float) -> float:
        return 32 + (high - math.log10(speed)) / (high - low) * _HEIGHT

    parts = [
        f'<text x="{_MARGIN}" y="20" font-size="14" font-weight="bold">{escape(title)}</text>',
        f'<clipPath id="plot"><rect x="{_MARGIN}" y="32" width="{_WIDTH}" height="{_HEIGHT}"/></clipPath>',
        f'<rect x="{_MARGIN}" y="32" width="{_WIDTH}" height="{_HEIGHT}" fill="none" stroke="#adb5bd"/>',
    ]
    for count in counts:
        parts.append(f'<text x="{x(count):.1f}" y="{_HEIGHT + 48}" text-anchor="middle">{count}</text>')
    for tick in (m * 10.0**d for d in range(math.floor(low), math.ceil(high) + 1) for m in (1, 2, 5)):
        if low <= math.log10(tick) <= high:
            parts.append(f'<text x="{_MARGIN - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:,.0f}</text>')
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
    parts.append(f'<text x="{_MARGIN + _WIDTH / 2}" y="{_HEIGHT + 66}" text-anchor="middle">devices</text>')
    middle = 32 + _HEIGHT / 2
    parts.append(f'<text transform="rotate(-90 14 {middle})" x="14" y="{middle}" text-anchor="middle">tokens/s</text>')
    size = f'width="{_WIDTH + _MARGIN + 16}" height="{_HEIGHT + 80}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">\n'
        f'<rect {size} fill="white"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _line(points: Sequence[tuple[float, float]], style: str) -> str:
    corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline clip-path="url(#plot)" points="{corners}" fill="none" {style}/>'
