"""Status: what a job is doing now, from its records, for programs and for people."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from megatron_elastic.layout import Cell, Layout
from megatron_elastic.observe import telling
from megatron_elastic.observe.run import RECENT, Copy, Process, Run, loss_of

_EVENTS = 8
"""Events that are shown: the newest."""
_COPIES, _BAR = 8, 10
"""Ranks that get copies of which each has a line, and characters of its bar."""
_SILENT, _SILENT_STEPS = 60.0, 20
"""Seconds, and usual steps, without a new record after which a job that has not ended is called silent."""
_STYLES = {"training": "green", "finished": "green", "recovering": "yellow", "silent": "yellow", "failed": "red"}


def status(run: Run, now: float | None = None) -> dict[str, Any]:
    """What a job is doing, as JSON has it. Times in milliseconds where a name says so, else seconds.

    ``state``: ``beginning``, ``training``, ``recovering``, ``silent`` (it has not ended, and nothing was written for
    long), ``finished`` or ``failed``. A loss that is not finite is None, as on record.
    """
    now = time.time() if now is None else now
    recent, step_ms = run.metrics[-RECENT:], _step_ms(run)
    last = run.metrics[-1] if run.metrics else {}
    recovered = run.of("recovered")
    good, used = run.account.goodput(), run.utilisation
    usual = used.usual(recent)
    return {
        "run_dir": run.place.name,
        "state": state_of(run, now),
        "reason": None if run.end is None else run.end.get("reason"),
        "step": last.get("step", 0),
        "total_steps": run.total,
        "loss": last.get("loss"),
        "grad_norm": last.get("grad_norm"),
        "lr": last.get("lr"),
        "consumed_samples": last.get("consumed_samples", 0),
        "step_ms": step_ms,
        "tokens_per_s": statistics.median(record["tokens_per_s"] for record in recent) if recent else None,
        "flops_per_token": used.flops_per_token,
        "tflops_per_device": None if usual is None else usual[0] / 1e12,
        "mfu": None if usual is None else usual[1],
        "since_last_record_s": run.age(now),
        "left_s": _left(run, step_ms),
        "goodput": good.share,
        "lost_ms": dict(good.lost),
        "recoveries": len(recovered),
        "causes": dict(Counter(str(event["cause"]) for event in recovered)),
        "last_recovery": dict(recovered[-1]) if recovered else None,
        "layout": None if run.layout is None else _layout(run.layout, run.slow),
        "copies": [_copy(copy) for copy in run.copies],
        "progress": [_progress(event) for event in run.chores],
        "ranks": {str(rank): process._asdict() for rank, process in _there(run).items()},
        "events": [dict(event) for event in run.events if event["kind"] not in telling.QUIET][-_EVENTS:],
    }


def state_of(run: Run, now: float | None = None) -> str:
    """One word; see ``status``."""
    if run.end is not None:
        return str(run.end["kind"])
    if (run.age(now) or 0.0) > max(_SILENT, _SILENT_STEPS * (_step_ms(run) or 0.0) / 1e3):
        return "silent"
    if run.recovering is not None:
        return "recovering"
    return "training" if run.metrics else "beginning"


def _step_ms(run: Run) -> float | None:
    """What a step takes now; None before the first."""
    recent = run.metrics[-RECENT:]
    return statistics.median(record["step_ms"] for record in recent) if recent else None


def _left(run: Run, step_ms: float | None) -> float | None:
    """Seconds that the job still has to do at its present pace; None where that is not known."""
    if run.end is not None or run.total is None or step_ms is None:
        return None
    return (run.total - run.metrics[-1]["step"]) * step_ms / 1e3


def _there(run: Run) -> dict[int, Process]:
    """Rank -> process of those that live, as far as the layout says."""
    lost = set() if run.layout is None else set(run.layout.lost)
    return {rank: process for rank, process in sorted(run.processes.items()) if rank not in lost}


def _layout(layout: Layout, slow: Mapping[int, float]) -> dict[str, Any]:
    return {
        "epoch": layout.epoch,
        "world_size": sum(len(cell.ranks) for stage in layout.stages for cell in stage.cells if not cell.shadow),
        "grains": layout.num_grains,
        "stages": [
            {
                "units": [layout.units[unit] for unit in stage.units],
                "cells": [
                    {
                        "ranks": list(cell.ranks), "grains": list(cell.grains), "parts": len(cell.parts),
                        "shadow": cell.shadow, "times_as_slow": slow.get(cell.leader),
                    }
                    for cell in stage.cells
                ],
            }
            for stage in layout.stages
        ],
        "spares": list(layout.spares),
        "lost": list(layout.lost),
    }  # fmt: skip


def _copy(copy: Copy) -> dict[str, Any]:
    left = copy.size - copy.done
    return {
        "rank": copy.rank, "source": copy.source, "unit": copy.unit, "done_bytes": copy.done, "bytes": copy.size,
        "bytes_per_s": copy.rate, "left_s": left / copy.rate if copy.rate else None,
    }  # fmt: skip


def _progress(event: Mapping[str, Any]) -> dict[str, Any]:
    return {"what": event["what"], "busy": event["busy"], "done_bytes": event["done_bytes"],
            "bytes": event["all_bytes"], "seconds": event["seconds"]}  # fmt: skip


# ---- for people ----------------------------------------------------------------------------------


def picture(run: Run) -> RenderableType:
    """The status of a job, to be printed or shown."""
    now = status(run)
    parts: list[RenderableType] = [_headline(now), _figures(now, run)]
    if chores := run.chores:
        parts.append(_chores(chores))
    if now["copies"]:
        parts.append(_copies(now["copies"]))
    if run.layout is not None:
        parts.append(grid(run.layout, run.slow))
    if now["events"]:
        parts.append(_events(now["events"]))
    return Group(*parts)


def _headline(now: Mapping[str, Any]) -> Text:
    text = Text(str(now["state"]), style=f"bold {_STYLES.get(now['state'], '')}".strip())
    rest = f"  step {now['step']}" + (f" of {now['total_steps']}" if now["total_steps"] else "")
    if now["state"] == "silent":
        rest += f"  nothing was written for {telling.duration(now['since_last_record_s'])}"
    elif now["state"] == "failed":
        rest += f"  {str(now['reason']).partition(chr(10))[0]}"
    elif now["left_s"]:
        rest += f"  {telling.duration(now['left_s'])} left"
    return text.append(rest, style="not bold default")


def _figures(now: Mapping[str, Any], run: Run) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim")
    table.add_column()
    if run.metrics:
        norm = "" if now["grad_norm"] is None else f"   gradient norm {now['grad_norm']:.3f}"
        table.add_row("loss", f"{loss_of(run.metrics[-1]):.4f}{norm}")
        table.add_row("speed", f"{now['tokens_per_s']:,.0f} tokens/s, {now['step_ms']:,.0f} ms a step "
                               f"(median of the last {RECENT})")
        if now["tflops_per_device"] is not None:
            computes = telling.utilisation(1e12 * now["tflops_per_device"], now["mfu"], run.utilisation.devices)
            table.add_row("computes", Text(computes))
        lost = ", ".join(f"{name.removesuffix('_ms')} {telling.duration(ms / 1e3)}"
                         for name, ms in now["lost_ms"].items() if ms >= 1)  # fmt: skip
        table.add_row("goodput", f"{100 * now['goodput']:.2f} %" + (f"   lost: {lost}" if lost else ""))
    causes = ", ".join(f"{count} x {cause}" for cause, count in now["causes"].items())
    table.add_row("recoveries", Text(f"{now['recoveries']}" + (f"   {causes}" if causes else "")))
    return table


def _chores(chores: Sequence[Mapping[str, Any]]) -> Table:
    """A line for each, with a bar where it is known how much there is to do."""
    table = Table(show_header=False, box=None, pad_edge=False)
    for chore in chores:
        bar = _bar(chore["done_bytes"] / chore["all_bytes"]) if chore["all_bytes"] else ""
        table.add_row(bar, telling.tell(chore))
    return table


def _bar(share: float) -> Text:
    return Text(f"{'█' * round(_BAR * share):░<{_BAR}}", style="cyan")


def _copies(copies: Sequence[Mapping[str, Any]]) -> Table:
    """Those that have the longest way to go, and how many there are besides."""
    done, size = (sum(copy[name] for copy in copies) for name in ("done_bytes", "bytes"))
    table = Table(title=f"copies in the background: {telling.size(done)} of {telling.size(size)} are there",
                  title_justify="left", show_header=False, box=None, pad_edge=False)  # fmt: skip
    for _ in range(4):
        table.add_column(overflow="fold")
    for copy in sorted(copies, key=lambda copy: copy["done_bytes"] - copy["bytes"])[:_COPIES]:
        there, whole = copy["done_bytes"], copy["bytes"]
        pace = "" if not copy["bytes_per_s"] else (
            f"{telling.size(copy['bytes_per_s'])}/s, {telling.duration(copy['left_s'])} left")
        source = "" if copy["source"] is None else f" from {copy['source']}: {copy['unit']}"
        table.add_row(f"rank {copy['rank']}{source}", _bar(there / whole),
                      f"{telling.size(there)} of {telling.size(whole)}", pace)  # fmt: skip
    if len(copies) > _COPIES:
        table.add_row(f"and {len(copies) - _COPIES} more ranks")
    return table


def grid(layout: Layout, slow: Mapping[int, float]) -> Table:
    """The layout as a picture: a row for each stage, with its cells and how many grains each computes."""
    table = Table(title=f"layout of epoch {layout.epoch}, {layout.num_grains} grains a step", title_justify="left",
                  pad_edge=False)
    table.add_column("stage", no_wrap=True)
    table.add_column("units", overflow="fold")
    table.add_column("cells, as ranks: grains", overflow="fold")
    for index, stage in enumerate(layout.stages):
        cells = Text("   ").join(_cell(cell, slow.get(cell.leader)) for cell in stage.cells)
        table.add_row(str(index), span_of([layout.units[unit] for unit in stage.units]), cells)
    for name, ranks in (("spare", layout.spares), ("lost", layout.lost)):
        if ranks:
            table.add_row(name, "", telling.ranks(ranks), style="dim")
    return table


def span_of(names: Sequence[str]) -> str:
    """What a stage holds, in few words: layers and whatever is not of a layer."""
    layers = [name.partition(".")[2] for name in names if name.startswith("layer.")]
    others = [name for name in names if "." not in name or name.startswith("mtp.")]
    span = [] if not layers else [f"layers {layers[0]}-{layers[-1]}" if len(layers) > 1 else f"layer {layers[0]}"]
    return ", ".join([*(name for name in others if name == "embedding"), *span,
                      *(name for name in others if name != "embedding")])  # fmt: skip


def _cell(cell: Cell, times: float | None) -> Text:
    if cell.shadow:
        return Text(f"{cell.name}: follows", style="cyan")
    share = f"{cell.name}: {len(cell.share)}"
    return Text(share) if times is None else Text(f"{share} ({times:.1f} times as slow)", style="red")


def _events(events: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title="last events", title_justify="left", show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim", no_wrap=True, min_width=8)
    table.add_column(no_wrap=True, min_width=max(len(event["kind"]) for event in events))
    table.add_column(overflow="fold")
    for event in events:
        # As texts, in which brackets are no markup wherever they are shown.
        table.add_row(time.strftime("%H:%M:%S", time.localtime(event["time"])), Text(str(event["kind"])),
                      Text(telling.tell(event)))  # fmt: skip
    return table
