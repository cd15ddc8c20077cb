"""Verification: whether the memory still holds what was written into it, looked at while training goes on.

Of every N steps each slice has its turn in one. After that step a rank takes a checksum of each copy of the slice's
state that it holds, and of its part of the model's weights; who holds a replica sends its checksum to the owner. Before
the next vote, so before anything that was computed meanwhile counts, the rank takes the checksums again: a copy that
has changed in between was damaged here. A rank that is interrupted first does so before it reports. And the owner
compares what the replicas' holders have sent: copies that are outvoted were damaged at some time since the slice's last
turn. If no side has a majority, none can be trusted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron_elastic.comm.operation import Recv, Sending
from megatron_elastic.comm.tag import Channel, at_slice
from megatron_elastic.comm.transport import Transport
from megatron_elastic.device.copies import HostCopy
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
        self._sends: list[Sending] = []
        self._recvs: dict[SliceId, list[Recv]] = {}

    def note(self, step: int) -> None:
        """Take the checksums that are due after ``step``, whose parameters are everywhere. Does not wait."""
        me, owned, replicated = self._transport.rank, self._owned, self._replicated
        live = {(unit, k) for unit, k, _ in self._store.held()}
        due = list(self._due(step))
        self._weights = self._weights_checksums(at for at in due if at[0] in self._units)
        self._states = self._state_checksums(at for at in due if at in live)
        for at in due:
            unit, k = at
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

    def changed(self) -> list[Damage]:
        """What is damaged here of what ``note`` has looked at, as far as it shows without the others. Does not wait for
        them.
        """
        me = self._transport.rank
        weights, states = self._weights_checksums(self._weights), self._state_checksums(self._states)
        found = [Damage(me, *at, "weights") for at, sum_ in self._weights.items() if weights[at] != sum_]
        return found + [Damage(me, *at, "state") for at, sum_ in self._states.items() if states[at] != sum_]

    def check(self) -> list[Damage]:
        """What is damaged of what ``note`` has looked at, and forget it. Waits for the replicas' checksums."""
        me, found = self._transport.rank, self.changed()
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

    def _weights_checksums(self, slices: Iterable[SliceId]) -> dict[SliceId, int]:
        units = self._units
        found = {at: [units[at[0]].slice_of(units[at[0]].params, at[1])] for at in slices}
        return {at: sums[0] for at, sums in checksums(found).items()}

    def _state_checksums(self, slices: Iterable[SliceId]) -> dict[SliceId, int]:
        # Each tensor counts with a weight of its own, so that equal damage in two does not cancel.
        found = checksums({at: self._store[at].tensors for at in slices})
        return {at: sum(each * (2 * i + 1) for i, each in enumerate(sums)) % (1 << 62) + 1
                for at, sums in found.items()}  # fmt: skip


def checksums(tensors: Mapping[SliceId, Sequence[torch.Tensor]]) -> dict[SliceId, list[int]]:
    """Sum of the 32-bit words of contiguous tensors; no single flipped bit leaves one as it was. Needs whole words.

    Waits once for a device, however many are there.
    """
    sums = [each.view(torch.int32).sum(dtype=torch.int64) for some in tensors.values() for each in some]
    there = [each for each in sums if not each.is_cpu]
    read = iter(HostCopy(torch.stack(there)).wait().tolist() if there else ())
    values = iter([each.item() if each.is_cpu else next(read) for each in sums])
    return {at: [int(next(values)) for _ in some] for at, some in tensors.items()}


def outvoted(copies: Mapping[int, int]) -> list[int]:
    """Of ranks and the checksums of their copies: those that a majority contradicts; all, if there is no majority."""
    votes = {rank: value for rank, value in copies.items() if value != _NOT_LIVE}
    if len(set(votes.values())) <= 1:
        return []
    value, count = Counter(votes.values()).most_common(1)[0]
    return sorted(rank for rank, other in votes.items() if other != value or 2 * count <= len(votes))
