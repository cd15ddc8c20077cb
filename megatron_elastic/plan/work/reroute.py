"""Reroute: which cell of a stage computes which grain, moving as few as possible."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from megatron_elastic.plan.work.quotas import quotas


def reroute(
    grains: Sequence[Sequence[int]], num_grains: int, times: Sequence[float] | None = None
) -> list[tuple[int, ...]]:
    """All grains 0..num_grains-1 over the cells of a stage, balanced to within one, ascending in each.

    ``grains``: what each cell computes now, empty for a new one. A grain moves only where it must. ``times``: what a
    grain takes in each cell; without it they are equally fast.
    """
    room = quotas(num_grains, times or [1.0] * len(grains), [len(share) for share in grains])
    return deal(grains, room, num_grains)[0]


def deal(
    grains: Sequence[Sequence[int]], room: Sequence[int], num_grains: int
) -> tuple[list[tuple[int, ...]], list[int]]:
    """Grains 0..num_grains-1 over cells that get ``room`` each, ascending, and those for which there is none.

    Only those move that nobody has, or of which a cell has too many. They are chosen so that the first grains are
    spread as evenly as all are, because a batch that is still to grow has no others (``ramp``): in their order, one
    goes to the cell that has got fewest so far and lacks some, from one that has got more.
    """
    holders = {grain: index for index, share in enumerate(grains) for grain in share}
    left = [len(share) for share in grains]
    surplus = [max(len(share) - most, 0) for share, most in zip(grains, room, strict=True)]
    lacking = [max(most - len(share), 0) for share, most in zip(grains, room, strict=True)]
    dealt: list[list[int]] = [[] for _ in grains]
    over: list[int] = []
    emptiest = [(0, index) for index, lacks in enumerate(lacking) if lacks]
    for grain in range(num_grains):
        holder, taker = holders.get(grain), _emptiest(emptiest, dealt, lacking)
        if holder is not None:
            ahead = taker is not None and len(dealt[holder]) > len(dealt[taker])
            gives = surplus[holder] and (ahead or surplus[holder] == left[holder])
            left[holder] -= 1
            if not gives:
                dealt[holder].append(grain)
                continue
            surplus[holder] -= 1
        if taker is None:
            over.append(grain)
        else:
            dealt[taker].append(grain)
            lacking[taker] -= 1
    return [tuple(share) for share in dealt], over


def _emptiest(heap: list[tuple[int, int]], dealt: Sequence[Sequence[int]], lacking: Sequence[int]) -> int | None:
    """Of the cells that lack grains, the one that has got fewest. ``heap``: how many each had when last looked at."""
    while heap:
        count, index = heap[0]
        if not lacking[index]:
            heapq.heappop(heap)
        elif count < len(dealt[index]):
            heapq.heapreplace(heap, (len(dealt[index]), index))
        else:
            return index
    return None
