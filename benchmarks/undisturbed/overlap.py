"""Does overlapping pay? ``megatron-elastic bench overlap``.

Short elastic jobs without overlap, with ``--overlap-grad-reduce``, and with ``--overlap-param-gather`` too take turns;
the order rotates from round to round.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from common import emit, load_average, prepare_data, progress, run_job, run_root, step_times

from megatron_elastic.observe.records import read_metrics
from undisturbed.overhead import circumstances, flags_of_job, parse_args, plan_jobs

VARIANTS = {
    "off": [],
    "gradients": ["--overlap-grad-reduce"],
    "both": ["--overlap-grad-reduce", "--overlap-param-gather"],
}


def figures(times: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, Any]:
    """Medians over all rounds, and ratios to ``off``. ``times``: variant -> rounds."""
    medians = {name: statistics.median(t for each in rounds for t in each) for name, rounds in times.items()}
    result: dict[str, Any] = {"step_ms": {name: round(value, 1) for name, value in medians.items()}}
    for name in ("gradients", "both"):
        result[f"ratio_{name}"] = round(medians[name] / medians["off"], 4)
    return result


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; 0 if all jobs finished."""
    options = parse_args(argv, "overlap", "Step times without and with overlap of communication and computation.")
    load = load_average()
    flags = [*flags_of_job(options, prepare_data()), "--elastic"]
    jobs = list(plan_jobs(options.rounds, tuple(VARIANTS)))
    times: dict[str, list[list[float]]] = {name: [] for name in VARIANTS}
    with run_root() as root:
        for number, (turn, name) in enumerate(jobs, start=1):
            run_dir = root / f"round{turn + 1}-{name}"
            run_job(run_dir, options.nproc_per_node, [*flags, *VARIANTS[name]])
            times[name].append(step_times(read_metrics(run_dir)))
            progress(f"job {number}/{len(jobs)}: {name} {statistics.median(times[name][-1]):.0f} ms a step")
    emit("overlap", argv, {**figures(times), **circumstances(options), "load_before": load})
    return 0
