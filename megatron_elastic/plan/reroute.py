"""Reroute: which cell of a stage computes which grain, moving as few as possible."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def reroute(grains: Sequence[Sequence[int]], num_grains: int) -> list[tuple[int, ...]]:
    """All grains 0..num_grains-1 over the cells of a stage, balanced to within one, ascending in each.

    ``grains``: what each cell computes now, empty for a new one. A grain moves only where it must.
    """
    low, extra = divmod(num_grains, len(grains))
    # The fullest cells may keep one more than the others: then as few grains as possible move.
    order = sorted(range(len(grains)), key=lambda index: (-len(grains[index]), index))
    room = {index: low + (place < extra) for place, index in enumerate(order)}
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
