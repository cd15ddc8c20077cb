"""Plot: how long searches take, against how much there is to be put in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from figures import figure


def draw(cases: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Write the plot as SVG: a point for each case that was searched, a mark for each number of stages."""
    with figure(file, 6.4, 4.0) as drawn:
        axes = drawn.subplots()
        for stages, mark in zip(sorted({case["stages"] for case in cases}), cycle("osD^vP*Xhd8"), strict=False):
            found = [case for case in cases if case["stages"] == stages and case["search_s"] is not None]
            axes.plot([stages * case["grains"] for case in found], [case["search_s"] for case in found], mark,
                      markersize=5, label=f"{stages} stages")  # fmt: skip
        axes.set(xscale="log", yscale="log", xlabel="stages x grains", ylabel="seconds of the processor")
        axes.grid()
        axes.legend(fontsize=8)
