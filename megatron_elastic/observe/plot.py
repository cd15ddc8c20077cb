"""Plot: curves of a run as SVG, for a page that stands alone. Needs matplotlib (the extra ``plot``).

Colours are those of Okabe and Ito, which people with any colour vision can tell apart.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, YELLOW, SKY, RED, PINK = (
    "#0072b2", "#e69f00", "#009e73", "#f0e442", "#56b4e9", "#d55e00", "#cc79a7",
)  # fmt: skip
PART_COLOURS = {
    "detect_ms": RED, "interrupt_ms": ORANGE, "plan_ms": YELLOW, "edit_ms": SKY, "state_ms": BLUE, "redo_ms": GREEN,
}  # fmt: skip
"""Of the parts of a recovery."""
_POINTS = 1200
"""Points of a curve at most: more do not show."""
_STYLE: Any = {
    "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 10, "axes.spines.top": False,
    "axes.spines.right": False, "svg.hashsalt": "megatron-elastic",
}  # fmt: skip


def curve(steps: Sequence[int], values: Sequence[float], name: str, marks: Sequence[int], zero: bool = False) -> str:
    """A figure over steps, as an ``<svg>`` element. ``marks``: steps with vertical lines; ``zero``: it begins at 0."""
    at, what = thinned(np.asarray(steps), np.asarray(values, dtype=float))
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(9, 2.6), layout="constrained")
        axes = figure.subplots()
        for mark in marks:
            axes.axvline(mark, color=RED, linewidth=0.8, alpha=0.5)
        axes.plot(at, what, color=BLUE, linewidth=1.2)
        axes.set_xlabel("step")
        axes.set_ylabel(name)
        axes.margins(x=0.01)
        if zero:
            axes.set_ylim(bottom=0)
        axes.grid(axis="y", alpha=0.3)
        return _svg(figure, name)


def bars(rows: Sequence[tuple[str, Mapping[str, float]]]) -> str:
    """One bar for each row of (name, milliseconds by part), its parts side by side, as an ``<svg>`` element."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(9, 1.0 + 0.28 * len(rows)), layout="constrained")
        axes = figure.subplots()
        left = np.zeros(len(rows))
        for part, colour in PART_COLOURS.items():
            widths = np.array([parts.get(part, 0.0) for _, parts in rows])
            axes.barh(range(len(rows)), widths, left=left, color=colour, label=part.removesuffix("_ms"), height=0.7)
            left += widths
        axes.set_yticks(range(len(rows)), [name for name, _ in rows])
        axes.invert_yaxis()
        axes.set_xlabel("ms")
        axes.legend(ncols=len(PART_COLOURS), loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
        return _svg(figure, "parts of recoveries")


def thinned(at: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """At most about ``_POINTS`` of the points: of each stretch the lowest and the highest one, so that no peak is lost.

    Values that are not finite are left out.
    """
    finite = np.isfinite(values)
    at, values = at[finite], values[finite]
    if len(at) <= _POINTS:
        return at, values
    chosen: list[int] = []
    for stretch in np.array_split(np.arange(len(at)), _POINTS // 2):
        ends = {int(stretch[values[stretch].argmin()]), int(stretch[values[stretch].argmax()])}
        chosen += sorted(ends)
    return at[chosen], values[chosen]


def _svg(figure: Figure, name: str) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    # As wide as the page, whatever that is.
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', rf'\1 role="img" aria-label="{name}"', svg, count=1)
    return svg
