"""Dataflow: which cell of a stage computes which grains, and parts of which.

Where grains stay whole (``reroute``), cells come out even to within one grain, and a run stays the same bit for bit.
Where they can be cut (``Layout.samples``), the grains that do not come out even are: the cells of the stage compute
consecutive samples of them, and are even to within one sample. All other grains stay whole. Cells that are slower than
others get less to do, so that all are done at the same time (``quotas``). Each stage does this for itself; a cell sends
to whom it has samples in common with. Gradients are sums over samples, so global batch, gradient scale and sample order
stay what they were either way.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import replace

from megatron_elastic.layout import Cell, Layout, Part
from megatron_elastic.plan.work.quotas import quotas
from megatron_elastic.plan.work.reroute import deal, reroute


def share(layout: Layout, cells: Sequence[Cell], slow: Mapping[int, float] | None = None) -> tuple[Cell, ...]:
    """``cells``, all that are to compute a stage of ``layout``, with all grains shared out so that they are done at the
    same time, as far as can be; nothing is incoming.

    Grains move only where they must. ``slow``: how many times as long as usual a grain takes in a cell, by its leader;
    1 for those that are not named.
    """
    held = [cell.grains for cell in cells]
    times = [(slow or {}).get(cell.leader, 1.0) for cell in cells]
    if layout.samples == 1:
        grains = reroute(held, layout.num_grains, times)
        return tuple(_given(cell, whole, ()) for cell, whole in zip(cells, grains, strict=True))
    shares = resize(held, layout.num_grains, layout.samples, times)
    return tuple(_given(cell, whole, parts) for cell, (whole, parts) in zip(cells, shares, strict=True))


def dealt(layout: Layout, cells: Sequence[Cell], slow: Mapping[int, float] | None = None) -> tuple[Cell, ...]:
    """Likewise, but who computes what has nothing to do with how it was before: grains are dealt out in turn, to slower
    cells less often. No state belongs to them, and so neighbouring stages are in step.
    """
    times = [(slow or {}).get(cell.leader, 1.0) for cell in cells]
    hands = _in_turn(layout.num_grains, times)
    return share(layout, [Cell(cell.ranks, tuple(hand)) for cell, hand in zip(cells, hands, strict=True)], slow)


def shared(layout: Layout, slow: Mapping[int, float] | None = None) -> Layout:
    """``layout`` with the grains of each stage shared as ``share`` does it."""
    return replace(layout, stages=tuple(
        replace(stage, cells=share(layout, stage.cells, slow)) for stage in layout.stages
    ))  # fmt: skip


def dealt_anew(layout: Layout, slow: Mapping[int, float] | None = None) -> Layout:
    """``layout`` with the grains of each stage dealt out as ``dealt`` does it."""
    return replace(layout, stages=tuple(
        replace(stage, cells=dealt(layout, stage.cells, slow)) for stage in layout.stages
    ))  # fmt: skip


def _in_turn(grains: int, times: Sequence[float]) -> Sequence[Sequence[int]]:
    """Of each cell, the grains in whose turn it is half way through one, if all begin at once."""
    if len(set(times)) == 1:
        return [range(at, grains, len(times)) for at in range(len(times))]
    hands: list[list[int]] = [[] for _ in times]
    halves = sorted((each / 2, at) for at, each in enumerate(times))
    for grain in range(grains):
        half, at = halves[0]
        hands[at].append(grain)
        heapq.heapreplace(halves, (half + times[at], at))
    return hands


def _given(cell: Cell, whole: tuple[int, ...], parts: tuple[Part, ...]) -> Cell:
    same = (cell.grains, cell.parts, cell.incoming) == (whole, parts, ())
    return cell if same else Cell(cell.ranks, whole, parts=parts)


def resize(
    grains: Sequence[Sequence[int]], num_grains: int, samples: int, times: Sequence[float] | None = None
) -> list[tuple[tuple[int, ...], tuple[Part, ...]]]:
    """Whole grains and parts for each cell of a stage: all samples of grains 0..num_grains-1, balanced to within one.

    ``grains``: those that each cell computes whole now. All cells get as many whole grains as they can, kept where they
    were as far as possible; the same number if they are equally fast. The grains that are left over, the last ones, are
    laid in a row and cut as often as there are cells, so that a cell has parts of two of them at most. ``times``: what
    a sample takes in each cell.
    """
    sizes = quotas(num_grains * samples, times or [1.0] * len(grains), [0] * len(grains))
    room = [size // samples for size in sizes]
    whole, cut = deal(grains, room, num_grains)
    shares, start = [], 0
    for kept, size in zip(whole, sizes, strict=True):
        stop = start + size - samples * len(kept)
        row = (
            Part(cut[at], max(start - at * samples, 0), min(stop - at * samples, samples))
            for at in range(start // samples, -(-stop // samples))
            if start < stop
        )
        shares.append((kept, tuple(row)))
        start = stop
    return shares
