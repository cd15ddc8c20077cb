"""Planner: ``megatron-elastic plan``, which shows what an event would make of a layout, without a job."""

from __future__ import annotations

import argparse
import json
import re
import runpy
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_elastic import scaling, usage
from megatron_elastic.comparison import compare, figures, show
from megatron_elastic.config import UsageError
from megatron_elastic.layout import Holdings, Layout, LayoutError, SliceLost, Stage, Transfer, transfers
from megatron_elastic.pipeline.dag import Dag
from megatron_elastic.pipeline.picture import LEGEND, Panel, draw, shown, svg
from megatron_elastic.pipeline.prediction import MOST_SIMULATED
from megatron_elastic.pipeline.program import Program
from megatron_elastic.pipeline.search import NotFitting, find
from megatron_elastic.pipeline.simulate import Step, Timeline, fastest, run, scheduled
from megatron_elastic.plan import NoLayout, lose
from megatron_elastic.plan.choice import SCHEDULES, SEARCH
from megatron_elastic.plan.costs import memory
from megatron_elastic.plan.costs.cost import Costs, ProfileError
from megatron_elastic.plan.costs.power import Clocking, PowerModel
from megatron_elastic.plan.costs.recomputation import recomputing
from megatron_elastic.plan.growth import admit
from megatron_elastic.plan.migration import duration_ms, size
from megatron_elastic.plan.policies import POLICIES
from megatron_elastic.plan.replan import replan

_EXAMPLES = """\
examples:
  what the loss of rank 5 would do to the newest layout of a run:
    megatron-elastic plan --layout runs/1/layouts/0.json --event lose:rank=5
  two ranks at once, with measured costs, and a picture:
    megatron-elastic plan --layout L.json --event lose:rank=5,6 \\
        --profile P.json --svg plan.svg
  a node with 8 ranks joins; the pipeline gets 2 stages:
    megatron-elastic plan --layout L.json --event join:ranks=8
    megatron-elastic plan --layout L.json --event pp:2 --json
  what each policy would make of a loss, predicted (docs/policies.md):
    megatron-elastic plan --layout L.json --event lose:rank=5 \\
        --profile P.json --policy all
  the memory that each rank of a job needs, from the flags of its script:
    megatron-elastic plan --memory --ranks 8 examples/pretrain_gpt.py \\
        --data-path data ...
  what a running job would have with another number of devices:
    megatron-elastic plan --devices 12 runs/1

Three layouts are shown: before; interim, which goes on at once and moves nothing that the job waits for; and after, the
layout to work towards in the background. docs/planning.md explains how they are made and what a profile contains."""
_MOST_CELLS = 16
"""Cells that a picture shows, where there are not more stages."""
_CLOCKS = (0.6, 0.7, 0.8, 0.9, 1.0, 1.1)
"""Of a device, if none are given."""


class _Refused(Exception):
    """The command cannot do what it was asked; printed without a traceback."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an event makes of a layout. ``interim`` is None where nothing can go on before state has been moved."""

    before: Layout
    interim: Layout | None
    after: Layout
    moves: tuple[Transfer, ...]
    """Slices to copy so that ``after`` can be entered."""
    missing: str | None
    """Why some slice has to be loaded from a checkpoint; then ``moves`` is empty."""

    @property
    def layouts(self) -> Iterable[tuple[str, Layout]]:
        """The layouts with their names, in order."""
        named = (("before", self.before), ("interim", self.interim), ("after", self.after))
        return ((name, layout) for name, layout in named if layout is not None)


def plan(
    layout: Layout, event: str, costs: Costs, tied: bool | None = None, schedule: str | None = None
) -> Outcome:
    """What ``event`` ('lose:rank=R[,R...]', 'join:ranks=N' or 'pp:N') makes of ``layout``.

    Every owner and replica is taken to hold its slices. Raises ValueError for an event that cannot be read, LayoutError
    for ranks that are not there, NoLayout where nothing can go on.
    """
    match = re.fullmatch(r"lose:rank=(\d+(?:,\d+)*)|join:ranks=([1-9]\d*)|pp:([1-9]\d*)", event)
    if match is None:
        raise ValueError(f"event {event!r} is none of 'lose:rank=R[,R...]', 'join:ranks=N', 'pp:N'")
    epoch, lost = layout.epoch, _lost(layout, match[1] or "")
    if lost and {*layout.ranks, *layout.spares} <= set(lost):
        raise NoLayout(f"no rank of the layout of epoch {epoch} would be left: name fewer of them")
    held = Holdings.of(layout).without(lost)
    interim: Layout | None = layout
    if lost:
        try:
            interim = lose(layout, lost, held, epoch + 1)
        except NoLayout:
            interim = None
    elif match[2]:
        newest = max((*layout.ranks, *layout.spares, *layout.lost))
        interim = admit(layout, {newest + i + 1: len(layout.hosts) for i in range(int(match[2]))}, epoch + 1)
    stages = [int(match[3])] if match[3] else None
    if interim is None:
        after = replan(layout, costs, epoch + 1, lost=lost, tied=tied, recompute=schedule == SEARCH)
    else:
        if interim.spares:
            interim = admit(interim, {}, interim.epoch)
        after = replan(interim, costs, interim.epoch + 1, stages=stages, tied=tied, recompute=schedule == SEARCH)
    if schedule == SEARCH:
        after = recomputing(after, costs)
    try:
        moves, missing = transfers(after, held), None
    except SliceLost as error:
        moves, missing = (), f"{error}: it has to be loaded from the newest checkpoint"
    return Outcome(layout, interim, after, moves, missing)


def _lost(layout: Layout, ranks: str) -> list[int]:
    """Ranks as they are written in an event. Raises LayoutError for those that are not there."""
    lost = [int(rank) for rank in ranks.split(",")] if ranks else []
    if unknown := set(lost) - {*layout.ranks, *layout.spares}:
        raise LayoutError(f"ranks {sorted(unknown)} are not in the layout of epoch {layout.epoch}, or lost already")
    return lost


def timeline(layout: Layout, costs: Costs, schedule: str | None = None) -> Timeline | None:
    """A step of ``layout``, simulated; None where that would take long. The overhead is not in it. ``schedule`` as
    ``program`` has it.
    """
    if layout.num_grains * layout.pipeline_size > MOST_SIMULATED:
        return None
    return run(program(layout, costs, schedule), layout, costs)


def program(layout: Layout, costs: Costs, schedule: str | None = None) -> Program:
    """What cells do under ``--elastic-schedule``, in a layout that is ``recomputed``; None: 1F1B with as many live
    activations as are of use. Raises NotFitting if no order is known that fits the memory.
    """
    if schedule is None:
        return fastest(layout, costs)[0]
    return find(layout, costs).program if schedule == SEARCH else scheduled(schedule, layout)


def recomputed(outcome: Outcome, costs: Costs, schedule: str | None) -> Outcome:
    """With those chunks recomputed in its layouts that a search recomputes, if that is the schedule."""
    if schedule != SEARCH:
        return outcome

    def searched(layout: Layout) -> Layout:
        if layout.num_grains * layout.pipeline_size > MOST_SIMULATED:
            return layout
        return replace(layout, recomputed=find(layout, costs).recomputed)

    return replace(
        outcome, before=searched(outcome.before), after=searched(outcome.after),
        interim=None if outcome.interim is None else searched(outcome.interim),
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """``megatron-elastic plan``: print the plan and return the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if "--memory" in argv:
        first = argv.index("--memory")
        return _memory([*argv[:first], *argv[first + 1 :]])
    if any(argument.partition("=")[0] == "--devices" for argument in argv):
        return scaling.main(argv)
    parser = make_parser()
    options = parser.parse_args(argv)
    if options.ranks is not None:
        parser.error("--ranks is of --memory: add that, or leave it out")
    try:
        layout, costs, source = _read(options)
        if options.policy:
            return _compare(options, layout, costs, source)
        for flag in ("dvfs", "power", "clocks", "tokens"):
            if getattr(options, flag) is not None:
                raise _Refused(f"--{flag} is about what policies would make of a loss: add --policy, or leave it out")
        outcome = plan(layout, options.event, costs, False if options.untied else None, options.schedule)
        outcome = recomputed(outcome, costs, options.schedule)
        if options.dag:
            goal = outcome.after
            if goal.num_grains * goal.pipeline_size > MOST_SIMULATED:
                raise _Refused(f"the layout is too large: --dag takes up to {MOST_SIMULATED} grains x stages")
            dag = Dag.of(program(goal, costs, options.schedule), goal, costs)
            options.dag.write_text(dag.to_json(), encoding="utf-8")
        if options.svg:
            panels = _panels(outcome, costs, options.schedule)
            if not panels:
                raise _Refused(f"the layout is too large to draw: --svg takes up to {MOST_SIMULATED} grains x stages")
            options.svg.write_text(svg(panels, 4 * _MOST_CELLS), encoding="utf-8")
        if options.json:
            print(json.dumps(_figures(outcome, costs, options.schedule)))
        else:
            _print(outcome, costs, source, options.schedule)
    except OSError as error:
        print(f"megatron-elastic plan: error: cannot write {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    except (_Refused, ValueError, LayoutError, NoLayout, NotFitting, ProfileError) as error:
        print(f"megatron-elastic plan: error: {error}", file=sys.stderr)
        return 2
    return 0


def _compare(options: argparse.Namespace, layout: Layout, costs: Costs, source: str) -> int:
    """``plan --policy``: what policies would make of a loss."""
    match = re.fullmatch(r"lose:rank=(\d+(?:,\d+)*)", options.event)
    if match is None or options.svg or options.dag or options.schedule == SEARCH:
        raise _Refused("--policy compares what is made of a loss: it takes --event lose:rank=R[,R...], and no --svg, "
                       f"--dag or --schedule {SEARCH}")
    names = list(POLICIES) if options.policy == "all" else [options.policy]
    schedules = SCHEDULES if options.schedule is None else (options.schedule,)
    if options.dvfs and options.power is None:
        raise _Refused("--dvfs needs --power IDLE,STATIC,DYNAMIC: what clocks cost decides which are chosen")
    clocked = None
    if options.dvfs:
        clocked = replace(costs, power=options.power, clock_steps=options.clocks or _CLOCKS,
                          clocking=Clocking(options.dvfs))  # fmt: skip
    found = compare(layout, _lost(layout, match[1]), costs, names, schedules=schedules, power=options.power,
                    clocked=clocked)  # fmt: skip
    if options.json:
        print(json.dumps(figures(found, options.tokens or 1)))
        return 0
    console = _console(160)
    console.print(f"costs: {source}")
    show(console, found, options.tokens or 1)
    return 0


def _console(width: int = 120) -> Console:
    """For people, or a file, which is as wide as is needed."""
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = max(width, console.width)
    return console


def _power(text: str) -> PowerModel:
    try:
        idle, static, dynamic = map(float, text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not three numbers of watts, as 90,150,450") from None
    return PowerModel(idle, static, dynamic)


def _clocks(text: str) -> tuple[float, ...]:
    try:
        steps = tuple(sorted(map(float, text.split(","))))
    except ValueError:
        steps = ()
    if not steps or steps[0] <= 0 or 1.0 not in steps:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of clocks with 1 among them, as 0.8,0.9,1,1.1")
    return steps


def _memory(argv: Sequence[str]) -> int:
    """``plan --memory``: what a job with a script's flags would need."""
    parser = argparse.ArgumentParser(prog="megatron-elastic plan --memory", description="Show what memory a job needs.",
                                     formatter_class=usage.Formatter)
    parser.add_argument("--ranks", type=int, required=True, metavar="N", help="ranks of the job, on all nodes")
    parser.add_argument("script", help="examples/pretrain_gpt.py, or another one with its parse_args")
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="the script's flags")
    options = parser.parse_args(argv)
    try:
        parse = runpy.run_path(options.script).get("parse_args")
        if parse is None:
            raise UsageError(f"{options.script} has no parse_args: give the flags of examples/pretrain_gpt.py instead")
        memory.main(parse([*options.flags, "--elastic"], options.ranks), options.ranks)
    except (UsageError, OSError) as error:
        print(f"megatron-elastic plan: error: {error}", file=sys.stderr)
        return 2
    return 0


def make_parser() -> argparse.ArgumentParser:
    """The flags of ``megatron-elastic plan``."""
    parser = argparse.ArgumentParser(
        prog="megatron-elastic plan", formatter_class=usage.Formatter,
        description="Show what an event would make of a layout: the layouts, what moves, and how long a step takes.",
        epilog=_EXAMPLES,
    )  # fmt: skip
    parser.add_argument(
        "--layout",
        type=Path,
        required=True,
        metavar="L.json",
        help="a layout, as runs keep them in RUN_DIR/layouts/EPOCH.json",
    )
    parser.add_argument(
        "--event",
        required=True,
        metavar="EVENT",
        help="'lose:rank=R[,R...]', 'join:ranks=N' (new ranks, on a host of their own) or 'pp:N' "
        "(another number of pipeline stages)",
    )
    parser.add_argument(
        "--profile",
        type=Path,
        metavar="P.json",
        help="costs of units and links (default: RUN_DIR/profile.json if there is one, else every "
        "layer is taken to have a million parameters)",
    )
    parser.add_argument(
        "--untied",
        action="store_true",
        help="the output layer has its own weights (needed for layouts of one stage only)",
    )
    parser.add_argument(
        "--policy",
        choices=(*POLICIES, "all"),
        metavar="NAME",
        help="what a policy, or each, would make of a loss: predicted throughput, pause and energy, in a table; one of "
        "%(choices)s",
    )
    parser.add_argument("--schedule", choices=(*SCHEDULES, SEARCH), help="the job's (default: 1f1b, with as many "
                        "activations kept as are of use; with --policy the fastest one)")  # fmt: skip
    parser.add_argument(
        "--tokens", type=int, metavar="N", help="with --policy: tokens of a grain (default: count grains)"
    )
    parser.add_argument(
        "--power",
        type=_power,
        metavar="IDLE,STATIC,DYNAMIC",
        help="with --policy: watts of a device that waits, and of one that computes besides, at any clock and at the "
        "base clock: gives joules a token",
    )
    parser.add_argument(
        "--dvfs",
        choices=("performance", "energy"),
        help="with --policy and --power: what planned clocks add to 'elastic'",
    )
    parser.add_argument(
        "--clocks",
        type=_clocks,
        metavar="C[,C...]",
        default=None,
        help="with --dvfs: clocks of a device, as multiples of that at which costs were measured (default: 0.6 to 1.1)",
    )
    parser.add_argument("--dag", type=Path, metavar="OUT", help="write what a step of the last layout executes, as a "
                        "graph that Perfetto opens, too (JSON, docs/schedules.md)")  # fmt: skip
    parser.add_argument("--svg", type=Path, metavar="OUT", help="write a picture of the pipelines")
    parser.add_argument("--json", action="store_true", help="print one line of JSON instead of tables")
    instead = parser.add_argument_group("instead of --layout and --event")
    instead.add_argument("--memory", action="store_true", help="show what memory a job needs, with --ranks and a "
                         "script with its flags; --memory --help tells more")  # fmt: skip
    instead.add_argument("--ranks", type=usage.count, metavar="N", help="with --memory: ranks of the job, on all nodes")
    instead.add_argument("--devices", type=usage.count, metavar="N", help="show what a running job would have with so "
                         "many devices, with its run directory; --devices N --help tells more")  # fmt: skip
    return parser


def _read(options: argparse.Namespace) -> tuple[Layout, Costs, str]:
    try:
        layout = Layout.from_json(options.layout.read_bytes())
    except OSError as error:
        raise _Refused(f"--layout {options.layout}: {error.strerror}; runs keep layouts in RUN_DIR/layouts") from None
    except LayoutError as error:
        raise _Refused(f"--layout {options.layout}: {error}; give one as in RUN_DIR/layouts") from None
    beside = options.layout.resolve().parent.parent / "profile.json"
    path = options.profile or (beside if beside.exists() else None)
    if path is None:
        return (
            layout,
            Costs.assumed(layout.units),
            "assumed (a million parameters a layer); --profile gives measured ones",
        )
    try:
        return layout, Costs.read(path, layout.units), str(path)
    except ProfileError as error:
        raise _Refused(f"--profile {error}; docs/planning.md says how to get one") from None


def _step_ms(layout: Layout, costs: Costs, schedule: str | None) -> float:
    if layout.num_grains * layout.pipeline_size > MOST_SIMULATED:
        return costs.pace_of(layout).step_ms
    return Step.of(program(layout, costs, schedule), layout, costs).ms


def _panels(outcome: Outcome, costs: Costs, schedule: str | None) -> list[Panel]:
    simulated = ((name, layout, timeline(layout, costs, schedule)) for name, layout in outcome.layouts)
    return [Panel(name, layout, line) for name, layout, line in simulated if line is not None]


def _figures(outcome: Outcome, costs: Costs, schedule: str | None) -> dict[str, Any]:
    """What ``--json`` prints."""
    return {
        "step_ms": {name: round(_step_ms(layout, costs, schedule), 3) for name, layout in outcome.layouts},
        "layouts": {name: json.loads(layout.to_json()) for name, layout in outcome.layouts},
        "transfers": [
            {
                "unit": outcome.after.units[move.unit], "slice": move.slice, "tp": move.part, "src": move.src,
                "dst": move.dst, "role": move.role, "bytes": round(size(move, outcome.after, costs)),
            }
            for move in outcome.moves
        ],
        "missing": outcome.missing,
    }  # fmt: skip


# ---- for people -----------------------------------------------------------------------------


def _print(outcome: Outcome, costs: Costs, source: str, schedule: str | None) -> None:
    console = _console()
    console.print(f"costs: {source}")
    if outcome.interim is None:
        console.print("no interim layout: nothing can go on before state has been moved")
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("stage")
    for name, layout in outcome.layouts:
        table.add_column(f"{name} (epoch {layout.epoch})")
    for index in range(max(layout.pipeline_size for _, layout in outcome.layouts)):
        cells = [
            _describe(layout, layout.stages[index]) if index < layout.pipeline_size else "-"
            for _, layout in outcome.layouts
        ]
        table.add_row(str(index), *cells)
    table.add_row("spares", *(_ranks(layout.spares) for _, layout in outcome.layouts))
    table.add_row("step", *(f"{_step_ms(layout, costs, schedule):.1f} ms" for _, layout in outcome.layouts))
    console.print(table)
    _print_moves(console, outcome, costs)
    panels = _panels(outcome, costs, schedule)
    if not panels:
        return
    scale = max(panel.timeline.makespan for panel in panels) / max(40, min(console.width, 160) - 28)
    for panel in panels:
        total = sum(not cell.shadow for stage in panel.layout.stages for cell in stage.cells)
        drawn = sum(1 for _ in shown(panel.layout, _MOST_CELLS))
        console.print(f"\n{panel.title}" + (f", {drawn} of {total} cells" if drawn < total else ""))
        for row in draw(panel, scale, _MOST_CELLS):
            console.print(row)
    console.print(f"\n{LEGEND}; one character is {scale:.2f} ms")


def _describe(layout: Layout, stage: Stage) -> str:
    names = [layout.units[unit] for unit in stage.units]
    tied = [names.pop(0)] if stage is not layout.stages[0] and stage.units[0] == 0 else []
    units = "+".join([names[0] if len(names) == 1 else f"{names[0]}..{names[-1]}", *tied])
    counts = sorted({layout.load(cell) for cell in stage.cells if not cell.shadow})
    grains = f"{counts[0]:.4g}" if len(counts) == 1 else f"{counts[0]:.4g}-{counts[-1]:.4g}"
    ranks = _ranks([rank for cell in stage.cells if not cell.shadow for rank in cell.ranks])
    shadows = _ranks([rank for cell in stage.cells if cell.shadow for rank in cell.ranks])
    index = layout.stages.index(stage)
    chunks = [chunk for chunk in range(len(layout.chunks(index))) if layout.recomputes(index, chunk)]
    again = "" if not chunks else "\n  recomputed" + (
        f": chunks {', '.join(map(str, chunks))}" if len(layout.chunks(index)) > 1 else ""
    )
    return f"{units}\n  {ranks}: {grains} grains each" + (f"\n  {shadows} follow" if shadows != "-" else "") + again


def _ranks(ranks: Sequence[int]) -> str:
    """``0-3,6``, or for many pieces how many they are; a dash for none."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans) or "-"
    return text if len(spans) <= 8 else f"{spans[0][0]}..{spans[-1][1]} ({len(ranks)})"


def _print_moves(console: Console, outcome: Outcome, costs: Costs) -> None:
    if outcome.missing:
        console.print(f"\ntransfers: {outcome.missing}")
        return
    if not outcome.moves:
        console.print("\ntransfers: none")
        return
    pairs: dict[tuple[int, int, str], tuple[list[int], float]] = {}
    for move in outcome.moves:
        key = move.src, move.dst, f"{outcome.after.units[move.unit]} ({move.role})"
        slices, together = pairs.setdefault(key, ([], 0.0))
        slices.append(move.slice)
        pairs[key] = slices, together + size(move, outcome.after, costs)
    total = sum(together for _, together in pairs.values())
    console.print(
        f"\ntransfers, in the background: {len(outcome.moves)} slices between {len({key[:2] for key in pairs})} pairs "
        f"of ranks, {_bytes(total)}; at full bandwidth {duration_ms(outcome.moves, outcome.after, costs):.1f} ms"
    )
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for column in ("from", "to", "what", "slices", "bytes"):
        table.add_column(column, justify="right" if column == "bytes" else "left")
    for (src, dst, what), (slices, together) in list(pairs.items())[:40]:
        table.add_row(str(src), str(dst), what, _ranks(slices), _bytes(together))
    console.print(table)
    if len(pairs) > 40:
        console.print(f"... and {len(pairs) - 40} more; --json lists all")


def _bytes(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            break
        size /= 1000
    return f"{size:.4g} {unit}"


if __name__ == "__main__":
    sys.exit(main())
