"""Migration: what it takes to bring slices to where a layout wants them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from megatron_elastic.layout import Holdings, Layout, SliceLost, Transfer, transfers
from megatron_elastic.plan.costs.cost import Costs


def size(move: Transfer, layout: Layout, costs: Costs) -> float:
    """Bytes of one transfer."""
    return costs.units[move.unit].optimizer_bytes / layout.num_slices


def duration_ms(moves: Iterable[Transfer], layout: Layout, costs: Costs) -> float:
    """Milliseconds that ``moves`` take at full bandwidth: as long as the rank that sends or receives most."""
    sent: Counter[int] = Counter()
    received: Counter[int] = Counter()
    for move in moves:
        sent[move.src] += round(size(move, layout, costs))
        received[move.dst] += round(size(move, layout, costs))
    most = max((*sent.values(), *received.values()), default=0)
    return costs.transfer_ms(most) if most else 0.0


def pause_ms(layout: Layout, held: Holdings, costs: Costs) -> float:
    """Milliseconds that training waits until owners have what ``layout`` asks for; infinite if nobody holds a slice."""
    try:
        moves = [move for move in transfers(layout, held) if move.role == "owner"]
    except SliceLost:
        return math.inf
    return duration_ms(moves, layout, costs)
