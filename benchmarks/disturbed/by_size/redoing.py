"""Redoing: how much longer a step takes in whose passes a rank dies, resumed or done again."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from common import JobFailed, progress, run_job, summary

from disturbed.by_size.models import RANKS, Model, flags_of
from megatron_elastic.layout import Layout, gpt_units
from megatron_elastic.observe.compare import compare
from megatron_elastic.observe.records import read_events, read_metrics
from megatron_elastic.pipeline.schedule import for_cell

REDO = {"resume": "lost", "back": "step"}
"""By the name of the decision, the value of ``--elastic-redo`` that leads to it."""
GRIDS = ("1x1", "1x2", "1x4", "2x2")
"""TPxPP"""
SHARES = (0.1, 0.5, 0.9)
"""Of the victim's passes, how many it has done."""
BATCH = 8 * RANKS
STEP, STEPS = 3, 4
"""In which the victim dies, and how many there are."""


class Case(NamedTuple):
    """When the victim dies, and how the step is to go on."""

    share: float
    decision: str


def redo(
    model: Model, data: Path, mode: str, grids: Sequence[str], decisions: Sequence[str], repeat: int, root: Path
) -> dict[str, Any]:
    """Run all jobs with a model, decisions in turns; times by grid, share and decision. Raises JobFailed."""
    found = {}
    for tp, pp in (map(int, grid.split("x")) for grid in grids):
        folder = root / f"{model.name}-{tp}-{pp}"
        found[f"TP{tp} x PP{pp} x DP{RANKS // tp // pp}"] = _in_grid(
            model, data, mode, decisions, repeat, folder, tp, pp
        )
    return found


def _in_grid(
    model: Model, data: Path, mode: str, decisions: Sequence[str], repeat: int, folder: Path, tp: int, pp: int
) -> dict[str, Any]:
    found: dict[Case, list[dict[str, Any]]] = defaultdict(list)
    folder.mkdir()
    cases = [Case(share, decision) for share in SHARES for decision in decisions] * repeat
    for number, case in enumerate(cases):
        rank = 2 * tp * (number // (len(cases) // repeat)) % RANKS  # of all stages in turn
        run = _run(model, data, mode, tp, pp, rank, case, folder / str(number))
        found[case].append(run)
        difference = compare(folder / "0", folder / str(number)) if mode == "bitwise" else None
        if difference is not None:
            raise JobFailed(f"{folder / str(number)} ({case}): {difference}")
        progress(f"{folder.name}, {case.share:.0%}: {run['decision']}, {run['mttr_ms']:.0f} ms from the kill to the "
                 f"commit; the step is {run['longer_by']:.2f} steps longer")
    return {f"{share:.0%}": {decision: _summary(found[Case(share, decision)]) for decision in decisions}
            for share in SHARES}


def _run(
    model: Model, data: Path, mode: str, tp: int, pp: int, rank: int, case: Case, run_dir: Path
) -> dict[str, Any]:
    flags = ["--elastic", "--elastic-consistency", mode, "--elastic-redo", REDO[case.decision],
             *flags_of(model, data, pp, STEPS), "--tensor-model-parallel-size", str(tp),
             "--global-batch-size", str(BATCH), "--elastic-inject", kill(model, tp, pp, rank, case.share)]
    run_job(run_dir, RANKS, flags)
    (event,) = (event for event in read_events(run_dir) if event["kind"] == "recovered")
    if event["step"] != STEP:
        raise JobFailed(f"{run_dir}: rank {rank} was to be lost in the middle of step {STEP}, but it was {event}")
    times = {step: line["step_ms"] for step, line in read_metrics(run_dir).items()}
    usual = statistics.median([times[step] for step in range(2, STEP)])
    return {"decision": event["decision"], "mttr_ms": event["mttr_ms"], "step_ms": usual,
            "longer_by": times[STEP] / usual - 1}


def kill(model: Model, tp: int, pp: int, rank: int, share: float) -> str:
    """An injection that comes when a rank has done so much of its passes."""
    units, stage_units = gpt_units(model.layers, pp, tied=True, positions=True)
    layout = Layout.grid(tp=tp, pp=pp, dp=RANKS // tp // pp, stage_units=stage_units, units=units, num_grains=BATCH,
                         num_slices=1, replicas=0)
    ops = for_cell("1f1b", layout, layout.cell_of(rank).leader)
    op = ops[int(share * len(ops))]
    return f"kill:rank={rank},step={STEP},at={op.kind},grain={op.grain}"


def _summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """``decisions``: where nothing was kept, there is nothing to resume."""
    return {
        "decisions": dict(Counter(run["decision"] for run in runs)),
        "mttr_ms": summary(run["mttr_ms"] for run in runs),
        "step_ms": round(statistics.median(run["step_ms"] for run in runs), 1),
        "longer_by_steps": round(statistics.median(run["longer_by"] for run in runs), 3),
    }
