"""Copying: replicas that are missing are fetched in the background, one slice after the other, no faster than allowed.

Who lacks slices asks for them, piece by piece and a few ahead, and the sender answers. A slice is remembered by its
sender as it is when it comes to its first piece, so only slices on their way are in memory twice, and nothing is copied
while a step waits. The answer says how many steps the slice has done; who fetches it keeps the gradients of the steps
since it asked, and the one before, because ranks are up to one step apart: with them the copy catches up
(``state.store``).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch

from megatron_elastic.comm.operation import Pause, Recv, Sending, Steps
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
_AHEAD = 2
"""Pieces that are asked for while one is on its way: the way to who has them and back costs nothing then."""


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


class _Piece(NamedTuple):
    """A piece that has been asked for: of all of a slice's tensors."""

    at: SliceId
    source: int
    nbytes: int
    seconds: float
    """That it takes at the rate allowed."""
    step: torch.Tensor | None
    """With the slice's last piece: where the number of steps is that the slice has done."""
    operations: Sequence[Sending | Recv]


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

    def take(each: _Piece) -> Steps:
        yield each.operations
        piece(each.at, each.nbytes)
        if each.step is not None:
            arrived(each.at, int(each.step.item()))

    free_at = time.monotonic()
    under_way: deque[_Piece] = deque()
    for asked in _pieces(transport, wanted, begin, rate):
        under_way.append(asked)
        free_at = max(free_at, time.monotonic()) + asked.seconds
        if len(under_way) > _AHEAD:
            yield from take(under_way.popleft())
        if asked.seconds:
            yield [Pause(asked.source, free_at)]
    for asked in under_way:
        yield from take(asked)


def _pieces(
    transport: Transport,
    wanted: Sequence[tuple[int, SliceId]],
    begin: Callable[[int, SliceId], Sequence[torch.Tensor]],
    rate: Rate,
) -> Iterator[_Piece]:
    """Ask for one piece after the other: for each when it is taken from here."""
    for source, at in wanted:
        tensors = begin(source, at)
        size, step = tensors[0].numel(), torch.empty(1, dtype=torch.int64)
        a_second = rate(at[0])
        each = max(_LEAST, int(a_second * _INTERVAL / (4 * len(tensors)))) if a_second else size
        for start in range(0, size, each):
            end = min(start + each, size)
            operations: list[Sending | Recv] = [
                transport.recv(source, Channel.STATE, part_of(at, part), tensor[start:end])
                for part, tensor in enumerate(tensors)
            ]
            if start == 0:
                operations.append(transport.recv(source, Channel.STATE, part_of(at, 3), step))
            request = torch.tensor([start, end])
            operations.append(transport.send(source, Channel.REQUEST, part_of(at, 3), request))
            nbytes = 4 * len(tensors) * (end - start)
            seconds = nbytes / a_second if a_second else 0.0
            yield _Piece(at, source, nbytes, seconds, step if end == size else None, operations)
