"""How long is a step after a loss, with whole micro-batches and with cut ones? ``megatron-elastic bench dataflow``.

Short jobs with ``--elastic-dataflow reroute`` and ``resize`` take turns; each loses its last rank. By default three
ranks have one micro-batch of four samples each, so that of the two that are left one has eight samples to compute, or
both have six. Ranks should have a core each: where they share cores, what counts is how much there is to do in all.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from common import emit, load_average, prepare_data, progress, run_job, run_root
from undisturbed.overhead import add_flags, check_flags, circumstances, flags_of_job, medians, plan_jobs, ratio

from megatron_elastic.layout import Layout
from megatron_elastic.observe.records import read_metrics

VARIANTS = ("reroute", "resize")
_KILLED_AT = 8
_SETTLED = 5
"""Steps from the loss on in which slices may still move."""


def samples_of_fullest(layout: Layout, size: int) -> float:
    """Samples that the cell which has most to do computes in a step, of micro-batches of ``size``."""
    return max(size * layout.load(cell) for stage in layout.stages for cell in stage.cells)


def figures(before: Mapping[str, Sequence[Sequence[float]]], after: Mapping[str, Sequence[Sequence[float]]]) -> Any:
    """Medians before and after the loss over all rounds, and resize's to reroute's after it."""
    return {"before_ms": medians(before), "after_ms": medians(after),
            **ratio(after, "resize", "reroute", "ratio_after")}


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """Parse and check the flags."""
    parser = argparse.ArgumentParser(
        prog="megatron-elastic bench dataflow", description="Step times after a loss: reroute against resize.")
    add_flags(parser)
    parser.set_defaults(tp=1, pp=1, nproc_per_node=3, micro_batch_size=4, global_batch_size=12, steps=30)
    options = parser.parse_args(argv)
    check_flags(parser, options)
    if options.steps <= _KILLED_AT + _SETTLED:
        parser.error(f"--steps must be more than {_KILLED_AT + _SETTLED}: the loss is in step {_KILLED_AT}")
    return options


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; 0 if all jobs finished."""
    options = parse_args(argv)
    load = load_average()
    kill = f"kill:rank={options.nproc_per_node - 1},step={_KILLED_AT},at=forward"
    flags = [*flags_of_job(options, prepare_data()), "--elastic", "--elastic-inject", kill]
    before: dict[str, list[list[float]]] = {name: [] for name in VARIANTS}
    after: dict[str, list[list[float]]] = {name: [] for name in VARIANTS}
    fullest: dict[str, float] = {}
    jobs = list(plan_jobs(options.rounds, VARIANTS))
    with run_root() as root:
        for number, (turn, name) in enumerate(jobs, start=1):
            run_dir = root / f"round{turn + 1}-{name}"
            run_job(run_dir, options.nproc_per_node, [*flags, "--elastic-dataflow", name])
            times = {step: line["step_ms"] for step, line in read_metrics(run_dir).items()}
            before[name].append([ms for step, ms in times.items() if 2 < step < _KILLED_AT])
            after[name].append([ms for step, ms in times.items() if step >= _KILLED_AT + _SETTLED])
            last = max((run_dir / "layouts").glob("*.json"), key=lambda path: int(path.stem))
            fullest[name] = samples_of_fullest(Layout.from_json(last.read_text()), options.micro_batch_size)
            progress(f"job {number}/{len(jobs)}: {name}")
    emit("dataflow", argv, {
        **figures(before, after),
        "samples_of_fullest_cell": fullest,
        **circumstances(options),
        "steps_counted": (options.steps + 1 - _KILLED_AT - _SETTLED) * options.rounds,
        "load_before": load,
    })
    return 0
