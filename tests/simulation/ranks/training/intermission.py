"""Intermission: what is due between two steps: a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_elastic.cluster.messages import Event
from tests.simulation.errors import Violation
from tests.simulation.ranks.training import parameters

if TYPE_CHECKING:
    from tests.simulation.ranks.rank import Rank, Waits
    from tests.simulation.ranks.training.tenure import Tenure


def hold(rank: Rank, tenure: Tenure, done: int) -> Waits:
    """Do what is due after ``done`` steps."""
    every = rank.world.save_every
    if every and done != rank.world.start_step and done - done % every >= rank.save_first:
        yield from _save(rank, tenure, done)


def _save(rank: Rank, tenure: Tenure, done: int) -> Waits:
    """Save the state after ``done`` steps."""
    layout, store, meeting = tenure.layout, tenure.store, rank.transport.meeting
    yield from parameters.await_all(rank, tenure)
    yield meeting(layout, "save", done)
    yield rank.world.delay(0.02)
    yield meeting(layout, "saved", done)
    for at in layout.owned(rank.rank):
        state = store.live.get(at)
        if state is None or state.step != done:
            raise Violation("invented", f"rank {rank.rank} saves slice {at} after {done} steps and has "
                                        f"{'nothing' if state is None else state.step}")
    rank.save_first = done + 1
    if rank.rank == layout.ranks[0]:
        rank.world.save(layout, done)
        rank.control.send(Event(rank=rank.rank, epoch=layout.epoch, kind="saved", fields={"step": done}))
