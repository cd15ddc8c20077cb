"""How far do faults lead training away? ``megatron-elastic bench consistency``.

Jobs of TP1 x PP2 and the rest data parallel lose ranks, and are held against the same job without faults: final loss,
losses on the way, final weights. Three ways: ``bitwise`` sums; ``fast`` ones, whose order depends on who computed what;
and the ``usual`` way, ``fast`` with one random stream a rank instead of numbers that belong to micro-batches
(``programs/stream_per_rank_gpt.py``). ElasWave's section on RNG resharding compares the last two.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import SCRIPT, JobFailed, emit, prepare_data, progress, run_job, run_root
from torch.distributed import checkpoint
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from disturbed.recovery import STAGES, add_model_flags, flags_of_job
from megatron_elastic.adaptor.checkpoints.folder import step_folder
from megatron_elastic.observe.records import read_events, read_metrics

WAYS: Mapping[str, tuple[str, str]] = {
    "bitwise": ("bitwise", SCRIPT),
    "fast": ("fast", SCRIPT),
    "usual": ("fast", "benchmarks/programs/stream_per_rank_gpt.py"),
}
"""Name -> ``--elastic-consistency`` and script."""
_FIRST, _BETWEEN = 5, 4
"""Step of a job's first fault, and steps from one to the next."""
_POINTS = ("backward", "vote", "forward", "grad_sync")


@dataclass(frozen=True, slots=True)
class Trained:
    """What came of a job."""

    losses: Mapping[int, float]
    weights: Mapping[str, torch.Tensor]


def kills(turn: int, columns: int, count: int) -> list[str]:
    """``--elastic-inject`` of ``count`` kills in as many columns; rank = column + columns * stage."""
    ranks = [(turn + nth) % columns + columns * ((turn + nth) % STAGES) for nth in range(count)]
    return [f"kill:rank={rank},step={_FIRST + nth * _BETWEEN},at={_POINTS[(turn + nth) % len(_POINTS)]}"
            for nth, rank in enumerate(ranks)]


def read_weights(save: Path, step: int) -> dict[str, torch.Tensor]:
    """The model's weights in the checkpoint of a step, by Megatron's names."""
    reader = FileSystemReader(step_folder(save, step))
    there = reader.read_metadata().state_dict_metadata
    weights: dict[str, Any] = {
        name: torch.empty(each.size, dtype=each.properties.dtype) for name, each in there.items()
        if isinstance(each, TensorStorageMetadata) and not name.startswith("optimizer.")
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it is read by one process
        checkpoint.load(weights, storage_reader=reader, no_dist=True)
    return weights


def deviation(undisturbed: Trained, disturbed: Trained) -> dict[str, float]:
    """How far two jobs are from each other, relative to the first one.

    ``final_loss``; ``loss``, the mean over the steps from the first fault on; ``weights``, the norm of the difference.
    """
    ours, theirs = undisturbed.losses, disturbed.losses
    relative = {step: abs(theirs[step] - loss) / abs(loss) for step, loss in ours.items()}
    apart = sum(float((disturbed.weights[name].double() - each.double()).square().sum())
                for name, each in undisturbed.weights.items())
    whole = sum(float(each.double().square().sum()) for each in undisturbed.weights.values())
    return {"final_loss": relative[max(relative)],
            "loss": statistics.mean(value for step, value in relative.items() if step >= _FIRST),
            "weights": math.sqrt(apart / whole)}


def figures(deviations: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, Any]:
    """Mean deviation of each way, and by how much it is smaller than the usual way's."""
    means = {way: {name: statistics.mean(each[name] for each in found) for name in found[0]}
             for way, found in deviations.items()}
    usual = means["usual"]
    return {"deviation": means,
            "less_than_usual": {way: {name: 1 - value / usual[name] for name, value in mean.items()}
                                for way, mean in means.items() if way != "usual"}}


def table(found: Mapping[str, Any]) -> str:
    """In Markdown."""
    lines = ["| way | final loss | losses after the first fault | weights |", "|---|---|---|---|"]
    for way, mean in found["deviation"].items():
        cells = (f"{mean[name]:.2g}" for name in ("final_loss", "loss", "weights"))
        lines.append(f"| {way} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """Parse and check the flags."""
    parser = argparse.ArgumentParser(
        prog="megatron-elastic bench consistency",
        description="Kill ranks, and hold losses and final weights against the same job without faults: with bitwise "
        "sums, with fast ones, and the usual way, with a random stream for each rank.")
    parser.add_argument("--nproc-per-node", type=int, default=8, metavar="N", help="ranks (default: %(default)s)")
    parser.add_argument("--faults", type=int, default=2, metavar="N", help="kills in a job (default: %(default)s)")
    parser.add_argument("--repeat", type=int, default=3, metavar="N",
                        help="jobs with faults, each with others, for each way (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=60, metavar="N", help="default: %(default)s")
    add_model_flags(parser)
    options = parser.parse_args(argv)
    columns = options.nproc_per_node // STAGES
    if options.nproc_per_node % STAGES or not 0 < options.faults <= columns - 2:
        parser.error(f"--nproc-per-node must be a multiple of {STAGES}, and two columns must be left after --faults, "
                     f"which takes one each: {options.faults} of {columns}")
    if options.steps <= _FIRST + _BETWEEN * options.faults:
        parser.error(f"--steps must be more than {_FIRST + _BETWEEN * options.faults}: so long there are faults")
    return options


def train(root: Path, name: str, options: argparse.Namespace, way: str, faults: Sequence[str]) -> Trained:
    """Run a job. Raises JobFailed if it fails, or a fault has not come."""
    consistency, script = WAYS[way]
    run_dir, save = root / name, root / f"{name}-save"
    flags = [*flags_of_job(options, prepare_data(), options.steps), "--elastic-consistency", consistency,
             "--save", str(save), "--save-interval", str(options.steps),
             *(text for fault in faults for text in ("--elastic-inject", fault))]
    run_job(run_dir, options.nproc_per_node, flags, script)
    come = sum(event["kind"] == "recovered" for event in read_events(run_dir))
    if come != len(faults):
        raise JobFailed(f"{run_dir}: {len(faults)} recoveries were expected, {come} were recorded")
    losses = {step: line["loss"] for step, line in read_metrics(run_dir).items()}
    return Trained(losses, read_weights(save, options.steps))


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; 0 if all jobs finished and ``bitwise`` did not deviate."""
    options = parse_args(argv)
    columns, total = options.nproc_per_node // STAGES, len(WAYS) * (options.repeat + 1)
    deviations: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    done = 0
    with run_root() as root:
        undisturbed: dict[str, Trained] = {}
        for turn in range(options.repeat + 1):
            for way in WAYS:
                if turn == 0:
                    undisturbed[way] = train(root, f"{way}-undisturbed", options, way, [])
                else:
                    faults = kills(turn, columns, options.faults)
                    disturbed = train(root, f"{way}-{turn}", options, way, faults)
                    deviations[way].append(deviation(undisturbed[way], disturbed))
                done += 1
                progress(f"job {done}/{total}: {way}" + (f" {deviations[way][-1]}" if turn else ""))
        found = figures(deviations)
        print(table(found), file=sys.stderr)
        if any(found["deviation"]["bitwise"].values()):
            raise JobFailed(f"bitwise deviates: {found['deviation']['bitwise']}")
    emit("consistency", argv, {**found, "jobs": total, "faults_per_job": options.faults, "steps": options.steps,
                               "ranks": options.nproc_per_node})
    return 0
