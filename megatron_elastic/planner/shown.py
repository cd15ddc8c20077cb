"""Shown: what ``megatron-elastic plan`` prints and draws for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from megatron_elastic.layout import Layout, Stage
from megatron_elastic.pipeline.picture import LEGEND, Panel, draw, shown
from megatron_elastic.plan.costs.cost import Costs
from megatron_elastic.plan.migration import duration_ms, size
from megatron_elastic.planner.outcome import Outcome, step_ms, timeline
from megatron_elastic.tables import grid

MOST_CELLS = 16
"""Cells that a picture shows, where there are not more stages."""


def panels(outcome: Outcome, costs: Costs, schedule: str | None) -> list[Panel]:
    """A picture of a step of each layout that can be simulated."""
    simulated = ((name, layout, timeline(layout, costs, schedule)) for name, layout in outcome.layouts)
    return [Panel(name, layout, line) for name, layout, line in simulated if line is not None]


def show(console: Console, outcome: Outcome, costs: Costs, source: str, schedule: str | None) -> None:
    """Print the layouts, what has to be copied, and pictures of steps."""
    console.print(f"costs: {source}")
    if outcome.interim is None:
        console.print("no interim layout: nothing can go on before state has been moved")
    table = grid("stage", *(f"{name} (epoch {layout.epoch})" for name, layout in outcome.layouts))
    for index in range(max(layout.pipeline_size for _, layout in outcome.layouts)):
        cells = [
            _describe(layout, layout.stages[index]) if index < layout.pipeline_size else "-"
            for _, layout in outcome.layouts
        ]
        table.add_row(str(index), *cells)
    table.add_row("spares", *(_ranks(layout.spares) for _, layout in outcome.layouts))
    table.add_row("step", *(f"{step_ms(layout, costs, schedule):.1f} ms" for _, layout in outcome.layouts))
    console.print(table)
    _print_moves(console, outcome, costs)
    drawings = panels(outcome, costs, schedule)
    if not drawings:
        return
    scale = max(panel.timeline.makespan for panel in drawings) / max(40, min(console.width, 160) - 28)
    for panel in drawings:
        total = sum(not cell.shadow for stage in panel.layout.stages for cell in stage.cells)
        drawn = sum(1 for _ in shown(panel.layout, MOST_CELLS))
        console.print(f"\n{panel.title}" + (f", {drawn} of {total} cells" if drawn < total else ""))
        for row in draw(panel, scale, MOST_CELLS):
            console.print(row)
    console.print(f"\n{LEGEND}; one character is {scale:.2f} ms")


def _describe(layout: Layout, stage: Stage) -> str:
    names = [layout.units[unit] for unit in stage.units]
    tied = [names.pop(0)] if stage is not layout.stages[0] and stage.units[0] == 0 else []
    units = "+".join([names[0] if len(names) == 1 else f"{names[0]}..{names[-1]}", *tied])
    counts = sorted({layout.load(cell) for cell in stage.cells if not cell.shadow})
    grains = f"{counts[0]:.4g}" if len(counts) == 1 else f"{counts[0]:.4g}-{counts[-1]:.4g}"
    ranks = _ranks([rank for cell in stage.cells if not cell.shadow for rank in cell.ranks])
    shadows = _ranks([rank for cell in stage.cells if cell.shadow for rank in cell.ranks])
    index = layout.stages.index(stage)
    chunks = [chunk for chunk in range(len(layout.chunks(index))) if layout.recomputes(index, chunk)]
    again = "" if not chunks else "\n  recomputed" + (
        f": chunks {', '.join(map(str, chunks))}" if len(layout.chunks(index)) > 1 else ""
    )
    return f"{units}\n  {ranks}: {grains} grains each" + (f"\n  {shadows} follow" if shadows != "-" else "") + again


def _ranks(ranks: Sequence[int]) -> str:
    """``0-3,6``, or for many pieces how many they are; a dash for none."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans) or "-"
    return text if len(spans) <= 8 else f"{spans[0][0]}..{spans[-1][1]} ({len(ranks)})"


def _print_moves(console: Console, outcome: Outcome, costs: Costs) -> None:
    if outcome.missing:
        console.print(f"\ntransfers: {outcome.missing}")
        return
    if not outcome.moves:
        console.print("\ntransfers: none")
        return
    pairs: dict[tuple[int, int, str], tuple[list[int], float]] = {}
    for move in outcome.moves:
        key = move.src, move.dst, f"{outcome.after.units[move.unit]} ({move.role})"
        slices, together = pairs.setdefault(key, ([], 0.0))
        slices.append(move.slice)
        pairs[key] = slices, together + size(move, outcome.after, costs)
    total = sum(together for _, together in pairs.values())
    console.print(
        f"\ntransfers, in the background: {len(outcome.moves)} slices between {len({key[:2] for key in pairs})} pairs "
        f"of ranks, {_bytes(total)}; at full bandwidth {duration_ms(outcome.moves, outcome.after, costs):.1f} ms"
    )
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for column in ("from", "to", "what", "slices", "bytes"):
        table.add_column(column, justify="right" if column == "bytes" else "left")
    for (src, dst, what), (slices, together) in list(pairs.items())[:40]:
        table.add_row(str(src), str(dst), what, _ranks(slices), _bytes(together))
    console.print(table)
    if len(pairs) > 40:
        console.print(f"... and {len(pairs) - 40} more; --json lists all")


def _bytes(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            break
        size /= 1000
    return f"{size:.4g} {unit}"
