"""What do other schedules than 1F1B save? ``megatron-elastic bench schedules --nproc-per-node 2 --pp 2``.

Short elastic jobs with 1F1B, with the backward split, and with two virtual stages on each rank take turns; the order
rotates from round to round. What the simulator says of operations that take equally long is beside it. There is
something to save only where a rank that waits leaves its core idle: with more ranks than cores others use it, and all
take as long as the work does.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

from common import emit, load_average, prepare_data, progress, run, run_job, run_root, step_times
from overhead import add_flags, check_flags, circumstances, flags_of_job, medians, plan_jobs, ratio

from megatron_elastic.layout import Layout
from megatron_elastic.observe.records import read_metrics
from megatron_elastic.pipeline.program import Op, Program
from megatron_elastic.pipeline.schedule import interleaved, one_forward_one_backward, split_backward
from megatron_elastic.pipeline.simulate import simulate

CHUNKS = 2
SCHEDULES = {
    "1f1b": [],
    "split": ["--elastic-schedule", "split"],
    "interleaved": ["--num-virtual-stages-per-pipeline-rank", str(CHUNKS)],
}


def predicted(pp: int, grains: int) -> dict[str, float]:
    """Length of a step in forwards of a grain, if a backward takes two, and its halves one each."""
    layout = Layout.grid(tp=1, pp=pp, dp=1, stage_units=[[p] for p in range(pp)], units=[str(p) for p in range(pp)],
                         num_grains=grains, num_slices=1, replicas=0)
    plain = one_forward_one_backward(layout)

    def length(program: Program, chunks: int = 1) -> float:
        def duration(leader: int, stage: int, op: Op) -> float:
            return (2.0 if op.kind == "backward" else 1.0) / chunks

        return simulate(program, layout, duration, chunks=chunks).makespan

    return {"1f1b": length(plain), "split": length(split_backward(plain, layout)),
            "interleaved": length(interleaved(layout, CHUNKS), CHUNKS)}


def figures(times: dict[str, list[list[float]]], pp: int, grains: int) -> dict[str, Any]:
    """Ratios of medians to that of 1F1B, and the predicted ones. ``grains``: of a cell."""
    lengths = predicted(pp, grains)
    return {**ratio(times, "split", "1f1b", "ratio_split"), **ratio(times, "interleaved", "1f1b", "ratio_interleaved"),
            "step_ms": medians(times),
            "predicted": {name: round(lengths[name] / lengths["1f1b"], 4) for name in ("split", "interleaved")}}


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """Parse and check the flags."""
    parser = argparse.ArgumentParser(prog="megatron-elastic bench schedules",
                                     description="Step times with other schedules against 1F1B.")
    add_flags(parser)
    parser.add_argument("--pp", type=int, default=2, help="pipeline-parallel size (default: %(default)s)")
    parser.set_defaults(tp=1)
    options = parser.parse_args(argv)
    if options.nproc_per_node % options.pp:
        parser.error(f"--nproc-per-node {options.nproc_per_node} is no multiple of --pp {options.pp}")
    check_flags(parser, options)
    return options


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; 0 if all jobs finished."""
    options = parse_args(argv)
    load = load_average()
    flags = [*flags_of_job(options, prepare_data()), "--elastic"]
    times: dict[str, list[list[float]]] = {name: [] for name in SCHEDULES}
    with run_root() as root:
        for turn, name in plan_jobs(options.rounds, tuple(SCHEDULES)):
            run_dir = root / f"round{turn + 1}-{name}"
            run_job(run_dir, options.nproc_per_node, [*flags, *SCHEDULES[name]])
            times[name].append(step_times(read_metrics(run_dir)))
            progress(f"round {turn + 1}/{options.rounds}: {name} {statistics.median(times[name][-1]):.0f} ms a step")
    width = options.nproc_per_node // options.pp
    emit("schedules", argv, {
        **figures(times, options.pp, options.global_batch_size // width),
        **circumstances(options),
        "load_before": load,
    })
    return 0


if __name__ == "__main__":
    run("schedules", main)
