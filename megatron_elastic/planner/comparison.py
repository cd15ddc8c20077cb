"""Comparison: what each policy makes of the same loss, predicted. ``megatron-elastic plan --policy NAME|all``."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_elastic.layout import Layout
from megatron_elastic.pipeline.prediction import Prediction, predict, predicted
from megatron_elastic.plan import NoLayout
from megatron_elastic.plan.choice import HORIZON_MS, SCHEDULES, Way, best
from megatron_elastic.plan.costs.cost import Costs
from megatron_elastic.plan.costs.power import PowerModel
from megatron_elastic.plan.policies import POLICIES, Outcome
from megatron_elastic.plan.policies.elastic import Elastic
from megatron_elastic.plan.work.clock import clocks

_OURS = Elastic.name


@dataclass(frozen=True, slots=True)
class Row:
    """What one policy makes of a loss; ``problem`` says why it cannot go on, if so."""

    policy: str
    outcome: Outcome | None = None
    interim: Prediction | None = None
    """Until all is where it is to be, if that takes work in the background."""
    after: Prediction | None = None
    clocked: Prediction | None = None
    """What it makes of it with planned clocks, if they were asked for and it is ours."""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Of all policies that were asked for."""

    before: Prediction
    limit: float
    """Share of the ranks that compute which are left. Who waits less than before can be faster than that."""
    rows: tuple[Row, ...]
    considered: tuple[Way, ...] = ()
    """What ours has to choose from, where it is asked for."""


def compare(
    layout: Layout,
    lost: Collection[int],
    costs: Costs,
    names: Iterable[str] = tuple(POLICIES),
    *,
    schedules: Collection[str] = SCHEDULES,
    power: PowerModel | None = None,
    clocked: Costs | None = None,
) -> Comparison:
    """What the policies of these names make of the loss of ranks. All may use all ``schedules``.

    ``clocked``: costs of a job that sets clocks, with its power; for ours alone.
    """
    rows, considered = [], tuple[Way, ...]()
    for name in names:
        try:
            outcome = POLICIES[name].foresee(layout, lost, costs, schedules)
        except NoLayout as error:
            rows.append(Row(name, problem=str(error)))
            continue
        interim = outcome.interim
        at_clocks = None
        if name == _OURS:
            considered = Elastic().considered(interim or outcome.layouts[0], clocked or costs, schedules)
            if clocked is not None:
                at_clocks = _at_clocks(layout, lost, clocked, schedules)
        rows.append(Row(
            name, outcome,
            interim=None if interim is None else predict(interim, costs, schedules=schedules, power=power),
            after=predicted(outcome, costs, schedules=schedules, power=power), clocked=at_clocks,
        ))  # fmt: skip
    working = {rank for cell in layout.cells.values() if not cell.shadow for rank in cell.ranks}
    before = predict(layout, costs, schedules=schedules, power=power)
    return Comparison(before, len(working.difference(lost)) / len(working), tuple(rows), considered)


def _at_clocks(
    layout: Layout, lost: Collection[int], costs: Costs, schedules: Collection[str]
) -> Prediction:
    reached = Elastic().foresee(layout, lost, costs, schedules).layouts[0]
    chosen = clocks(reached, costs, lambda each: predict(reached, costs, each, schedules=schedules).step_ms)
    return predict(reached, costs, chosen, schedules=schedules, power=costs.power)


def figures(comparison: Comparison, tokens: int) -> dict[str, Any]:
    """What ``--json`` prints; ``tokens`` of a grain."""
    before = comparison.before
    found: dict[str, Any] = {}
    for row in comparison.rows:
        if row.outcome is None or row.after is None:
            found[row.policy] = {"problem": row.problem}
            continue
        share = row.after.share_of(before)
        found[row.policy] = {
            "step_ms": round(row.after.step_ms, 3), "tokens_per_s": round(row.after.tokens_per_s(tokens), 3),
            "share": round(share, 4), "share_of_limit": round(share / comparison.limit, 4),
            "interim_share": None if row.interim is None else round(row.interim.share_of(before), 4),
            "batch": round(row.after.grains / before.grains, 4),
            "pause_ms": round(row.outcome.pause_ms, 3), "background_ms": round(row.outcome.background_ms, 3),
            "joules_per_token": row.after.joules_per_token(tokens),
            "executable": POLICIES[row.policy].refusal is None,
        }  # fmt: skip
        if row.clocked is not None:
            found[row.policy]["clocked"] = {
                "step_ms": round(row.clocked.step_ms, 3), "share": round(row.clocked.share_of(before), 4),
                "joules_per_token": row.clocked.joules_per_token(tokens),
            }  # fmt: skip
    return {
        "before": {"step_ms": round(before.step_ms, 3), "tokens_per_s": round(before.tokens_per_s(tokens), 3),
                   "joules_per_token": before.joules_per_token(tokens)},
        "limit_share": round(comparison.limit, 4),
        "policies": found,
        "considered": [
            {"way": way.name, "widths": [stage.width for stage in way.layout.stages], "step_ms": round(way.step_ms, 3),
             "moves_ms": round(way.moves_ms, 3) if math.isfinite(way.moves_ms) else None, "gain": round(way.gain, 4),
             "problem": way.problem, "chosen": way is _chosen(comparison),
             **({"base_ms": round(way.base_ms, 3)} if way.clocks else {})}
            for way in comparison.considered
        ],
    }  # fmt: skip


def show(console: Console, comparison: Comparison, tokens: int) -> None:
    """Print it as a table."""
    before = comparison.before
    console.print(f"undisturbed: step {before.step_ms:.1f} ms, {before.tokens_per_s(tokens):.4g} tokens a second"
                  + _joules(before, tokens, " J a token"))  # fmt: skip
    console.print(f"left to compute with: {comparison.limit:.1%} of the ranks\n")
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    columns = ["policy", "step", "tokens/s", "of undisturbed", "of the limit", "until then", "pause", "background"]
    if before.joules is not None:
        columns.append("J/token")
    for name in (*columns, ""):
        table.add_column(name, justify="left" if name in ("policy", "") else "right")
    for row in comparison.rows:
        table.add_row(*_cells(row, comparison, tokens))
        if row.clocked is not None:
            share = row.clocked.share_of(before)
            table.add_row("  with clocks", f"{row.clocked.step_ms:.1f} ms", f"{row.clocked.tokens_per_s(tokens):.4g}",
                          f"{share:.1%}", f"{share / comparison.limit:.1%}", "", "", "",
                          f"{row.clocked.joules_per_token(tokens):.4g}")  # fmt: skip
    console.print(table)
    _show_considered(console, comparison)
    for row in comparison.rows:
        policy = POLICIES[row.policy]
        console.print(f"\n{row.policy}: {policy.idea}")
        if policy.refusal is not None:
            console.print(f"  predicted only: {policy.refusal}")
        if row.problem:
            console.print(f"  cannot go on: {row.problem}")


def _chosen(comparison: Comparison) -> Way | None:
    return best(comparison.considered) if comparison.considered else None


def _show_considered(console: Console, comparison: Comparison) -> None:
    if not comparison.considered:
        return
    console.print(f"\nconsidered by {_OURS}, with {HORIZON_MS / 3.6e6:g} h until the next event:")
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    clocked = any(way.clocks for way in comparison.considered)
    steps = ("step with clocks", "without") if clocked else ("step",)
    for name in ("way", "cells of each stage", *steps, "moves", "grains until then", ""):
        table.add_column(name, justify="left" if name in ("way", "cells of each stage", "") else "right")
    chosen = _chosen(comparison)
    for way in comparison.considered:
        widths = " ".join(str(stage.width) for stage in way.layout.stages)
        base = [f"{way.base_ms:.1f} ms"] if clocked else []
        table.add_row(way.name, widths, f"{way.step_ms:.1f} ms", *base, _time(way.moves_ms), f"{way.gain:.3f}",
                      "chosen" if way is chosen else "does not fit" if way.problem else "")  # fmt: skip
    console.print(table)


def _cells(row: Row, comparison: Comparison, tokens: int) -> Sequence[str]:
    if row.outcome is None or row.after is None:
        return row.policy, *["-"] * (8 if comparison.before.joules is not None else 7), "cannot go on"
    share = row.after.share_of(comparison.before)
    notes = [] if POLICIES[row.policy].refusal is None else ["predicted only"]
    if row.after.grains != comparison.before.grains:
        notes.append(f"batch {row.after.grains / comparison.before.grains:.0%}")
    cells = [
        row.policy, f"{row.after.step_ms:.1f} ms", f"{row.after.tokens_per_s(tokens):.4g}", f"{share:.1%}",
        f"{share / comparison.limit:.1%}",
        "" if row.interim is None else f"{row.interim.share_of(comparison.before):.1%}",
        _time(row.outcome.pause_ms), _time(row.outcome.background_ms),
    ]  # fmt: skip
    if row.after.joules is not None:
        cells.append(f"{row.after.joules_per_token(tokens):.4g}")
    return *cells, ", ".join(notes)


def _joules(prediction: Prediction, tokens: int, unit: str) -> str:
    joules = prediction.joules_per_token(tokens)
    return "" if joules is None else f", {joules:.4g}{unit}"


def _time(ms: float) -> str:
    return "-" if not ms else f"{ms:.0f} ms" if ms < 1e4 else f"{ms / 1e3:.0f} s"
