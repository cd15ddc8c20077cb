"""Scale: ``megatron-elastic scale``. Asks a running job for another shape."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from megatron_elastic.cluster.ask import ask
from megatron_elastic.cluster.messages import Scale


def main(argv: Sequence[str]) -> int:
    """Ask; return the exit code: 0 it will be done, 1 it will not, 2 bad flags."""
    parser = argparse.ArgumentParser(
        prog="megatron-elastic scale",
        description="Ask a running job for another number of pipeline stages. Layers move while training goes on.",
        epilog="example:\n  megatron-elastic scale runs/20261121-120000 --pp 2",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the job's run directory, on its first node")
    parser.add_argument("--pp", type=int, required=True, metavar="N", help="pipeline stages")
    options = parser.parse_args(argv)
    return ask(options.run_dir, Scale(stages=options.pp))
