"""How far predicted steps are from measured ones. ``megatron-elastic bench prediction TABLE.csv``.

Constants are fitted on some rows of the table and held against the others, never against their own: on fractions drawn
at random, with several seeds; on all rows with one value of a column (one number of devices, one hidden size, ...),
which asks for rows unlike those that were fitted on; and on all rows up to a value, which asks for larger ones. Each
time the model alone, and with what it misses on the fitted rows carried over. Where the times are shuffled among the
rows there is nothing to be learned: errors then must be large. With ``--other``, constants of the random fractions are
also held against another table.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from common import emit, load_average, progress
from numpy.typing import NDArray

from megatron_elastic.plan.predict import (
    Case,
    Check,
    Columns,
    Constants,
    Device,
    DeviceError,
    Predictor,
    Table,
    TableError,
    calibrate,
    likely_unit,
)

COLUMNS = ("devices", "tp", "pp", "dp", "micro_batch", "hidden", "layers", "seq_length")
"""By which rows are told apart."""
FEWEST = 10
"""Rows to fit on, and to test on."""

_Rows = NDArray[np.intp]


def errors(predictor: Predictor, table: Table, rows: _Rows | None = None) -> dict[str, float]:
    """Mean, median and worst relative error on some rows."""
    figures = Check.of(table, predictor).summary(None if rows is None else rows.tolist())
    return {name: round(float(value), 4) for name, value in figures.items()}


def held_out(
    table: Table, seconds: NDArray[np.float64], fitted: _Rows, device: Device
) -> tuple[dict[str, Any], Predictor]:
    """Errors on the rows that are not fitted on, and the model alone."""
    others = np.setdiff1d(np.arange(len(table.cases)), fitted)
    begun = time.process_time()
    calibration = calibrate(Columns.of(table.cases).take(fitted), seconds[fitted], device)
    took = time.process_time() - begun
    chosen = calibration.predictor
    model = replace(chosen, residual=None)
    figures = {
        "fitted": len(fitted), "fit_cpu_s": round(took, 2), "model": errors(model, table, others),
        "chosen": errors(chosen, table, others), "corrected": chosen.residual is not None,
    }  # fmt: skip
    return figures, model


def by_value(cases: Sequence[Case]) -> Iterator[tuple[str, _Rows]]:
    """Rows with one value of a column, where there are others, too."""
    for column in COLUMNS:
        values = np.array([getattr(case, column) for case in cases])
        for value in np.unique(values):
            rows = np.flatnonzero(values == value)
            if FEWEST <= len(rows) <= len(cases) - FEWEST:
                yield f"{column} {value}", rows


def up_to(cases: Sequence[Case]) -> Iterator[tuple[str, _Rows]]:
    """Rows with at most one value of a column, where there are larger ones."""
    for column in COLUMNS:
        values = np.array([getattr(case, column) for case in cases])
        for value in np.unique(values)[:-1]:
            rows = np.flatnonzero(values <= value)
            if FEWEST <= len(rows) <= len(cases) - FEWEST:
                yield f"{column} up to {value}", rows


def main(argv: Sequence[str]) -> int:
    """Run the benchmark and return the exit code."""
    parser = argparse.ArgumentParser(prog="megatron-elastic bench prediction", description=__doc__)
    parser.add_argument("table", type=Path, metavar="TABLE.csv", help="as for megatron-elastic predict --check")
    parser.add_argument("--other", type=Path, metavar="OTHER.csv", help="tested only, with constants of TABLE.csv")
    parser.add_argument("--fraction", type=_fractions, default=[0.1], metavar="X,...", help="fitted on (default: 0.1)")
    parser.add_argument("--seeds", type=int, default=10, metavar="N", help="random fractions (default: %(default)s)")
    parser.add_argument("--device", default="a100-80g", metavar="NAME", help="(default: %(default)s)")
    parser.add_argument("--recompute", choices=("full", "none"), default="full", help="(default: %(default)s)")
    options = parser.parse_args(argv)
    if options.seeds < 1:
        parser.error("--seeds must be at least 1")
    load = load_average()
    try:
        device = Device.named(options.device)
        table = Table.read(options.table, options.recompute == "full")
        other = Table.read(options.other, options.recompute == "full") if options.other else None
    except (DeviceError, TableError, OSError) as error:
        parser.error(str(error))
    seconds = table.seconds(likely_unit(table, Predictor(device, Constants())))
    random, shuffled, transferred = [], [], []
    for fraction, seed in product(options.fraction, range(options.seeds)):
        count = max(1, int(len(table.cases) * fraction))
        draw = np.random.default_rng(seed)
        rows = np.sort(draw.permutation(len(table.cases))[:count])
        figures, model = held_out(table, seconds, rows, device)
        random.append({"fraction": fraction, "seed": seed, **figures})
        progress(f"{fraction:g} of the rows, seed {seed}: {figures}")
        order = draw.permutation(len(table.cases))
        figures, _ = held_out(replace(table, times=table.times[order]), seconds[order], rows, device)
        shuffled.append({"fraction": fraction, "seed": seed, **figures})
        if other is not None:
            transferred.append({"fraction": fraction, "seed": seed, **errors(model, other)})
    by_rows = {}
    for name, rows in (*by_value(table.cases), *up_to(table.cases)):
        by_rows[name], _ = held_out(table, seconds, rows, device)
        progress(f"fitted on {name}: {by_rows[name]}")
    expected = Predictor(device, Constants())
    emit("prediction", argv, {
        "rows": len(table.cases), "device": device.name, "unfitted": errors(expected, table), "random": random,
        "curve": [{"fraction": fraction, **_summary(random, fraction)} for fraction in options.fraction],
        "shuffled": [{"fraction": fraction, **_summary(shuffled, fraction)} for fraction in options.fraction],
        "by_rows": by_rows, "other": transferred, "load_before": load,
    })  # fmt: skip
    return 0


def _fractions(text: str) -> list[float]:
    """Raises argparse.ArgumentTypeError."""
    try:
        fractions = [float(part) for part in text.split(",")]
    except ValueError:
        fractions = []
    if not fractions or not all(0 < fraction < 1 for fraction in fractions):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number between 0 and 1, nor several like 0.01,0.1")
    return fractions


def _summary(results: Sequence[dict[str, Any]], fraction: float) -> dict[str, dict[str, float]]:
    """Figures over the seeds of one fraction."""
    figures = {}
    for which, figure in product(("model", "chosen"), ("mean_error", "median_error", "worst")):
        values = [result[which][figure] for result in results if result["fraction"] == fraction]
        mean = round(float(np.mean(values)), 4)
        figures[f"{which}_{figure}"] = {"mean": mean, "least": min(values), "most": max(values)}
    return figures
