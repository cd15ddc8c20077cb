"""Scaling: ``megatron-elastic plan --devices``, what a job's scale table says of a number of devices."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_elastic import usage
from megatron_elastic.plan.predict import Entry, ScaleTable, ScaleTableError

_DESCRIPTION = """\
Show what a job would have with another number of devices: the layout, and how fast it would be there, from the scale
table that the job keeps in its run directory while it trains (--elastic-profile). Where a number is not worth having,
the next smaller one that is, and why."""


def make_parser() -> argparse.ArgumentParser:
    """The flags of ``megatron-elastic plan --devices``."""
    parser = argparse.ArgumentParser(
        prog="megatron-elastic plan --devices", description=_DESCRIPTION, formatter_class=usage.Formatter
    )
    parser.add_argument(
        "--devices", type=usage.count, required=True, metavar="N", help="devices that the job would have"
    )
    parser.add_argument(
        "run", type=Path, metavar="RUN_DIR", help="the job's run directory, or a file that predict --scale-table wrote"
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON instead of a sentence")
    return parser


def main(argv: Sequence[str]) -> int:
    """``megatron-elastic plan --devices``: 0, or 2 where there is no table, or nothing in it for so few devices."""
    options = make_parser().parse_args(argv)
    path = options.run / "scale_table.json" if options.run.is_dir() else options.run
    try:
        table = ScaleTable.from_json(path.read_bytes())
    except FileNotFoundError:
        return _refuse(f"{path} is not there: a job with --elastic-profile keeps one while it trains, and "
                       "megatron-elastic predict --scale-table N,... --run RUN_DIR makes one")  # fmt: skip
    except (ScaleTableError, OSError) as error:
        return _refuse(f"{path}: {error}")
    used = max((count for count in table.entries if count <= options.devices), default=None)
    why = None if used == options.devices else _why(table, options.devices)
    if used is None:
        least = min(table.entries, default=None)
        return _refuse(f"{path} has no layout of {options.devices} devices or fewer: {why}"
                       + ("" if least is None else f"; the least is {least}"))  # fmt: skip
    entry = table.entries[used]
    if options.json:
        print(json.dumps(figures(options.devices, entry, why)))
        return 0
    print(f"{options.devices} devices" + ("" if why is None else f" ({why}), of which {used} are of use") + ":")
    print(f"  TP{entry.tp} PP{entry.pp} DP{entry.dp}, micro-batches of {entry.micro_batch}, {entry.schedule}"
          + (f", {entry.chunks} chunks a stage" if entry.chunks > 1 else ""))  # fmt: skip
    sure = "of one predictor only" if entry.confidence is None else f"confidence {entry.confidence:.2f}"
    print(f"  {entry.tokens_per_s:.0f} tokens/s, steps of {entry.step_ms:.1f} ms, "
          f"{entry.memory_bytes / 1e9:.1f} GB on the device that needs most; {sure}")  # fmt: skip
    return 0


def figures(asked: int, entry: Entry, why: str | None) -> dict[str, Any]:
    """For the line of JSON: ``asked`` devices, those of ``entry`` that are of use, and ``why`` not all are."""
    return {"asked": asked, **asdict(entry), "why": why}


def _why(table: ScaleTable, count: int) -> str:
    """There is no entry of so many devices."""
    if count in table.left_out:
        return table.left_out[count]
    known = sorted({*table.entries, *table.left_out})
    span = f"it goes from {known[0]} to {known[-1]} devices" if known else "it is empty"
    return f"the table says nothing of so many, {span}; megatron-elastic predict --scale-table makes another"


def _refuse(why: str) -> int:
    print(f"megatron-elastic plan: error: {why}", file=sys.stderr)
    return 2
