"""Transfer: which slice has to be copied from which rank to which, so that a layout becomes true."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from megatron_elastic.layout.layout import Layout

Role = Literal["owner", "replica"]


class SliceLost(Exception):
    """No live rank holds part ``tp`` of this slice, so that no transfer can bring it back."""

    def __init__(self, unit: int, slice: int, tp: int) -> None:
        super().__init__(f"no live rank holds slice {slice} of unit {unit}, tensor-parallel index {tp}")
        self.unit = unit
        self.slice = slice
        self.tp = tp


@dataclass(frozen=True, slots=True)
class Transfer:
    """Copy part ``tp`` of a slice's state from ``src`` to ``dst``, whose ``role`` needs it."""

    unit: int
    slice: int
    tp: int
    src: int
    dst: int
    role: Role


Held = Mapping[int, Collection[tuple[int, int, int]]]
"""For every live rank, spares too, the (unit, slice, tensor-parallel index) whose state it holds."""


def transfers(layout: Layout, held: Held) -> tuple[Transfer, ...]:
    """Everything to copy so that each owner and replica of ``layout`` holds live state.

    A source is the owner if it holds the part, else a replica, else whichever other holder sends least so far; all
    ranks that call this with the same arguments get the same answer, in the same order. Raises SliceLost if nobody
    holds a part.
    """
    holders: dict[tuple[int, int, int], list[int]] = {}
    for rank in sorted(set(held).difference(layout.lost)):
        for part in held[rank]:
            holders.setdefault(part, []).append(rank)
    result: list[Transfer] = []
    sent: Counter[int] = Counter()
    for unit in range(len(layout.units)):
        for k in range(layout.num_slices):
            for tp in range(layout.cell_size):
                sources = holders.get((unit, k, tp))
                if not sources:
                    raise SliceLost(unit, k, tp)
                owner, copies = layout.owner(unit, k, tp), layout.copies(unit, k, tp)
                roles: list[tuple[Role, int]] = [("owner", owner), *(("replica", copy) for copy in copies)]
                for role, dst in roles:
                    if dst in sources:
                        continue
                    src = min(sources, key=lambda rank: (rank != owner, rank not in copies, sent[rank], rank))
                    sent[src] += 1
                    result.append(Transfer(unit, k, tp, src, dst, role))
    return tuple(result)
