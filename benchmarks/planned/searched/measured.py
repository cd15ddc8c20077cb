"""Measured: emulated jobs under each schedule, against each other and against what was foreseen of them."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from common import JobFailed, progress, run_job, run_root
from emulated.job import SCRIPT, asked_for, flags_of_job

from megatron_elastic.emulation.command import grid
from megatron_elastic.emulation.forecast import forecast
from megatron_elastic.layout import Layout
from megatron_elastic.observe.records import read_events, read_metrics

SCHEDULES = ("1f1b", "split", "search", "placed")
"""``placed``: a search that may place chunks otherwise."""
_LEFT_OUT = 2
"""Steps at the beginning of a job, or after the change to another order, which also warm things up."""


def jobs(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Run jobs that take turns, and tell of each. Raises JobFailed."""
    with run_root() as root:
        for text in options.layouts.split(";"):
            options.layout = grid(text)
            profile, layout = asked_for(options)
            path = root / "profile.json"
            path.write_text(profile.text)
            for schedule in SCHEDULES:
                run_dir = root / f"{text}-{schedule}"
                # Under ``column`` units stay where they are, whatever the profile says.
                placed = schedule == "placed"
                order = "search" if placed else schedule
                flags = [*flags_of_job(options, options.steps * (1 + 3 * placed)), "--elastic-emulate", str(path),
                         "--elastic-profile", str(path), "--elastic-schedule", order, "--elastic-policy", "column",
                         *(["--elastic-placement", "search"] if placed else [])]  # fmt: skip
                run_job(run_dir, len(layout.ranks), flags, SCRIPT)
                last, times = _times(run_dir, order)
                reached = Layout.from_json((run_dir / "layouts" / f"{last}.json").read_text())
                step, expected = statistics.median(times), forecast(reached, profile, order).step_ms
                progress(f"{text} {schedule}: {step:.0f} ms a step, {expected:.0f} foreseen")
                yield {"layout": text, "schedule": schedule, "through": reached.through(reached.pipeline_size),
                       "steps": len(times), "step_ms": round(step, 1), "foreseen_ms": round(expected, 1),
                       "error": round(expected / step - 1, 4)}  # fmt: skip


def _times(run_dir: Path, schedule: str) -> tuple[int, list[float]]:
    """The last layout's epoch, and steps in it without the first ones."""
    metrics = read_metrics(run_dir)
    last = max(line["epoch"] for line in metrics.values())
    if schedule == "search" and not any(event["kind"] == "ordered" for event in read_events(run_dir)):
        raise JobFailed(f"{run_dir}: no order was looked for; give more --steps, or layouts of which all copies are "
                        "there when a job begins, as they are not with dp1")
    times = [line["step_ms"] for line in metrics.values() if line["epoch"] == last][_LEFT_OUT:]
    if not times:
        raise JobFailed(f"{run_dir}: no steps are left to measure; give more --steps")
    return last, times


def summary(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Median error, and steps against 1F1B, measured and foreseen."""
    by_layout: dict[str, dict[str, dict[str, Any]]] = {}
    for job in found:
        by_layout.setdefault(job["layout"], {})[job["schedule"]] = job
    return {
        "median_error": round(statistics.median(abs(job["error"]) for job in found), 4),
        "worst_error": max((job["error"] for job in found), key=abs),
        **{
            f"{schedule}_to_1f1b": {
                layout: {name: round(of[schedule][name] / of["1f1b"][name], 4) for name in ("step_ms", "foreseen_ms")}
                for layout, of in by_layout.items()
            }
            for schedule in ("search", "placed")
        },
        "jobs": list(found),
    }  # fmt: skip
