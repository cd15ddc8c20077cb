"""Drain: ``megatron-elastic drain``. Lets the ranks of a node leave a running job."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from megatron_elastic.cluster.ask import ask
from megatron_elastic.cluster.messages import Drain


def main(argv: Sequence[str]) -> int:
    """Ask; return the exit code: 0 it will be done, 1 it will not, 2 bad flags."""
    parser = argparse.ArgumentParser(
        prog="megatron-elastic drain",
        description="Let the ranks of a node leave a running job. What they hold is copied to others while training "
        "goes on; then the node's launcher ends, with exit code 0, and nothing is computed again. SIGTERM to that "
        "launcher does the same.",
        epilog="example:\n  megatron-elastic drain runs/20261121-120000 --node 3",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the job's run directory, on its first node")
    parser.add_argument("--node", type=int, required=True, metavar="N", help="the node's --node-rank")
    options = parser.parse_args(argv)
    return ask(options.run_dir, Drain(node_rank=options.node))
