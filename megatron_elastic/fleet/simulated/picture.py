"""Picture: the devices in use over time, as SVG, one row for each policy and cluster."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from megatron_elastic.fleet.simulated.usage import Usage

_WIDTH, _HEIGHT, _LEFT, _GAP, _COLUMNS = 1000, 70, 60, 34, 500
"""Pixels of a row, of what is left of it and above it, and how many times are told apart."""
_DAY_S = 86400.0
_COLOURS = (("other jobs", "#adb5bd"), ("elastic jobs, as submitted", "#6ea8fe"), ("beyond that", "#75b798"))


class Panel(NamedTuple):
    """A row. ``end`` is in seconds."""

    title: str
    total: int
    usage: Usage
    end: float


def svg(panels: Sequence[Panel]) -> str:
    """All rows below one another, in one scale of time; each as high as its cluster is large."""
    end = max(panel.end for panel in panels)
    parts = [
        f'<rect x="{_LEFT + 200 * index}" y="6" width="12" height="12" fill="{colour}"/>'
        f'<text x="{_LEFT + 200 * index + 17}" y="16">{name}</text>'
        for index, (name, colour) in enumerate(_COLOURS)
    ]
    y = 20
    for panel in panels:
        y += _GAP
        parts.append(f'<text x="{_LEFT}" y="{y - 6}" font-size="13" font-weight="bold">{escape(panel.title)}</text>')
        parts += _row(panel, y, end)
        y += _HEIGHT
    y += 16
    for sixth in range(7):
        x, day = _LEFT + sixth * _WIDTH / 6, sixth * end / 6 / _DAY_S
        parts.append(f'<text x="{x:.0f}" y="{y}" text-anchor="middle">day {day:.1f}</text>')
    size = f'width="{_LEFT + _WIDTH + 40}" height="{y + 10}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">\n'
        f'<rect {size} fill="white"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _row(panel: Panel, y: int, end: float) -> list[str]:
    base = [0.0] * _COLUMNS
    parts = []
    usage = panel.usage
    for (name, colour), series in zip(_COLOURS, (usage.rigid, usage.given, usage.extra), strict=True):
        means = usage.means(series, end, _COLUMNS)
        top = [below + own for below, own in zip(base, means, strict=True)]
        if any(means):
            points = [*_steps(top, panel.total, y), *reversed(_steps(base, panel.total, y))]
            parts.append(f'<polygon points="{" ".join(points)}" fill="{colour}"><title>{name}</title></polygon>')
        base = top
    frame = f'<rect x="{_LEFT}" y="{y}" width="{_WIDTH}" height="{_HEIGHT}" fill="none" stroke="#495057"/>'
    labels = (
        f'<text x="{_LEFT - 4}" y="{y + 9}" text-anchor="end">{panel.total}</text>'
        f'<text x="{_LEFT - 4}" y="{y + _HEIGHT}" text-anchor="end">0</text>'
    )
    return [*parts, frame, labels]


def _steps(heights: Sequence[float], total: int, y: int) -> list[str]:
    """Corners of a curve of steps."""
    pixels = _WIDTH / _COLUMNS
    levels = [f"{y + _HEIGHT * (1 - height / total):.1f}" for height in heights]
    points = []
    for column, level in enumerate(levels):
        if column == 0 or levels[column - 1] != level:
            points.append(f"{_LEFT + column * pixels:.0f},{level}")
        if column + 1 == len(levels) or levels[column + 1] != level:
            points.append(f"{_LEFT + (column + 1) * pixels:.0f},{level}")
    return points
