"""Lockstep: the ranks of a cell do the same operations together, and none leaves another alone in one.

An operation that changes sums is finished although an interrupt has come. It needs the other ranks of the cell, who may
have stopped before it: so who stops tells them how far it has come, and who is further gives up. Whatever a rank needs
for an operation that another has ended is on its way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch

from megatron_elastic.cluster.rank.control import Interrupted
from megatron_elastic.comm.group import Group
from megatron_elastic.comm.operation import Recv
from megatron_elastic.comm.tag import GROUPS, Channel
from megatron_elastic.comm.transport import Transport

_GROUP = GROUPS - 3
"""Group id of a cell's ranks here, beyond any that Megatron's groups reach."""


class Lockstep:
    """One rank's part, under one layout. ``ranks``: those of its cell."""

    def __init__(self, transport: Transport, ranks: Sequence[int]) -> None:
        self._transport = transport
        self._group = Group(transport, _GROUP, ranks)
        self._others = [rank for rank in ranks if rank != transport.rank]
        self._stops: list[Recv] = []
        """Of each other rank: before which operation it stops."""
        self._number = 0
        """The operation that this rank is at."""

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around the operations of a step. All ranks of the cell begin them, or none does."""
        self._number = 0
        if not self._others:
            yield
            return
        try:
            if not self._stops:
                self._stops = [self._transport.recv(rank, Channel.STOP, 0, _number(0)) for rank in self._others]
            self._transport.run(self._group.barrier())
            yield
        except Interrupted:
            for rank in self._others:
                self._transport.send(rank, Channel.STOP, 0, _number(self._number))
            raise

    def whole(self) -> AbstractContextManager[None]:
        """Around an operation that is to be finished if it can be."""
        return self._transport.whole(self._others, self._is_alone)

    def next(self) -> None:
        """An operation is done."""
        self._number += 1

    def _is_alone(self) -> bool:
        return any(stop.done and int(stop.buffer) <= self._number for stop in self._stops)


def _number(value: int) -> torch.Tensor:
    return torch.tensor(value)
