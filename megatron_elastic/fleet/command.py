"""Command: ``megatron-elastic fleet``."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from megatron_elastic import tables, usage
from megatron_elastic.fleet.capacity import ample, used_by_fifo
from megatron_elastic.fleet.faults import Drawn, Faults, FaultsError, Recorded
from megatron_elastic.fleet.job import Job
from megatron_elastic.fleet.policies import NAMES, policy
from megatron_elastic.fleet.running import live
from megatron_elastic.fleet.running.journal import JournalError
from megatron_elastic.fleet.running.submission import SubmissionError
from megatron_elastic.fleet.simulated.outcome import Outcome
from megatron_elastic.fleet.simulated.picture import Panel, svg
from megatron_elastic.fleet.simulated.simulation import Simulation
from megatron_elastic.fleet.simulated.trace import Trace, TraceError, read

_DESCRIPTION = """\
Let jobs of a trace run on a simulated cluster, once under each policy, and compare what becomes of them.

Large jobs are elastic, the others run on exactly the devices that they ask for; all start in the order of submission. A
trace is a .csv as ElasticFlow, Helios or Alibaba publish them, or Philly's cluster_job_log, or a .tar.gz of several."""
_EXAMPLES = """\
examples:
  all policies on all clusters of an archive, with a picture:
    megatron-elastic fleet simulate --policy all --svg fleet.svg \\
        --trace elasticflow-clusters-01-to-06.tar.gz
  one cluster of it, with 1,024 devices:
    megatron-elastic fleet simulate --trace clusters.tar.gz \\
        --cluster cluster04 --devices 1024
  a cluster that is used little, as FlexTrain describes its own:
    megatron-elastic fleet simulate --trace trace.csv --devices ample
  what live scaling is worth: the same, where every change of a job stops it
  for five minutes:
    megatron-elastic fleet simulate --trace trace.csv \\
        --policy flextrain-dp-pp,elastic --overhead 300
  with failures as Meta's RSC-1 had them:
    megatron-elastic fleet simulate --trace trace.csv --failures 6.5
    megatron-elastic fleet simulate --trace trace.csv \\
        --failures infinitehbd-fault_trace.json.gz

policies:
  fifo             as submitted (the baseline)
  torchelastic     takes what is idle; every change restarts the job
  elasticflow      the least that meets the deadline, then who gains most
  pollux           the most goodput
  rubick           the steepest slope of the best plan for each number of them
  easyscale        a fixed number of logical workers on whatever there is
  flextrain-pp     more stages when that is expected to pay
  flextrain-dp-pp  more stages and wider ones
  elastic          ours: any number of cells, while the job trains

Progress goes to stderr; the last line of stdout is one JSON object. docs/fleet.md explains policies and assumptions."""


def make_parser() -> argparse.ArgumentParser:
    """The flags of ``megatron-elastic fleet``."""
    parser = argparse.ArgumentParser(
        prog="megatron-elastic fleet", description="Share out devices among jobs: real ones, or those of a trace.",
        formatter_class=usage.Formatter,
    )
    commands = parser.add_subparsers(dest="action", required=True, metavar="COMMAND")
    live.add_commands(commands)
    simulated = commands.add_parser(
        "simulate", help="policies on a trace, compared", description=_DESCRIPTION, epilog=_EXAMPLES,
        formatter_class=usage.Formatter,
    )  # fmt: skip
    _flags(simulated)
    simulated.set_defaults(command=simulate)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """``megatron-elastic fleet``: 0, or 2 when something cannot be read or done."""
    options = live.parse(make_parser(), list(sys.argv[1:] if argv is None else argv))
    try:
        return int(options.command(options))
    except BrokenPipeError:
        raise  # nobody reads on what is printed
    except (TraceError, FaultsError, JournalError, SubmissionError, ValueError, OSError) as error:
        print(f"megatron-elastic fleet: error: {error}", file=sys.stderr)
        return 2


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace", type=Path, required=True, metavar="FILE", help="the jobs")
    parser.add_argument("--policy", type=_policies, default=list(NAMES), metavar="NAME[,NAME]|all", help="default: all")
    parser.add_argument("--cluster", metavar="NAME", help="of an archive, only the file of this name (default: each)")
    parser.add_argument(
        "--devices",
        "--gpus",
        type=_capacity,
        default=_Capacity(share=0.85),
        metavar="N|P%|ample",
        help="devices of the cluster: so many; as many, in whole nodes of 8, as fifo has in use to P %%; or as many as "
        "would serve everybody at once for 95 %% of the time. At least the largest job (default: 85%%)",
    )
    parser.add_argument(
        "--elastic-from",
        type=usage.count,
        default=32,
        metavar="N",
        help="jobs that ask for at least N devices are elastic, up to four times as many, as FlexTrain's models that "
        "start with 32, 64 and 256 (default: %(default)s)",
    )
    parser.add_argument(
        "--overhead",
        type=_seconds,
        metavar="SECONDS",
        help="that a job stands still for another number of devices (default: 0.1 for elastic, 60 for all others)",
    )
    parser.add_argument(
        "--failures",
        default="0",
        metavar="RATE|FILE",
        help="of nodes, for 1,000 days of a node: Meta's RSC-1 had 6.5, Llama 3's cluster 3.8; or a trace of real "
        "ones, as InfiniteHBD publishes it (default: none)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of deadlines and failures (default: %(default)s)"
    )
    parser.add_argument("--svg", type=Path, metavar="OUT", help="write a picture of the devices in use")


def _policies(text: str) -> list[str]:
    names = list(NAMES) if text == "all" else [name for name in text.split(",") if name]
    unknown = [name for name in names if name not in NAMES]
    if unknown or not names:
        raise argparse.ArgumentTypeError(
            f"there is no policy {', '.join(unknown) or repr(text)}: all, or of {', '.join(NAMES)}"
        )
    return list(dict.fromkeys(names))


class _Capacity(NamedTuple):
    """How many devices: ``devices``, or as many as ``fifo`` uses to a share, or an ample number of them."""

    devices: int | None = None
    share: float | None = None

    def of(self, jobs: Sequence[Job]) -> int:
        """Of the cluster that has these jobs."""
        if self.devices is not None:
            return self.devices
        return ample(jobs) if self.share is None else used_by_fifo(jobs, self.share)


def _capacity(text: str) -> _Capacity:
    if text == "ample":
        return _Capacity()
    if not text.endswith("%"):
        return _Capacity(devices=usage.count(text))
    share = _seconds(text[:-1]) / 100
    if not 0.01 <= share <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 1% and 100%")
    return _Capacity(share=share)


def _faults(text: str) -> Faults:
    """Raises ValueError, FaultsError, OSError."""
    try:
        rate = float(text)
    except ValueError:
        return Recorded.read(Path(text))
    if not 0 <= rate < 1e9:
        raise ValueError(f"--failures {text}: it is neither a number from 0 on nor a file")
    return Drawn(rate)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e9:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0 on")
    return value


def simulate(options: argparse.Namespace) -> int:
    """Every policy on every cluster: tables, and a line of JSON. Raises TraceError, ValueError and OSError."""
    begun = time.perf_counter()
    faults = _faults(options.failures)
    traces = read(options.trace)
    if options.cluster is not None:
        named = [trace for trace in traces if trace.name == options.cluster]
        if not named:
            raise ValueError(f"{options.trace} has no {options.cluster}, but {', '.join(t.name for t in traces)}")
        traces = named
    if options.svg:
        options.svg.touch()  # whether it can be written is known before all is simulated
    console = tables.console(140)
    panels: list[Panel] = []
    clusters: dict[str, dict[str, Any]] = {}
    sums = {name: Outcome() for name in options.policy}
    for trace in traces:
        total, outcomes = _cluster(options, trace, faults, panels)
        sums = {name: sums[name] + outcome for name, outcome in outcomes.items()}
        left_out = ", ".join(f"{count} {reason}" for reason, count in trace.left_out.items())
        if trace.unknown:
            console.print(f"{trace.name}: columns that say nothing here: {', '.join(map(repr, trace.unknown))}")
        _print(console, f"{trace.name}: {total} devices" + (f" (left out: {left_out})" if left_out else ""), outcomes)
        clusters[trace.name] = {
            "devices": total,
            "jobs": len(trace.entries),
            "elastic_jobs": sum(entry.devices >= options.elastic_from for entry in trace.entries),
            "left_out": dict(trace.left_out),
            "policies": {name: outcome.figures() for name, outcome in outcomes.items()},
        }
    if len(traces) > 1:
        _print(console, f"all {len(traces)} clusters", sums)
    if options.svg:
        options.svg.write_text(svg(panels), encoding="utf-8")
    figures = {
        "policies": {name: outcome.figures() for name, outcome in sums.items()},
        "jobs": sum(len(trace.entries) for trace in traces),
        "devices": sum(cluster["devices"] for cluster in clusters.values()),
        "elapsed_s": round(time.perf_counter() - begun, 2),
        "overhead_s": options.overhead,
        "failures": faults.rate if isinstance(faults, Drawn) else options.failures,
        "elastic_from": options.elastic_from,
        "seed": options.seed,
        "clusters": clusters,
    }
    print(json.dumps(figures))
    return 0


def _cluster(
    options: argparse.Namespace, trace: Trace, faults: Faults, panels: list[Panel]
) -> tuple[int, dict[str, Outcome]]:
    """Devices of a cluster, and what each policy makes of it; what ``panels`` gets is drawn later."""
    jobs = trace.jobs(options.elastic_from, options.seed)
    total = options.devices.of(jobs)
    outcomes: dict[str, Outcome] = {}
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        for name in options.policy:
            bar = progress.add_task(f"{trace.name}, {name}", total=len(jobs))
            run = Simulation(
                jobs, total, policy(name, options.overhead), faults, options.seed, _shown(progress, bar)
            )
            outcomes[name] = run.run()
            progress.remove_task(bar)
            panels.append(Panel(f"{trace.name}, {name}", total, run.usage, outcomes[name].makespan))
    return total, outcomes


def _shown(progress: Progress, bar: TaskID) -> Callable[[Simulation], None]:
    """Moves the bar with every 500th job that ends."""

    def watch(seen: Simulation) -> None:
        if seen.ended % 500 == 0:
            progress.update(bar, completed=seen.ended)

    return watch


def _print(console: Console, title: str, outcomes: dict[str, Outcome]) -> None:
    """Times in hours; in brackets, how many times shorter than the first policy's (queues: by how much)."""
    first = next(iter(outcomes.values()))
    others = first.jobs - first.elastic_jobs
    console.print(f"\n{title}, {first.jobs} jobs, {first.elastic_jobs} of them elastic")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    heads = ("JCT", "of elastic jobs", "queue of others", "in use", "makespan", "deadlines", "of elastic", "scalings")
    for column in ("policy", *heads):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for name, own in outcomes.items():
        jct = own.elastic_jct / own.elastic_jobs / 3600 if own.elastic_jobs else None
        queue = own.other_queue / others / 3600 if others else None
        table.add_row(
            name,
            f"{own.jct / own.jobs / 3600:.2f} h",
            "-" if jct is None else f"{jct:.2f} h ({first.elastic_jct / own.elastic_jct:.2f}x)",
            "-" if queue is None else f"{queue:.3f} h ({_change(own.other_queue, first.other_queue)})",
            f"{own.held / own.capacity:.1%}",
            f"{own.makespan / 86400:.2f} d",
            f"{own.deadlines / own.jobs:.1%}",
            f"{own.elastic_deadlines / own.elastic_jobs:.1%}" if own.elastic_jobs else "-",
            str(own.scalings),
        )
    console.print(table)


def _change(value: float, reference: float) -> str:
    return f"{value / reference - 1:+.0%}" if reference else "-"
