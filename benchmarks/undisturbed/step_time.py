"""Megatron's own step over ``elastic`` and over gloo. ``megatron-elastic bench step_time --tp 2 --pp 2``.

Both are plain Megatron (its data-parallel wrapper, distributed optimizer and schedules); only ``--distributed-backend``
differs. Short jobs take turns, so that what else the machine does hits both; the first of a round changes each time.
When other work competes for the cores, step times say who was scheduled more: look at ``load_before`` and at the
processor time, which includes starting the job.

Losses are compared too: sums of floats over more than two ranks are taken in another order, so the last digits may
differ.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Sequence
from typing import Any

from common import emit, load_average, prepare_data, progress, run_job, run_root, step_times

from megatron_elastic.observe.records import read_metrics
from undisturbed.overhead import Times, add_flags, check_flags, circumstances, flags_of_job, medians, ratio

BACKENDS = ("elastic", "gloo")


def figures(times: Times) -> dict[str, Any]:
    """The ratio of the medians over all rounds, and by round. ``times``: by backend."""
    return {**ratio(times, "elastic", "gloo", "ratio"), "step_ms": medians(times)}


def cpu_seconds() -> float:
    """What the jobs that have ended used of the processors so far."""
    times = os.times()
    return times.children_user + times.children_system


def losses_apart(losses: dict[str, list[float]]) -> dict[str, Any]:
    """How far the losses of the two backends are apart, step by step."""
    pairs = list(zip(losses["elastic"], losses["gloo"], strict=True))
    return {"steps": len(pairs), "equal": sum(ours == gloos for ours, gloos in pairs),
            "largest_relative_difference": max(abs(ours - gloos) / abs(gloos) for ours, gloos in pairs)}


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """Parse and check the flags."""
    parser = argparse.ArgumentParser(
        prog="megatron-elastic bench step_time", description="Megatron's step time over elastic against gloo.")
    add_flags(parser)
    parser.add_argument("--tp", type=int, default=2, help="tensor-parallel size (default: %(default)s)")
    parser.add_argument("--pp", type=int, default=2, help="pipeline-parallel size (default: %(default)s)")
    options = parser.parse_args(argv)
    if options.nproc_per_node % (options.tp * options.pp):
        parser.error(f"--nproc-per-node {options.nproc_per_node} is no multiple of --tp {options.tp} x "
                     f"--pp {options.pp}")
    check_flags(parser, options)
    return options


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; 0 if all jobs finished."""
    options = parse_args(argv)
    load = load_average()
    flags = flags_of_job(options, prepare_data())
    times: dict[str, list[list[float]]] = {name: [] for name in BACKENDS}
    losses: dict[str, list[float]] = {name: [] for name in BACKENDS}
    cpu: dict[str, list[float]] = {name: [] for name in BACKENDS}
    with run_root() as root:
        for turn in range(options.rounds):
            for name in BACKENDS if turn % 2 == 0 else reversed(BACKENDS):
                run_dir = root / f"round{turn + 1}-{name}"
                before = cpu_seconds()
                run_job(run_dir, options.nproc_per_node, [*flags, "--distributed-backend", name])
                cpu[name].append(cpu_seconds() - before)
                metrics = read_metrics(run_dir)
                times[name].append(step_times(metrics))
                losses[name] += [metrics[step]["loss"] for step in sorted(metrics)]
                progress(f"round {turn + 1}/{options.rounds}: {name} "
                         f"{statistics.median(times[name][-1]):.0f} ms a step")
    emit("step_time", argv, {
        **figures(times),
        "cpu_s_per_job": {name: round(statistics.median(each), 1) for name, each in cpu.items()},
        "losses": losses_apart(losses),
        **circumstances(options),
        "load_before": load,
    })
    return 0
