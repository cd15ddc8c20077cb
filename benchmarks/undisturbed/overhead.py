"""What does being elastic cost when nothing fails? ``megatron-elastic bench overhead``.

Jobs of plain Megatron over gloo and over ``elastic``, and of the elastic trainer, ``fast`` and ``bitwise`` with
replicas, without the log that resumed steps need, and with all that there is to look at switched on (``watched``:
Prometheus' metrics, TensorBoard, lines as JSON, and a look each second, as ``top`` does), take turns of a few steps
(``turns``): what else the machine does then hits all of them. So does, with ``--against CHECKOUT``, ``bitwise`` as
another checkout has it. One more job tells what it costs that ranks are watched (``watching``).

Two jobs of one commit differ as well, for as long as they live: their memory lies elsewhere. ``--jobs`` starts all anew
so often, and tells ratios by job, too: before a few percent are believed, their error is to be that of jobs, not of
turns.

When other work competes for the cores, step times say who was scheduled more: look at ``load_before``, and at the
processor time of a step, which is that of all processes of a job together.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from common import (
    CHECKOUT,
    emit,
    free_port,
    load_average,
    prepare_data,
    progress,
    run_job,
    run_root,
    spread_of_ratios,
)

from undisturbed import watching
from undisturbed.turns import WARM, TakingTurns, started

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
_SPARE = 10
"""Steps of a job, for each of its turns, beyond those that are asked for: it is ended, and must not end by itself."""
_WATCHED = 6
"""Steps of the job that counts how ranks are watched."""
_OF_EXPERTS = "--moe-router-topk 2 --moe-aux-loss-coeff 1e-2 --disable-bias-linear"
Times = Mapping[str, Sequence[Sequence[float]]]
"""Variant -> rounds -> steps, in ms. A round is a job, or a turn of one, of each variant."""


def plan_jobs(rounds: int, names: Sequence[str] = tuple(VARIANTS)) -> Iterator[tuple[int, str]]:
    """(round, variant) of each job, or turn of one; the order rotates."""
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
    experts = ["--num-experts", str(options.num_experts), *_OF_EXPERTS.split()] if options.num_experts else []
    return [*(text for name, value in values.items() for text in (f"--{name}", str(value))), *experts]


def figures(times: Times, jobs: int = 1) -> dict[str, Any]:
    """Medians over all rounds, and those of ``RATIOS`` whose variants were measured. ``jobs``: see ``ratio``."""
    found: dict[str, Any] = {}
    for key, (name, base) in RATIOS.items():
        if name in times and base in times:
            found |= ratio(times, name, base, key, jobs)
    return {**found, "step_ms": medians(times)}


def medians(times: Times) -> dict[str, float]:
    """Median step time of each variant over all rounds, in ms."""
    return {name: round(_median(rounds), 1) for name, rounds in times.items()}


def ratio(times: Times, name: str, base: str, key: str, jobs: int = 1) -> dict[str, Any]:
    """``key``: a variant's median divided by that of ``base``; ``key``_rounds: how far it spreads over the rounds.

    Of rounds enough to tell also their geometric mean, and its standard error. Where the rounds are those of several
    ``jobs``, as many of each, the same of jobs: ``key``_jobs.
    """
    by_round = [statistics.median(a) / statistics.median(b) for a, b in zip(times[name], times[base], strict=True)]
    found = {key: round(_median(times[name]) / _median(times[base]), 4), f"{key}_rounds": spread_of_ratios(by_round)}
    if jobs > 1:
        each = len(by_round) // jobs
        of_jobs = [statistics.geometric_mean(by_round[at : at + each]) for at in range(0, len(by_round), each)]
        found[f"{key}_jobs"] = spread_of_ratios(of_jobs)
    return found


def _median(rounds: Sequence[Sequence[float]]) -> float:
    return statistics.median(t for each in rounds for t in each)


def parse_args(argv: Sequence[str], name: str, description: str) -> argparse.Namespace:
    """Parse and check the flags of a benchmark of step times whose jobs have two stages and run one after the other."""
    parser = argparse.ArgumentParser(prog=f"megatron-elastic bench {name}", description=description)
    add_flags(parser)
    options = _of_two_stages(parser, argv)
    check_flags(parser, options)
    return options


def _of_two_stages(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    parser.set_defaults(tp=1, pp=STAGES)
    options = parser.parse_args(argv)
    if options.nproc_per_node % STAGES:
        parser.error(f"--nproc-per-node must be a multiple of {STAGES}")
    return options


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of a benchmark of step times whose jobs run one after the other."""
    parser.add_argument("--rounds", type=int, default=4, metavar="N",
                        help="jobs of each variant (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=12, metavar="N",
                        help="steps of each job; the first two are left out (default: %(default)s)")
    add_model_flags(parser)


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of every benchmark of step times: how many ranks train which model."""
    parser.add_argument("--nproc-per-node", type=int, default=8, metavar="N", help="ranks (default: %(default)s)")
    parser.add_argument("--num-layers", type=int, default=4, metavar="N", help="default: %(default)s")
    parser.add_argument("--hidden-size", type=int, default=256, metavar="N", help="default: %(default)s")
    parser.add_argument("--seq-length", type=int, default=256, metavar="N", help="default: %(default)s")
    parser.add_argument("--micro-batch-size", type=int, default=1, metavar="N", help="default: %(default)s")
    parser.add_argument("--global-batch-size", type=int, default=16, metavar="N", help="default: %(default)s")

    parser.add_argument("--num-experts", type=int, default=0, metavar="N",
                        help="in every layer, of which each token goes to two; 0: dense (default: %(default)s)")


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
                  for name in ("num_layers", "hidden_size", "seq_length", "micro_batch_size", "global_batch_size",
                               "num_experts")},
    }  # fmt: skip


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse and check the flags of this benchmark."""
    parser = argparse.ArgumentParser(
        prog="megatron-elastic bench overhead",
        description="Step times of the elastic job without faults against plain Megatron's.")
    parser.add_argument("--rounds", type=int, default=10, metavar="N",
                        help="turns of each variant's job (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N",
                        help="start all jobs anew so often, each time for so many turns: from 4 on the error of ratios "
                             "is told that jobs of the same commit have among each other (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=3, metavar="N",
                        help="steps of a turn that count (default: %(default)s)")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), metavar="NAME",
                        help=f"what is measured: some of {', '.join(VARIANTS)} (default: all)")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT",
                        help="measure bitwise as another checkout of this project has it, too")
    add_model_flags(parser)
    options = _of_two_stages(parser, argv)
    if min(options.rounds, options.steps, options.jobs) < 1:
        parser.error("--rounds, --steps and --jobs must be at least 1")
    return options


def _starts(
    options: argparse.Namespace, root: Path, flags: Sequence[str]
) -> dict[str, Callable[[], TakingTurns]]:
    """What starts the job of each variant."""

    def start(name: str) -> TakingTurns:
        run_dir, more = root / name, list(VARIANTS["bitwise" if name == "against" else name])
        looked_at: Callable[[], AbstractContextManager[None]] = nullcontext
        if name == "watched":
            more += ["--elastic-metrics-port", str(free_port()), "--tensorboard-dir", f"{run_dir}-curves"]
            looked_at = partial(watching.looked_at, run_dir)
        checkout = options.against.resolve() if name == "against" else CHECKOUT
        return TakingTurns(run_dir, options.nproc_per_node, [*flags, *more], checkout, looked_at)

    return {name: partial(start, name) for name in (*options.variants, *(["against"] if options.against else []))}


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; 0 if all jobs finished."""
    options = _parse(argv)
    load = load_average()
    flags = flags_of_job(options, prepare_data())
    times: defaultdict[str, list[Sequence[float]]] = defaultdict(list)
    cpu: defaultdict[str, list[Sequence[float]]] = defaultdict(list)
    with run_root() as root:
        long = WARM + options.rounds * (2 * options.steps + _SPARE)
        for job in range(options.jobs):
            folder = root / str(job + 1)
            folder.mkdir()
            starts = _starts(options, folder, [*flags, "--train-iters", str(long)])
            turns = list(plan_jobs(options.rounds, list(starts)))
            with started(starts) as jobs:
                for number, (_, name) in enumerate(turns, start=1 + job * len(turns)):
                    turn = jobs[name].take(options.steps)
                    times[name].append(turn.step_ms)
                    cpu[name].append([turn.cpu_ms])
                    progress(f"turn {number}/{options.jobs * len(turns)}: {name} "
                             f"{statistics.median(turn.step_ms):.0f} ms a step, {turn.cpu_ms:.0f} ms of the processors")
        found = {**figures(times, options.jobs), "cpu": figures(cpu, options.jobs)}
        if "bitwise" in times:
            run_job(root / "counted", options.nproc_per_node,
                    [*flags, *VARIANTS["bitwise"], "--train-iters", str(_WATCHED)], watching.SCRIPT)
            found["watching"] = watching.watching(root / "counted", options.nproc_per_node, medians(times)["bitwise"])
    emit("overhead", argv, {
        **found,
        **circumstances(options),
        "steps_counted": options.steps * options.rounds * options.jobs,
        "jobs": options.jobs,
        "load_before": load,
    })
    return 0
