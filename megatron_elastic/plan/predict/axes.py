"""Axes: what pictures of predictions have around their points, as SVG."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

_TOP, _RIGHT, _BELOW = 32, 16, 48


class Axes(NamedTuple):
    """A field of points, in pixels, with so much room for labels on its left."""

    left: int
    width: int
    height: int

    @property
    def top(self) -> int:
        """Where the field begins."""
        return _TOP

    @property
    def bottom(self) -> int:
        """Where it ends."""
        return _TOP + self.height

    def document(self, title: str, x: str, y: str, parts: Iterable[str]) -> str:
        """The whole picture: these parts in a frame. What is drawn with ``clip-path="url(#plot)"`` stays inside it."""
        field = f'x="{self.left}" y="{_TOP}" width="{self.width}" height="{self.height}"'
        page = f'width="{self.left + self.width + _RIGHT}" height="{self.bottom + _BELOW}"'
        middle = _TOP + self.height / 2
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {page} font-family="sans-serif" font-size="11">',
            f'<rect {page} fill="white"/>',
            f'<clipPath id="plot"><rect {field}/></clipPath>',
            f'<text x="{self.left}" y="20" font-size="14" font-weight="bold">{escape(title)}</text>',
            f'<rect {field} fill="none" stroke="#adb5bd"/>',
            *parts,
            f'<text x="{self.left + self.width / 2}" y="{self.bottom + 34}" text-anchor="middle">{x}</text>',
            f'<text transform="rotate(-90 14 {middle})" x="14" y="{middle}" text-anchor="middle">{y}</text>',
            "</svg>",
        ]
        return "\n".join(lines) + "\n"

    def below(self, x: float, label: str) -> str:
        """The label of a place on the lower side."""
        return f'<text x="{x:.1f}" y="{self.bottom + 16}" text-anchor="middle">{label}</text>'

    def beside(self, y: float, label: str) -> str:
        """The label of a place on the left side."""
        return f'<text x="{self.left - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>'


def ticks(low: float, high: float) -> Sequence[float]:
    """1, 2 and 5 of each decade, from 10^low to 10^high."""
    decades = range(math.floor(low), math.ceil(high) + 1)
    return [tick for tick in (m * 10.0**d for d in decades for m in (1, 2, 5)) if low <= math.log10(tick) <= high]
