"""Reroute: which cell of a stage computes which grain, moving as few as possible."""

from __future__ import annotations

from collections.abc import Sequence


def reroute(
    grains: Sequence[Sequence[int]], num_grains: int, idle: Sequence[float] | None = None
) -> list[tuple[int, ...]]:
    """All grains 0..num_grains-1 over the cells of a stage, balanced to within one, ascending in each.

    ``grains``: what each cell computes now, empty for a new one. A grain moves only where it must. ``idle``: how long
    each cell waits in a step; where grains do not come out even, those that wait longest take one more.
    """
    waits = [0.0] * len(grains) if idle is None else idle
    low, extra = divmod(num_grains, len(grains))
    # The fullest cells may keep one more than the others: then as few grains as possible move.
    order = sorted(range(len(grains)), key=lambda index: (-len(grains[index]), -waits[index], index))
    room = {index: low + (place < extra) for place, index in enumerate(order)}
    kept = [list(share[: room[index]]) for index, share in enumerate(grains)]
    for grain in sorted(set(range(num_grains)).difference(*kept)):
        index = min((i for i in room if len(kept[i]) < room[i]), key=lambda i: (len(kept[i]), i))
        kept[index].append(grain)
    return [tuple(sorted(share)) for share in kept]
