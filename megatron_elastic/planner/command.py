"""Command: ``megatron-elastic plan``."""

from __future__ import annotations

import argparse
import json
import re
import runpy
import sys
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

from megatron_elastic import usage
from megatron_elastic.cluster.launch import launcher
from megatron_elastic.config import UsageError
from megatron_elastic.layout import Layout, LayoutError
from megatron_elastic.pipeline.dag import Dag
from megatron_elastic.pipeline.picture import svg
from megatron_elastic.pipeline.prediction import MOST_SIMULATED, takes_long
from megatron_elastic.pipeline.search import NotFitting
from megatron_elastic.plan import NoLayout
from megatron_elastic.plan.choice import SCHEDULES, SEARCH
from megatron_elastic.plan.costs import memory
from megatron_elastic.plan.costs.cost import Costs, ProfileError
from megatron_elastic.plan.costs.power import Clocking, PowerModel
from megatron_elastic.plan.policies import POLICIES
from megatron_elastic.planner import comparison, scaling
from megatron_elastic.planner.outcome import figures, lost_ranks, plan, program, recomputed
from megatron_elastic.planner.shown import MOST_CELLS, panels, show
from megatron_elastic.tables import console

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
_CLOCKS = (0.6, 0.7, 0.8, 0.9, 1.0, 1.1)
"""Of a device, if none are given."""


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
                raise UsageError(f"--{flag} is about what policies would make of a loss: add --policy, or leave it out")
        outcome = plan(layout, options.event, costs, False if options.untied else None, options.schedule)
        outcome = recomputed(outcome, costs, options.schedule)
        if options.dag:
            goal = outcome.after
            if takes_long(goal):
                raise UsageError(f"the layout is too large: --dag takes up to {MOST_SIMULATED} grains x stages")
            dag = Dag.of(program(goal, costs, options.schedule), goal, costs)
            _write(options.dag, dag.to_json())
        if options.svg:
            drawings = panels(outcome, costs, options.schedule)
            if not drawings:
                raise UsageError(f"the layout is too large to draw: --svg takes up to {MOST_SIMULATED} grains x stages")
            _write(options.svg, svg(drawings, 4 * MOST_CELLS))
        if options.json:
            print(json.dumps(figures(outcome, costs, options.schedule)))
        else:
            show(console(120), outcome, costs, source, options.schedule)
    except BrokenPipeError:
        raise  # nobody reads on what is printed
    except OSError as error:
        print(f"megatron-elastic plan: error: cannot print: {error.strerror}", file=sys.stderr)
        return 2
    except (UsageError, ValueError, LayoutError, NoLayout, NotFitting, ProfileError) as error:
        print(f"megatron-elastic plan: error: {error}", file=sys.stderr)
        return 2
    return 0


def _write(path: Path, text: str) -> None:
    """Raises UsageError."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None


def _compare(options: argparse.Namespace, layout: Layout, costs: Costs, source: str) -> int:
    """``plan --policy``: what policies would make of a loss."""
    match = re.fullmatch(r"lose:rank=(\d+(?:,\d+)*)", options.event)
    if match is None or options.svg or options.dag or options.untied or options.schedule == SEARCH:
        raise UsageError("--policy compares what is made of a loss: it takes --event lose:rank=R[,R...], and no --svg, "
                         f"--dag, --untied or --schedule {SEARCH}")
    names = list(POLICIES) if options.policy == "all" else [options.policy]
    schedules = SCHEDULES if options.schedule is None else (options.schedule,)
    if options.clocks is not None and not options.dvfs:
        raise UsageError("--clocks is about which clocks are planned: add --dvfs, or leave it out")
    if options.dvfs and options.power is None:
        raise UsageError("--dvfs needs --power IDLE,STATIC,DYNAMIC: what clocks cost decides which are chosen")
    clocked = None
    if options.dvfs:
        clocked = replace(costs, power=options.power, clock_steps=options.clocks or _CLOCKS,
                          clocking=Clocking(options.dvfs))  # fmt: skip
    lost = lost_ranks(layout, match[1])
    found = comparison.compare(layout, lost, costs, names, schedules=schedules, power=options.power, clocked=clocked)
    if options.json:
        print(json.dumps(comparison.figures(found, options.tokens or 1)))
        return 0
    screen = console(160)
    screen.print(f"costs: {source}")
    comparison.show(screen, found, options.tokens or 1)
    return 0


def _power(text: str) -> PowerModel:
    try:
        idle, static, dynamic = watts = [float(part) for part in text.split(",")]
    except ValueError:
        watts = []
    if not watts or not all(0 <= each < inf for each in watts):
        raise argparse.ArgumentTypeError(f"{text!r} is not three numbers of watts, as 90,150,450")
    return PowerModel(idle, static, dynamic)


def _clocks(text: str) -> tuple[float, ...]:
    try:
        steps = tuple(sorted(map(float, text.split(","))))
    except ValueError:
        steps = ()
    if not all(0 < step < inf for step in steps) or 1.0 not in steps:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of clocks with 1 among them, as 0.8,0.9,1,1.1")
    return steps


def _memory(argv: Sequence[str]) -> int:
    """``plan --memory``: what a job with a script's flags would need."""
    parser = argparse.ArgumentParser(prog="megatron-elastic plan --memory", description="Show what memory a job needs.",
                                     formatter_class=usage.Formatter)
    parser.add_argument("--ranks", type=usage.count, required=True, metavar="N", help="ranks of the job, on all nodes")
    parser.add_argument("script", help="examples/pretrain_gpt.py, or another one with its parse_args")
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="the script's flags")
    options = parser.parse_args(argv)
    folder = str(Path(options.script).resolve().parent)
    sys.path.insert(0, folder)  # as Python does for a script
    try:
        parse = _run(options.script).get("parse_args")
        if parse is None:
            raise UsageError(f"{options.script} has no parse_args: give the flags of examples/pretrain_gpt.py instead")
        flags = launcher.with_arguments_from_elsewhere([*options.flags, "--elastic"])
        spares = launcher.elastic_config(flags).spares
        if spares >= options.ranks:
            raise UsageError(f"--elastic-spares {spares}: there are {options.ranks} ranks in all, and some must train: "
                             "raise --ranks")
        memory.main(parse(flags, options.ranks - spares), options.ranks - spares)
    except (UsageError, OSError) as error:
        print(f"megatron-elastic plan: error: {error}", file=sys.stderr)
        return 2
    finally:
        sys.path.remove(folder)
    return 0


def _run(script: str) -> dict[str, Any]:
    """What a script defines. Raises UsageError, OSError."""
    try:
        return runpy.run_path(script)
    except (UsageError, OSError):
        raise
    except Exception as error:  # whatever its author has done wrong
        raise UsageError(f"{script} cannot be run: {type(error).__name__}: {error}") from None


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
        "--tokens", type=usage.count, metavar="N", help="with --policy: tokens of a grain (default: count grains)"
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
        raise UsageError(f"--layout {options.layout}: {error.strerror}; runs keep layouts in RUN_DIR/layouts") from None
    except LayoutError as error:
        raise UsageError(f"--layout {options.layout}: {error}; give one as in RUN_DIR/layouts") from None
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
        raise UsageError(f"--profile {error}; docs/planning.md says how to get one") from None
