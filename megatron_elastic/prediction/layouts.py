"""Layouts: how long steps of models and layouts of given shapes take, as tables, JSON or a plot."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from megatron_elastic.config import UsageError
from megatron_elastic.plan.predict import Case, CaseError, Columns, Predictor, footprint, predict
from megatron_elastic.plan.predict.sweep import Point, svg
from megatron_elastic.prediction.cases import cases_of, refuse
from megatron_elastic.prediction.shown import degrees, figures_of, layout_of
from megatron_elastic.tables import console, grid

_MOST_SHOWN = 200
"""Layouts that a table shows; --json has all."""


def show(options: argparse.Namespace, predictor: Predictor) -> None:
    """Print the predictions. Raises UsageError, CaseError."""
    refuse(options, ("fit", "save_constants", "model_only"), "needs --check TABLE.csv")
    refuse(options, ("profile", "run", "out"), "needs --scale-table N,...")
    cases = cases_of(options, predictor.device.per_node)
    possible: list[Case] = []
    refused: list[str] = []
    for case in cases:
        try:
            case.check()
            possible.append(case)
        except CaseError as error:
            refused.append(f"{layout_of(case)}: {error}")
    if not possible:
        why = refused[0] if refused else "what is given of TP, PP and DP never makes so many devices"
        raise UsageError(why if len(refused) <= 1 else f"none of {len(refused)} layouts can be; {why}")
    figures = sorted(_figures(possible, predictor), key=lambda row: -row["tokens_per_s"])
    if options.svg:
        points = [Point(row["name"], row["devices"], row["tokens_per_s"], row["fits"]) for row in figures]
        title = f"{options.layers} layers of {options.hidden}, {predictor.device.name}"
        options.svg.write_text(svg(points, title), encoding="utf-8")
    if options.best:
        figures = _best(figures)
    if options.json:
        print(json.dumps({"device": predictor.device.name, "cases": figures, "refused": refused}))
        return
    screen = console(160)
    screen.print(f"{predictor.device.name}: {figures_of(predictor.device)}")
    table = grid("devices", "layout", "grain", "step", "tokens/s", "MFU", "computing", "collectives", "bubble",
                 "reduction", "update", "memory", padding=2)  # fmt: skip
    for row in figures[:_MOST_SHOWN]:
        parts = row["parts_ms"]
        shares = (f"{100 * parts[name] / row['step_ms']:.0f}%" for name in parts)
        memory = f"{row['memory_bytes'] / 1e9:.1f} GB"
        table.add_row(
            str(row["devices"]), row["name"], str(row["micro_batch"]), f"{row['step_ms']:.1f} ms",
            f"{row['tokens_per_s']:.0f}", f"{100 * row['utilisation']:.0f}%", *shares,
            memory if row["fits"] else f"{memory} does not fit",
        )  # fmt: skip
    screen.print(table)
    if len(figures) > _MOST_SHOWN:
        screen.print(f"and {len(figures) - _MOST_SHOWN} more, which are slower")
    for line in refused if not options.devices else ():
        screen.print(f"cannot be: {line}")


def _best(figures: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The fastest that fits of each number of devices. Raises UsageError where none does."""
    best = {row["devices"]: row for row in reversed(figures) if row["fits"]}
    if not best:
        least = min(figures, key=lambda row: row["memory_bytes"])
        raise UsageError(f"no layout fits the device's memory: {least['name']}, micro-batch {least['micro_batch']}, "
                         f"needs least, {least['memory_bytes'] / 1e9:.1f} GB")  # fmt: skip
    return [best[count] for count in sorted(best)]


def _figures(cases: Sequence[Case], predictor: Predictor) -> Iterable[Mapping[str, Any]]:
    """What is printed of each case."""
    columns = Columns.of(cases)
    step, memory = predict(columns, predictor.device, predictor.constants), footprint(columns)
    collectives = columns.grains * columns.stage_layers * step.layer_collectives
    computing = step.busy - collectives
    for index, case in enumerate(cases):
        seconds = float(step.total[index])
        parts = {
            "computing": computing, "collectives": collectives, "bubble": step.bubble, "reduction": step.reduction,
            "update": step.update,
        }  # fmt: skip
        yield {
            "name": degrees(case), "devices": case.devices, "tp": case.tp, "pp": case.pp, "dp": case.dp,
            "micro_batch": case.micro_batch, "chunks": case.chunks, "step_ms": round(1e3 * seconds, 3),
            "tokens_per_s": round(case.tokens / seconds, 1),
            "utilisation": round(_flops(case) / seconds / case.devices / predictor.device.flops, 4),
            "parts_ms": {name: round(1e3 * float(part[index]), 3) for name, part in parts.items()},
            "memory_bytes": round(float(memory[index])),
            "fits": bool(memory[index] <= predictor.device.memory_bytes),
        }  # fmt: skip


def _flops(case: Case) -> float:
    """Of a step, without what is recomputed."""
    columns = Columns.of([case])
    layer = columns.layer_weights + 2 * case.seq_length * case.hidden
    return float(6 * case.tokens * (case.layers * layer + columns.embedding_weights)[0])
