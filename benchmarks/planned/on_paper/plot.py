"""Plot: lost share of the time against MTBF, a panel for each length of a step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from figures import COLOURS, figure
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from planned.on_paper.policies import Policy

SHORTEST, LONGEST = 60.0, 24 * 3600.0
"""Ends of the axis of MTBFs, in s."""
LEAST = 3e-6
"""Lower end of the axis of lost shares."""
_POINTS = 200
_APART = 0.24
"""Least distance of two labels, in powers of ten."""


def draw(which: Sequence[Policy], steps: Sequence[float], marked: Mapping[float, str], file: Path) -> None:
    """Write the plot as SVG. ``marked``: MTBFs in s to mark, and how they are called."""
    # The space is so that "24 h" and the next panel's "1 min" do not touch.
    with figure(file, 3.3 * len(steps) + 1.6, 4.4, wspace=0.06) as drawn:
        panels = drawn.subplots(1, len(steps), sharey=True, squeeze=False)[0]
        for panel, step in zip(panels, steps, strict=True):
            _panel(panel, which, step, marked)
        panels[0].set_ylabel("share of the time that is lost")
        _labels(panels[-1], which, steps[-1])
        drawn.supxlabel("mean time between failures. Dashed: counting that a cell is absent until another takes part",
                        fontsize=9)  # fmt: skip


def _panel(axes: Axes, which: Sequence[Policy], step: float, marked: Mapping[float, str]) -> None:
    mtbfs = [SHORTEST * (LONGEST / SHORTEST) ** (i / (_POINTS - 1)) for i in range(_POINTS)]
    for policy, colour in zip(which, COLOURS[: len(which)], strict=True):
        axes.plot(mtbfs, [1 - policy.goodput(step, mtbf) for mtbf in mtbfs], color=colour, linewidth=1.8)
        if policy.rejoin is not None:
            axes.plot(mtbfs, [1 - policy.goodput(step, mtbf, absence=True) for mtbf in mtbfs], color=colour,
                      linewidth=1.2, linestyle=(0, (4, 3)))  # fmt: skip
    axes.set_title(f"steps of {step:g} s", fontsize=10)
    axes.set(xscale="log", yscale="log", xlim=(SHORTEST, LONGEST), ylim=(LEAST, 1))
    names = {SHORTEST: "1 min", **marked, LONGEST: "24 h"}
    axes.xaxis.set_major_locator(FixedLocator(list(names)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda mtbf, _: names[mtbf]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:g} %"))
    axes.yaxis.set_minor_locator(NullLocator())
    for mtbf in marked:
        axes.axvline(mtbf, color="#999999", linewidth=0.8, zorder=0)
    axes.grid(axis="y")
    axes.tick_params(labelsize=8)


def _labels(axes: Axes, which: Sequence[Policy], step: float) -> None:
    """Names at the right ends of the lines, pushed apart where they would overlap."""
    ends = [math.log10(1 - policy.goodput(step, LONGEST)) for policy in which]
    above = math.inf
    for i in sorted(range(len(which)), key=ends.__getitem__, reverse=True):
        above = min(ends[i], above - _APART)
        axes.annotate(which[i].title, (1, 10**above), xycoords=("axes fraction", "data"), xytext=(5, 0),
                      textcoords="offset points", va="center", fontsize=9, color=COLOURS[i],
                      annotation_clip=False)  # fmt: skip
