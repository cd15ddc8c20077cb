"""Quotas: how much each cell of a stage gets to do when they are not equally fast."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def quotas(total: int, times: Sequence[float], held: Sequence[int]) -> list[int]:
    """So many of ``total`` for each cell that the last one is done as early as can be; at least one each, if there are
    enough.

    ``times``: what one takes, by cell, in any unit. ``held``: how many each has now; of sharings that are equally good
    it is the one that moves fewest: what was shared out so stays as it is.
    """
    if len(set(times)) == 1:  # at once, as ten thousand cells may have a hundred thousand grains
        low, extra = divmod(total, len(times))
        fullest = set(sorted(range(len(times)), key=lambda index: (-held[index], index))[:extra])
        return [low + (index in fullest) for index in range(len(times))]
    given = [0] * len(times)

    def offer(index: int) -> tuple[float, bool, int, int]:
        """The next one goes where it is done first."""
        more = given[index] + 1
        return more * times[index] if more > 1 else 0.0, more > held[index], -held[index], index

    offers = [offer(index) for index in range(len(times))]
    heapq.heapify(offers)
    for _ in range(total):
        index = offers[0][-1]
        given[index] += 1
        heapq.heapreplace(offers, offer(index))
    return given
