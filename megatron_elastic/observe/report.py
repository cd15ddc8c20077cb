"""Report: what happened in a run, as tables and a plot in the terminal."""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_elastic import usage
from megatron_elastic.observe import telling
from megatron_elastic.observe.compare import compare
from megatron_elastic.observe.records import (
    RECOVERED,
    RecordsError,
    check_fields,
    check_run,
    check_step,
    read_digest,
    read_events,
    read_metrics,
)
from megatron_elastic.observe.run import loss_of
from megatron_elastic.observe.tracing import verdict
from megatron_elastic.observe.utilisation import Utilisation
from megatron_elastic.tables import Screen

_PARTS = ("detect_ms", "interrupt_ms", "plan_ms", "edit_ms", "state_ms", "redo_ms", "mttr_ms")
_BLOCKS = " ▁▂▃▄▅▆▇█"
_PLOT_ROWS = 6
_RECOVERIES_ABREAST = 5


def render(run_dir: Path, reference: Path | None = None, console: Console | None = None) -> None:
    """Print the report of a run: summary, loss plot, recoveries, and how it compares with ``reference``.

    Raises RecordsError when a directory has no readable records.
    """
    console = console or Screen()
    metrics = read_metrics(run_dir)
    # A plain run of an earlier release has steps, but no events.
    events = read_events(run_dir) if (run_dir / "events.jsonl").is_file() else []
    for step, record in metrics.items():
        check_step(record, f"step {step} in {run_dir / 'metrics.jsonl'}")
    recoveries = [event for event in events if event.get("kind") == "recovered"]
    for event in recoveries:
        check_fields(event, RECOVERED, f"a recovery in {run_dir / 'events.jsonl'}")
    console.print(Text.assemble(("Run", "bold"), f" {run_dir}"), soft_wrap=True)
    if not metrics:
        console.print("There is no step in the records yet.")
        return
    used = Utilisation(event for event in events if event.get("kind") == "hello")
    console.print(_summary(run_dir, metrics, recoveries, used))
    marks = [event["step"] for event in recoveries]
    for text in plot({step: loss_of(record) for step, record in metrics.items()}, marks, min(console.width, 100)):
        console.print(text, highlight=False, markup=False)
    for first in range(0, len(recoveries), _RECOVERIES_ABREAST):
        console.print(_recovery_table(recoveries[first : first + _RECOVERIES_ABREAST], metrics))
    if reference is not None:
        difference = compare(run_dir, reference)
        if difference is None:
            verdict = f"Equal bit for bit to {reference}: every loss, every gradient norm, final weights and optimizer."
            console.print(verdict, style="green", highlight=False, soft_wrap=True)
        else:
            console.print(f"Different from {reference} at {difference}", style="red", highlight=False, soft_wrap=True)


def plot(losses: Mapping[int, float], marks: Sequence[int], width: int) -> list[str]:
    """Lines of a bar plot of loss over step, at most ``width`` columns; ▲ below marks the steps in ``marks``.

    Where there are more steps than columns a bar is the mean of neighbours. Losses that are not finite leave a gap; the
    answer is empty when none is finite.
    """
    steps = sorted(losses)
    finite = [losses[step] for step in steps if math.isfinite(losses[step])]
    if not finite:
        return []
    low, high = min(finite), max(finite)
    labels = f"{high:.3f}", f"{low:.3f}"
    margin = max(map(len, labels)) + 2
    columns = max(1, min(len(steps), width - margin))
    column_of = {step: index * columns // len(steps) for index, step in enumerate(steps)}
    bars: list[list[float]] = [[] for _ in range(columns)]
    for step in steps:
        if math.isfinite(losses[step]):
            bars[column_of[step]].append(losses[step])
    levels = len(_BLOCKS) - 1
    # The lowest loss still gets a sliver, so that it differs from a gap.
    heights = [
        1 + round((statistics.fmean(bar) - low) / ((high - low) or 1) * (_PLOT_ROWS * levels - 1)) if bar else 0
        for bar in bars
    ]
    lines = []
    for row in reversed(range(_PLOT_ROWS)):
        label = labels[0] if row == _PLOT_ROWS - 1 else labels[1] if row == 0 else ""
        cells = "".join(_BLOCKS[min(max(height - row * levels, 0), levels)] for height in heights)
        lines.append(f"{label:>{margin - 2}}  {cells}".rstrip())
    marked = {column_of[step] for step in marks if step in column_of}
    if marked:
        lines.append(" " * margin + "".join("▲" if column in marked else " " for column in range(columns)).rstrip())
    return lines


def _summary(
    run_dir: Path, metrics: Mapping[int, dict[str, Any]], recoveries: Sequence[dict[str, Any]], used: Utilisation
) -> Table:
    first, last = metrics[min(metrics)], metrics[max(metrics)]
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim")
    table.add_column()
    table.add_row("steps", f"{min(metrics)} to {max(metrics)}, {len(metrics)} committed, each once")
    table.add_row("loss", f"{loss_of(first):.4f} -> {loss_of(last):.4f}")
    table.add_row("ranks at work", f"{first['world_size']} -> {last['world_size']}")
    table.add_row("step time", f"{statistics.median(r['step_ms'] for r in metrics.values()):.0f} ms (median)")
    table.add_row(
        "throughput", f"{statistics.median(r['tokens_per_s'] for r in metrics.values()):.0f} tokens/s (median)"
    )
    if (usual := used.usual(metrics.values())) is not None:
        table.add_row("computes", f"{telling.utilisation(*usual, used.devices)}, median")
    table.add_row("recoveries", str(len(recoveries)) if recoveries else "none")
    if (run_dir / "digest.json").is_file():
        table.add_row("digest", str(read_digest(run_dir).get("sha256")))
    return table


def _recovery_table(recoveries: Sequence[dict[str, Any]], metrics: Mapping[int, dict[str, Any]]) -> Table:
    """One column a recovery, one row a fact: that fits a narrow terminal."""
    table = Table(title="Recoveries", title_justify="left")
    table.add_column("step")
    for event in recoveries:
        table.add_column(str(event["step"]), justify="right")
    rows: dict[str, list[str]] = {
        "ranks lost": [",".join(map(str, event["ranks"])) for event in recoveries],
        "cause": [str(event["cause"]) for event in recoveries],
        "step goes": [str(event["decision"]) for event in recoveries],
    }
    rows |= {part.replace("_", " "): [f"{event[part]:.1f}" for event in recoveries] for part in _PARTS}
    for name, offset in (("loss before", -1), ("loss after", 0)):
        found = [metrics.get(event["step"] + offset) for event in recoveries]
        rows[name] = ["-" if record is None else f"{loss_of(record):.4f}" for record in found]
    for name, cells in rows.items():
        table.add_row(name, *cells, style="bold" if name == "mttr ms" else None)
    return table


def _write_page(run_dir: Path, path: Path, reference: Path | None) -> None:
    """Raises RecordsError where that cannot be."""
    try:
        from megatron_elastic.observe import page
    except ImportError as error:
        raise RecordsError(f"--html needs matplotlib ({error}): pip install 'megatron-elastic[plot]'") from None
    try:
        page.write(run_dir, path, reference)
    except OSError as error:
        raise RecordsError(f"cannot write {path}: {error.strerror}") from None
    print(f"{path}: {path.stat().st_size / 1e3:.0f} kB")


def make_parser() -> argparse.ArgumentParser:
    """The flags of ``megatron-elastic report``."""
    parser = argparse.ArgumentParser(
        prog="megatron-elastic report", description="Show what happened in a run: losses, faults, recoveries.",
        epilog="examples:\n  megatron-elastic report runs/a --html page.html\n"
               "  megatron-elastic report runs/a --reference runs/undisturbed\n"
               "  megatron-elastic report runs/a --critical-path",
        formatter_class=usage.Formatter,
    )  # fmt: skip
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="run directory")
    parser.add_argument(
        "--reference", type=Path, metavar="RUN_DIR", help="an undisturbed run to compare with, bit for bit"
    )
    parser.add_argument("--critical-path", type=int, nargs="?", const=0, metavar="STEP", help="of a job with "
                        "--elastic-trace: what determined how long a step took (default: of those that are traced the "
                        "one of median length), and what a faster part would bring, instead")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with curves, timelines and layouts "
                        "instead: one file that needs no server and no network (needs the extra plot)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """``megatron-elastic report RUN_DIR [--reference RUN_DIR] [--html FILE]``: 0, or 2 without readable records."""
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.critical_path is not None and (args.html, args.reference) != (None, None):
        parser.error("--critical-path is shown instead of all else: leave out --html and --reference")
    try:
        check_run(args.run_dir)
        if args.reference is not None:
            check_run(args.reference)
        if args.critical_path is not None:
            verdict.render([args.run_dir], args.critical_path or None)
        elif args.html is None:
            render(args.run_dir, args.reference)
        else:
            _write_page(args.run_dir, args.html, args.reference)
    except RecordsError as error:
        print(f"megatron-elastic report: error: {error}", file=sys.stderr)
        return 2
    return 0
