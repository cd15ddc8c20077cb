"""Command: ``megatron-elastic predict``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_elastic import usage
from megatron_elastic.config import UsageError
from megatron_elastic.layout import LayoutError
from megatron_elastic.observe.records import RecordsError
from megatron_elastic.plan import NoLayout, ProfileError
from megatron_elastic.plan.predict import (
    DEVICES,
    FITTED,
    CaseError,
    Constants,
    ConstantsError,
    Device,
    DeviceError,
    Predictor,
    TableError,
)
from megatron_elastic.prediction import check, layouts, scale

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


def main(argv: Sequence[str] | None = None) -> int:
    """``megatron-elastic predict``: print predictions, or their errors, and return the exit code."""
    options = make_parser().parse_args(argv)
    try:
        device = Device.named(options.device)
        constants = _constants(options.constants) if options.constants else None
        if options.check is not None:
            check.show(options, device, constants)
        elif options.scale_table is not None:
            scale.show(options, Predictor(device, constants or FITTED))
        else:
            layouts.show(options, Predictor(device, constants or FITTED))
    except BrokenPipeError:
        raise  # nobody reads on what is printed
    except (
        CaseError, ConstantsError, DeviceError, LayoutError, NoLayout, ProfileError, RecordsError, TableError,
        UsageError, OSError,
    ) as error:  # fmt: skip
        print(f"megatron-elastic predict: error: {error}", file=sys.stderr)
        return 2
    return 0


def _constants(path: Path) -> Constants:
    """Raises ConstantsError, OSError."""
    try:
        return Constants.from_json(path.read_bytes())
    except ConstantsError as error:
        raise ConstantsError(f"--constants {path}: {error}") from None


def _numbers(text: str) -> list[int]:
    """``1,2,4`` or ``8-16``."""
    numbers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        try:
            more = range(int(first), int(last) + 1) if dash else [int(first)]
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number, nor several like 1,2,4 or 8-16") from None
        if not more:
            raise argparse.ArgumentTypeError(f"{part.strip()!r} has no numbers in it: give the smaller one first")
        numbers += more
    if min(numbers) < 1:
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
