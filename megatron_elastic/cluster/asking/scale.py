"""Scale: ``megatron-elastic scale``. Asks a running job for another shape."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from megatron_elastic import usage
from megatron_elastic.cluster.asking.ask import WHERE, ask
from megatron_elastic.cluster.messages import Scale

_DESCRIPTION = """\
Ask a running job for another shape. Training goes on meanwhile, nothing is computed again, and the numbers stay what
they would have been, bit for bit (but for --tp and --cp, and see --ep). The answer comes at once, the change takes some
steps.

A cell is the ranks that compute a stage together: tensor-parallel ranks, times the larger of the context- and the
expert-parallel size. Cells that are too many leave; their ranks stay as spares, which repair other cells, and come
again when the job is asked for more. (To give machines back: megatron-elastic drain.)

With --tp, --cp and --ep cells are put together anew, of the ranks that are in cells. Between two steps everybody then
waits until states are where they are needed, and has its part of the model made anew. With --elastic-consistency
bitwise and --moe-token-dispatcher-type alltoall another --ep changes no bit; otherwise, and with another --tp or --cp,
numbers differ by rounding, and with --tp and --cp by what dropout draws."""
_EXAMPLES = """\
examples:
  megatron-elastic scale runs/a --pp 2         layers move into two stages
  megatron-elastic scale runs/a --dp 3         every stage has three cells, the
                                               other ranks are spares
  megatron-elastic scale runs/a --ranks 8      as many cells as eight ranks
                                               make, widths even to one, and no
                                               more stages than cells
  megatron-elastic scale runs/a --pp 2 --dp 4  both
  megatron-elastic scale runs/a --ep 4         four ranks share the experts of a
                                               layer
  megatron-elastic scale host0:29500 --tp 2    two ranks share the tensors of a
                                               layer; a job somewhere else"""


def make_parser() -> argparse.ArgumentParser:
    """The flags of ``megatron-elastic scale``."""
    parser = argparse.ArgumentParser(
        prog="megatron-elastic scale", description=_DESCRIPTION, epilog=_EXAMPLES,
        formatter_class=usage.Formatter,
    )  # fmt: skip
    parser.add_argument("job", metavar="JOB", help=WHERE)
    parser.add_argument("--pp", type=usage.count, metavar="N", help="pipeline stages (default: as now)")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--dp", type=usage.count, metavar="N", help="cells of every stage, from the ranks that are there")
    size.add_argument("--ranks", type=usage.count, metavar="N", help="as many cells as N ranks make, shared out evenly")
    parser.add_argument("--ep", type=usage.count, metavar="N", help="expert-parallel size of cells (default: as now)")
    parser.add_argument("--cp", type=usage.count, metavar="N", help="context-parallel size of cells (default: as now)")
    parser.add_argument("--tp", type=usage.count, metavar="N", help="tensor-parallel size of cells (default: as now)")
    parser.add_argument("--json", action="store_true", help="one JSON object, for programs")
    return parser


def main(argv: Sequence[str]) -> int:
    """Ask; return the exit code: 0 it will be done, 1 it will not, 2 bad flags."""
    parser = make_parser()
    options = parser.parse_args(argv)
    cells = not options.ep is options.cp is options.tp is None
    if options.pp is options.dp is options.ranks is None and not cells:
        parser.error("say what there is to be: --pp, --dp, --ranks, --tp, --cp or --ep")
    if cells and not options.pp is options.dp is options.ranks is None:
        parser.error("--tp, --cp and --ep change the cells that there are: ask for other numbers of cells or stages "
                     "before that, or after it")
    o = options
    return ask(o.job, Scale(stages=o.pp, width=o.dp, ranks=o.ranks, cp=o.cp, ep=o.ep, tp=o.tp), o.json)
