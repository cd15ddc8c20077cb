"""What do other schedules than 1F1B save? ``megatron-elastic bench schedules --nproc-per-node 2 --pp 2``.

Short elastic jobs with 1F1B, with the backward split, and with two virtual stages on each rank take turns; the order
rotates from round to round. What the simulator says of operations that take equally long is beside it. There is
something to save only where a rank that waits leaves its core idle: with more ranks than cores others use it, and all
take as long as the work does.

With ``--table`` nothing is run: known schedules, searched ones, optima and bounds are put side by side for pipelines of
published models (docs/schedules.md). With ``--emulate`` jobs of emulated devices run under 1F1B, split and searched.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from common import emit, load_average, prepare_data, progress, run_job, run_root, step_times
from undisturbed.overhead import add_flags, check_flags, circumstances, flags_of_job, medians, plan_jobs, ratio

from megatron_elastic.emulation import command
from megatron_elastic.emulation.accelerators import ACCELERATORS
from megatron_elastic.emulation.models import MODELS
from megatron_elastic.layout import Layout
from megatron_elastic.observe.records import read_metrics
from megatron_elastic.pipeline.program import Op, Program
from megatron_elastic.pipeline.schedule import split_backward, usual
from megatron_elastic.pipeline.simulate import simulate
from planned.searched import measured, table
from planned.searched.pipelines import FURTHER

CHUNKS = 2
SCHEDULES = {
    "1f1b": [],
    "split": ["--elastic-schedule", "split"],
    "interleaved": ["--num-virtual-stages-per-pipeline-rank", str(CHUNKS)],
}


def predicted(pp: int, grains: int) -> dict[str, float]:
    """Length of a step in forwards of a grain, if a backward takes two, and its halves one each."""
    plain, chunked = (
        Layout.grid(tp=1, pp=pp, dp=1, stage_units=[range(p, pp * chunks, pp) for p in range(pp)],
                    units=[str(p) for p in range(pp * chunks)], num_grains=grains, num_slices=1, replicas=0)
        for chunks in (1, CHUNKS)
    )  # fmt: skip

    def length(program: Program, layout: Layout) -> float:
        def duration(leader: int, stage: int, op: Op) -> float:
            return (2.0 if op.kind == "backward" else 1.0) / layout.num_chunks

        return simulate(program, layout, duration).makespan

    return {"1f1b": length(usual(plain), plain), "split": length(split_backward(usual(plain), plain), plain),
            "interleaved": length(usual(chunked), chunked)}


def figures(times: dict[str, list[list[float]]], pp: int, grains: int) -> dict[str, Any]:
    """Ratios of medians to that of 1F1B, and the predicted ones. ``grains``: of a cell."""
    lengths = predicted(pp, grains)
    return {**ratio(times, "split", "1f1b", "ratio_split"), **ratio(times, "interleaved", "1f1b", "ratio_interleaved"),
            "step_ms": medians(times),
            "predicted": {name: round(lengths[name] / lengths["1f1b"], 4) for name in ("split", "interleaved")}}


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """Parse and check the flags."""
    parser = argparse.ArgumentParser(prog="megatron-elastic bench schedules",
                                     description="Step times with other schedules against 1F1B.",
                                     epilog="With --emulate MODEL emulated devices run them; its flags, as --layouts "
                                     "and --step-seconds: bench schedules --emulate MODEL --help")
    add_flags(parser)
    parser.add_argument("--pp", type=int, default=2, help="pipeline-parallel size (default: %(default)s)")
    parser.set_defaults(tp=1)
    parser.add_argument("--table", action="store_true", help="run nothing; search, and compare on paper")
    on_paper = parser.add_argument_group("with --table")
    on_paper.add_argument("--models", default=",".join(name for name in MODELS if name.startswith("flextrain")),
                          metavar="NAMES", help="default: %(default)s")
    on_paper.add_argument("--device", choices=tuple(ACCELERATORS), default="h100", help="default: %(default)s")
    on_paper.add_argument("--stages", default="2,4,8,16", metavar="N,N", help="default: %(default)s")
    on_paper.add_argument("--optimum", type=float, default=10.0, metavar="S",
                          help="seconds for the optimum of each small pipeline, for which OR-Tools is needed; 0: do "
                          "without (default: %(default)s)")
    options = parser.parse_args(argv)
    if options.table:
        if unknown := sorted(set(options.models.split(",")) - set(MODELS)):
            parser.error(f"unknown model {', '.join(unknown)}: {', '.join(MODELS)}")
        return options
    if options.nproc_per_node % options.pp:
        parser.error(f"--nproc-per-node {options.nproc_per_node} is no multiple of --pp {options.pp}")
    check_flags(parser, options)
    return options


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; 0 if all jobs finished."""
    if argv[:1] == ["--emulate"]:
        return _emulated(argv)
    options, load = parse_args(argv), load_average()
    if options.table:
        return _on_paper(options, argv)
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


def _emulated(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="megatron-elastic bench schedules",
                                     description="Emulated jobs under 1F1B, split and searched, also with chunks "
                                     "placed otherwise.")
    parser.add_argument("--emulate", choices=tuple(MODELS), required=True)
    command.add_flags(parser)
    parser.add_argument("--layouts", default="tp1,pp4,dp2;tp1,pp2,dp2", metavar="L;L", help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=9, metavar="N", help="of each job (default: %(default)s)")
    options = parser.parse_args(argv)
    options.model, load = options.emulate, load_average()
    emit("schedules", argv, {**measured.summary(list(measured.jobs(options))), "load_before": load})
    return 0


def _on_paper(options: argparse.Namespace, argv: Sequence[str]) -> int:
    models, stages = options.models.split(","), [int(count) for count in options.stages.split(",")]
    found = list(table.rows(models, options.device, stages, options.optimum))
    padded = list(table.no_ops(models, options.device, range(2, 17), FURTHER))
    print(table.markdown(found), table.no_ops_markdown(padded), sep="\n\n", file=sys.stderr)
    emit("schedules", argv, {**table.summary(found), "pipelines": found, "no_ops": padded})
    return 0
