"""Picture: timelines for people, as rows of characters and as SVG."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

from rich.text import Text

from megatron_elastic.layout import Layout
from megatron_elastic.pipeline.program import Kind, Op
from megatron_elastic.pipeline.simulate import Span, Timeline

LEGEND = "a digit is a forward (the grain's last digit), a letter its backward (a for 0, to j for 9), · is waiting"
_COLOURS: dict[Kind, tuple[str, str]] = {
    "forward": ("blue", "#6ea8fe"),
    "backward": ("green", "#75b798"),
    "backward_input": ("green", "#75b798"),
    "backward_weight": ("yellow", "#ffda6a"),
}
"""Of each kind of operation, in a terminal and in SVG."""
_ROW, _GAP, _LABEL, _WIDTH = 18, 3, 150, 1000
"""Pixels of an SVG: a cell's height, between cells, for its name, and for the longest timeline."""


class Panel(NamedTuple):
    """A timeline with its layout and a title."""

    title: str
    layout: Layout
    timeline: Timeline


def shown(layout: Layout, most: int) -> Iterator[tuple[int, str, int]]:
    """(stage, cell's name, leader) of ``most`` cells or one a stage: the first ones of each that have grains."""
    each = max(1, most // layout.pipeline_size)
    for index, stage in enumerate(layout.stages):
        for cell in [cell for cell in stage.cells if not cell.shadow][:each]:
            yield index, cell.name, cell.leader


def draw(panel: Panel, scale: float, most: int) -> Iterator[Text]:
    """A row for each cell shown, one character for each ``scale`` milliseconds."""
    width = max(len(name) for _, name, _ in shown(panel.layout, most))
    for stage, name, leader in shown(panel.layout, most):
        yield Text(f"stage {stage:2d}  cell {name:>{width}s} ") + _row(
            panel.timeline.spans[leader], scale, panel.timeline
        )


def _row(spans: Sequence[Span], scale: float, timeline: Timeline) -> Text:
    starts = [span.start for span in spans]
    row = Text()
    for column in range(max(1, round(timeline.makespan / scale))):
        at = (column + 0.5) * scale
        index = bisect_right(starts, at) - 1
        if index >= 0 and at < spans[index].end:
            op = spans[index].op
            row.append(_character(op), style=_COLOURS[op.kind][0])
        else:
            row.append("·", style="dim")
    return row


def _character(op: Op) -> str:
    return str(op.grain % 10) if op.kind == "forward" else "abcdefghij"[op.grain % 10]


def svg(panels: Sequence[Panel], most: int) -> str:
    """One picture of all timelines, below one another, in one scale of time."""
    pixels = _WIDTH / max(panel.timeline.makespan for panel in panels)
    parts: list[str] = []
    y = 0
    for panel in panels:
        y += 24
        heading = f"{panel.title}: {panel.timeline.makespan:.1f} ms"
        parts.append(f'<text x="4" y="{y}" font-size="14" font-weight="bold">{escape(heading)}</text>')
        y += 8
        for stage, name, leader in shown(panel.layout, most):
            parts.append(f'<text x="4" y="{y + 13}">stage {stage}, cell {name}</text>')
            parts += [_box(span, y, pixels) for span in panel.timeline.spans[leader]]
            y += _ROW + _GAP
    size = f'width="{_LABEL + _WIDTH + 10}" height="{y + 10}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">\n'
        f'<rect {size} fill="white"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _box(span: Span, y: int, pixels: float) -> str:
    x, width = _LABEL + span.start * pixels, (span.end - span.start) * pixels
    label = f'<text x="{x + 2:.1f}" y="{y + 13}">{span.op.grain}</text>' if width > 8 * len(str(span.op.grain)) else ""
    return (
        f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_ROW}" fill="{_COLOURS[span.op.kind][1]}" '
        f'stroke="white" stroke-width="0.5"><title>{span.op} from {span.start:.2f} to {span.end:.2f} ms</title></rect>'
        + label
    )
