"""What do replicas cost when nothing fails? ``megatron-elastic bench replay``.

Short elastic jobs without replicas, with replay of gradients and with replay of whole states take turns; the order
rotates from round to round. Besides step times they give the bytes that all ranks together send in a step.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common import JobFailed, emit, load_average, prepare_data, progress, run_job, run_root, step_times

from megatron_elastic.observe.records import read_events, read_metrics
from undisturbed.overhead import Times, circumstances, flags_of_job, medians, parse_args, plan_jobs, ratio

VARIANTS = {
    "off": ["--elastic-replicas", "0"],
    "gradient": ["--elastic-replay", "gradient"],
    "state": ["--elastic-replay", "state"],
}


def bytes_per_step(run_dir: Path) -> float:
    """Bytes that all ranks together sent to others in a step, on average. Raises JobFailed if they do not tell."""
    told = [event for event in read_events(run_dir) if event["kind"] == "traffic"]
    if not told:
        raise JobFailed(f"no rank tells in {run_dir}/events.jsonl what it has sent")
    return float(sum(event["bytes"] / max(event["steps"], 1) for event in told))


def figures(times: Times, sent: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Medians over all rounds, and ratios to ``off``. ``times`` and ``sent``: variant -> rounds."""
    return {
        "step_ms": medians(times),
        **ratio(times, "gradient", "off", "ratio_gradient"),
        **ratio(times, "state", "off", "ratio_state"),
        "bytes_per_step": {name: round(statistics.median(rounds)) for name, rounds in sent.items()},
    }


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; 0 if all jobs finished."""
    options = parse_args(argv, "replay", "Step times and bytes sent without replicas and with both forms of replay.")
    load = load_average()
    flags = [*flags_of_job(options, prepare_data()), "--elastic"]
    jobs = list(plan_jobs(options.rounds, tuple(VARIANTS)))
    times: dict[str, list[list[float]]] = {name: [] for name in VARIANTS}
    sent: dict[str, list[float]] = {name: [] for name in VARIANTS}
    with run_root() as root:
        for number, (turn, name) in enumerate(jobs, start=1):
            run_dir = root / f"round{turn + 1}-{name}"
            run_job(run_dir, options.nproc_per_node, [*flags, *VARIANTS[name]])
            times[name].append(step_times(read_metrics(run_dir)))
            sent[name].append(bytes_per_step(run_dir))
            progress(f"job {number}/{len(jobs)}: {name} {statistics.median(times[name][-1]):.0f} ms and "
                     f"{sent[name][-1] / 1e6:.2f} MB a step")
    emit("replay", argv, {**figures(times, sent), **circumstances(options), "load_before": load})
    return 0
