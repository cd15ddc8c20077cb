"""Copying: replicas that are missing are fetched in the background, one slice after the other, no faster than allowed.

Who lacks slices asks for them, piece by piece, and the sender answers. A slice is remembered by its sender as it is
when its first piece is asked for, so only slices on their way are in memory twice, and nothing is copied while a step
waits. The answer says how many steps the slice has done; who fetches it keeps the gradients of the steps since it
asked, and the one before, because ranks are up to one step apart: with them the copy catches up (``state.store``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from megatron_elastic.comm.operation import Pause, Sending, Steps
from megatron_elastic.comm.tag import Channel, at_slice
from megatron_elastic.comm.transport import Transport

SliceId = tuple[int, int]
"""(unit, slice)"""
Rate = Callable[[int], float]
"""Bytes a second that may be fetched of a unit in the background; 0: no limit."""
_INTERVAL = 0.1
"""Seconds that a piece takes at the rate allowed."""
_LEAST = 1024
"""Elements of the smallest piece."""


def part_of(at: SliceId, part: int) -> int:
    """Coordinate of a message about one of a slice's tensors, or about all of them (3)."""
    return at_slice(*at, part)


def serve(
    transport: Transport,
    peer: int,
    slices: Sequence[SliceId],
    snapshot: Callable[[SliceId], tuple[int, Sequence[torch.Tensor]]],
) -> Steps:
    """Answer ``peer``, who asks for ``slices`` in this order. ``snapshot``: (steps done, tensors) of a slice
    now; called in another thread."""
    for at in slices:
        request = torch.empty(2, dtype=torch.int64)
        yield [transport.recv(peer, Channel.REQUEST, part_of(at, 3), request)]
        taken = transport.aside(peer, partial(snapshot, at))
        yield [taken]
        step, tensors = taken.result
        size = tensors[0].numel()
        sends: list[Sending] = [transport.send(peer, Channel.STATE, part_of(at, 3), torch.tensor([step]))]
        while True:
            start, end = request.tolist()
            for part, tensor in enumerate(tensors):
                sends.append(transport.send(peer, Channel.STATE, part_of(at, part), tensor[start:end]))
            if end == size:
                break
            request = torch.empty(2, dtype=torch.int64)
            yield [transport.recv(peer, Channel.REQUEST, part_of(at, 3), request)]
        yield sends


def fetch(
    transport: Transport,
    wanted: Sequence[tuple[int, SliceId]],
    begin: Callable[[int, SliceId], Sequence[torch.Tensor]],
    piece: Callable[[SliceId, int], None],
    arrived: Callable[[SliceId, int], None],
    rate: Rate,
) -> Steps:
    """Get slices from other ranks: ``wanted`` are (rank, slice).

    ``begin`` is called with both before a slice is asked for, and gives the tensors to receive it in; ``piece`` when a
    part of it is here, with its bytes; ``arrived`` when all of it is, with the number of steps that it has done.
    """
    free_at = time.monotonic()
    for source, at in wanted:
        tensors = begin(source, at)
        size, step = tensors[0].numel(), torch.empty(1, dtype=torch.int64)
        a_second = rate(at[0])
        each = max(_LEAST, int(a_second * _INTERVAL / (4 * len(tensors)))) if a_second else size
        for start in range(0, size, each):
            end = min(start + each, size)
            request = torch.tensor([start, end])
            recvs = [
                transport.recv(source, Channel.STATE, part_of(at, part), tensor[start:end])
                for part, tensor in enumerate(tensors)
            ]
            if start == 0:
                recvs.append(transport.recv(source, Channel.STATE, part_of(at, 3), step))
            yield [transport.send(source, Channel.REQUEST, part_of(at, 3), request), *recvs]
            piece(at, bytes_here := 4 * len(tensors) * (end - start))
            if a_second:
                free_at = max(free_at, time.monotonic()) + bytes_here / a_second
                yield [Pause(source, free_at)]
        arrived(at, int(step.item()))
