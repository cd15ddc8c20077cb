"""Drain: ``megatron-elastic drain``. Lets the ranks of nodes leave a running job."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from megatron_elastic import usage
from megatron_elastic.cluster.asking.ask import WHERE, ask
from megatron_elastic.cluster.messages import Drain


def make_parser() -> argparse.ArgumentParser:
    """The flags of ``megatron-elastic drain``."""
    parser = argparse.ArgumentParser(
        prog="megatron-elastic drain",
        description="Let the ranks of nodes leave a running job. What they hold is copied to others while training "
        "goes on; then the nodes' launchers end, with exit code 0, and nothing is computed again. SIGTERM to a "
        "launcher does the same. Of several nodes all leave, in one change, or, if that cannot be, none.",
        epilog="examples:\n  megatron-elastic drain runs/20261121-120000 --node 3\n"
        "  megatron-elastic drain runs/20261121-120000 --node 3,4,5",
        formatter_class=usage.Formatter,
    )
    parser.add_argument("job", metavar="JOB", help=WHERE)
    parser.add_argument("--node", type=_nodes, required=True, metavar="N,...", help="the nodes' --node-rank")
    parser.add_argument("--json", action="store_true", help="one JSON object, for programs")
    return parser


def main(argv: Sequence[str]) -> int:
    """Ask; return the exit code: 0 it will be done, 1 it will not, 2 bad flags."""
    options = make_parser().parse_args(argv)
    return ask(options.job, Drain(node_ranks=options.node), options.json)


def _nodes(text: str) -> tuple[int, ...]:
    words = text.split(",")
    if not all(word.isdecimal() for word in words):
        raise argparse.ArgumentTypeError(f"{text} is not the number of a node, or several with commas between")
    return tuple(dict.fromkeys(map(int, words)))
