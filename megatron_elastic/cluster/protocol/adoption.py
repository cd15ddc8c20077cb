"""Adoption: a layout comes into force."""

from __future__ import annotations

from immutables import Map
from msgspec.structs import replace

from megatron_elastic.cluster.protocol.changes import clocks, pace
from megatron_elastic.cluster.protocol.effects import WriteLayout
from megatron_elastic.cluster.protocol.turn import Turn
from megatron_elastic.layout import Layout


def use(turn: Turn, layout: Layout) -> None:
    """``layout`` is the present one from now on."""
    job, before = turn.job, turn.job.layout
    unsettled: Map[int, None] = Map({
        rank: None for rank in layout.ranks if job.settled.get(rank, -1) < layout.epoch
    })
    # Who has finished may have been faster than the word that everybody has switched.
    unfinished: Map[int, None] = Map({
        rank: None for rank in layout.ranks if rank not in job.finished
    }) if job.finished else Map()
    since: Map[int, int] = Map({rank: job.since.get(rank, layout.epoch) for rank in layout.ranks})
    turn.set(
        layout=layout, since=since, epoch=layout.epoch, unsettled=unsettled, unfinished=unfinished,
        arrangement=replace(job.arrangement, samples=Map()),
    )  # fmt: skip
    pace.enter(turn, before)
    turn.do(WriteLayout(layout))
    clocks.plan(turn)
