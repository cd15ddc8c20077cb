"""Prediction: ``megatron-elastic predict``, which says how long steps take and what memory they need, without a job."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table as Grid

from megatron_elastic import usage
from megatron_elastic.layout import Layout, LayoutError, gpt_units
from megatron_elastic.observe.records import RecordsError, read_metrics
from megatron_elastic.plan import Costs, NoLayout, ProfileError
from megatron_elastic.plan.predict import (
    DEVICES,
    FITTED,
    Calibration,
    Case,
    CaseError,
    Check,
    Columns,
    Constants,
    ConstantsError,
    Device,
    DeviceError,
    Entry,
    Predictor,
    ScaleTable,
    ScaleTableError,
    Table,
    TableError,
    by_model,
    by_profile,
    calibrate,
    divisions,
    footprint,
    likely_unit,
    predict,
    scale_table,
)
from megatron_elastic.plan.predict.likeness import resized
from megatron_elastic.plan.predict.measured.scatter import svg
from megatron_elastic.plan.predict.outlook import outlook
from megatron_elastic.plan.predict.past import past
from megatron_elastic.plan.predict.sweep import Point
from megatron_elastic.plan.predict.sweep import svg as speeds

_EXAMPLES = """\
examples:
  a model in some layouts of 16 devices:
    megatron-elastic predict --layers 48 --hidden 8192 --heads 64 --seq 2048 \\
        --tp 2,4,8 --pp 1,2,4 --dp 2,4 --micro-batch-size 1,2 \\
        --global-batch-size 512 --device a100-80g --recompute full
  all layouts of so many devices, or only the best of each, with a plot:
    megatron-elastic predict --layers 24 --hidden 2048 --heads 16 --seq 2048 \\
        --global-batch-size 256 --micro-batch-size 1,2 \\
        --devices 8,16,32,64 --best --svg speeds.svg
  the fastest layout for each number of devices:
    megatron-elastic predict --layers 24 --hidden 2048 --heads 16 --seq 2048 \\
        --tp 1,2 --pp 4 --dp 4 --micro-batch-size 1 --global-batch-size 256 \\
        --scale-table 4,8,16,32,64
    megatron-elastic predict --scale-table 2-16 --run runs/a
  how far predictions are from what was measured, with constants fitted on
  other rows than those tested:
    megatron-elastic predict --check measured.csv --fit others.csv \\
        --svg errors.svg

docs/prediction.md derives the formulas, and says how the constants were fitted and how far they can be trusted."""
_WORST = 5
"""Rows that a check shows."""
_BIASED = 1.3
"""Predictions that are off by this factor at the median are not of this kind of device."""
_MOST_SHOWN = 200
"""Layouts that a table shows; --json has all."""


class _Refused(Exception):
    """The command cannot do what it was asked; printed without a traceback."""


def main(argv: Sequence[str] | None = None) -> int:
    """``megatron-elastic predict``: print predictions, or their errors, and return the exit code."""
    options = make_parser().parse_args(argv)
    try:
        device = Device.named(options.device)
        constants = Constants.from_json(options.constants.read_bytes()) if options.constants else None
        if options.check is not None:
            _check(options, device, constants)
        else:
            _predict(options, Predictor(device, constants or FITTED))
    except (
        _Refused, CaseError, ConstantsError, DeviceError, LayoutError, NoLayout, ProfileError, RecordsError, TableError,
        OSError,
    ) as error:  # fmt: skip
        print(f"megatron-elastic predict: error: {error}", file=sys.stderr)
        return 2
    return 0


# ---- flags ----------------------------------------------------------------------------------


def _numbers(text: str) -> list[int]:
    """``1,2,4`` or ``8-16``."""
    numbers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        try:
            numbers += range(int(first), int(last) + 1) if dash else [int(first)]
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number, nor several like 1,2,4 or 8-16") from None
    if not numbers or min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be positive numbers")
    return numbers


def make_parser() -> argparse.ArgumentParser:
    """The flags of ``megatron-elastic predict``."""
    parser = argparse.ArgumentParser(
        prog="megatron-elastic predict", formatter_class=usage.Formatter,
        description="Predict step times and memory of layouts, or say how far predictions are from measured ones.",
        epilog=_EXAMPLES,
    )  # fmt: skip
    model = parser.add_argument_group("the model")
    model.add_argument("--layers", "--num-layers", type=int, metavar="N")
    model.add_argument("--hidden", "--hidden-size", type=int, metavar="N")
    model.add_argument("--heads", "--num-attention-heads", type=int, metavar="N")
    model.add_argument("--seq", "--seq-length", type=int, metavar="N")
    model.add_argument("--vocab", "--vocab-size", type=int, default=51_200, metavar="N", help="(default: %(default)s)")
    model.add_argument("--ffn", "--ffn-hidden-size", type=int, default=0, metavar="N", help="(default: 4 x hidden)")
    model.add_argument("--groups", "--num-query-groups", type=int, default=0, metavar="N", help="(default: heads)")
    model.add_argument("--swiglu", action="store_true", help="the networks after attention have gates")
    layout = parser.add_argument_group("layouts: all combinations of what is given, such as --tp 1,2 --pp 4-8")
    layout.add_argument("--devices", type=_numbers, metavar="N,...", help="only layouts of so many: with TP inside a "
                        "node, and any PP and DP, where these are not given")  # fmt: skip
    layout.add_argument("--best", action="store_true", help="only the fastest layout that fits, of each number of "
                        "devices")  # fmt: skip
    layout.add_argument("--tp", "--tensor-model-parallel-size", type=_numbers, metavar="N,...")
    layout.add_argument("--pp", "--pipeline-model-parallel-size", type=_numbers, metavar="N,...")
    layout.add_argument("--dp", type=_numbers, metavar="N,...")
    layout.add_argument("--micro-batch-size", type=_numbers, default=[1], metavar="N,...", help="samples of a grain")
    layout.add_argument("--global-batch-size", type=int, metavar="N", help="samples of a step")
    layout.add_argument("--virtual-stages", type=_numbers, default=[1], metavar="N,...", help="chunks of a stage")
    layout.add_argument("--recompute", choices=("none", "full"), help="activations (default: none; of tables without "
                        "such a column: full)")  # fmt: skip
    layout.add_argument("--overlap-grad-reduce", action="store_true", help="gradients are reduced in the backward")
    layout.add_argument("--use-distributed-optimizer", action="store_true", help="its state is divided among replicas")
    machine = parser.add_argument_group("the machine")
    machine.add_argument("--device", default="a100-80g", metavar="NAME",
                         help=f"one of {', '.join(DEVICES)}, or a file of JSON (default: %(default)s)")  # fmt: skip
    machine.add_argument("--constants", type=Path, metavar="FILE",
                         help="as --save-constants writes it; with --fit, what is expected")  # fmt: skip
    check = parser.add_argument_group("held against measurements")
    check.add_argument("--check", type=Path, metavar="TABLE.csv", help="measured steps; columns are found by name")
    check.add_argument("--fit", type=Path, metavar="OTHER.csv", help="fit the constants on these rows first")
    check.add_argument("--model-only", action="store_true", help="do not carry over what the model misses there")
    check.add_argument("--save-constants", type=Path, metavar="FILE", help="write the constants that were fitted")
    check.add_argument("--svg", type=Path, metavar="FILE", help="draw predicted against measured steps; without "
                       "--check tokens a second by the number of devices")  # fmt: skip
    scale = parser.add_argument_group("the best layout for each number of devices")
    scale.add_argument("--scale-table", type=_numbers, metavar="N,...", help="for these numbers; --tp and "
                       "--virtual-stages are tried, the other sizes given are those of the present layout")  # fmt: skip
    scale.add_argument("--profile", type=Path, metavar="P.json", help="measured costs of the present layout "
                       "(docs/planning.md): what both predict inconsistently is left out")  # fmt: skip
    scale.add_argument("--run", type=Path, metavar="RUN_DIR", help="in place of shapes: what a job with "
                       "--elastic-profile measured has measured; written to RUN_DIR/scale_table.json")  # fmt: skip
    scale.add_argument("--out", type=Path, metavar="FILE", help="write the scale table there, too")
    parser.add_argument("--json", action="store_true", help="print one line of JSON instead of tables")
    return parser


def _cases(options: argparse.Namespace, per_node: int) -> list[Case]:
    """What is asked for, on nodes of ``per_node`` devices. Raises _Refused."""
    needed = {"--layers": options.layers, "--hidden": options.hidden, "--heads": options.heads, "--seq": options.seq,
              "--global-batch-size": options.global_batch_size}  # fmt: skip
    if missing := [name for name, value in needed.items() if value is None]:
        raise _Refused(f"{', '.join(missing)} must be given, or --check TABLE.csv; see --help")
    degrees = _degrees_of(options, per_node)
    return [
        Case(
            layers=options.layers, hidden=options.hidden, heads=options.heads, seq_length=options.seq,
            vocab_size=options.vocab, ffn=options.ffn, groups=options.groups, gated=options.swiglu, tp=tp, pp=pp, dp=dp,
            micro_batch=micro_batch, global_batch=options.global_batch_size, chunks=chunks,
            recompute=options.recompute == "full", overlap=options.overlap_grad_reduce,
            sharded=options.use_distributed_optimizer,
        )
        for tp, pp, dp in degrees
        for micro_batch, chunks in product(options.micro_batch_size, options.virtual_stages)
        if not (options.devices and chunks > 1 and pp == 1)
    ]  # fmt: skip


def _degrees_of(options: argparse.Namespace, per_node: int) -> Iterator[tuple[int, int, int]]:
    """TP, PP and DP: all combinations of what is given, or those that make ``--devices``."""
    if not options.devices:
        yield from product(options.tp or [1], options.pp or [1], options.dp or [1])
        return
    for count in options.devices:
        for tp in options.tp or range(1, min(per_node, options.heads) + 1):
            for pp in options.pp or range(1, min(count // tp, options.layers) + 1):
                dp, rest = divmod(count, tp * pp)
                if not rest and dp and (options.dp is None or dp in options.dp):
                    yield tp, pp, dp


# ---- shapes ---------------------------------------------------------------------------------


def _predict(options: argparse.Namespace, predictor: Predictor) -> None:
    for flag in ("fit", "save_constants", "model_only"):
        if getattr(options, flag):
            raise _Refused(f"--{flag.replace('_', '-')} needs --check TABLE.csv")
    if options.scale_table:
        for flag in ("svg", "devices", "best"):
            if getattr(options, flag):
                raise _Refused(f"--{flag} and --scale-table are two things: leave one out")
        _scale(options, predictor)
        return
    for flag in ("profile", "run", "out"):
        if getattr(options, flag):
            raise _Refused(f"--{flag} needs --scale-table N,...")
    cases = _cases(options, predictor.device.per_node)
    possible: list[Case] = []
    refused: list[str] = []
    for case in cases:
        try:
            case.check()
            possible.append(case)
        except CaseError as error:
            refused.append(f"{_layout(case)}: {error}")
    if not possible:
        why = refused[0] if refused else "what is given of TP, PP and DP never makes so many devices"
        raise _Refused(why if len(refused) <= 1 else f"none of {len(refused)} layouts can be; {why}")
    figures = sorted(_figures(possible, predictor), key=lambda row: -row["tokens_per_s"])
    if options.svg:
        points = [Point(row["name"], row["devices"], row["tokens_per_s"], row["fits"]) for row in figures]
        title = f"{options.layers} layers of {options.hidden}, {predictor.device.name}"
        options.svg.write_text(speeds(points, title), encoding="utf-8")
    if options.best:
        figures = _best(figures)
    if options.json:
        print(json.dumps({"device": predictor.device.name, "cases": figures, "refused": refused}))
        return
    console = _console()
    console.print(f"{predictor.device.name}: {_figures_of(predictor.device)}")
    grid = _grid("devices", "layout", "grain", "step", "tokens/s", "MFU", "computing", "collectives", "bubble",
                 "reduction", "update", "memory", padding=2)  # fmt: skip
    for row in figures[:_MOST_SHOWN]:
        parts = row["parts_ms"]
        shares = (f"{100 * parts[name] / row['step_ms']:.0f}%" for name in parts)
        memory = f"{row['memory_bytes'] / 1e9:.1f} GB"
        grid.add_row(
            str(row["devices"]), row["name"], str(row["micro_batch"]), f"{row['step_ms']:.1f} ms",
            f"{row['tokens_per_s']:.0f}", f"{100 * row['utilisation']:.0f}%", *shares,
            memory if row["fits"] else f"{memory} does not fit",
        )  # fmt: skip
    console.print(grid)
    if len(figures) > _MOST_SHOWN:
        console.print(f"and {len(figures) - _MOST_SHOWN} more, which are slower")
    for line in refused if not options.devices else ():
        console.print(f"cannot be: {line}")


def _best(figures: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The fastest that fits of each number of devices. Raises _Refused where none does."""
    best = {row["devices"]: row for row in reversed(figures) if row["fits"]}
    if not best:
        least = min(figures, key=lambda row: row["memory_bytes"])
        raise _Refused(f"no layout fits the device's memory: {least['name']}, micro-batch {least['micro_batch']}, "
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
            "name": _degrees(case), "devices": case.devices, "tp": case.tp, "pp": case.pp, "dp": case.dp,
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


def _degrees(case: Case | Entry) -> str:
    chunks = f" x {case.chunks} chunks" if case.chunks > 1 else ""
    return f"TP{case.tp} PP{case.pp}{chunks} DP{case.dp}"


def _layout(case: Case) -> str:
    return f"{_degrees(case)}, micro-batch {case.micro_batch}"


def _figures_of(device: Device) -> str:
    return (
        f"{device.flops / 1e12:.0f} TFLOP/s, {device.memory_bytes / 1e9:.0f} GB at "
        f"{device.memory_bandwidth / 1e9:.0f} GB/s, "
        f"links {device.link_bandwidth / 1e9:.0f} GB/s, {device.per_node} a node, which has "
        f"{device.node_bandwidth / 1e9:.0f} GB/s to others"
    )


# ---- scale tables ---------------------------------------------------------------------------


def _scale(options: argparse.Namespace, predictor: Predictor) -> None:
    if options.run:
        table, out = _scale_of_run(options), options.out or options.run / "scale_table.json"
    else:
        table, out = _scale_of_shapes(options, predictor), options.out
    if out:
        partial = out.with_name(out.name + ".part")  # whole or not at all: a controller may read it at any moment
        partial.write_text(table.to_json(), encoding="utf-8")
        partial.replace(out)
    if options.json:
        print(json.dumps(json.loads(table.to_json())))
    else:
        _print_scale(table)


def _scale_of_shapes(options: argparse.Namespace, predictor: Predictor) -> ScaleTable:
    """By the model; with a profile by that, where the model agrees."""
    present = _cases(options, predictor.device.per_node)[0]
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


def _scale_of_run(options: argparse.Namespace) -> ScaleTable:
    """By what a job has measured: its newest layout, ``profile.json``, and the tokens of its last step."""
    layouts = sorted((options.run / "layouts").glob("*.json"), key=lambda path: int(path.stem))
    if not layouts:
        raise _Refused(f"{options.run} is not the folder of a run: it has no layouts")
    layout = Layout.from_json(layouts[-1].read_bytes())
    path = options.run / "profile.json"
    if not path.exists():
        raise _Refused(f"{path} is not there (yet): start the job with --elastic-profile measured")
    costs = Costs.read(path, layout.units)
    metrics = read_metrics(options.run)
    last = metrics[max(metrics)]
    tokens = round(last["tokens_per_s"] * last["step_ms"] / 1e3)
    return outlook(layout, costs, tokens, options.scale_table, _sizes_of_run(options.run, layout),
                   past(layout, map(Layout.from_json, map(Path.read_bytes, layouts)), metrics.values()))  # fmt: skip


def _sizes_of_run(run: Path, layout: Layout) -> Case | None:
    """The present layout with the sizes that the job itself has written, if it has."""
    try:
        written = ScaleTable.from_json((run / "scale_table.json").read_bytes()).present
    except (OSError, ScaleTableError):
        return None
    return None if written is None else resized(written, layout)


def _print_scale(table: ScaleTable) -> None:
    console = _console()
    grid = _grid("devices", "layout", "schedule", "step", "tokens/s", "memory", "confidence")
    for entry in table.entries.values():
        grid.add_row(
            str(entry.devices), _degrees(entry), entry.schedule,
            f"{entry.step_ms:.1f} ms", f"{entry.tokens_per_s:.0f}", f"{entry.memory_bytes / 1e9:.1f} GB",
            "-" if entry.confidence is None else f"{entry.confidence:.2f}",
        )  # fmt: skip
    console.print(grid)
    for count, why in table.left_out.items():
        console.print(f"{count}: {why}")


# ---- tables ---------------------------------------------------------------------------------


def _check(options: argparse.Namespace, device: Device, constants: Constants | None) -> None:
    for flag in ("scale_table", "profile", "run", "out", "devices", "best"):
        if getattr(options, flag):
            raise _Refused(f"--{flag.replace('_', '-')} and --check are two things: leave one out")
    if options.fit is None and (options.save_constants or options.model_only):
        raise _Refused("--save-constants and --model-only need --fit OTHER.csv")
    recompute = options.recompute != "none"
    table = Table.read(options.check, recompute, options.vocab)
    console = _console()
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
        _print_read(console, check, recompute, device)
        _print_constants(console, predictor, fitted_on, calibration, options)
        _print_errors(console, check, fitted_on)
    if options.save_constants:
        options.save_constants.write_text(predictor.constants.to_json(), encoding="utf-8")
    if options.svg:
        options.svg.write_text(svg(check, f"{table.name}, {device.name}"), encoding="utf-8")
    print(check.to_json(), flush=True)


def _print_read(console: Console, check: Check, recompute: bool, device: Device) -> None:
    table = check.table
    read = ", ".join(f"{role} from {title!r}" for role, title in table.columns.items())
    without = f", {table.skipped} without a time left out" if table.skipped else ""
    console.print(f"{table.name}: {len(table.cases)} rows{without}: {read}")
    if table.unknown:
        console.print(f"columns that say nothing here: {', '.join(map(repr, table.unknown))}")
    taken = [] if "recompute" in table.columns else ["full recomputation" if recompute else "no recomputation"]
    taken += [] if "vocab_size" in table.columns else [f"a vocabulary of {table.cases[0].vocab_size}"]
    if table.unit is None:
        seconds = check.measured[0] / table.times[0]
        taken.append("times in " + ("seconds" if seconds == 1 else "milliseconds") + ", which the table does not say")
    if taken:
        console.print(f"taken to be so: {', '.join(taken)}")
    console.print(f"{device.name}: {_figures_of(device)}")


def _print_constants(
    console: Console, predictor: Predictor, fitted_on: Table | None, calibration: Calibration | None,
    options: argparse.Namespace,
) -> None:  # fmt: skip
    if fitted_on is None:
        source = f"those of {options.constants}" if options.constants else (
            "the defaults, fitted on 144 rows of vTrain's table of one node: of that table not all rows are new to them"
        )  # fmt: skip
        console.print(f"constants: {source}")
    else:
        console.print(f"constants: fitted on {len(fitted_on.cases)} rows of {fitted_on.name}")
    if calibration is not None and calibration.model_error is not None and calibration.residual_error is not None:
        chosen = "taken" if predictor.residual is not None else "not taken"
        console.print(
            f"held out in turn there, mean error: {_percent(calibration.model_error)} of the model alone, "
            f"{_percent(calibration.residual_error)} with what it misses on other rows ({chosen})"
        )
    grid = _grid("constant", "value", "expected", "", "what it is")
    start = Constants.from_json(options.constants.read_bytes()) if options.constants else Constants()
    for name, prior in Constants.priors().items():
        value, expected = getattr(predictor.constants, name), getattr(start, name)
        grid.add_row(name, f"{value:.3g}", f"{expected:.3g}", prior.unit, prior.what)
    console.print(grid)


def _print_errors(console: Console, check: Check, fitted_on: Table | None) -> None:
    cases = check.table.cases
    for what, keys in {
        "devices": [case.devices for case in cases],
        "TP": [case.tp for case in cases],
        "micro-batch": [case.micro_batch for case in cases],
    }.items():
        grid = _grid(what, "rows", "mean", "median", "worst")
        for key in sorted(set(keys)):
            figures = check.summary([index for index, other in enumerate(keys) if other == key])
            errors = (_percent(figures[name]) for name in ("mean_error", "median_error", "worst"))
            grid.add_row(str(key), str(figures["rows"]), *errors)
        console.print(grid)
    grid = _grid("worst, line", "model", "layout", "batch", "measured", "predicted", "error")
    for index in np.argsort(-check.errors, kind="stable")[:_WORST]:
        case = cases[index]
        grid.add_row(
            str(check.table.lines[index]), f"{case.layers} layers, hidden {case.hidden}", _layout(case),
            str(case.global_batch), f"{1e3 * check.measured[index]:.1f} ms", f"{1e3 * check.predicted[index]:.1f} ms",
            _percent(check.errors[index]),
        )  # fmt: skip
    console.print(grid)
    if not 1 / _BIASED < check.bias < _BIASED:
        console.print(
            f"predictions are {check.bias:.2f} times what was measured at the median: the table may be of other "
            "devices, or of runs with or without recomputation: see --device, --recompute, --fit"
        )
    known = set() if fitted_on is None else set(check.known(fitted_on))
    if fitted_on is not None and known:
        console.print(f"{len(known)} of the rows are also in {fitted_on.name}, on which the constants were fitted")
        if others := [index for index in range(len(cases)) if index not in known]:
            console.print(f"the {len(others)} others: {json.dumps(check.summary(others))}")


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.1f}%"


def _grid(*columns: str, padding: int = 3) -> Grid:
    grid = Grid(box=None, pad_edge=False, padding=(0, padding, 0, 0))
    for column in columns:
        grid.add_column(column)
    return grid


def _console() -> Console:
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = max(160, console.width)
    return console
