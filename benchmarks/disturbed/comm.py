"""Communicator recovery: editing groups in place against rebuilding them, for the loss of one rank and for its return.

Every rank is a process forked after the imports. It first makes Megatron's groups over gloo and measures, for the loss
of the last rank, a full rebuild (destroy, ``init_process_group``, every group of Megatron's without the dead rank) and
a partial one (only the groups that held it); then the same groups over ``elastic``, and an edit. Each measurement ends
when every survivor has done a first all-reduce on each of its groups (partial and in place: on each edited group).
The return is measured the same way; over ``elastic`` a new process joins, whose links nobody has yet.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from common import emit, free_port, load_average, progress
from forked import FORK, LIMIT, Times, run_ranks

from megatron_elastic.cluster.rank.control import InterruptFlag
from megatron_elastic.comm.group import Group
from megatron_elastic.comm.transport import Transport
from megatron_elastic.device import stand_in

stand_in.install()
from megatron.core import parallel_state  # noqa: E402  after the CPU's answers are in place

MEASURES = ("full_rebuild_ms", "partial_rebuild_ms", "in_place_ms")


class Bench:
    """What all ranks share: where to meet, and the times they measured."""

    def __init__(self, ranks: int, tensor: int, pipeline: int, port: int) -> None:
        self.ranks, self.tensor, self.pipeline = ranks, tensor, pipeline
        self.port = port
        self.connection: dist.Store | None = None
        self.lost, self.joiner = ranks - 1, ranks
        self.everybody = FORK.Barrier(ranks + 1)
        """All processes: the ranks and the one that joins."""
        self.times = Times(2 * len(MEASURES), ranks + 1)
        self.addresses = FORK.Array("c", 4096 * (ranks + 1), lock=False)

    def measure(self, me: int, event: str, measure: str, act: Callable[[], None] | None) -> None:
        """Act together with all others that take part; the slowest counts."""
        gc.collect()  # groups that are over, with their sockets
        self.everybody.wait()
        if act is not None:
            started = time.perf_counter()
            act()
            row = ("loss", "return").index(event) * len(MEASURES) + MEASURES.index(measure)
            self.times[row, me] = (time.perf_counter() - started) * 1e3
        self.everybody.wait()

    def result(self, event: str) -> dict[str, float]:
        """Milliseconds of each measure, and the ratios to the edit."""
        at = ("loss", "return").index(event) * len(MEASURES)
        slowest = [self.times.slowest(at + i) for i in range(len(MEASURES))]
        figures = {measure: round(value, 2) for measure, value in zip(MEASURES, slowest, strict=True)}
        edit = figures["in_place_ms"]
        figures["full_ratio"] = round(figures["full_rebuild_ms"] / edit, 1)
        figures["partial_ratio"] = round(figures["partial_rebuild_ms"] / edit, 1)
        return figures

    def store(self, name: str) -> dist.Store:
        """A store of its own for each making of groups; rank 0 serves them all."""
        if self.connection is None:
            self.connection = dist.TCPStore("127.0.0.1", self.port, is_master=False, timeout=LIMIT)
        return dist.PrefixStore(name, self.connection)


def megatron_groups(bench: Bench) -> list[list[int]]:
    """Member lists of every group that Megatron makes, in its order; the groups are made on the way."""
    lists: list[list[int]] = []
    original = dist.new_group

    def recorded(ranks: Sequence[int] | None = None, *args: object, **kwargs: object) -> object:
        lists.append(list(range(bench.ranks)) if ranks is None else list(ranks))
        return original(ranks, *args, **kwargs)  # type: ignore[arg-type]

    dist.new_group = recorded
    try:
        parallel_state.initialize_model_parallel(
            bench.tensor, bench.pipeline, create_gloo_process_groups=False, distributed_timeout_minutes=5
        )
    finally:
        dist.new_group = original
    return lists


def reduce_on(groups: Sequence[dist.ProcessGroup]) -> None:
    """A first all-reduce on each group, and check it."""
    for group in groups:
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=group)
        if tensor.item() != dist.get_world_size(group):
            raise AssertionError(f"an all-reduce over {dist.get_world_size(group)} ranks gave {tensor.item()}")


def measure_gloo(bench: Bench, me: int) -> list[list[int]]:
    """Rebuild over gloo. Returns Megatron's member lists."""
    member = me < bench.ranks
    lists: list[list[int]] = []
    if member:
        dist.init_process_group("gloo", store=bench.store("first"), rank=me, world_size=bench.ranks, timeout=LIMIT)
        lists = megatron_groups(bench)
        world = dist.group.WORLD
        assert world is not None
        mine = [group for group in dist.distributed_c10d._world.pg_map]
        reduce_on(mine)
        # Who keeps a reference keeps the sockets.
        parallel_state.destroy_model_parallel()
        del mine
        if me == 0:
            progress("Megatron's groups are up over gloo")
    survivor = member and me != bench.lost
    without = [[rank for rank in ranks if rank != bench.lost] for ranks in lists]

    def partial() -> None:
        held = [list(range(bench.ranks)), *(ranks for ranks in lists if bench.lost in ranks and len(ranks) > 1)]
        made = [dist.new_group([r for r in ranks if r != bench.lost], timeout=LIMIT) for ranks in held]
        reduce_on([group for group in made if isinstance(group, dist.ProcessGroup)])

    def full(event: str, rank: int, size: int, members: list[list[int]]) -> Callable[[], None]:
        def rebuild() -> None:
            dist.destroy_process_group()
            dist.init_process_group("gloo", store=bench.store(event), rank=rank, world_size=size, timeout=LIMIT)
            made = [dist.new_group(ranks, timeout=LIMIT) for ranks in members if ranks]
            whole = dist.group.WORLD
            assert whole is not None
            reduce_on([whole, *(group for group in made if isinstance(group, dist.ProcessGroup))])

        return rebuild

    def partial_return() -> None:
        held = [ranks for ranks in lists if bench.lost in ranks]
        made = [dist.new_group(list(range(bench.ranks)), timeout=LIMIT)]
        made += [dist.new_group(ranks, timeout=LIMIT) for ranks in held]
        reduce_on([group for group in made if isinstance(group, dist.ProcessGroup)])

    def discard() -> None:
        """Let go of the groups that are to be rebuilt; not measured. A host of many ranks is short of ports."""
        for group in list(dist.distributed_c10d._world.pg_map):
            if group is not dist.group.WORLD and bench.lost in dist.get_process_group_ranks(group):
                dist.destroy_process_group(group)

    # In a world of its own each time, so that what is made for one measurement does not help another.
    if member:
        discard()
    bench.measure(me, "loss", "partial_rebuild_ms", partial if survivor else None)
    bench.measure(me, "loss", "full_rebuild_ms", full("loss", me, bench.ranks - 1, without) if survivor else None)
    if me == bench.lost:
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=bench.store("alone"), rank=0, world_size=1)
    bench.measure(me, "return", "full_rebuild_ms", full("return", me, bench.ranks, lists) if member else None)
    if member:
        discard()
    bench.measure(me, "return", "partial_rebuild_ms", partial_return if member else None)
    if member:
        dist.destroy_process_group()
    return lists


def measure_elastic(bench: Bench, me: int, lists: list[list[int]]) -> None:
    """Edit over elastic."""
    transport = Transport(me, InterruptFlag(), LIMIT.total_seconds())
    address = transport.address
    bench.addresses[4096 * me : 4096 * me + 4 + len(address)] = len(address).to_bytes(4, "little") + address
    bench.everybody.wait()
    known = {}
    for rank in range(bench.ranks + 1):
        size = int.from_bytes(bench.addresses[4096 * rank : 4096 * rank + 4], "little")
        known[rank] = bench.addresses[4096 * rank + 4 : 4096 * rank + 4 + size]
    transport.add_peers(known)
    everyone = list(range(bench.ranks))
    groups: list[Group] = []
    if me < bench.ranks:
        groups = [Group(transport, i, ranks) for i, ranks in enumerate([everyone, *lists]) if me in ranks]
        for group in groups:
            _reduce(transport, group)
    held = [group for group in groups if bench.lost in group.ranks]

    def lose() -> None:
        transport.advance(1, [bench.lost])
        for group in held:
            group.edit([rank for rank in group.ranks if rank != bench.lost])
        for group in held:
            _reduce(transport, group)

    before = {group.ident: group.ranks for group in held}

    def join() -> None:
        transport.advance(2)
        if me == bench.joiner:
            for i, ranks in enumerate([everyone, *joiner_lists]):
                if bench.lost in ranks:
                    groups.append(Group(transport, i, [bench.joiner if r == bench.lost else r for r in ranks]))
        for group in held:
            group.edit([bench.joiner if rank == bench.lost else rank for rank in before[group.ident]])
        for group in groups if me == bench.joiner else held:
            _reduce(transport, group)

    joiner_lists = lists
    bench.measure(me, "loss", "in_place_ms", lose if me < bench.lost else None)
    bench.measure(me, "return", "in_place_ms", join if me != bench.lost else None)
    bench.everybody.wait()
    transport.close()


def _reduce(transport: Transport, group: Group) -> None:
    tensor = torch.ones(1)
    transport.run(group.all_reduce(tensor, torch.Tensor.add_))
    if tensor.item() != group.size:
        raise AssertionError(f"an all-reduce over {group.size} ranks gave {tensor.item()}")


def rank_main(bench: Bench, me: int, folder: Path) -> None:
    """One process."""
    if me == 0:
        bench.connection = dist.TCPStore("127.0.0.1", bench.port, is_master=True, wait_for_workers=False)
    bench.everybody.wait()
    lists = measure_gloo(bench, me)
    if me == 0:
        progress("gloo is measured")
        (folder / "lists").write_text(json.dumps(lists))
    bench.everybody.wait()
    if me == bench.joiner:
        lists = json.loads((folder / "lists").read_text())
    measure_elastic(bench, me, lists)


def main(argv: Sequence[str]) -> int:
    """Run the benchmark and print its line."""
    parser = argparse.ArgumentParser(prog="megatron-elastic bench comm", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=96, help="(default: %(default)s)")
    parser.add_argument("--tp", type=int, default=2, help="tensor-parallel size (default: %(default)s)")
    parser.add_argument("--pp", type=int, default=8, help="pipeline-parallel size (default: %(default)s)")
    args = parser.parse_args(argv)
    if args.ranks % (args.tp * args.pp):
        parser.error(f"--ranks {args.ranks} is not divisible by --tp {args.tp} times --pp {args.pp}")
    load = load_average()
    bench = Bench(args.ranks, args.tp, args.pp, free_port())
    progress(f"starting {args.ranks} ranks and one that joins")
    run_ranks(args.ranks + 1, lambda me, folder: rank_main(bench, me, folder))
    emit("comm", argv, {"ranks": args.ranks, "tp": args.tp, "pp": args.pp, "loss": bench.result("loss"),
                         "return": bench.result("return"), "load_average": load})
    return 0
