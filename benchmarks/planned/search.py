"""How good are searched schedules? ``megatron-elastic bench search --stages 2,4,8 --layers 15,29,61``.

Nothing is run: pipelines of layers that all cost the same are put in order by the known schedules and by the search,
and where they are small an exact solver says what the best would be (docs/schedules.md).
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from common import emit, load_average, progress

from megatron_elastic import usage
from planned.searched.alike import NAMES, Case, row


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """Parse and check the flags."""
    parser = argparse.ArgumentParser(
        prog="megatron-elastic bench search", formatter_class=usage.Formatter,
        description="Step, bubble and peak memory of 1F1B, interleaved, ZB-H1, ZB-H2, ZB-V and what a search finds, "
        "for pipelines of layers that are all alike. A step is told in forwards of a layer, of which a backward takes "
        "two, half of it for the weights; memory in multiples of what 1F1B keeps where it keeps most. What does not "
        "fit, or is not proved, is null.",
    )
    parser.add_argument("--stages", type=_several(int), default=[2, 4, 8], metavar="N,N", help="default: 2,4,8")
    parser.add_argument("--grains", type=_several(int), default=[8, 32], metavar="N,N", help="default: 8,32")
    parser.add_argument("--memory", type=_several(float), default=[1.0, 1.5, 2.0], metavar="X,X",
                        help="of a device; default: 1,1.5,2")
    parser.add_argument("--layers", type=_several(int), default=[15, 29, 61], metavar="N,N",
                        help="default: 15,29,61, FlexTrain's models")
    parser.add_argument("--optimum", type=float, default=10.0, metavar="S",
                        help="seconds for the solver, OR-Tools, for each case with a small pipeline; 0: do without "
                        "(default: %(default)g)")
    parser.add_argument("--svg", type=Path, metavar="FILE",
                        help="draw how long searches take; needs matplotlib, the extra plot")
    options = parser.parse_args(argv)
    if options.svg is not None and find_spec("matplotlib") is None:
        parser.error("--svg needs matplotlib: pip install 'megatron-elastic[plot]'")
    if options.optimum and find_spec("ortools") is None:
        parser.error("the optimum needs OR-Tools: pip install 'megatron-elastic[search]', or do without: --optimum 0")
    return options


def _several(kind: type[int] | type[float]) -> Callable[[str], list[float]]:
    def read(text: str) -> list[float]:
        try:
            numbers: list[float] = [kind(each) for each in text.split(",")]
        except ValueError:
            numbers = []
        if not numbers or not all(0 < number < float("inf") for number in numbers):
            raise argparse.ArgumentTypeError(f"{text!r} are no positive numbers with commas between them")
        return numbers

    return read


def main(argv: Sequence[str]) -> int:
    """Run the benchmark."""
    options, load = parse_args(argv), load_average()
    cases = []
    for asked in itertools.product(options.stages, options.grains, options.memory, options.layers):
        cases.append(row(Case(*asked), options.optimum))
        progress(line(cases[-1]))
    print(markdown(cases), file=sys.stderr)
    if options.svg is not None:
        from planned.searched.plot import draw

        draw(cases, options.svg)
    emit("search", argv, {**summary(cases), "cases": cases, "load_before": load})
    return 0


def line(case: Mapping[str, Any]) -> str:
    """What came of a case."""
    steps = ", ".join(f"{name} {found['step']:g}" for name, found in case["schedules"].items() if found)
    best = f"optimum {case['optimum']:g}" if case["optimum"] else f"bound {case['bound'] or 0:g}"
    return (f"{case['stages']} stages, {case['grains']} grains, memory {case['memory']:g}, {case['layers']} layers: "
            + (f"{steps}; {best}" if steps else "nothing fits"))  # fmt: skip


def markdown(cases: Sequence[Mapping[str, Any]]) -> str:
    """A table: bubble and peak of each schedule, and how far the search is from the optimum or the bound."""
    lines = [f"| layers | stages | grains | memory | {' | '.join(NAMES)} | search to optimum |", "|---" * 11 + "|"]
    for case in cases:
        cells = [f"{100 * found['bubble']:.1f} %, {found['peak']:.2f}" if found else "-"
                 for found in case["schedules"].values()]  # fmt: skip
        search, best = case["schedules"]["search"], case["optimum"] or case["bound"]
        gap = f"{search['step'] / best:.3f}{'' if case['optimum'] else ' ?'}" if search else "-"
        lines.append(f"| {case['layers']} | {case['stages']} | {case['grains']} | {case['memory']:g} | "
                     f"{' | '.join(cells)} | {gap} |")
    return "\n".join(lines)


def summary(cases: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How far the search is from the optimum where it is known, and from the bound elsewhere; its longest time."""
    found = [case for case in cases if case["schedules"]["search"]]
    gaps: dict[str, list[float]] = {"optimum": [], "bound": []}
    for case in found:
        best = "optimum" if case["optimum"] else "bound"
        gaps[best].append(case["schedules"]["search"]["step"] / case[best])
    return {
        **{f"to_{best}": {"cases": len(each), "median": round(statistics.median(each), 4), "worst": round(max(each), 4)}
           for best, each in gaps.items() if each},
        "slowest_search_s": max((case["search_s"] for case in found), default=None),
    }  # fmt: skip
