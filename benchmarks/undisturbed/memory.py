"""Do stages keep as much as is foreseen? ``megatron-elastic bench memory``.

Jobs on the accelerator made of software, whose allocator counts, one rank a stage, under 1F1B, with the backward split,
and with two chunks a stage. What the passes of a step have allocated at most is put beside what the graph of the step
says by the activations that the job itself has measured, with the log of what a step sends to other stages.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from common import CHECKOUT, JobFailed, emit, load_average, newest_layout, prepare_data, progress, run_job, run_root
from planned.schedules import SCHEDULES

from megatron_elastic.layout import Layout
from megatron_elastic.pipeline.dag import Dag
from megatron_elastic.pipeline.schedule import split_backward, usual
from megatron_elastic.plan.costs.cost import Costs
from undisturbed.overhead import add_flags, check_flags, flags_of_job

SCRIPT = str(CHECKOUT / "benchmarks" / "programs" / "kept_gpt.py")
_KEPT = re.compile(r"^kept (\d+)$", re.MULTILINE)
_WARM = 2
"""Steps at the beginning that are left out."""


def stages(run_dir: Path, schedule: str) -> Iterator[dict[str, Any]]:
    """Of each stage of a job, in MiB: what its rank has allocated, and what was foreseen. Raises JobFailed."""
    layout = newest_layout(run_dir)
    costs = Costs.from_json((run_dir / "profile.json").read_text(), layout.units)
    program = usual(layout)
    peaks = Dag.of(split_backward(program, layout) if schedule == "split" else program, layout, costs).peaks
    for stage, leader in enumerate(layout.cells):
        told = _KEPT.findall((run_dir / "logs" / f"rank{leader}.log").read_text())[_WARM:]
        if not told:
            raise JobFailed(f"{run_dir}: rank {leader} does not say what it has kept; give more --steps")
        kept, log = max(map(int, told)), _log(layout, stage, costs)
        yield {"schedule": schedule, "stage": stage, "kept": _mib(kept), "activations": _mib(peaks[leader]),
               "with_log": _mib(peaks[leader] + log), "error": round((peaks[leader] + log) / kept - 1, 4)}  # fmt: skip


def _log(layout: Layout, stage: int, costs: Costs) -> int:
    """Bytes of what a stage sends to others in a step, which is there until the step is committed."""
    ends = (0, len(layout.way) - 1)
    each = sum(2 - (at == ends[0]) - (at == ends[1]) for at, place in enumerate(layout.way) if place.stage == stage)
    return each * layout.num_grains * costs.boundary_bytes


def _mib(size: float) -> float:
    return round(size / 2**20, 3)


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """Parse and check the flags."""
    parser = argparse.ArgumentParser(prog="megatron-elastic bench memory",
                                     description="What stages keep of activations, foreseen and measured.")
    add_flags(parser)
    parser.set_defaults(nproc_per_node=4, steps=12, rounds=1, num_layers=8, hidden_size=64, seq_length=128,
                        micro_batch_size=2)
    options = parser.parse_args(argv)
    check_flags(parser, options)
    if options.num_layers % (2 * options.nproc_per_node):
        parser.error(f"--num-layers {options.num_layers} must be a multiple of {2 * options.nproc_per_node}, for two "
                     f"chunks on each of {options.nproc_per_node} stages")
    options.tp, options.pp = 1, options.nproc_per_node
    return options


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; 0 if all jobs finished."""
    options, load = parse_args(argv), load_average()
    flags = [*flags_of_job(options, prepare_data()), "--elastic", "--elastic-device", "soft", "--elastic-profile",
             "measured", "--untie-embeddings-and-output-weights"]  # fmt: skip
    found: list[dict[str, Any]] = []
    with run_root() as root:
        for schedule, more in SCHEDULES.items():
            run_job(root / schedule, options.nproc_per_node, [*flags, *more], SCRIPT)
            found += stages(root / schedule, schedule)
            progress(f"{schedule}: " + ", ".join(
                f"stage {each['stage']} {each['kept']:.1f} MiB, {100 * each['error']:+.1f} %"
                for each in found if each["schedule"] == schedule))
    errors = [abs(each["error"]) for each in found]
    emit("memory", argv, {"median_error": statistics.median(errors), "worst_error": max(errors), "stages": found,
                          "load_before": load})
    return 0
