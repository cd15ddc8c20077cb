"""How long is a cell out that has lost a rank? ``megatron-elastic bench repair``.

Cells of TP2 x EP2 with a tiny GPT that has experts, one stage. Ranks are killed one after the other, the next as soon
as the cell is repaired: the lost place is taken by a rank that is started anew, or by one that has been waiting as a
spare. Each grain also waits as for a device, so that what the other cells do meanwhile is what they would do with
processors of their own. The jobs are compared bit for bit with one that nothing disturbed.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import statistics
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from common import (
    JobFailed,
    emit,
    even_over,
    load_average,
    newest_layout,
    pid_of,
    prepare_data,
    progress,
    run_job,
    run_root,
    watch_job,
)
from programs.waiting_gpt import VARIABLE

from disturbed.recovery import add_model_flags, flags_of_job
from megatron_elastic.layout import Layout
from megatron_elastic.observe.compare import compare
from megatron_elastic.observe.records import read_events, read_metrics

TP, EP = 2, 2
CELL = TP * EP
EXPERTS = ("--num-experts 4 --moe-ffn-hidden-size 64 --swiglu --disable-bias-linear --sequence-parallel "
           f"--expert-model-parallel-size {EP}")  # fmt: skip
SCRIPT = "benchmarks/programs/waiting_gpt.py"
SPARES = {"newcomer": 0, "spare": 1}
"""Who takes the lost place, and how many ranks there are besides those that train. Whoever dies is started anew."""
_STEP = re.compile(r"step +(\d+)/")
_UNDISTURBED = 5
"""Steps before each kill in which nothing happens."""
_STEPS_PER_KILL, _REST = 30, 10


class Repair(NamedTuple):
    """Seconds from a loss until the others train on, the cell follows as a shadow, and it begins with a grain."""

    others: float
    follows: float
    first_grain: float


def victims(ranks: int, kills: int) -> list[int]:
    """Who is killed: every place has its turn, and every cell."""
    return [(1 + i * (CELL + 1)) % ranks for i in range(kills)]


def kill_in_turn(lines: Iterator[str], run_dir: Path, ranks: int, wanted: Sequence[int]) -> None:
    """Read a job's output to its end and kill ranks meanwhile. Raises JobFailed if it ends too soon."""
    left, wait, whole = list(wanted), _UNDISTURBED, True
    for line in lines:
        if even_over(line) == ranks:
            whole, wait = True, _UNDISTURBED
        elif _STEP.match(line):
            wait -= 1
        if whole and wait <= 0 and left:
            os.kill(pid_of(run_dir, left.pop(0)), signal.SIGKILL)
            whole = False
    if left or not whole:
        raise JobFailed(f"the job ended before all of {len(wanted)} cells were repaired; give it more --steps")


def repairs(run_dir: Path, ranks: int) -> list[Repair]:
    """What became of each loss of a job of so many ranks."""
    found: list[Repair] = []
    lost = others = follows = 0.0
    for event in read_events(run_dir):
        match event["kind"]:
            case "fault":
                lost = event["exited_at"]
            case "recovered":
                others = event["mttr_ms"] / 1e3
            case "switched" if event["entered"]:
                follows = event["time"] - lost
            case "switched" if lost and not event["shadows"] and event["world_size"] == ranks:
                found.append(Repair(others, follows, event["time"] - lost))
                lost = 0.0
    return found


def places(first: Layout, last: Layout, lost: Collection[int]) -> bool:
    """Whether everybody but those who took lost places is where it was at first."""
    return all(first.place_of(rank) == last.place_of(rank) for rank in first.ranks if rank not in lost)


def tokens_per_s(run_dir: Path) -> dict[str, float]:
    """Medians over the steps in which all cells compute, and over those without one of them."""
    working: dict[int, int] = {}
    for path in (run_dir / "layouts").iterdir():
        layout = Layout.from_json(path.read_text())
        working[layout.epoch] = sum(not cell.shadow for cell in layout.cells.values())
    steps: dict[bool, list[float]] = {True: [], False: []}
    for step, line in read_metrics(run_dir).items():
        if step > 2:
            steps[working[line["epoch"]] == working[0]].append(line["tokens_per_s"])
    return {name: round(statistics.median(steps[whole]), 1) for name, whole in (("whole", True), ("meanwhile", False))}


def figures(found: Sequence[Repair]) -> dict[str, Any]:
    """Medians and worst of each part, in ms."""
    return {
        f"{name}_ms": {"median": round(statistics.median(times) * 1e3), "worst": round(max(times) * 1e3)}
        for name, times in zip(Repair._fields, zip(*found, strict=True), strict=True)
    }


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """Parse and check the flags."""
    parser = argparse.ArgumentParser(
        prog="megatron-elastic bench repair",
        description=f"Kill ranks of cells of TP{TP} x EP{EP}; measure until the repaired cell begins with a grain.")
    parser.add_argument("--kills", type=int, default=4, metavar="N", help="default: %(default)s")
    parser.add_argument("--nproc-per-node", type=int, default=2 * CELL, metavar="N",
                        help="ranks that train (default: %(default)s)")
    parser.add_argument("--device-ms", type=float, default=50.0, metavar="MS",
                        help="each grain's forward also takes so long without the processor (default: %(default)s)")
    parser.add_argument("--steps", type=int, metavar="N",
                        help=f"steps of a job (default: {_STEPS_PER_KILL} for each kill and {_REST})")
    add_model_flags(parser)
    options = parser.parse_args(argv)
    if options.nproc_per_node % CELL or options.nproc_per_node < 2 * CELL:
        parser.error(f"--nproc-per-node must be a multiple of {CELL}, at least {2 * CELL}")
    if not 1 <= options.kills <= options.nproc_per_node:
        parser.error("--kills must be at least 1, and at most --nproc-per-node")
    return options


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; 0 if all jobs finished and were identical to the undisturbed one."""
    options = parse_args(argv)
    ranks, steps = options.nproc_per_node, options.steps or _STEPS_PER_KILL * options.kills + _REST
    load = load_average()
    flags = [*flags_of_job(options, prepare_data(), steps, TP, 1), *EXPERTS.split(), "--elastic-slow", "off"]
    os.environ[VARIABLE] = str(options.device_ms)
    wanted = victims(ranks, options.kills)
    found: dict[str, Any] = {}
    with run_root() as root:
        progress(f"undisturbed, {steps} steps")
        run_job(root / "undisturbed", ranks, flags, SCRIPT)
        for name, spares in SPARES.items():
            progress(f"ranks {wanted} are lost, each place is taken by a {name}")
            run_dir, more = root / name, ["--elastic-respawn", "--elastic-spares", str(spares)]
            with closing(watch_job(run_dir, ranks + spares, [*flags, *more], SCRIPT)) as lines:
                kill_in_turn(lines, run_dir, ranks, wanted)
            difference = compare(root / "undisturbed", run_dir)
            if difference is not None:
                raise JobFailed(f"{run_dir} differs from the undisturbed job: {difference}")
            first = Layout.from_json((run_dir / "layouts" / "0.json").read_text())
            found[name] = {**figures(repairs(run_dir, ranks)), "tokens_per_s": tokens_per_s(run_dir),
                           "everybody_else_in_place": places(first, newest_layout(run_dir), wanted)}
            progress(str(found[name]))
        step_ms = [line["step_ms"] for step, line in read_metrics(root / "undisturbed").items() if step > 2]
    emit("repair", argv, {
        **found,
        "identical": True,
        "step_ms": round(statistics.median(step_ms), 1),
        "victims": wanted,
        "layout": {"tp": TP, "ep": EP, "pp": 1, "dp": ranks // CELL},
        "device_ms": options.device_ms,
        "load_before": load,
    })
    return 0
