"""How long does training pause when a rank is killed? ``megatron-elastic bench recovery``.

Jobs of TP1 x PP2 and the rest data parallel, with a tiny GPT. A kill takes a cell away. A job has kills in all columns
but two, one after the other, with undisturbed steps between them in which the replicas come back. Every job is compared
bit for bit with one that nothing disturbed. With ``--params`` it is about models of several sizes instead, and with
``--decision`` about how the step goes on in which a rank dies. With ``--against CHECKOUT`` another checkout of this
project does every job as well, and the two take turns.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from common import (
    CHECKOUT,
    JobFailed,
    emit,
    load_average,
    prepare_data,
    progress,
    run_job,
    run_root,
    spread_of_ratios,
    step_times,
    summary,
)

from disturbed.by_size.models import RANKS, Model, accumulation, available_memory, lose_ranks
from disturbed.by_size.redoing import GRIDS, REDO, redo
from disturbed.by_size.restart import restart_ms
from disturbed.by_size.shards import move_ms
from megatron_elastic.observe.compare import compare
from megatron_elastic.observe.records import read_events, read_metrics

PHASES = ("forward", "backward", "grad_sync", "replay", "vote", "apply", "param_sync", "commit")
NESTED = "second_during_first"
"""The first rank dies in the backward pass, the second, of another column, in the recovery from that."""
PARTS = ("detect_ms", "interrupt_ms", "plan_ms", "edit_ms", "state_ms", "redo_ms")
STAGES = 2
FIRST_KILL, BETWEEN = 5, 5
"""Step of a job's first kill, and steps from one to the next."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that happens to a job: the ranks it takes and the flags that make it happen."""

    phase: str
    step: int
    ranks: tuple[int, ...]

    @property
    def flags(self) -> list[str]:
        points = ("backward", "edit") if self.phase == NESTED else (self.phase,)
        return [flag for rank, at in zip(self.ranks, points, strict=True)
                for flag in ("--elastic-inject", f"kill:rank={rank},step={self.step},at={at}")]


def plan_jobs(repeat: int, columns: int) -> Iterator[list[Fault]]:
    """The faults of each job: every phase ``repeat`` times, and as often the nested one, each rank's turn coming."""
    room = columns - 2
    for turn in range(repeat):
        for first in range(0, len(PHASES), room):
            phases = PHASES[first : first + room]
            yield [Fault(phase, FIRST_KILL + i * BETWEEN, (_victim(turn + first + i, i, turn + first, columns),))
                   for i, phase in enumerate(phases)]
        yield [Fault(NESTED, FIRST_KILL, (_victim(turn, 0, turn, columns), _victim(turn + 1, 1, turn, columns)))]


def _victim(stage: int, nth: int, turn: int, columns: int) -> int:
    """The ``nth`` victim of a job is in a column of its own; rank = column + columns * stage, as tp is 1."""
    return (turn + nth) % columns + columns * (stage % STAGES)


def flags_of_job(options: argparse.Namespace, data: Path, steps: int, tp: int = 1, pp: int = STAGES) -> list[str]:
    """Flags of the tiny GPT."""
    values = {
        "data-path": data, "tensor-model-parallel-size": tp, "pipeline-model-parallel-size": pp,
        "num-layers": options.num_layers, "hidden-size": options.hidden_size, "num-attention-heads": 4,
        "seq-length": options.seq_length, "micro-batch-size": 1, "global-batch-size": options.global_batch_size,
        "train-iters": steps, "lr": 1e-3, "attention-dropout": 0.1, "hidden-dropout": 0.1, "eval-iters": 0,
    }
    return ["--elastic", *(text for name, value in values.items() for text in (f"--{name}", str(value)))]


def recoveries(run_dir: Path, faults: Sequence[Fault]) -> list[tuple[str, dict[str, Any]]]:
    """(phase, ``recovered`` event) of each fault of a job. Raises JobFailed if one is missing or not alone."""
    found = {tuple(sorted(e["ranks"])): e for e in read_events(run_dir) if e["kind"] == "recovered"}
    wanted = {tuple(sorted(fault.ranks)): fault.phase for fault in faults}
    if found.keys() != wanted.keys():
        raise JobFailed(f"{run_dir}: recoveries from the loss of ranks {sorted(wanted)} were expected, "
                        f"{sorted(found)} were recorded")
    return [(phase, found[ranks]) for ranks, phase in wanted.items()]


@dataclass(slots=True)
class Series:
    """The jobs of one checkout, and what they have shown."""

    name: str
    checkout: Path
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """(phase, ``recovered``) of every kill."""
    undisturbed: list[float] = field(default_factory=list)
    """Step times in ms."""
    different: list[str] = field(default_factory=list)
    """Jobs that differ from the undisturbed one, and how."""

    def lose(self, run_dir: Path, ranks: int, flags: Sequence[str], faults: Sequence[Fault], reference: Path) -> None:
        """Run a job with these faults. Raises JobFailed."""
        injections = [flag for fault in faults for flag in fault.flags]
        run_job(run_dir, ranks, [*flags, *injections], checkout=self.checkout)
        found = recoveries(run_dir, faults)
        self.events += found
        # Steps before the first kill count as undisturbed: one job alone may meet a busy moment of the machine.
        before = {step: line for step, line in read_metrics(run_dir).items() if step < FIRST_KILL}
        self.undisturbed += step_times(before)
        difference = compare(reference, run_dir)
        if difference is not None:
            self.different.append(f"{run_dir.name} ({' '.join(injections[1::2])}): {difference}")
            progress(self.different[-1])
        progress(f"{run_dir.name}: " + ", ".join(
            f"{phase} {e['mttr_ms']:.0f} ms ({pause_ms(e):.0f} without the redone work)" for phase, e in found))

    def figures(self) -> dict[str, Any]:
        """Those of all its jobs."""
        return {**figures(self.events), "step_ms": round(statistics.median(self.undisturbed), 1),
                "identical": not self.different}


def pause_ms(event: Mapping[str, Any]) -> float:
    """How long a recovery took, without the work that was done again."""
    return float(event["mttr_ms"] - event["redo_ms"])


def ratios(ours: Series, theirs: Series) -> dict[str, Any]:
    """What our kills took by what the same ones took of another checkout."""
    pairs = [(a, b) for (_, a), (_, b) in zip(ours.events, theirs.events, strict=True)]
    return {"mttr": spread_of_ratios([a["mttr_ms"] / b["mttr_ms"] for a, b in pairs]),
            "pause": spread_of_ratios([pause_ms(a) / pause_ms(b) for a, b in pairs])}


def figures(events: Sequence[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """Medians and worst cases, over all and by phase."""
    phases: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for phase, event in events:
        phases[phase].append(event)
    return {
        **_times([event for _, event in events]),
        "by_phase": {phase: _times(group) for phase, group in phases.items()},
    }


def _times(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "kills": len(events),
        "mttr_ms": summary(e["mttr_ms"] for e in events),
        "pause_ms": summary(map(pause_ms, events)),
        "parts_median_ms": {part: round(statistics.median(e[part] for e in events), 2) for part in PARTS},
    }


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that ``flags_of_job`` reads."""
    parser.add_argument("--num-layers", type=int, default=2, metavar="N", help="default: %(default)s")
    parser.add_argument("--hidden-size", type=int, default=64, metavar="N", help="default: %(default)s")
    parser.add_argument("--seq-length", type=int, default=64, metavar="N", help="default: %(default)s")
    parser.add_argument("--global-batch-size", type=int, default=12, metavar="N", help="default: %(default)s")


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """Parse and check the flags."""
    parser = argparse.ArgumentParser(
        prog="megatron-elastic bench recovery",
        description="Kill ranks in every phase of a step, and in recovery; measure from fault to next committed step.")
    parser.add_argument("--nproc-per-node", type=int, default=8, metavar="N", help="ranks (default: %(default)s)")
    parser.add_argument("--repeat", type=int, default=5, metavar="N", help="kills of each phase (default: %(default)s)")
    add_model_flags(parser)
    parser.add_argument("--params", type=_models, metavar="SIZES",
                        help=f"instead: {RANKS} ranks, PP1 and PP2, models of these sizes, for instance 2M,20M,100M")
    parser.add_argument("--decision", type=partial(_some, REDO), metavar="NAMES",
                        help="instead: what a kill in mid-step "
                        f"costs in four layouts of {RANKS} ranks, if the step is resumed or done again: resume,back; "
                        "models as in --params (default: 2M)")
    parser.add_argument("--layouts", type=partial(_some, GRIDS), default=list(GRIDS), metavar="NAMES",
                        help=f"with --decision: which ones, TPxPP (default: {','.join(GRIDS)})")
    parser.add_argument("--alternatives", action="store_true", help="with --params: also restart a plain job from "
                        "checkpoints with torchrun, and move a contiguous shard, with the same models")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT",
                        help="another checkout of this project does every job as well, in turn")
    options = parser.parse_args(argv)
    if options.against and (options.params or options.decision):
        parser.error("--against goes neither with --params nor with --decision")
    if options.alternatives and not options.params:
        parser.error("--alternatives needs --params")
    if options.nproc_per_node % STAGES or options.nproc_per_node < 4 * STAGES:
        parser.error(f"--nproc-per-node must be a multiple of {STAGES}, at least {4 * STAGES}: two columns must be "
                     "left after two kills")
    if options.repeat < 1:
        parser.error("--repeat must be at least 1")
    return options


def _models(text: str) -> list[Model]:
    try:
        return [Model.parse(name) for name in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _some(known: Collection[str], text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names).difference(known):
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: only {', '.join(known)} can be asked for")
    return names


def compare_decisions(
    argv: Sequence[str], models: Sequence[Model], layouts: Sequence[str], decisions: Sequence[str], repeat: int
) -> None:
    """Measure what kills in mid-step cost, and print the result."""
    load, data = load_average(), prepare_data()
    mode = accumulation(models, available_memory())
    with run_root() as root:
        emit("recovery", argv, {
            "by_size": {model.name: redo(model, data, mode, layouts, decisions, repeat, root) for model in models},
            "accumulation": mode,
            "load_before": load,
        })


def compare_sizes(argv: Sequence[str], models: Sequence[Model], alternatives: bool) -> None:
    """Measure the pause by size of the model, and print the result."""
    load, data = load_average(), prepare_data()
    mode = accumulation(models, available_memory())
    figures: dict[str, dict[str, Any]] = {}
    with run_root() as root:
        for model in models:
            grids = {f"PP{pp} x DP{RANKS // pp}": lose_ranks(model, data, pp, mode, root) for pp in (1, 2)}
            pauses, besides = (
                [ms for grid in grids.values() for ms in grid.pop(name)] for name in ("pauses", "besides")
            )
            figures[model.name] = {"parameters": model.parameters, "pause_ms": summary(pauses),
                                   "besides_interrupt_ms": summary(besides), **grids}
            if alternatives:
                # What comes before anything is moved, detection and planning, takes as long with contiguous shards.
                common = statistics.median(pauses) - grids["PP1 x DP8"]["state_ms"]["median"]
                moved = move_ms(model)
                figures[model.name]["contiguous_shard"] = {**moved, "pause_ms": round(common + moved["move_ms"], 1)}
                figures[model.name]["restart_ms"] = round(restart_ms(model, data, root), 1)
    medians, besides_interrupt = (
        {name: size[part]["median"] for name, size in figures.items()} for part in ("pause_ms", "besides_interrupt_ms")
    )
    emit("recovery", argv, {
        "pause_ms": medians,
        "largest_to_smallest": round(medians[models[-1].name] / medians[models[0].name], 2),
        "besides_interrupt_ms": besides_interrupt,
        "accumulation": mode,
        **({"saved_of_moving": {name: round(1 - size["pause_ms"]["median"] / size["contiguous_shard"]["pause_ms"], 3)
                                for name, size in figures.items()}} if alternatives else {}),
        "by_size": figures,
        "load_before": load,
    })


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; 0 if all jobs finished and were identical to the undisturbed one."""
    options = parse_args(argv)
    if options.decision:
        compare_decisions(argv, options.params or _models("2M"), options.layouts, options.decision, options.repeat)
        return 0
    if options.params:
        compare_sizes(argv, options.params, options.alternatives)
        return 0
    measure(argv, options)
    return 0


def measure(argv: Sequence[str], options: argparse.Namespace) -> None:
    """Kill ranks in all phases, and print the result. Raises JobFailed, also if a job differs."""
    columns = options.nproc_per_node // STAGES
    jobs = list(plan_jobs(options.repeat, columns))
    steps = max(fault.step for job in jobs for fault in job) + BETWEEN
    load = load_average()
    flags = flags_of_job(options, prepare_data(), steps)
    ours = Series("job", CHECKOUT)
    theirs = [Series("against", options.against.resolve())] if options.against else []
    turn = [ours, *theirs]
    with run_root() as root:
        reference = root / "undisturbed"
        progress(f"undisturbed job, {steps} steps")
        run_job(reference, options.nproc_per_node, flags)
        ours.undisturbed += step_times(read_metrics(reference))
        progress(f"its steps take {statistics.median(ours.undisturbed):.0f} ms (median)")
        for number, faults in enumerate(jobs, start=1):
            for series in turn if number % 2 else reversed(turn):
                run_dir = root / f"{series.name}{number}of{len(jobs)}"
                series.lose(run_dir, options.nproc_per_node, flags, faults, reference)
        found = ours.figures()
        for other in theirs:
            found |= {"against": other.figures(), "ratio_against": ratios(ours, other)}
        emit("recovery", argv, {
            **found,
            "jobs": len(jobs),
            "layout": {"tp": 1, "pp": STAGES, "dp": columns},
            "model": {name: getattr(options, name)
                      for name in ("num_layers", "hidden_size", "seq_length", "global_batch_size")},
            "load_before": load,
        })
        different = [each for series in turn for each in series.different]
        if different:
            raise JobFailed(f"{len(different)} of {len(turn) * len(jobs)} jobs differ from the undisturbed one; "
                            f"the first: {different[0]}")
