"""What does being elastic cost when nothing fails? ``megatron-elastic bench overhead``.

Short jobs of plain Megatron over gloo and over ``elastic``, and of the elastic trainer, ``fast`` and ``bitwise`` with
replicas, without the log that resumed steps need, and with all that there is to look at switched on (``watched``:
Prometheus' metrics, TensorBoard, lines as JSON, and a look each second, as ``top`` does), take turns: what else the
machine does then hits all of them. So does, with ``--against CHECKOUT``, ``bitwise`` as another checkout has it. The
order rotates from round to round. One more job tells what it costs that ranks are watched (``watching``).

When other work competes for the cores, step times say who was scheduled more: look at ``load_before``, and at the
processor time of a step, which is that of all ranks together, without what a job of the fewest steps takes.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import watching
from common import CHECKOUT, emit, free_port, load_average, prepare_data, progress, run, run_job, run_root, step_times

from megatron_elastic.observe.records import read_metrics

VARIANTS = {
    "plain": [],
    "same_transport": ["--distributed-backend", "elastic"],
    "fast": ["--elastic", "--elastic-consistency", "fast"],
    "bitwise": ["--elastic", "--elastic-consistency", "bitwise"],
    "without_log": ["--elastic", "--elastic-consistency", "bitwise", "--elastic-redo", "step"],
    "watched": ["--elastic", "--elastic-consistency", "bitwise", "--elastic-log-format", "json"],
}
RATIOS = {
    "ratio_fast": ("fast", "plain"),
    "ratio_bitwise": ("bitwise", "plain"),
    "ratio_fast_same_transport": ("fast", "same_transport"),
    "ratio_bitwise_same_transport": ("bitwise", "same_transport"),
    "ratio_log": ("bitwise", "without_log"),
    "ratio_watched": ("watched", "bitwise"),
    "ratio_against": ("bitwise", "against"),
    "ratio_against_same_transport": ("against", "same_transport"),
}
"""Name -> variant, and what it is divided by."""
STAGES = 2
_FEWEST = 2
"""Steps of the job whose processor time counts as that of starting one."""
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
        "seq-length": options.seq_length, "micro-batch-size": options.micro_batch_size,
        "global-batch-size": options.global_batch_size,
        "train-iters": options.steps, "lr": 1e-3, "attention-dropout": 0.1, "hidden-dropout": 0.1, "eval-iters": 0,
    }
    return [text for name, value in values.items() for text in (f"--{name}", str(value))]


def figures(times: Times) -> dict[str, Any]:
    """Medians over all rounds, and those of ``RATIOS`` whose variants were measured."""
    found: dict[str, Any] = {}
    for key, (name, base) in RATIOS.items():
        if name in times and base in times:
            found |= ratio(times, name, base, key)
    return {**found, "step_ms": medians(times)}


def cpu_seconds() -> float:
    """What the jobs that have ended used of the processors so far."""
    times = os.times()
    return times.children_user + times.children_system


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


def parse_args(
    argv: Sequence[str], name: str, description: str, add: Callable[[argparse.ArgumentParser], None] = lambda _: None
) -> argparse.Namespace:
    """Parse and check the flags of a benchmark of step times whose jobs have two stages. ``add``: adds its own."""
    parser = argparse.ArgumentParser(prog=f"megatron-elastic bench {name}", description=description)
    add_flags(parser)
    add(parser)
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
    parser.add_argument("--micro-batch-size", type=int, default=1, metavar="N", help="default: %(default)s")
    parser.add_argument("--global-batch-size", type=int, default=16, metavar="N", help="default: %(default)s")


def _add_variants(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), metavar="NAME",
                        help=f"what is measured: some of {', '.join(VARIANTS)} (default: all)")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT",
                        help="measure bitwise as another checkout of this project has it, too")


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
                  for name in ("num_layers", "hidden_size", "seq_length", "micro_batch_size", "global_batch_size")},
    }


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; 0 if all jobs finished."""
    options = parse_args(argv, "overhead",
                         "Step times of the elastic job without faults against plain Megatron's.", _add_variants)
    load = load_average()
    flags = flags_of_job(options, prepare_data())
    names = [*options.variants, *(["against"] if options.against else [])]
    jobs = list(plan_jobs(options.rounds, names))
    times: dict[str, list[list[float]]] = {name: [] for name in names}
    cpu: dict[str, list[list[float]]] = {name: [] for name in names}
    with run_root() as root:

        def job(name: str, label: str, more: Sequence[str] = ()) -> tuple[Path, float]:
            """Run one; where its records are, and the seconds of the processors that it took."""
            before, run_dir = cpu_seconds(), root / f"{label}-{name}"
            checkout = options.against.resolve() if name == "against" else CHECKOUT
            variant = VARIANTS["bitwise" if name == "against" else name]
            if name == "watched":
                more = [*more, "--elastic-metrics-port", str(free_port()), "--tensorboard-dir", f"{run_dir}-curves"]
            with watching.looked_at(run_dir) if name == "watched" else nullcontext():
                run_job(run_dir, options.nproc_per_node, [*flags, *variant, *more], checkout=checkout)
            return run_dir, cpu_seconds() - before

        start = {name: job(name, "start", ("--train-iters", str(_FEWEST)))[1] for name in names}
        for number, (turn, name) in enumerate(jobs, start=1):
            run_dir, seconds = job(name, f"round{turn + 1}")
            times[name].append(step_times(read_metrics(run_dir)))
            cpu[name].append([(seconds - start[name]) * 1e3 / (options.steps - _FEWEST)])
            progress(f"job {number}/{len(jobs)}: {name} {statistics.median(times[name][-1]):.0f} ms a step, "
                     f"{cpu[name][-1][0]:.0f} ms of the processors")
        found = {**figures(times), "cpu": figures(cpu)}
        if "bitwise" in times:
            run_job(root / "watched", options.nproc_per_node, [*flags, *VARIANTS["bitwise"]], watching.SCRIPT)
            found["watching"] = watching.watching(root / "watched", options.nproc_per_node, medians(times)["bitwise"])
    emit("overhead", argv, {
        **found,
        **circumstances(options),
        "load_before": load,
    })
    return 0


if __name__ == "__main__":
    run("overhead", main)
