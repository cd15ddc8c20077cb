"""Look: ``megatron-elastic status``. What a job is doing, from its run directory or over the network."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from megatron_elastic import usage
from megatron_elastic.cluster.asking.ask import WHERE, run_of
from megatron_elastic.observe.records import RecordsError
from megatron_elastic.observe.status import picture, status
from megatron_elastic.tables import Screen


def make_parser() -> argparse.ArgumentParser:
    """The flags of ``megatron-elastic status``."""
    parser = argparse.ArgumentParser(
        prog="megatron-elastic status", description="Show what a job is doing, or did: state, speed, goodput, layout.",
        epilog="examples:\n  megatron-elastic status runs/20261121-120000\n"
               "  megatron-elastic status runs/20261121-120000 --json | jq .goodput\n"
               "  MEGATRON_ELASTIC_TOKEN=... megatron-elastic status host0:29500",
        formatter_class=usage.Formatter,
    )  # fmt: skip
    parser.add_argument("job", metavar="JOB", help=WHERE)
    parser.add_argument("--json", action="store_true", help="one JSON object, for programs")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """``megatron-elastic status JOB``: 0, or 2 where there are no records to be seen."""
    options = make_parser().parse_args(argv)
    try:
        run = run_of(options.job)
    except RecordsError as error:
        print(f"megatron-elastic status: error: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(status(run)))
    else:
        Screen().print(picture(run))
    return 0
