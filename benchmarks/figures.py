"""Figures: plots as SVG whose text stays text, and which are the same file for the same figures. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from megatron_elastic.observe.plot import BLUE, GREEN, PINK, RED, SKY

COLOURS = (BLUE, RED, GREEN, PINK, "#000000", SKY)
_STYLE: Any = {
    "svg.fonttype": "none", "svg.hashsalt": "megatron-elastic",
    "font.sans-serif": ["DejaVu Sans", "Arial", "Helvetica"],
    "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True, "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
}  # fmt: skip


@contextmanager
def figure(file: Path, width: float, height: float, wspace: float = 0.02) -> Iterator[Figure]:
    """A figure to draw on, in inches, which is written to ``file`` in the end. ``wspace``: a share of a panel's width,
    between panels.
    """
    with mpl.rc_context(_STYLE):
        drawn = Figure(figsize=(width, height), facecolor="white", layout=ConstrainedLayoutEngine(wspace=wspace))
        FigureCanvasSVG(drawn)
        yield drawn
        drawn.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
