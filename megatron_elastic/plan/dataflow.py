"""Dataflow: which cell of a stage computes which grains, and parts of which.

Where grains stay whole (``reroute``), cells come out even to within one grain, and a run stays the same bit for bit.
Where they can be cut (``Layout.samples``), the grains that do not come out even are: the cells of the stage compute
consecutive samples of them, and are even to within one sample. All other grains stay whole. Each stage does this for
itself; a cell sends to whom it has samples in common with. Gradients are sums over samples, so global batch, gradient
scale and sample order stay what they were either way.
"""

from __future__ import annotations

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
        return tuple(Cell(cell.ranks, whole) for cell, whole in zip(cells, grains, strict=True))
    shares = resize(held, layout.num_grains, layout.samples)
    return tuple(Cell(cell.ranks, whole, parts=parts) for cell, (whole, parts) in zip(cells, shares, strict=True))


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
    for grain in free[: len(free) - extra]:
        min(whole, key=len).append(grain)
    least, more = divmod(extra * samples, len(grains))
    shares, start = [], 0
    for index, kept in enumerate(whole):
        stop = start + least + (index < more)
        row = (
            Part(grain, max(start - at * samples, 0), min(stop - at * samples, samples)) for at, grain in enumerate(cut)
        )
        shares.append((tuple(sorted(kept)), tuple(part for part in row if part.size > 0)))
        start = stop
    return shares
