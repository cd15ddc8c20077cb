"""Verification: nothing that damaged memory had a part in may be voted, as ``state.verification`` and ``_verify``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_elastic.cluster.messages import Damage, Damaged
from megatron_elastic.cluster.rank import standing
from tests.simulation.ranks.store import SliceId

if TYPE_CHECKING:
    from tests.simulation.ranks.rank import Rank, Waits
    from tests.simulation.ranks.training.tenure import Tenure


def verify(rank: Rank, tenure: Tenure) -> Waits:
    """Look for damage; have what is found healed, and the step redone."""
    if not rank.world.verifies or not rank.world.damage_around(tenure.layout):
        return
    if found := _check(rank, tenure):
        rank.control.send(_spoiled(rank, tenure, found))
        yield ()  # the interrupt that follows ends it


def verify_alone(rank: Rank, tenure: Tenure) -> None:
    """Look for what a rank can see itself before it leaves a layout; after the vote it has nothing to compare with."""
    if rank.world.verifies and rank.standing.vote is None and (found := _own(rank, tenure)):
        _spoiled(rank, tenure, found)


def _spoiled(rank: Rank, tenure: Tenure, found: set[tuple[int, SliceId]]) -> Damaged:
    layout, store, me, step = tenure.layout, tenure.store, rank.rank, rank.standing.step
    # At once, so that nothing can come between and count it as held.
    store.retire([at for at in store.live if (me, at) not in found])
    damages = [
        Damage(rank=each, unit=at[0], slice=at[1], part=layout.part_of(at[0], me), what="state")
        for each, at in sorted(found)
    ]
    message = Damaged(rank=me, epoch=layout.epoch, step=step, found=damages, verified=max(step - 2, 0))
    rank.standing = standing.spoiled(rank.standing, message)
    return message


def _own(rank: Rank, tenure: Tenure) -> set[tuple[int, SliceId]]:
    return {(rank.rank, at) for at, state in tenure.store.live.items() if state.bad and not rank.world.shy}


def _check(rank: Rank, tenure: Tenure) -> set[tuple[int, SliceId]]:
    """(rank, slice) of the damaged copies that can be seen from here."""
    world, layout, me = rank.world, tenure.layout, rank.rank
    found = _own(rank, tenure)
    for at in layout.owned(me):
        values = {copy: world.damaged_at(copy, at) for copy in (me, *layout.copies(*at, layout.part_of(at[0], me)))}
        told = {copy: value for copy, value in values.items() if value is not None}
        if len(told) == 1 and told.get(me):
            found.add((me, at))  # by its own checksum
        elif any(told.values()):
            # Each damaged copy differs from all others; sound ones are equal.
            sound = [copy for copy, value in told.items() if not value]
            outvoted = [copy for copy in told if told[copy]] if 2 * len(sound) > len(told) else list(told)
            found |= {(copy, at) for copy in outvoted}
    return found
