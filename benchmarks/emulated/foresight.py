"""How far a job's scale table is from other layouts' steps. ``megatron-elastic bench foresight [--emulate MODEL]``.

A job trains on two stages of two cells, and its costs predict the step of seven other layouts, as its scale table does
(``plan.predict.foresight``). Then a job is started in each of them, and its steps are held against that. With
``--emulate`` ranks behave as devices of that model; else they compute a small model on this machine, whose cores ranks
share, so that more of them need not be faster, and no costs of one rank can tell.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

from common import SCRIPT, emit, load_average, prepare_data, progress, run_job, run_root

from emulated import job as emulated
from megatron_elastic.emulation import command
from megatron_elastic.emulation.derive import Grid
from megatron_elastic.emulation.models import MODELS
from megatron_elastic.layout import Layout
from megatron_elastic.observe.records import read_metrics
from megatron_elastic.plan.costs.cost import Costs
from megatron_elastic.plan.predict import by_profile, stand_in

PRESENT = Grid(tp=1, pp=2, dp=2)
OTHERS = tuple(Grid(tp=1, pp=pp, dp=dp) for pp, dp in ((2, 1), (1, 2), (4, 1), (1, 4), (3, 2), (4, 2), (2, 4)))
_GRAINS = 16
_LEFT_OUT = 2
"""Steps at the beginning, which also warm things up."""
_MEASURED = 10
"""Steps until a job tells what units cost."""


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """Parse and check the flags."""
    parser = argparse.ArgumentParser(prog="megatron-elastic bench foresight", description=__doc__)
    parser.add_argument("--emulate", choices=tuple(MODELS), help="default: nothing is emulated")
    command.add_flags(parser)
    parser.set_defaults(device="h200", layout=PRESENT, grains=_GRAINS)
    parser.add_argument("--steps", type=int, default=12, metavar="N", help="of each job (default: %(default)s)")
    options = parser.parse_args(argv)
    options.model = options.emulate
    least = _LEFT_OUT if options.emulate else _MEASURED
    if options.steps <= least:
        parser.error(f"--steps must be more than {least}")
    return options


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; 0 if all jobs finished."""
    options, load = parse_args(argv), load_average()
    with run_root() as root:
        present = _run(root, PRESENT, options)
        layout = Layout.from_json((present / "layouts" / "0.json").read_bytes())
        profile = _profile(root) if options.emulate else present / "profile.json"
        costs = Costs.from_json(profile.read_bytes(), layout.units)
        like = stand_in(layout, tokens=1)
        foresee = by_profile(costs, layout.units, layout.is_tied, like)
        rows = []
        for grid in (PRESENT, *OTHERS):
            seen = foresee(replace(like, pp=grid.pp, dp=grid.dp))
            assert seen is not None
            run_dir = present if grid is PRESENT else _run(root, grid, options)
            measured = _step_ms(run_dir)
            rows.append({"layout": f"PP{grid.pp} DP{grid.dp}", "predicted_ms": round(seen.step_ms, 1),
                         "measured_ms": round(measured, 1), "error": round(seen.step_ms / measured - 1, 4)})
            progress(str(rows[-1]))
    emit("foresight", argv, {**figures(rows), "emulated": options.emulate, "layouts": rows, "load_before": load})
    return 0


def figures(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of the layouts but the first, which was measured: errors, and how many pairs are predicted in the right order."""
    errors = [abs(row["error"]) for row in rows[1:]]
    pairs = list(combinations(rows, 2))
    right = sum((a["predicted_ms"] < b["predicted_ms"]) == (a["measured_ms"] < b["measured_ms"]) for a, b in pairs)
    return {"median_error": round(statistics.median(errors), 4), "mean_error": round(statistics.mean(errors), 4),
            "worst": max(errors), "pairs": len(pairs), "pairs_in_order": right}


def _profile(root: Path) -> Path:
    return root / "emulated.json"


def _run(root: Path, grid: Grid, options: argparse.Namespace) -> Path:
    """A job in a layout; its run directory."""
    run_dir = root / f"pp{grid.pp}-dp{grid.dp}"
    if options.emulate:
        if not (path := _profile(root)).exists():
            path.write_text(emulated.asked_for(options)[0].text)
        here = argparse.Namespace(**{**vars(options), "layout": grid})
        flags = [*emulated.flags_of_job(here, options.steps), "--elastic-emulate", str(path)]
        run_job(run_dir, grid.ranks, flags, emulated.SCRIPT)
    else:
        values = {
            "data-path": prepare_data(), "pipeline-model-parallel-size": grid.pp, "num-layers": 12, "hidden-size": 128,
            "num-attention-heads": 4, "seq-length": 128, "micro-batch-size": 1, "global-batch-size": _GRAINS,
            "train-iters": options.steps, "lr": 1e-3, "eval-iters": 0, "elastic-profile": "measured",
        }  # fmt: skip
        flags = [text for name, value in values.items() for text in (f"--{name}", str(value))]
        run_job(run_dir, grid.ranks, [*flags, "--elastic"], SCRIPT)
    return run_dir


def _step_ms(run_dir: Path) -> float:
    """The median, without the first steps."""
    times = [line["step_ms"] for step, line in read_metrics(run_dir).items() if step > _LEFT_OUT]
    return float(statistics.median(times))
