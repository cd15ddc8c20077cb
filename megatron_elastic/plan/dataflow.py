"""Dataflow: which cell of a stage computes which grains, and parts of which.

Where grains stay whole (``reroute``), cells come out even to within one grain, and a run stays the same bit for bit.
Where they can be cut (``Layout.samples``), the grains that do not come out even are: the cells of the stage compute
consecutive samples of them, and are even to within one sample. All other grains stay whole. Each stage does this for
itself; a cell sends to whom it has samples in common with. Gradients are sums over samples, so global batch, gradient
scale and sample order stay what they were either way.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from megatron_elastic.layout import Cell, Layout, Part
from megatron_elastic.plan.reroute import reroute


def share(layout: Layout, cells: Sequence[Cell]) -> tuple[Cell, ...]:
    """``cells``, all that are to compute a stage of ``layout``, with all grains shared out evenly; nothing is incoming.

    Grains move only where they must.
    """
    held = [cell.grains for cell in cells]
    if layout.samples == 1:
        grains = reroute(held, layout.num_grains)
        return tuple(_given(cell, whole, ()) for cell, whole in zip(cells, grains, strict=True))
    shares = resize(held, layout.num_grains, layout.samples)
    return tuple(_given(cell, whole, parts) for cell, (whole, parts) in zip(cells, shares, strict=True))


def _given(cell: Cell, whole: tuple[int, ...], parts: tuple[Part, ...]) -> Cell:
    same = (cell.grains, cell.parts, cell.incoming) == (whole, parts, ())
    return cell if same else Cell(cell.ranks, whole, parts=parts)


def resize(
    grains: Sequence[Sequence[int]], num_grains: int, samples: int
) -> list[tuple[tuple[int, ...], tuple[Part, ...]]]:
    """Whole grains and parts for each cell of a stage: all samples of grains 0..num_grains-1, balanced to within one.

    ``grains``: those that each cell computes whole now. All cells get the same number of whole grains, kept where they
    were as far as possible. The grains that are left over, the last ones, are laid in a row and cut as often as there
    are cells, so that a cell has parts of two of them at most.
    """
    low, extra = divmod(num_grains, len(grains))
    whole = [list(kept[:low]) for kept in grains]
    free = sorted(set(range(num_grains)).difference(*whole))
    cut = free[len(free) - extra :]
    emptiest = [(len(kept), index) for index, kept in enumerate(whole)]
    heapq.heapify(emptiest)
    for grain in free[: len(free) - extra]:
        _, index = emptiest[0]
        whole[index].append(grain)
        heapq.heapreplace(emptiest, (len(whole[index]), index))
    least, more = divmod(extra * samples, len(grains))
    shares, start = [], 0
    for index, kept in enumerate(whole):
        stop = start + least + (index < more)
        row = (
            Part(cut[at], max(start - at * samples, 0), min(stop - at * samples, samples))
            for at in range(start // samples, -(-stop // samples))
            if start < stop
        )
        shares.append((tuple(sorted(kept)), tuple(row)))
        start = stop
    return shares
