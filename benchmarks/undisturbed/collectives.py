"""Collectives: latency and bandwidth over ``elastic`` and over gloo, alternating in one call.

Every rank is a process forked after the imports. For each operation and message size the two backends take turns; a
round is the mean of a few calls, a figure the median over the rounds of the slowest rank. ``ratio`` is elastic's time
divided by gloo's: below 1 is faster. Sizes are bytes of the tensor that a caller passes in (all_gather: of each part).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import emit, load_average, progress
from forked import LIMIT, Times, run_ranks, world

OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "send_recv")
SIZES = [256 << (2 * i) for i in range(10)]
"""256 B to 64 MiB."""


def operation(name: str, size: int, group: dist.ProcessGroup, me: int, ranks: int) -> Callable[[], None]:
    """One call of a collective on float32 tensors."""
    count = size // 4
    whole, part = torch.ones(count), torch.ones(max(count // ranks, 1))
    if name == "all_reduce":
        whole.zero_()
        return lambda: dist.all_reduce(whole, group=group)
    if name == "reduce_scatter":
        source = torch.ones(part.numel() * ranks)
        return lambda: dist.reduce_scatter_single(part, source, group=group)
    if name == "all_gather":
        gathered = torch.empty(count * ranks)
        return lambda: dist.all_gather_single(gathered, whole, group=group)
    if name == "all_to_all":
        source, target = torch.ones(part.numel() * ranks), torch.empty(part.numel() * ranks)
        return lambda: dist.all_to_all_single(target, source, group=group)
    peer = me ^ 1

    def exchange() -> None:
        if me % 2 == 0:
            dist.send(whole, group=group, group_dst=peer)
            dist.recv(whole, group=group, group_src=peer)
        else:
            dist.recv(whole, group=group, group_src=peer)
            dist.send(whole, group=group, group_dst=peer)

    return exchange


def repeats(name: str, size: int, ranks: int) -> int:
    """Calls in a round: enough for a clock, few enough for large messages."""
    moved = size * (ranks if name == "all_gather" else 1) * ranks
    return max(1, min(50, (16 << 20) // moved))


def rank_main(me: int, ranks: int, rounds: int, folder: Path, sizes: list[int], times: Times) -> None:
    """One process: measure everything, write the times of each round."""
    with world(me, ranks, folder):
        groups = [dist.new_group(list(range(ranks)), backend=name, timeout=LIMIT) for name in ("elastic", "gloo")]
        row = 0
        for name in OPERATIONS:
            for size in sizes:
                calls = [operation(name, size, group, me, ranks) for group in groups]
                count = repeats(name, size, ranks)
                for call in calls:
                    call()
                for _ in range(rounds):
                    for call in calls:
                        dist.barrier()
                        started = time.perf_counter()
                        for _ in range(count):
                            call()
                        times[row, me] = (time.perf_counter() - started) / count * 1e6
                        row += 1
            if me == 0:
                progress(f"{name} is measured")


def table(times: Times, rounds: int, sizes: list[int]) -> dict[str, dict[str, Any]]:
    """{operation: {size: figures}} from the times of each round."""
    result: dict[str, dict[str, Any]] = {}
    row = 0
    for name in OPERATIONS:
        result[name] = {}
        for size in sizes:
            ours: list[float] = []
            gloos: list[float] = []
            for _ in range(rounds):
                for series in (ours, gloos):
                    series.append(times.slowest(row))
                    row += 1
            # There and back again: half of it is one way.
            scale = 0.5 if name == "send_recv" else 1.0
            mine, theirs = statistics.median(ours) * scale, statistics.median(gloos) * scale
            result[name][str(size)] = {
                "us": round(mine, 1), "gloo_us": round(theirs, 1), "gb_s": round(size / mine / 1e3, 3),
                "gloo_gb_s": round(size / theirs / 1e3, 3), "ratio": round(mine / theirs, 3),
            }
    return result


def main(argv: Sequence[str]) -> int:
    """Run the benchmark and print its line."""
    parser = argparse.ArgumentParser(prog="megatron-elastic bench collectives", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="an even number (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="(default: %(default)s)")
    parser.add_argument("--max-size", type=int, default=SIZES[-1], help="largest message, bytes (default: %(default)s)")
    args = parser.parse_args(argv)
    if args.ranks < 2 or args.ranks % 2:
        parser.error(f"--ranks {args.ranks}: an even number is needed, send and recv work in pairs")
    sizes = [size for size in SIZES if size <= args.max_size]
    load = load_average()
    times = Times(len(OPERATIONS) * len(sizes) * args.rounds * 2, args.ranks)
    run_ranks(args.ranks, lambda me, folder: rank_main(me, args.ranks, args.rounds, folder, sizes, times))
    figures = table(times, args.rounds, sizes)
    emit("collectives", argv, {"ranks": args.ranks, "operations": figures, "load_average": load})
    return 0
