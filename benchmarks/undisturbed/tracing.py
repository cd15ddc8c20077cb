"""What does it cost to trace a step? ``megatron-elastic bench tracing``.

In one job every third step is traced, and what was noted of it is written in the next one, so that steps that are
traced, steps in which a trace is written and steps without either take turns: what else the machine does hits them all.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from common import emit, load_average, prepare_data, progress, run_job, run_root

from megatron_elastic.observe.records import read_metrics
from undisturbed.overhead import add_flags, check_flags, circumstances, flags_of_job

KINDS = ("off", "traced", "written")
"""By a step's number modulo 3: step 1 is traced."""
_LEFT_OUT = 6
"""Steps at the beginning."""


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; 0 if all jobs finished."""
    parser = argparse.ArgumentParser(prog="megatron-elastic bench tracing", description="Step times with and without "
                                     "a trace, in turn in one job.")  # fmt: skip
    add_flags(parser)
    parser.set_defaults(tp=1, pp=2, rounds=1, steps=300)
    options = parser.parse_args(argv)
    check_flags(parser, options)
    if options.steps < 2 * _LEFT_OUT:
        parser.error(f"--steps must be at least {2 * _LEFT_OUT}")
    load, flags, times = load_average(), flags_of_job(options, prepare_data()), list[Mapping[int, float]]()
    traced = ",".join(str(step) for step in range(1, options.steps + 1, len(KINDS)))
    with run_root() as root:
        for turn in range(options.rounds):
            run_dir = root / f"round{turn + 1}"
            run_job(run_dir, options.nproc_per_node, [*flags, "--elastic", "--elastic-trace", traced])
            times.append({step: record["step_ms"] for step, record in read_metrics(run_dir).items()})
            progress(f"job {turn + 1}/{options.rounds}: {statistics.median(times[-1].values()):.0f} ms a step")
    counted = {"steps_counted": options.rounds * (options.steps - _LEFT_OUT)}
    emit("tracing", argv, {**figures(times), **circumstances(options), **counted, "load_before": load})
    return 0


def figures(jobs: Sequence[Mapping[int, float]]) -> dict[str, Any]:
    """Medians of step times by what was done in them; and ratios, of steps to the one without before or after them.

    ``jobs``: of each the step times in ms, by step.
    """
    by_kind: dict[str, list[float]] = {kind: [] for kind in KINDS}
    ratios: dict[str, list[float]] = {kind: [] for kind in KINDS[1:]}
    for steps in jobs:
        for step, took in steps.items():
            if step > _LEFT_OUT:
                by_kind[KINDS[step % len(KINDS)]].append(took)
        for off in range(_LEFT_OUT, max(steps), len(KINDS)):
            for kind, step in (("traced", off + 1), ("written", off + 2)):
                neighbour = off if kind == "traced" else off + 3
                if step in steps and neighbour in steps:
                    ratios[kind].append(steps[step] / steps[neighbour])
    return {
        **{f"ratio_{kind}": round(statistics.median(each), 4) for kind, each in ratios.items()},
        "step_ms": {kind: round(statistics.median(each), 2) for kind, each in by_kind.items()},
    }
