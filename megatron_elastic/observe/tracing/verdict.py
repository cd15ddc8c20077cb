"""Verdict: the critical path of a traced step as tables, for ``megatron-elastic report --critical-path``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_elastic.observe.records import RecordsError
from megatron_elastic.observe.tracing.graph import Link, shares
from megatron_elastic.observe.tracing.path import BESIDE, EARLIER, StepGraph, graph_of
from megatron_elastic.observe.tracing.reading import Traces
from megatron_elastic.tables import Screen

_HALF, _NOTHING = 0.5, 0.0
_ROWS = 40
"""Of the chain that are shown."""


def render(run_dirs: Sequence[Path], step: int | None, console: Console | None = None) -> None:
    """Print what determined a step's length (None: of all traced ones that of median length). Raises RecordsError."""
    console = console or Screen()
    traces = Traces.read(run_dirs)
    if step is None:
        took = traces.elapsed()
        if not took:
            raise RecordsError("no step is traced from one commit to the next")
        step = sorted(took, key=lambda each: took[each])[len(took) // 2]
    chosen = graph_of(traces, step)
    console.print(Text.assemble(
        (f"Step {chosen.step}", "bold"), f": {_ms(chosen.elapsed)} ms from one commit of rank {chosen.rank} to the "
        "next.\nWhat determined it:"))  # fmt: skip
    console.print(_chain(chosen))
    console.print(_shares(chosen))
    console.print(_ranks(chosen))


def _chain(step: StepGraph) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("ms", "rank"):
        table.add_column(name, justify="right")
    table.add_column("what", overflow="fold")
    nodes = step.graph.nodes
    rows: list[tuple[float, str, str]] = []

    def key(link: Link) -> tuple[int, str, int | None]:
        return nodes[link.node].rank, link.kind, None if link.source is None else nodes[link.source].rank

    for (rank, kind, source), group in groupby(step.links, key):
        links = list(group)
        texts = dict.fromkeys(nodes[link.node].text for link in links)
        detail = ", ".join(text for text in texts if text)
        what = kind + (f" ({detail})" if detail else "")
        if source is not None:
            what = {EARLIER: "was in the step before", BESIDE: "went on with what was done beside"}.get(
                kind, f"waited for rank {source}: {kind}"
            )
        rows.append((sum(link.took for link in links), str(rank), what))
    shown = sorted(sorted(range(len(rows)), key=lambda index: -rows[index][0])[:_ROWS])
    for index in shown:
        table.add_row(_ms(rows[index][0]), *rows[index][1:])
    if len(rows) > len(shown):
        rest = sum(rows[index][0] for index in set(range(len(rows))) - set(shown))
        table.add_row(_ms(rest), "", f"{len(rows) - len(shown)} shorter parts", style="dim")
    return table


def _shares(step: StepGraph) -> Table:
    table = Table(title="If it took less time everywhere, the step would take", title_justify="left")
    table.add_column("what")
    for name in ("of the chain, ms", "share", "half the time, ms", "none, ms"):
        table.add_column(name, justify="right")
    for kind, took in shares(step.links).items():
        if kind in (EARLIER, BESIDE):
            continue
        told = [_ms(took), f"{took / step.elapsed:.1%}"]
        told += [_ms(step.graph.length(step.end, {kind: factor})) for factor in (_HALF, _NOTHING)]
        table.add_row(kind, *told)
    return table


def _ranks(step: StepGraph) -> Table:
    table = Table(title="If a rank did all in half the time, the step would take", title_justify="left")
    for name in ("rank", "of the chain, ms", "half the time, ms"):
        table.add_column(name, justify="right")
    nodes, kinds = step.graph.nodes, {node.kind for node in step.graph.nodes}
    mine: dict[int, float] = {}
    for link in step.links:
        if not link.lag:
            mine[nodes[link.node].rank] = mine.get(nodes[link.node].rank, 0) + link.took
    for rank, took in sorted(mine.items(), key=lambda item: -item[1]):
        half = step.graph.length(step.end, dict.fromkeys(kinds, _HALF), rank)
        table.add_row(str(rank), _ms(took), _ms(half))
    return table


def _ms(ns: float) -> str:
    return f"{ns / 1e6:.2f}"
