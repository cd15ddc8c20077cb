"""Page: the report of a run as one HTML file that needs no server, no network and no script."""

from __future__ import annotations

import itertools
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from megatron_elastic.layout import Holdings, Layout, SliceLost, transfers
from megatron_elastic.observe import plot, telling
from megatron_elastic.observe.compare import compare
from megatron_elastic.observe.goodput import PARTS, Goodput
from megatron_elastic.observe.place import epochs
from megatron_elastic.observe.records import RecordsError
from megatron_elastic.observe.run import Run, loss_of, read_layout
from megatron_elastic.observe.status import span_of, state_of

_BARS = 25
"""Recoveries that are drawn: the longest ones."""
_LAYOUTS = 12
"""Recoveries of which the layouts are drawn: the first ones."""
_EVENTS = 1000
"""Events that are listed: the newest."""
_MARKS = 200
"""Recoveries that are marked in the curves at most."""

_CSS = """
:root { color-scheme: light dark; --line: #8886; --dim: #777; }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 62rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.4rem; margin: .3rem 0; overflow-wrap: anywhere; } h2 { font-size: 1.1rem; margin: 1.6rem 0 .4rem; }
.cards { display: flex; flex-wrap: wrap; gap: .6rem; } .card { border: 1px solid var(--line); border-radius: .5rem;
  padding: .4rem .8rem; } .card b { display: block; font-size: 1.15rem; } .card b + span { color: var(--dim); }
table { border-collapse: collapse; font-size: .85rem; } th, td { border-bottom: 1px solid var(--line);
  padding: .2rem .5rem; text-align: right; vertical-align: top; } th { color: var(--dim); font-weight: 600; }
td.text, th.text { text-align: left; overflow-wrap: anywhere; } .scroll { overflow-x: auto; }
.figure { background: #fff; border-radius: .5rem; } .figure svg { width: 100%; height: auto; display: block; }
.stage { display: flex; flex-wrap: wrap; gap: .25rem; margin: .2rem 0; align-items: center; font-size: .8rem; }
.stage i { min-width: 13rem; color: var(--dim); font-style: normal; }
.cell { border: 1px solid #0072b2; border-radius: .3rem;
  padding: .05rem .35rem; } .cell.shadow { border-style: dashed; border-color: #e69f00; } .cell.new { background:
  #56b4e955; } .cell.gone { border-color: #d55e00; text-decoration: line-through; }
.pair { display: flex; flex-wrap: wrap; gap: 0 2rem; } .pair > div { flex: 1 1 24rem; }
details > summary { cursor: pointer; color: var(--dim); } summary h2 { display: inline-block; }
.good { color: #009e73; } .bad { color: #d55e00; }
@media print { details { display: block; } body { max-width: none; font-size: 11px; } }
"""


def write(run_dir: Path, path: Path, reference: Path | None = None) -> None:
    """Write the page about a run to ``path``. Raises RecordsError without readable records, OSError if the file cannot
    be written.
    """
    run = Run.of_folder(run_dir)
    if not run.metrics:
        raise RecordsError(f"there is no step in the records of {run_dir} yet")
    recoveries = run.of("recovered")
    good = run.account.goodput()
    parts = [_head(run), _cards(run, good), _verdict(run_dir, reference), _curves(run, recoveries), _lost(good)]
    if recoveries:
        parts += [_timelines(recoveries), _table(recoveries, run.metrics), _layouts(run_dir, recoveries)]
    parts += [_moves(run_dir, run), _events(run)]
    title = escape(f"megatron-elastic: {run_dir.name}")
    path.write_text(
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_CSS}</style></head>\n<body>\n'
        + "\n".join(part for part in parts if part) + "\n</body></html>\n", encoding="utf-8")  # fmt: skip


def _head(run: Run) -> str:
    began = run.events[0]["time"] if run.events else None
    when = "" if began is None else time.strftime(", begun %Y-%m-%d %H:%M:%S %Z", time.localtime(began))
    return f"<h1>{escape(run.place.name)}</h1>\n<p>A run of megatron-elastic{escape(when)}.</p>"


def _cards(run: Run, good: Goodput) -> str:
    state, end = state_of(run), run.end
    first, last = run.metrics[0], run.metrics[-1]
    speed = statistics.median(record["tokens_per_s"] for record in run.metrics)
    tone = {"failed": "bad", "finished": "good"}.get(state, "")
    steps = f"{last['step']}" + (f" of {run.total}" if run.total else "")
    cards = [
        ("state", f'<span class="{tone}">{escape(state)}</span>'), ("steps", steps),
        ("loss", f"{loss_of(first):.4f} → {loss_of(last):.4f}"),
        ("tokens/s, median", f"{speed:,.0f}"), ("goodput", f"{100 * good.share:.2f} %"),
        ("time in steps", telling.duration(good.elapsed_ms / 1e3)), ("recoveries", f"{len(run.of('recovered'))}"),
        ("ranks at work", f"{first['world_size']} → {last['world_size']}"),
    ]  # fmt: skip
    if (usual := run.utilisation.usual(run.metrics)) is not None:
        flops, mfu = usual
        cards.append(("GFLOP/s a device, median", f"{flops / 1e9:,.3g}"))
        cards += [] if mfu is None else [("MFU, median", f"{100 * mfu:.1f} %")]
    inner = "".join(f'<div class="card"><b>{value}</b><span>{escape(name)}</span></div>' for name, value in cards)
    reason = f"<p>{escape(str(end['reason']))}</p>" if end is not None and state == "failed" else ""
    return f'<div class="cards">{inner}</div>{reason}'


def _verdict(run_dir: Path, reference: Path | None) -> str:
    if reference is None:
        return ""
    difference = compare(run_dir, reference)
    if difference is None:
        return (f'<p class="good">Equal bit for bit to {escape(str(reference))}: every loss, every gradient norm, '
                "final weights and optimizer states.</p>")  # fmt: skip
    return f'<p class="bad">Different from {escape(str(reference))} at {escape(str(difference))}</p>'


def _curves(run: Run, recoveries: Sequence[Mapping[str, Any]]) -> str:
    steps = [record["step"] for record in run.metrics]
    marks = sorted({event["step"] for event in recoveries})
    marks = marks[:: -(-len(marks) // _MARKS)] if marks else []
    loss = plot.curve(steps, [loss_of(record) for record in run.metrics], "loss", marks)
    speed = plot.curve(steps, [record["tokens_per_s"] for record in run.metrics], "tokens/s", marks, zero=True)
    note = "<p>Vertical lines: steps with recoveries.</p>" if marks else ""
    return f'<h2>Loss and speed</h2>{note}<div class="figure">{loss}{speed}</div>'


def _lost(good: Goodput) -> str:
    rows = [(name.removesuffix("_ms"), telling.duration(ms / 1e3), f"{100 * ms / good.elapsed_ms:.3f} %")
            for name, ms in good.lost.items() if ms]  # fmt: skip
    if not rows:
        return ""
    return ("<h2>Where the lost time went</h2><p>Useful is a step's time as it usually is; what interrupted steps took "
            "longer is lost. Slower steps of fewer ranks count as useful.</p>"
            + _rows(("part", "time", "of all time"), rows))  # fmt: skip


def _timelines(recoveries: Sequence[Mapping[str, Any]]) -> str:
    longest = sorted(recoveries, key=lambda event: -event["mttr_ms"])[:_BARS]
    shown = sorted(longest, key=lambda event: (event["step"], event["time"]))
    which = f"The {_BARS} longest ones. " if len(recoveries) > _BARS else ""
    bars = plot.bars([(f"step {event['step']}, {event['cause']}",
                       {part: event[part] for part in (*PARTS, "redo_ms")}) for event in shown])  # fmt: skip
    return (f"<h2>Recoveries</h2><p>{which}From the fault to the next committed step.</p>"
            f'<div class="figure">{bars}</div>')  # fmt: skip


def _table(recoveries: Sequence[Mapping[str, Any]], metrics: Sequence[Mapping[str, Any]]) -> str:
    losses = {record["step"]: loss_of(record) for record in metrics}
    head = ("step", "ranks lost", "cause", "step goes", *(part.removesuffix("_ms") for part in PARTS), "redo",
            "in all, ms", "loss before", "loss after")  # fmt: skip
    rows = [
        (event["step"], ", ".join(map(str, event["ranks"])), event["cause"], event["decision"],
         *(f"{event[part]:.1f}" for part in (*PARTS, "redo_ms", "mttr_ms")),
         *(f"{losses[step]:.4f}" if step in losses else "-" for step in (event["step"] - 1, event["step"])))
        for event in recoveries
    ]  # fmt: skip
    table = _rows(head, rows)
    return table if len(rows) <= _BARS else f"<details><summary>all {len(rows)}</summary>{table}</details>"


def _layouts(run_dir: Path, recoveries: Sequence[Mapping[str, Any]]) -> str:
    """Before and after each recovery, with what changed."""
    known = epochs(run_dir)
    parts: list[str] = []
    for event in recoveries[:_LAYOUTS]:
        after = event["epoch"]
        before = max((epoch for epoch in known if epoch < min(event.get("epochs", [after]))), default=None)
        if before is None or after not in known:
            continue
        old, new = (read_layout(run_dir, epoch) for epoch in (before, after))
        parts.append(
            f"<h3>step {event['step']}: {escape(telling.tell(event))}</h3>"
            f'<div class="pair"><div>before (epoch {before}){_drawn(old, new)}</div>'
            f"<div>after (epoch {after}){_drawn(new, old)}</div></div>"
        )
    if not parts:
        return ""
    which = f" of the first {_LAYOUTS} recoveries" if len(recoveries) > _LAYOUTS else ""
    body = "".join(parts)
    return (f"<details open><summary><h2>Layouts{which}</h2></summary><p>A box is a cell, as "
            "its ranks: the number of grains it computes. Blue: another share than in the other picture; struck out: "
            f"not there; dashed: it follows.</p>{body}</details>")  # fmt: skip


def _moves(run_dir: Path, run: Run) -> str:
    """What each layout asked to be copied from whom to whom, besides what the one before had."""
    rows, changes = [], 0
    sizes = {(event["epoch"], rank): size for event in run.of("copying")
             for rank, size in zip(event["ranks"], event["bytes"], strict=True)}  # fmt: skip
    for old, new in itertools.pairwise(read_layout(run_dir, epoch) for epoch in epochs(run_dir)):
        if changes == _LAYOUTS:
            break
        told = _asked(old, new)
        changes += bool(told)
        for rank, what in told.items():
            size = sizes.get((new.epoch, rank))
            rows.append((new.epoch, rank, *what, "-" if size is None else telling.size(size)))
    if not rows:
        return ""
    which = f"; the first {_LAYOUTS} layouts that asked for some" if changes == _LAYOUTS else ""
    return ("<details open><summary><h2>What moved where</h2></summary><p>States of slices that a rank got, with a "
            f"layout or in the background after it{which}. Bytes are those of copies in the background.</p>"
            + _rows(("epoch", "to rank", "slices", "of", "from", "bytes"), rows) + "</details>")  # fmt: skip


def _asked(old: Layout, new: Layout) -> dict[int, tuple[int, str, str]]:
    """By rank how many slices it gets, of what, and from whom; empty where states are not copied as they are."""
    if (old.tp, old.cp, old.ep, old.num_slices) != (new.tp, new.cp, new.ep, new.num_slices):
        return {}
    try:
        moves = transfers(new, Holdings.of(old))
    except SliceLost:
        return {}  # they come from a checkpoint
    found: dict[int, tuple[Counter[int], set[int]]] = {}
    for move in moves:
        units, sources = found.setdefault(move.dst, (Counter(), set()))
        units[move.unit] += 1
        sources.add(move.src)
    return {
        rank: (units.total(), span_of([new.units[unit] for unit in sorted(units)]), telling.ranks(sources))
        for rank, (units, sources) in sorted(found.items())
    }


def _drawn(layout: Layout, other: Layout) -> str:
    shares = {cell.ranks: cell.share for stage in other.stages for cell in stage.cells}
    rows = []
    for index, stage in enumerate(layout.stages):
        cells = "".join(
            f'<span class="cell{_kind(cell.ranks, cell.share, cell.shadow, shares)}">{cell.name}: '
            f"{len(cell.share)}</span>"
            for cell in stage.cells
        )
        units = escape(span_of([layout.units[unit] for unit in stage.units]))
        rows.append(f'<div class="stage"><i>stage {index}: {units}</i>{cells}</div>')
    return "".join(rows)


def _kind(ranks: tuple[int, ...], share: Sequence[int], shadow: bool, others: Mapping[tuple[int, ...], Any]) -> str:
    if ranks not in others:
        return " gone"
    return " shadow" if shadow else " new" if tuple(others[ranks]) != tuple(share) else ""


def _events(run: Run) -> str:
    shown = [event for event in run.events if event["kind"] not in ("traffic", "copying", "replicated")][-_EVENTS:]
    if not shown:
        return ""
    rows = [(time.strftime("%H:%M:%S", time.localtime(event["time"])), event["epoch"], event["kind"],
             telling.tell(event)) for event in shown]  # fmt: skip
    summary = f"the newest {_EVENTS} of {len(run.events)} events" if len(shown) == _EVENTS else f"{len(shown)} events"
    return f"<details><summary>{summary}</summary>{_rows(('time', 'epoch', 'kind', 'what'), rows)}</details>"


def _rows(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table; cells that are no numbers are aligned as text."""

    def cell(tag: str, value: Any) -> str:
        text = str(value)
        kind = "" if text[:1].isdigit() or text in ("", "-") else ' class="text"'
        return f"<{tag}{kind}>{escape(text)}</{tag}>"

    body = "".join("<tr>" + "".join(cell("td", value) for value in row) + "</tr>" for row in rows)
    top = "".join(cell("th", name) for name in head)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
