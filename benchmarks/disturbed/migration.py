"""What does it cost a job that layers move between its stages? ``megatron-elastic bench migration``.

A job changes its number of pipeline stages again and again while it trains. What is moved is copied in the background,
and the units change their stage between two steps; steps that take longer meanwhile are what it costs. Against that the
usual way: training stops, the same bytes are sent over the same transport, but each unit's optimizer state as a
contiguous piece, from the ranks whose shard has it to those that get it. What building a stage's model anew takes is
part of the first figure and not of the second. ``off_critical_path`` is the share of a move's time in which training
went on as if there were none, ``saved_of_stopping`` the share of the usual way's pause that is saved. Where ranks
compute on the processors that also copy, nothing is free; ``--device-ms`` lets them wait instead, as for a device.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from common import (
    SCRIPT,
    JobFailed,
    ask_while_it_trains,
    emit,
    load_average,
    prepare_data,
    progress,
    run_job,
    run_root,
    summary,
)
from forked import LIMIT, Times, run_ranks, world
from programs.waiting_gpt import VARIABLE

from megatron_elastic.layout import Holdings, Layout, transfers
from megatron_elastic.observe.compare import compare
from megatron_elastic.observe.records import read_events, read_metrics

RANKS = 8
STAGES = (4, 2)
"""Numbers of stages in turn."""
VOCABULARY, SEQUENCE = 4096, 32
BETWEEN = 6
"""Undisturbed steps before each move."""
_EACH = 8
"""Steps that a move takes at most, from the request on."""
_STATE, _PARAMETER = 12, 4
"""Bytes of an element: float32 weights and two moments, and the parameter."""
_READY = "all copies are there"
_REPEAT = 3


class Piece(NamedTuple):
    """So many bytes that one rank sends to another."""

    source: int
    target: int
    size: int


@dataclass(frozen=True, slots=True)
class Move:
    """One change of the number of stages. Times in ms.

    Attributes:
        stages: before and after.
        copying: what the steps took longer, in which copies were under way and units held twice.
        cut_over: what the step took longer in whose beginning the units change their stage, and the one after.
        background: from the first step of the copying to the cut-over.
        pieces: what the usual way sends.
    """

    stages: tuple[int, int]
    copying: float
    cut_over: float
    background: float
    pieces: tuple[Piece, ...]

    @property
    def added(self) -> float:
        return self.copying + self.cut_over

    @property
    def size(self) -> int:
        return sum(piece.size for piece in self.pieces)


def read_moves(run_dir: Path, parameters: Sequence[int]) -> list[Move]:
    """The moves of a job; ``parameters``: elements of each unit. Raises JobFailed unless each took two layouts."""
    steps = {step: line["step_ms"] for step, line in read_metrics(run_dir).items()}
    events = [event for event in read_events(run_dir) if event["kind"] in ("asked", "switched")]
    layouts = {int(path.stem): Layout.from_json(path.read_text()) for path in (run_dir / "layouts").glob("*.json")}
    asked = [index for index, event in enumerate(events) if event["kind"] == "asked"]
    found = []
    quiet = 3  # the first step that nothing disturbs
    for index in asked:
        try:
            begun, done = events[index + 1 : index + 3]
        except ValueError:
            raise JobFailed(f"{run_dir}: a move did not end") from None
        before = layouts[max(epoch for epoch in layouts if epoch < begun["epoch"])]
        after = layouts[done["epoch"]]
        if before.pipeline_size == after.pipeline_size:
            raise JobFailed(f"{run_dir}: a move took more than two layouts")
        following = [event["step"] for event in events[index + 3 :] if event["kind"] == "switched"]
        end = min([*following, max(steps) + 1])
        old = statistics.median(steps[step] for step in range(quiet, begun["step"] - 1))
        new = statistics.median(steps[step] for step in range(done["step"] + 2, end - 1))
        quiet = done["step"] + 2
        found.append(Move(
            stages=(before.pipeline_size, after.pipeline_size),
            copying=sum(steps[step] - old for step in range(begun["step"], done["step"])),
            cut_over=sum(steps[step] - new for step in range(done["step"], done["step"] + 2)),
            background=(done["time"] - begun["time"]) * 1e3,
            pieces=tuple(contiguous(before, layouts[begun["epoch"]], after, parameters)),
        ))  # fmt: skip
    return found


# ---- the usual way --------------------------------------------------------------------------


def contiguous(before: Layout, between: Layout, after: Layout, parameters: Sequence[int]) -> list[Piece]:
    """What is sent when every stage's optimizer state is one array, cut into one contiguous shard for each cell.

    As many bytes for every unit as ours are: of state, and of parameters for the cells that get the unit anew.
    """
    pieces: dict[tuple[int, int], float] = defaultdict(float)
    copied: dict[int, float] = defaultdict(float)
    for move in transfers(between, Holdings.of(before)):
        copied[move.unit] += parameters[move.unit] / before.num_slices * _STATE
    for unit, size in copied.items():
        old, new = _shards(before, unit, parameters), _shards(after, unit, parameters)
        for source, (start, end) in old.items():
            for target, (low, high) in new.items():
                share = size * max(0.0, min(end, high) - max(start, low))
                # Where it is already, a copy of it goes to another cell.
                others = [cell.leader for cell in after.stages[after.home(unit)].cells if cell.leader != source]
                pieces[source, others[0] if target == source and others else target] += share
    for rank in after.ranks:
        for unit in set(after.held_by(rank)).difference(before.held_by(rank)):
            for source, (start, end) in _shards(before, unit, parameters).items():
                pieces[source, rank] += parameters[unit] * _PARAMETER * (end - start)
    return [Piece(*pair, round(size)) for pair, size in sorted(pieces.items()) if size >= 1]


def _shards(layout: Layout, unit: int, parameters: Sequence[int]) -> dict[int, tuple[float, float]]:
    """Which part of a unit, from 0 to 1, is in whose contiguous shard."""
    home = layout.home(unit)
    units = layout.at_home(home)
    total, start = sum(parameters[each] for each in units), sum(parameters[each] for each in units if each < unit)
    cells = layout.stages[home].cells
    found = {}
    for index, cell in enumerate(cells):
        low, high = (total * edge / len(cells) - start for edge in (index, index + 1))
        low, high = max(low, 0.0) / parameters[unit], min(high / parameters[unit], 1.0)
        if low < high:
            found[cell.leader] = (low, high)
    return found


def stop_and_copy(plans: Sequence[Sequence[Piece]]) -> list[float]:
    """How long all wait for each plan, median of some, in ms. Raises JobFailed."""
    times = Times(len(plans), RANKS)
    run_ranks(RANKS, lambda me, folder: _rank_main(me, plans, folder, times))
    return [times.slowest(index) for index in range(len(plans))]


def _rank_main(me: int, plans: Sequence[Sequence[Piece]], folder: Path, times: Times) -> None:
    with world(me, RANKS, folder):
        group = dist.new_group(list(range(RANKS)), backend="elastic", timeout=LIMIT)
        everything = [Piece(a, b, 4096) for a in range(RANKS) for b in range(RANKS) if a != b]
        _send(me, everything, group)  # links and shared memory are made before the clock runs
        for index, plan in enumerate(plans):
            times[index, me] = statistics.median(_send(me, plan, group) for _ in range(_REPEAT))


def _send(me: int, plan: Sequence[Piece], group: dist.ProcessGroup) -> float:
    mine = [piece for piece in plan if me in (piece.source, piece.target)]
    tensors = [torch.ones(piece.size // 4) for piece in mine]
    dist.all_reduce(torch.ones(1), group=group)
    started = time.perf_counter()
    works = [
        dist.isend(tensor, piece.target, group=group) if piece.source == me
        else dist.irecv(tensor, piece.source, group=group)
        for piece, tensor in zip(mine, tensors, strict=True)
    ]  # fmt: skip
    for work in works:
        assert work is not None
        work.wait()
    dist.all_reduce(torch.ones(1), group=group)
    return (time.perf_counter() - started) * 1e3


# ---- the command ----------------------------------------------------------------------------


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """Parse and check the flags."""
    parser = argparse.ArgumentParser(
        prog="megatron-elastic bench migration",
        description=f"Change the number of pipeline stages of a job of {RANKS} ranks between {STAGES[0]} and "
        f"{STAGES[1]} while it trains; measure what the steps take longer, and what it takes to stop and copy.",
    )
    parser.add_argument("--moves", type=int, default=8, metavar="N", help="default: %(default)s")
    parser.add_argument("--num-layers", type=int, default=8, metavar="N", help="default: %(default)s")
    parser.add_argument("--hidden-size", type=int, default=384, metavar="N", help="default: %(default)s")
    parser.add_argument("--global-batch-size", type=int, default=4, metavar="N", help="default: %(default)s")
    parser.add_argument("--device-ms", type=float, default=0.0, metavar="MS",
                        help="as if there were devices: each grain's forward also takes so long without the processor")
    options = parser.parse_args(argv)
    if options.moves < 1:
        parser.error("--moves must be at least 1")
    if options.num_layers % STAGES[0]:
        parser.error(f"--num-layers must be a multiple of {STAGES[0]}")
    return options


def flags_of_job(options: argparse.Namespace, data: Path) -> list[str]:
    """Flags of the GPT and of its training."""
    values = {
        "data-path": data, "pipeline-model-parallel-size": STAGES[0], "num-layers": options.num_layers,
        "hidden-size": options.hidden_size, "num-attention-heads": 4, "seq-length": SEQUENCE,
        "micro-batch-size": 1, "global-batch-size": options.global_batch_size, "elastic-slices": RANKS,
        "train-iters": 2 + (options.moves + 1) * (BETWEEN + _EACH), "lr": 1e-4, "eval-iters": 0,
    }  # fmt: skip
    return ["--elastic", *(text for name, value in values.items() for text in (f"--{name}", str(value)))]


def elements_of_units(options: argparse.Namespace) -> list[int]:
    """Elements of each unit's parameters: embedding, positions, layers, final norm."""
    hidden = options.hidden_size
    layer = 12 * hidden * hidden + 13 * hidden
    return [VOCABULARY * hidden, SEQUENCE * hidden, *[layer] * options.num_layers, 2 * hidden]


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; 0 if the job that moved units trained bit for bit like one that did not."""
    options = parse_args(argv)
    load = load_average()
    flags = flags_of_job(options, prepare_data())
    parameters = elements_of_units(options)
    script = "benchmarks/programs/waiting_gpt.py" if options.device_ms else SCRIPT
    os.environ[VARIABLE] = str(options.device_ms)
    with run_root() as root:
        progress(f"a job of {sum(parameters) / 1e6:.1f}M parameters that stays as it is")
        run_job(root / "fixed", RANKS, flags, script)
        progress(f"the same job, whose layers move {options.moves} times")
        requests = [("--pp", str(STAGES[number % 2])) for number in range(1, options.moves + 1)]
        ask_while_it_trains(root / "moving", RANKS, flags, requests, done=_READY, first=2 + BETWEEN,
                            between=1 + BETWEEN, script=script)  # fmt: skip
        moves = read_moves(root / "moving", parameters)
        different = compare(root / "fixed", root / "moving")
        undisturbed = [line["step_ms"] for step, line in read_metrics(root / "fixed").items() if step > 2]
    stopped = stop_and_copy([move.pieces for move in moves])
    for move, wait in zip(moves, stopped, strict=True):
        progress(f"{move.stages[0]} -> {move.stages[1]} stages, {move.size / 1e6:.0f} MB: {move.copying:.0f} ms while "
                 f"copying, {move.cut_over:.0f} ms at the cut-over, in {move.background:.0f} ms; stop and copy "
                 f"{wait:.0f} ms")
    added, waited = (statistics.median(each) for each in ([move.added for move in moves], stopped))
    emit("migration", argv, {
        "off_critical_path": round(1 - max(added, 0.0) / statistics.median(move.background for move in moves), 3),
        "saved_of_stopping": round(1 - max(added, 0.0) / waited, 3),
        "added_ms": {"copying": summary(move.copying for move in moves),
                     "cut_over": summary(move.cut_over for move in moves),
                     "total": summary(move.added for move in moves)},
        "stop_and_copy_ms": summary(stopped),
        "background_ms": summary(move.background for move in moves),
        "megabytes": summary(move.size / 1e6 for move in moves),
        "step_ms": summary(undisturbed),
        "by_stages": {f"{a}->{b}": {
            "added_ms": summary(move.added for move in moves if move.stages == (a, b)),
            "stop_and_copy_ms": summary(w for move, w in zip(moves, stopped, strict=True) if move.stages == (a, b)),
        } for a, b in sorted({move.stages for move in moves})},
        "identical": different is None,
        "moves": len(moves),
        "layout": {"tp": 1, "pp": list(STAGES), "ranks": RANKS},
        "model": {"parameters": sum(parameters), "num_layers": options.num_layers, "hidden_size": options.hidden_size,
                  "seq_length": SEQUENCE, "global_batch_size": options.global_batch_size,
                  "device_ms": options.device_ms},
        "load_before": load,
    })  # fmt: skip
    if different is not None:
        raise JobFailed(f"the job whose layers moved differs from the one that stayed as it was: {different}")
    return 0
