"""Verification: whether the memory still holds what was written into it, looked at while training goes on.

Of every N steps each slice has its turn in one. After that step a rank takes a checksum of each copy of the slice's
state that it holds, and of its part of the model's weights; who holds a replica sends its checksum to the owner. Before
the next vote, so before anything that was computed meanwhile counts, the rank takes the checksums again: a copy that
has changed in between was damaged here. And the owner compares what the replicas' holders have sent: copies that are
outvoted were damaged at some time since the slice's last turn. If no side has a majority, none can be trusted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from megatron_elastic.comm.operation import Recv, Send
from megatron_elastic.comm.tag import Channel, at_slice
from megatron_elastic.comm.transport import Transport
from megatron_elastic.layout import Layout
from megatron_elastic.state.buffer import UnitBuffer
from megatron_elastic.state.copying import SliceId
from megatron_elastic.state.store import StateStore

_NOT_LIVE = 0
"""Instead of a checksum, while a replica is still being copied."""


@dataclass(frozen=True, slots=True)
class Damage:
    """A copy that is not to be trusted: its state, or the weights at its rank (``what``)."""

    rank: int
    unit: int
    slice: int
    what: str


class Verification:
    """Checksums of one rank under one layout.

    Args:
        every: steps in which every slice has one turn.
    """

    def __init__(
        self, layout: Layout, transport: Transport, units: Mapping[int, UnitBuffer], store: StateStore, every: int
    ) -> None:
        self._layout = layout
        self._transport = transport
        self._units = units
        self._store = store
        self._every = every
        self._states: dict[SliceId, int] = {}
        self._weights: dict[SliceId, int] = {}
        self._sends: list[Send] = []
        self._recvs: dict[SliceId, list[Recv]] = {}

    def note(self, step: int) -> None:
        """Take the checksums that are due after ``step``, whose parameters are everywhere. Does not wait."""
        me, owned, replicated = self._transport.rank, self._owned, self._replicated
        live = {(unit, k) for unit, k, _ in self._store.held()}
        for at in self._due(step):
            unit, k = at
            if unit in self._units:
                self._weights[at] = self._weights_checksum(at)
            if at in live:
                self._states[at] = self._state_checksum(at)
            if at in owned:
                self._recvs[at] = [
                    self._transport.recv(copy, Channel.DIGEST, at_slice(unit, k), torch.zeros(1, dtype=torch.int64))
                    for copy in self._layout.copies(unit, k, self._layout.part_of(unit, me))
                ]
            elif at in replicated:
                owner = self._layout.owner(unit, k, self._layout.part_of(unit, me))
                assert owner != me
                digest = torch.tensor([self._states.get(at, _NOT_LIVE)])
                self._sends.append(self._transport.send(owner, Channel.DIGEST, at_slice(unit, k), digest))

    def check(self) -> list[Damage]:
        """What is damaged of what ``note`` has looked at, and forget it. Waits for the replicas' checksums."""
        me = self._transport.rank
        found = [Damage(me, *at, "weights") for at, sum_ in self._weights.items() if self._weights_checksum(at) != sum_]
        found += [Damage(me, *at, "state") for at, sum_ in self._states.items() if self._state_checksum(at) != sum_]
        self._transport.wait(*self._sends, *(recv for recvs in self._recvs.values() for recv in recvs))
        for (unit, k), recvs in self._recvs.items():
            copies = {recv.peer: int(recv.buffer.item()) for recv in recvs}
            copies[me] = self._states[unit, k]
            found += [Damage(rank, unit, k, "state") for rank in outvoted(copies)]
        self._states.clear()
        self._weights.clear()
        self._sends.clear()
        self._recvs.clear()
        return list(dict.fromkeys(found))

    @property
    def _owned(self) -> set[SliceId]:
        return set(self._layout.owned(self._transport.rank))

    @property
    def _replicated(self) -> set[SliceId]:
        return set(self._layout.replicated(self._transport.rank))

    def _due(self, step: int) -> Iterator[SliceId]:
        # Of all units: a replica may lie in another stage than its owner.
        for unit in range(len(self._layout.units)):
            for k in range(self._layout.num_slices):
                if (unit * self._layout.num_slices + k) % self._every == step % self._every:
                    yield unit, k

    def _weights_checksum(self, at: SliceId) -> int:
        buffer = self._units[at[0]]
        return checksum(buffer.slice_of(buffer.params, at[1]))

    def _state_checksum(self, at: SliceId) -> int:
        # Each tensor counts with a weight of its own, so that equal damage in two does not cancel.
        sums = (checksum(tensor) * (2 * i + 1) for i, tensor in enumerate(self._store[at].tensors))
        return sum(sums) % (1 << 62) + 1


def checksum(tensor: torch.Tensor) -> int:
    """Sum of a contiguous tensor's 32-bit words; no single flipped bit leaves it as it was. Needs whole words."""
    return int(tensor.view(torch.int32).sum(dtype=torch.int64).item())


def outvoted(copies: Mapping[int, int]) -> list[int]:
    """Of ranks and the checksums of their copies: those that a majority contradicts; all, if there is no majority."""
    votes = {rank: value for rank, value in copies.items() if value != _NOT_LIVE}
    if len(set(votes.values())) <= 1:
        return []
    value, count = Counter(votes.values()).most_common(1)[0]
    return sorted(rank for rank, other in votes.items() if other != value or 2 * count <= len(votes))
