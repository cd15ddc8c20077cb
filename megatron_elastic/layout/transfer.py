"""Transfer: which slice has to be copied from which rank to which, so that a layout becomes true."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from megatron_elastic.layout.errors import SliceLost
from megatron_elastic.layout.holdings import Holdings
from megatron_elastic.layout.layout import Layout

Role = Literal["owner", "replica"]


@dataclass(frozen=True, slots=True)
class Transfer:
    """Copy a part of a slice's state from ``src`` to ``dst``, whose ``role`` needs it."""

    unit: int
    slice: int
    part: int
    src: int
    dst: int
    role: Role


def transfers(layout: Layout, held: Holdings) -> tuple[Transfer, ...]:
    """Everything to copy so that each owner and replica of ``layout`` holds live state.

    A source is the owner if it holds the part, else a replica, else whichever other holder sends least so far; all
    ranks that call this with the same arguments get the same answer, in the same order. Raises SliceLost if nobody
    holds a part.
    """
    held = held.without(layout.lost)
    result: list[Transfer] = []
    sent: Counter[int] = Counter()
    for unit, k in held.unsure(layout):
        for part in range(layout.num_parts(unit)):
            sources = held.holders((unit, k, part))
            if not sources:
                raise SliceLost(unit, k, part)
            owner, copies = layout.owner(unit, k, part), layout.copies(unit, k, part)
            roles: list[tuple[Role, int]] = [("owner", owner), *(("replica", copy) for copy in copies)]
            for role, dst in roles:
                if dst in sources:
                    continue
                src = min(sources, key=lambda rank: (rank != owner, rank not in copies, sent[rank], rank))
                sent[src] += 1
                result.append(Transfer(unit, k, part, src, dst, role))
    return tuple(result)


def by_rank(moves: Iterable[Transfer]) -> dict[int, tuple[Transfer, ...]]:
    """For each rank that sends or receives something its own transfers, in their order."""
    found: dict[int, list[Transfer]] = {}
    for move in moves:
        for rank in {move.src, move.dst}:
            found.setdefault(rank, []).append(move)
    return {rank: tuple(of_rank) for rank, of_rank in sorted(found.items())}
