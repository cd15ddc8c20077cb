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


def transfers(layout: Layout, held: Mapping[int, Collection[tuple[int, int]]]) -> tuple[Transfer, ...]:
    """Everything to copy so that each owner and replica of ``layout`` holds live state.

    ``held`` maps every live rank, spares too, to the (unit, slice) whose state it holds. A source is the owner if it
    holds the part, else the replica, else whichever other holder sends least so far (the lowest rank of those). All
    ranks that call this with the same arguments get the same answer, in the same order. Raises SliceLost if nobody
    holds a part.
    """
    holders: dict[tuple[int, int, int], list[int]] = {}
    for rank in sorted(set(held).difference(layout.lost)):
        tp = layout.tp_index(rank)
        for unit, k in held[rank]:
            holders.setdefault((unit, k, tp), []).append(rank)
    result: list[Transfer] = []
    sent: Counter[int] = Counter()
    for unit in range(len(layout.units)):
        for k in range(layout.num_slices):
            for tp in range(layout.cell_size):
                sources = holders.get((unit, k, tp))
                if not sources:
                    raise SliceLost(unit, k, tp)
                owner, replica = layout.owner(unit, k, tp), layout.replica(unit, k, tp)
                roles: tuple[tuple[Role, int | None], ...] = (("owner", owner), ("replica", replica))
                for role, dst in roles:
                    if dst is None or dst in sources:
                        continue
                    src = min(sources, key=lambda rank: (rank != owner, rank != replica, sent[rank], rank))
                    sent[src] += 1
                    result.append(Transfer(unit, k, tp, src, dst, role))
    return tuple(result)
