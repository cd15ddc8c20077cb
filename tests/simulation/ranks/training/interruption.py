"""Interruption: unwind, tell the coordinator where this model rank stands, and do what it decides."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_elastic.cluster.messages import Back, Forward, Reload, Resume, Suspect, WorkDone
from megatron_elastic.cluster.rank import standing
from tests.simulation.errors import Interrupted
from tests.simulation.ranks.training.adoption import adopt, come_into
from tests.simulation.ranks.training.verification import verify_alone
from tests.simulation.ranks.work import grains

if TYPE_CHECKING:
    from tests.simulation.ranks.rank import Rank, Waits

DECISIONS = (Forward, Back, Resume, Reload)
"""What a rank waits for that has reported."""


def handle(rank: Rank, interrupted: Interrupted) -> Waits:
    """Report, get the new layout, make it true. A further fault meanwhile begins it again."""
    while True:
        try:
            yield rank.world.delay(0.002)
            if interrupted.suspects:
                yield from _suspect(rank, interrupted.suspects)
            decision = yield from _report(rank)
            yield from adopt(rank, decision)
            return
        except Interrupted as again:
            interrupted = again


def _suspect(rank: Rank, suspects: tuple[int, ...]) -> Waits:
    """Tell the coordinator whose link broke, and wait for the interrupt that must follow."""
    if rank.control.interrupted or set(suspects) <= rank.control.lost:
        return
    rank.control.send(
        Suspect(rank=rank.rank, epoch=rank.standing.epoch, suspects=list(suspects), reason="the link broke")
    )
    yield ()


def _progress(rank: Rank) -> WorkDone | None:
    if not rank.standing.member:
        return None
    step = rank.standing.step
    return WorkDone.none(step, grains(rank.layout, step)) if rank.work is None else rank.work.progress()


def _report(rank: Rank) -> Waits:
    control, epoch = rank.control, rank.control.epoch
    control.acknowledge(epoch)
    if rank.tenure is not None:
        verify_alone(rank, rank.tenure)
    recut, rank.recut = rank.recut, None
    if recut is not None and recut.plan.epoch == control.layout:
        rank.recut = recut  # if this is interrupted, too
        yield from come_into(rank, recut)
    store = rank.store
    if store is not None:
        rank.copies.abandon()
    held = None if store is None else store.held()
    versions = {} if store is None or not rank.world.keeps else store.versions()
    now = rank.world.wall(rank.agent)
    control.send(standing.report(
        rank.standing, epoch, rank.layout, held, versions, now, control.layout, rank.saved, _progress(rank)
    ))  # fmt: skip
    return (yield DECISIONS)
