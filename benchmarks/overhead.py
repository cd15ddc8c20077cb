"""What does being elastic cost when nothing fails? ``megatron-elastic bench overhead``.

Short jobs of plain Megatron over gloo and of the elastic trainer, ``fast`` and ``bitwise`` with replicas, and without
the log that resumed steps need, take turns: what else the machine does then hits all of them. The order rotates from
round to round. One more job tells what it costs that ranks are watched (``watching``).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import watching
from common import emit, load_average, prepare_data, progress, run, run_job, run_root, step_times

from megatron_elastic.observe.records import read_metrics

VARIANTS = {
    "plain": [],
    "fast": ["--elastic", "--elastic-consistency", "fast"],
    "bitwise": ["--elastic", "--elastic-consistency", "bitwise"],
    "without_log": ["--elastic", "--elastic-consistency", "bitwise", "--elastic-redo", "step"],
}
STAGES = 2
Times = Mapping[str, Sequence[Sequence[float]]]
"""Variant -> rounds -> steps, in ms."""


def plan_jobs(rounds: int, names: Sequence[str] = tuple(VARIANTS)) -> Iterator[tuple[int, str]]:
    """(round, variant) of each job; the order rotates."""
    names = list(names)
    for turn in range(rounds):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            yield turn, name


def flags_of_job(options: argparse.Namespace, data: Path) -> list[str]:
    """Flags that all variants share."""
    values = {
        "data-path": data, "tensor-model-parallel-size": options.tp, "pipeline-model-parallel-size": options.pp,
        "num-layers": options.num_layers, "hidden-size": options.hidden_size, "num-attention-heads": 4,
        "seq-length": options.seq_length, "micro-batch-size": 1, "global-batch-size": options.global_batch_size,
        "train-iters": options.steps, "lr": 1e-3, "attention-dropout": 0.1, "hidden-dropout": 0.1, "eval-iters": 0,
    }
    return [text for name, value in values.items() for text in (f"--{name}", str(value))]


def figures(times: Times) -> dict[str, Any]:
    """Medians over all rounds, and ratios to ``plain`` and of what the log costs."""
    return {**ratio(times, "fast", "plain", "ratio_fast"), **ratio(times, "bitwise", "plain", "ratio_bitwise"),
            **ratio(times, "bitwise", "without_log", "ratio_log"), "step_ms": medians(times)}


def medians(times: Times) -> dict[str, float]:
    """Median step time of each variant over all rounds, in ms."""
    return {name: round(_median(rounds), 1) for name, rounds in times.items()}


def ratio(times: Times, name: str, base: str, key: str) -> dict[str, Any]:
    """``key``: a variant's median divided by that of ``base``; ``key``_rounds: how far it spreads over the rounds."""
    by_round = [statistics.median(a) / statistics.median(b) for a, b in zip(times[name], times[base], strict=True)]
    return {key: round(_median(times[name]) / _median(times[base]), 4),
            f"{key}_rounds": {"min": round(min(by_round), 4), "max": round(max(by_round), 4)}}


def _median(rounds: Sequence[Sequence[float]]) -> float:
    return statistics.median(t for each in rounds for t in each)


def parse_args(argv: Sequence[str], name: str, description: str) -> argparse.Namespace:
    """Parse and check the flags of a benchmark of step times whose jobs have two stages."""
    parser = argparse.ArgumentParser(prog=f"megatron-elastic bench {name}", description=description)
    add_flags(parser)
    parser.set_defaults(tp=1, pp=STAGES)
    options = parser.parse_args(argv)
    if options.nproc_per_node % STAGES:
        parser.error(f"--nproc-per-node must be a multiple of {STAGES}")
    check_flags(parser, options)
    return options


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of every benchmark of step times."""
    parser.add_argument("--nproc-per-node", type=int, default=8, metavar="N", help="ranks (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=4, metavar="N",
                        help="jobs of each variant (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=12, metavar="N",
                        help="steps of each job; the first two are left out (default: %(default)s)")
    parser.add_argument("--num-layers", type=int, default=4, metavar="N", help="default: %(default)s")
    parser.add_argument("--hidden-size", type=int, default=256, metavar="N", help="default: %(default)s")
    parser.add_argument("--seq-length", type=int, default=256, metavar="N", help="default: %(default)s")
    parser.add_argument("--global-batch-size", type=int, default=16, metavar="N", help="default: %(default)s")


def check_flags(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End with an error unless there is something to measure."""
    if options.rounds < 1 or options.steps < 3:
        parser.error("--rounds must be at least 1 and --steps at least 3")


def circumstances(options: argparse.Namespace) -> dict[str, Any]:
    """What the figures were measured with."""
    return {
        "rounds": options.rounds,
        "steps_counted": (options.steps - 2) * options.rounds,
        "layout": {"tp": options.tp, "pp": options.pp, "dp": options.nproc_per_node // (options.tp * options.pp)},
        "model": {name: getattr(options, name)
                  for name in ("num_layers", "hidden_size", "seq_length", "global_batch_size")},
    }


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; 0 if all jobs finished."""
    options = parse_args(argv, "overhead",
                         "Step times of the elastic job without faults against plain Megatron over gloo.")
    load = load_average()
    flags = flags_of_job(options, prepare_data())
    jobs = list(plan_jobs(options.rounds))
    times: dict[str, list[list[float]]] = {name: [] for name in VARIANTS}
    with run_root() as root:
        for number, (turn, name) in enumerate(jobs, start=1):
            run_dir = root / f"round{turn + 1}-{name}"
            run_job(run_dir, options.nproc_per_node, [*flags, *VARIANTS[name]])
            times[name].append(step_times(read_metrics(run_dir)))
            progress(f"job {number}/{len(jobs)}: {name} {statistics.median(times[name][-1]):.0f} ms a step")
        run_job(root / "watched", options.nproc_per_node, [*flags, *VARIANTS["bitwise"]], watching.SCRIPT)
        watched = watching.watching(root / "watched", options.nproc_per_node, medians(times)["bitwise"])
    emit("overhead", argv, {
        **figures(times),
        "watching": watched,
        **circumstances(options),
        "load_before": load,
    })
    return 0


if __name__ == "__main__":
    run("overhead", main)
