"""Scale: the best layout for each number of devices, from shapes or from what a job has measured."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from megatron_elastic.config import UsageError
from megatron_elastic.layout import Layout, gpt_units
from megatron_elastic.observe.place import epochs
from megatron_elastic.observe.records import check_fields, read_metrics
from megatron_elastic.observe.run import read_layout
from megatron_elastic.plan import Costs
from megatron_elastic.plan.predict import (
    Case,
    Predictor,
    ScaleTable,
    ScaleTableError,
    by_model,
    by_profile,
    divisions,
    scale_table,
)
from megatron_elastic.plan.predict.likeness import resized
from megatron_elastic.plan.predict.outlook import outlook
from megatron_elastic.plan.predict.past import past
from megatron_elastic.prediction.cases import cases_of, refuse
from megatron_elastic.prediction.shown import degrees
from megatron_elastic.tables import console, grid


def show(options: argparse.Namespace, predictor: Predictor) -> None:
    """Make the table, write it where it is wanted, and print it. Raises UsageError and what is wrong with files."""
    refuse(options, ("fit", "save_constants", "model_only"), "needs --check TABLE.csv")
    refuse(options, ("svg", "devices", "best"), "and --scale-table are two things: leave one out")
    if options.out and options.out.is_dir():
        raise UsageError(f"--out {options.out} is a folder: name a file in it")
    if options.run:
        table, out = _of_run(options), options.out or options.run / "scale_table.json"
    else:
        table, out = _of_shapes(options, predictor), options.out
    if out:
        partial = out.with_name(out.name + ".part")  # whole or not at all: a controller may read it at any moment
        partial.write_text(table.to_json(), encoding="utf-8")
        partial.replace(out)
    if options.json:
        print(json.dumps(json.loads(table.to_json())))
    else:
        _print(table)


def _of_shapes(options: argparse.Namespace, predictor: Predictor) -> ScaleTable:
    """By the model; with a profile by that, where the model agrees."""
    present = cases_of(options, predictor.device.per_node)[0]
    present.check()
    model, memory = by_model(predictor), predictor.device.memory_bytes

    def layouts(count: int) -> list[Case]:
        return divisions(count, present, options.tp or [1], options.virtual_stages)

    if options.profile is None:
        return scale_table(options.scale_table, layouts, model, present=present, memory_bytes=memory)
    units, _ = gpt_units(present.layers, 1, tied=True, positions=False)
    costs = Costs.read(options.profile, units)
    return scale_table(
        options.scale_table, layouts, by_profile(costs, units, True, present), present=present, second=model,
        memory_bytes=memory if costs.memory_bytes is None else costs.memory_bytes,
    )  # fmt: skip


def _of_run(options: argparse.Namespace) -> ScaleTable:
    """By what a job has measured: its newest layout, ``profile.json``, and the tokens of its last step."""
    known = epochs(options.run)
    if not known:
        raise UsageError(f"{options.run} is not the folder of a run: it has no layouts")
    layout = read_layout(options.run, known[-1])
    path = options.run / "profile.json"
    if not path.exists():
        raise UsageError(f"{path} is not there (yet): start the job with --elastic-profile measured")
    costs = Costs.read(path, layout.units)
    metrics = read_metrics(options.run)
    if not metrics:
        raise UsageError(f"there is no step in the records of {options.run} yet, so its speed is not known")
    for step, record in metrics.items():
        check_fields(record, ("step_ms", "tokens_per_s"), f"step {step} in {options.run / 'metrics.jsonl'}")
    last = metrics[max(metrics)]
    tokens = round(last["tokens_per_s"] * last["step_ms"] / 1e3)
    return outlook(layout, costs, tokens, options.scale_table, _sizes_of_run(options.run, layout),
                   past(layout, (read_layout(options.run, epoch) for epoch in known), metrics.values()))  # fmt: skip


def _sizes_of_run(run: Path, layout: Layout) -> Case | None:
    """The present layout with the sizes that the job itself has written, if it has."""
    try:
        written = ScaleTable.from_json((run / "scale_table.json").read_bytes()).present
    except (OSError, ScaleTableError):
        return None
    return None if written is None else resized(written, layout)


def _print(table: ScaleTable) -> None:
    screen = console(160)
    shown = grid("devices", "layout", "schedule", "step", "tokens/s", "memory", "confidence")
    for entry in table.entries.values():
        shown.add_row(
            str(entry.devices), degrees(entry), entry.schedule,
            f"{entry.step_ms:.1f} ms", f"{entry.tokens_per_s:.0f}", f"{entry.memory_bytes / 1e9:.1f} GB",
            "-" if entry.confidence is None else f"{entry.confidence:.2f}",
        )  # fmt: skip
    screen.print(shown)
    for count, why in table.left_out.items():
        screen.print(f"{count}: {why}")
