"""Moves: what each rank has to do with states under a new layout."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from megatron_elastic.cluster.messages import Moves
from megatron_elastic.cluster.protocol.turn import Turn
from megatron_elastic.layout import SlicePart, Transfer, by_rank


def send_moves(turn: Turn, moves: Collection[Transfer], epoch: int, kept: Mapping[int, list[SlicePart]]) -> None:
    """Tell each rank its own part of ``moves`` under the layout of ``epoch``, if it has any, and what of its states is
    live if that is not all that it has reported (``kept``). To be sent before the message that has the layout.
    """
    own = by_rank(moves)
    for rank in sorted({*own, *kept}):
        turn.send(Moves(epoch=epoch, moves=list(own.get(rank, ())), kept=kept.get(rank)), [rank])
