"""Check: how far predictions are from what was measured."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

import numpy as np
from rich.console import Console

from megatron_elastic.config import UsageError
from megatron_elastic.plan.predict import (
    FITTED,
    Calibration,
    Check,
    Columns,
    Constants,
    Device,
    Predictor,
    Table,
    calibrate,
    likely_unit,
)
from megatron_elastic.plan.predict.measured.scatter import svg
from megatron_elastic.prediction.cases import refuse
from megatron_elastic.prediction.shown import figures_of, layout_of, percent
from megatron_elastic.tables import console, grid

_WORST = 5
"""Rows that a check shows."""
_BIASED = 1.3
"""Predictions that are off by this factor at the median are not of this kind of device."""


def show(options: argparse.Namespace, device: Device, constants: Constants | None) -> None:
    """Print how far predictions are off, and write what else is wanted. Raises UsageError, TableError."""
    refuse(options, ("scale_table", "profile", "run", "out", "devices", "best"),
           "and --check are two things: leave one out")  # fmt: skip
    if options.fit is None and (options.save_constants or options.model_only):
        raise UsageError("--save-constants and --model-only need --fit OTHER.csv")
    recompute = options.recompute != "none"
    table = Table.read(options.check, recompute, options.vocab)
    screen = console(160)
    fitted_on, calibration = None, None
    if options.fit is None:
        predictor = Predictor(device, constants or FITTED)
    else:
        fitted_on = Table.read(options.fit, recompute, options.vocab)
        expected = Predictor(device, constants or Constants())
        seconds = fitted_on.seconds(likely_unit(fitted_on, expected))
        calibration = calibrate(Columns.of(fitted_on.cases), seconds, device, constants)
        predictor = calibration.predictor
        if options.model_only:
            predictor = replace(predictor, residual=None)
    check = Check.of(table, predictor)
    if not options.json:
        _print_read(screen, check, recompute, device)
        _print_constants(screen, predictor, fitted_on, calibration, options)
        _print_errors(screen, check, fitted_on)
    if options.save_constants:
        options.save_constants.write_text(predictor.constants.to_json(), encoding="utf-8")
    if options.svg:
        options.svg.write_text(svg(check, f"{table.name}, {device.name}"), encoding="utf-8")
    print(check.to_json(), flush=True)


def _print_read(screen: Console, check: Check, recompute: bool, device: Device) -> None:
    table = check.table
    read = ", ".join(f"{role} from {title!r}" for role, title in table.columns.items())
    without = f", {table.skipped} without a time left out" if table.skipped else ""
    screen.print(f"{table.name}: {len(table.cases)} rows{without}: {read}")
    if table.unknown:
        screen.print(f"columns that say nothing here: {', '.join(map(repr, table.unknown))}")
    taken = [] if "recompute" in table.columns else ["full recomputation" if recompute else "no recomputation"]
    taken += [] if "vocab_size" in table.columns else [f"a vocabulary of {table.cases[0].vocab_size}"]
    if table.unit is None:
        seconds = check.measured[0] / table.times[0]
        taken.append("times in " + ("seconds" if seconds == 1 else "milliseconds") + ", which the table does not say")
    if taken:
        screen.print(f"taken to be so: {', '.join(taken)}")
    screen.print(f"{device.name}: {figures_of(device)}")


def _print_constants(
    screen: Console, predictor: Predictor, fitted_on: Table | None, calibration: Calibration | None,
    options: argparse.Namespace,
) -> None:  # fmt: skip
    if fitted_on is None:
        source = f"those of {options.constants}" if options.constants else (
            "the defaults, fitted on 144 rows of vTrain's table of one node: of that table not all rows are new to them"
        )  # fmt: skip
        screen.print(f"constants: {source}")
    else:
        screen.print(f"constants: fitted on {len(fitted_on.cases)} rows of {fitted_on.name}")
    if calibration is not None and calibration.model_error is not None and calibration.residual_error is not None:
        chosen = "taken" if predictor.residual is not None else "not taken"
        screen.print(
            f"held out in turn there, mean error: {percent(calibration.model_error)} of the model alone, "
            f"{percent(calibration.residual_error)} with what it misses on other rows ({chosen})"
        )
    shown = grid("constant", "value", "expected", "", "what it is")
    start = Constants.from_json(options.constants.read_bytes()) if options.constants else Constants()
    for name, prior in Constants.priors().items():
        value, expected = getattr(predictor.constants, name), getattr(start, name)
        shown.add_row(name, f"{value:.3g}", f"{expected:.3g}", prior.unit, prior.what)
    screen.print(shown)


def _print_errors(screen: Console, check: Check, fitted_on: Table | None) -> None:
    cases = check.table.cases
    for what, keys in {
        "devices": [case.devices for case in cases],
        "TP": [case.tp for case in cases],
        "micro-batch": [case.micro_batch for case in cases],
    }.items():
        shown = grid(what, "rows", "mean", "median", "worst")
        for key in sorted(set(keys)):
            figures = check.summary([index for index, other in enumerate(keys) if other == key])
            errors = (percent(figures[name]) for name in ("mean_error", "median_error", "worst"))
            shown.add_row(str(key), str(figures["rows"]), *errors)
        screen.print(shown)
    shown = grid("worst, line", "model", "layout", "batch", "measured", "predicted", "error")
    for index in np.argsort(-check.errors, kind="stable")[:_WORST]:
        case = cases[index]
        shown.add_row(
            str(check.table.lines[index]), f"{case.layers} layers, hidden {case.hidden}", layout_of(case),
            str(case.global_batch), f"{1e3 * check.measured[index]:.1f} ms", f"{1e3 * check.predicted[index]:.1f} ms",
            percent(check.errors[index]),
        )  # fmt: skip
    screen.print(shown)
    if not 1 / _BIASED < check.bias < _BIASED:
        screen.print(
            f"predictions are {check.bias:.2f} times what was measured at the median: the table may be of other "
            "devices, or of runs with or without recomputation: see --device, --recompute, --fit"
        )
    known = set() if fitted_on is None else set(check.known(fitted_on))
    if fitted_on is not None and known:
        screen.print(f"{len(known)} of the rows are also in {fitted_on.name}, on which the constants were fitted")
        if others := [index for index in range(len(cases)) if index not in known]:
            screen.print(f"the {len(others)} others: {json.dumps(check.summary(others))}")
