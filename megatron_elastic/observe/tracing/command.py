"""Command: ``megatron-elastic trace``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_elastic import usage
from megatron_elastic.observe.records import RecordsError
from megatron_elastic.observe.tracing import perfetto


def make_parser() -> argparse.ArgumentParser:
    """The flags of ``megatron-elastic trace``."""
    parser = argparse.ArgumentParser(
        prog="megatron-elastic trace", formatter_class=usage.Formatter,
        description="Merge what the ranks of a job with --elastic-trace have written into one file, "
                    "which ui.perfetto.dev opens.",
        epilog="example:\n  megatron-elastic trace runs/20261121-120000 -o trace.json.gz",
    )  # fmt: skip
    parser.add_argument("run_dir", type=Path, nargs="+", metavar="RUN_DIR",
                        help="the job's run directory, or those of all nodes where each has its own")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE",
                        help="where to; compressed if it ends with .gz")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """``megatron-elastic trace RUN_DIR... -o FILE``: 0, or 2 where there is nothing to read or no place to write."""
    options = make_parser().parse_args(argv)
    try:
        events = perfetto.write(options.run_dir, options.output)
    except (RecordsError, OSError) as error:
        print(f"megatron-elastic trace: error: {error}", file=sys.stderr)
        return 2
    print(f"{options.output}: {events} events, {options.output.stat().st_size / 1e3:.0f} kB")
    return 0
