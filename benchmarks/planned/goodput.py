"""Goodput against failure rate, on paper. ``megatron-elastic bench goodput``.

What share of its time a job loses that restarts from checkpoints, restarts in its processes (like NVRx), loses the step
(like torchft), redoes the step, or resumes it. By formula, with measured constants; nothing runs. A table in Markdown
goes to stderr, docs/recovery.md explains it.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common import emit

from planned.on_paper.policies import Constants, Policy, policies

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def seconds(text: str) -> float:
    """``90``, ``90s``, ``1.5m`` or ``3h`` in s. Raises ValueError unless it is a time above 0."""
    unit = _UNITS.get(text[-1:])
    value = float(text) if unit is None else float(text[:-1]) * unit
    if not 0 < value < math.inf:
        raise ValueError(f"a time must be above 0, got {text}")
    return value


def times(text: str) -> list[float]:
    """Several of them, separated by commas."""
    return [seconds(part) for part in text.split(",")]


def spelled(time: float) -> str:
    """``3 h``, ``30 min`` or ``5 s``."""
    for unit, size in (("h", 3600), ("min", 60)):
        if time >= size and time % size == 0:
            return f"{time / size:.0f} {unit}"
    return f"{time:g} s"


def percent(share: float) -> str:
    """Two digits of it, in %."""
    value = 100 * share
    return f"{value:.0f}" if value >= 9.95 else f"{value:#.2g}"


def lost(policy: Policy, step: float, mtbf: float) -> dict[str, float]:
    """Lost shares of the time: if the lost cell is replaced at once; until it has been; and with a step's overhead."""
    kept = {
        "lost": policy.goodput(step, mtbf),
        "lost_with_absence": policy.goodput(step, mtbf, absence=True),
        "lost_with_absence_and_overhead": policy.goodput(step, mtbf, absence=True, overhead=True),
    }
    return {name: float(f"{1 - share:.4g}") for name, share in kept.items()}


def rows(constants: Constants, mtbfs: Sequence[float], steps: Sequence[float]) -> list[dict[str, Any]]:
    """One for each MTBF and length of a step."""
    return [
        {"mtbf_s": mtbf, "step_s": step, **{p.name: lost(p, step, mtbf) for p in policies(constants)}}
        for mtbf in mtbfs
        for step in steps
    ]


def table(constants: Constants, figures: Sequence[dict[str, Any]]) -> str:
    """The rows in Markdown, in % lost; with a second figure where a lost cell is absent for a while."""
    which = policies(constants)
    lines = ["| MTBF | step | " + " | ".join(p.title for p in which) + " |", "|" + "---|" * (len(which) + 2)]
    for row in figures:
        cells = [
            " / ".join(percent(row[p.name][key])
                       for key in ("lost", "lost_with_absence")[: 1 if p.rejoin is None else 2])
            for p in which
        ]  # fmt: skip
        lines.append(f"| {spelled(row['mtbf_s'])} | {row['step_s']:g} s | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _checked(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """As argparse wants it, with our message."""

    def convert(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{error}; give times like 20, 3m or 3h") from None

    return convert


def main(argv: Sequence[str]) -> int:
    """Run the benchmark and return the exit code."""
    default = Constants()
    parser = argparse.ArgumentParser(prog="megatron-elastic bench goodput", description=__doc__)
    parser.add_argument("--mtbf", type=_checked(times), default=times("3h,30m,3m"), metavar="TIME,...",
                        help="mean times between failures of the job (default: 3h,30m,3m)")
    parser.add_argument("--step", type=_checked(times), default=times("5,20,60"), metavar="TIME,...",
                        help="lengths of a step (default: 5,20,60)")
    for name, what in (
        ("restart", "from a failure until the newest checkpoint is loaded again"),
        ("checkpoint", "training waits for a checkpoint"),
        ("pause", "a recovery of ours but what is computed again"),
    ):
        parser.add_argument(f"--{name}", type=_checked(seconds), default=getattr(default, name), metavar="TIME",
                            help=f"{what} (default: %(default)s)")
    parser.add_argument("--width", type=int, default=default.width, metavar="N",
                        help="cells of the stage that loses one (default: %(default)s)")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw it; needs the extra [plot]")
    options = parser.parse_args(argv)
    if options.width < 2:
        parser.error(f"--width must be at least 2, got {options.width}: a stage of one cell has none left")
    constants = Constants(restart=options.restart, checkpoint=options.checkpoint, pause=options.pause,
                          width=options.width)
    if options.svg is not None:
        try:
            from planned.on_paper.plot import draw
        except ImportError as error:
            parser.error(f"--svg needs matplotlib ({error}); install it with: pip install 'megatron-elastic[plot]'")
        draw(policies(constants), options.step, {mtbf: spelled(mtbf) for mtbf in options.mtbf}, options.svg)
    figures = rows(constants, options.mtbf, options.step)
    print(table(constants, figures), file=sys.stderr)
    emit("goodput", argv, {"constants": asdict(constants), "rows": figures})
    return 0
