"""Shards: the usual way to go on without a rank. Its whole contiguous shard moves, and all shards are cut anew.

The optimizer's state of the model, 12 bytes a parameter, is one flat array with a contiguous part on each rank, whose
copy the next rank holds. When a rank is lost, everybody receives its part from that copy, the array is cut again for
the ranks that are left, and what changes hands is sent. Training waits for all of it. The messages go over the same
transport as ours.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from common import progress
from forked import LIMIT, Times, run_ranks, world

from disturbed.by_size.models import RANKS, Model

_LOST = 3
_STATES = 3
"""Master weights and two moments, float32."""


def move_ms(model: Model) -> dict[str, float]:
    """How long training waits: until everybody has the lost part, and until all have their new ones; in ms."""
    times = Times(2, RANKS)
    run_ranks(RANKS, lambda me, folder: _rank_main(me, model.parameters, folder, times))
    gather, whole = times.slowest(0), times.slowest(1)
    progress(f"{model.name}: the lost shard is everywhere after {gather:.0f} ms, all are cut anew after {whole:.0f} ms")
    return {"gather_ms": round(gather, 1), "move_ms": round(whole, 1)}


def _rank_main(me: int, parameters: int, folder: Path, times: Times) -> None:
    with world(me, RANKS, folder):
        survivors = [rank for rank in range(RANKS) if rank != _LOST]
        group = dist.new_group(survivors, backend="elastic", timeout=LIMIT)
        # Links and shared memory are made before the clock runs.
        if me != _LOST:
            dist.all_reduce(torch.ones(1), group=group)
            _move(me, 4096, survivors, group)
        dist.barrier()
        if me != _LOST:
            times[0, me], times[1, me] = _move(me, parameters, survivors, group)


def _move(me: int, parameters: int, survivors: Sequence[int], group: dist.ProcessGroup) -> tuple[float, float]:
    """Move the shards; the time until the lost one is here, and until all is done, in ms."""
    old, new = _cuts(parameters, range(RANKS)), _cuts(parameters, survivors)
    mine = torch.rand(_STATES, old[me][1] - old[me][0])
    lost = torch.rand(_STATES, old[_LOST][1] - old[_LOST][0])
    target = torch.empty(_STATES, new[me][1] - new[me][0])
    dist.all_reduce(torch.ones(1), group=group)  # all begin together
    started = time.perf_counter()
    dist.broadcast(lost, src=(_LOST + 1) % RANKS, group=group)
    gathered = time.perf_counter()
    works, arriving = [], []
    for rank in survivors:
        if rank != me and (piece := _overlap(old[me], new[rank])):
            part = mine[:, piece[0] - old[me][0] : piece[1] - old[me][0]].contiguous()
            works.append(dist.isend(part, rank, group=group))
    for source in range(RANKS):
        if not (piece := _overlap(old[source], new[me])):
            continue
        place = target[:, piece[0] - new[me][0] : piece[1] - new[me][0]]
        if source in (me, _LOST):
            have = mine if source == me else lost
            place.copy_(have[:, piece[0] - old[source][0] : piece[1] - old[source][0]])
        else:
            buffer = torch.empty(_STATES, piece[1] - piece[0])
            works.append(dist.irecv(buffer, source, group=group))
            arriving.append((place, buffer))
    for work in works:
        assert work is not None
        work.wait()
    for place, buffer in arriving:
        place.copy_(buffer)
    dist.all_reduce(torch.ones(1), group=group)
    done = time.perf_counter()
    return (gathered - started) * 1e3, (done - started) * 1e3


def _cuts(parameters: int, ranks: Sequence[int]) -> dict[int, tuple[int, int]]:
    """The range of each rank's contiguous shard."""
    edges = [parameters * i // len(ranks) for i in range(len(ranks) + 1)]
    return {rank: (edges[i], edges[i + 1]) for i, rank in enumerate(ranks)}


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int] | None:
    start, end = max(one[0], other[0]), min(one[1], other[1])
    return (start, end) if start < end else None
