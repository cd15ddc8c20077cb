"""Reroute: which cell of a stage computes which grain, moving as few as possible."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from megatron_elastic.plan.quotas import quotas


def reroute(
    grains: Sequence[Sequence[int]], num_grains: int, paces: Sequence[float] | None = None
) -> list[tuple[int, ...]]:
    """All grains 0..num_grains-1 over the cells of a stage, balanced to within one, ascending in each.

    ``grains``: what each cell computes now, empty for a new one. A grain moves only where it must. ``paces``: what a
    grain takes in each cell; without it they are equally fast.
    """
    room = quotas(num_grains, paces or [1.0] * len(grains), [len(share) for share in grains])
    kept = [list(share[: room[index]]) for index, share in enumerate(grains)]
    emptiest = [(len(share), index) for index, share in enumerate(kept) if len(share) < room[index]]
    heapq.heapify(emptiest)
    for grain in sorted(set(range(num_grains)).difference(*kept)):
        _, index = emptiest[0]
        kept[index].append(grain)
        if len(kept[index]) < room[index]:
            heapq.heapreplace(emptiest, (len(kept[index]), index))
        else:
            heapq.heappop(emptiest)
    return [tuple(sorted(share)) for share in kept]
