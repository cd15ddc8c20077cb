"""Copies: how far those are that ranks fetch in the background, and what else takes ranks long, as their agents read it
(``observe.dials``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from immutables import Map

from megatron_elastic.cluster.protocol.changes.membership import runs_on
from megatron_elastic.cluster.protocol.effects import Show, WriteEvent
from megatron_elastic.cluster.protocol.events import Metered
from megatron_elastic.cluster.protocol.turn import Turn
from megatron_elastic.observe.dials import Figures
from megatron_elastic.observe.telling import tell


def metered(turn: Turn, event: Metered) -> None:
    """A node has told what the dials of its ranks show: write down what is new of copies that the layout asks for."""
    job = turn.job
    figures = {rank: each for rank, each in event.figures.items()
               if runs_on(job, rank, event.node) and not job.ranks[rank].lost}  # fmt: skip
    if figures:
        turn.do(Show(figures))
        _progress(turn, figures)
    if job.layout is None:
        return
    known = Map({rank: each for rank, each in job.copies.items() if each[0] == job.layout.epoch})
    news = []
    for rank, each in sorted(figures.items()):
        _, copied, copies = known.get(rank, (each.epoch, -1, each.copies))
        more = each.copied > copied or each.copies != copies
        # What was complete before this coordinator heard of it is nothing that happens.
        if each.epoch == job.layout.epoch and more and (rank in known or each.copied < each.copies):
            known = known.set(rank, (each.epoch, each.copied, each.copies))
            news.append(rank)
    if known != job.copies:
        turn.set(copies=known)
    if news:
        told = [figures[rank] for rank in news]
        _record(turn, job.layout.epoch, news, [each.unit for each in told], [each.source for each in told])


def _progress(turn: Turn, figures: Mapping[int, Figures]) -> None:
    """Write down, and tell people, how far ranks are with what takes long besides training."""
    ranks = turn.job.ranks
    known, told = turn.job.progress.seen(figures, lambda rank: ranks[rank].lost, turn.now)
    if known is not turn.job.progress:
        turn.set(progress=known)
    for fields in told:
        turn.record("progress", **fields)
        turn.say(tell({"kind": "progress", **fields}), tells="progress")


def settled(turn: Turn, epoch: int, ranks: Sequence[int]) -> None:
    """All that the layout of ``epoch`` asks for at these ranks is there; their agents may not have looked since."""
    known, news = turn.job.copies, []
    for rank in sorted(ranks):
        of, copied, copies = known.get(rank, (epoch, 0, 0))
        if of == epoch and copied < copies:
            known = known.set(rank, (epoch, copies, copies))
            news.append(rank)
    if news:
        turn.set(copies=known)
        _record(turn, epoch, news, [None] * len(news), [None] * len(news))


def _record(
    turn: Turn, epoch: int, ranks: Sequence[int], units: Sequence[int | None], sources: Sequence[int | None]
) -> None:
    """``epoch``: of the layout that asks for the copies; another one may have begun."""
    known = turn.job.copies
    fields = {
        "ranks": list(ranks), "done": [known[rank][1] for rank in ranks], "bytes": [known[rank][2] for rank in ranks],
        "units": [-1 if unit is None else unit for unit in units],
        "sources": [-1 if source is None else source for source in sources],
    }  # fmt: skip
    turn.do(WriteEvent("copying", epoch, turn.now, fields))
