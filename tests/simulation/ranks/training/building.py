"""Building: a model rank's part of the model and of the optimizer's state: the first, a newcomer's, a checkpoint's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_elastic.cluster.messages import Built, Invite, Ready
from megatron_elastic.cluster.rank import standing
from megatron_elastic.layout import EXPERTS, UnitShape
from tests.simulation.errors import Violation
from tests.simulation.layouts import decoded
from tests.simulation.ranks.store import Store
from tests.simulation.ranks.training.tenure import Tenure

if TYPE_CHECKING:
    from tests.simulation.ranks.rank import Rank, Waits

_SHAPE = UnitShape(members=(), dtype="float32")
_EXPERTS = UnitShape(members=(), dtype="float32", experts=4)


def build(rank: Rank) -> Waits:
    """Model and optimizer state under the first layout; redone if interrupted."""
    layout = rank.layout
    yield from rank.transport.find(layout)
    yield rank.world.delay(0.05)
    rank.control.check()
    store = Store(rank.rank, layout, rank.world.keeps)
    load(rank, store, rank.standing.step - 1)
    rank.parameters.hold(layout.held_by(rank.rank))
    rank.store, rank.tenure, rank.standing = store, Tenure(layout, store), standing.built(rank.standing)
    tell(rank)


def tell(rank: Rank) -> None:
    """Tell what the units here are like."""
    names = rank.layout.units
    shapes = {unit: _EXPERTS if names[unit].startswith(EXPERTS) else _SHAPE for unit in rank.parameters.steps}
    rank.control.send(Built(rank=rank.rank, shapes=shapes))


def prepare(rank: Rank, invite: Invite) -> Waits:
    """Build this rank's part of the layout it is invited into, without the others, who are training."""
    layout = decoded(invite.layout)
    rank.transport.reach(layout)
    settled, rank.settled = rank.settled, False
    try:
        yield rank.world.newcomer_delay()
    finally:
        rank.settled = settled
    if rank.store is None or rank.store.place != layout.place_of(rank.rank) or not rank.store.fits(layout):
        rank.store = Store(rank.rank, layout, rank.world.keeps)
        rank.parameters.shapes.update(invite.shapes)
    rank.control.send(Ready(rank=rank.rank, epoch=invite.epoch))


def load(rank: Rank, store: Store, step: int) -> None:
    """State as after ``step`` steps: a checkpoint's, or a fresh one."""
    world, layout, me = rank.world, rank.layout, rank.rank
    if step != world.start_step and step not in world.saved:
        raise Violation("no checkpoint", f"rank {me} is to load step {step}; there are {world.saved}")
    if step == 0 and world.start_step:
        raise Violation("no checkpoint", "the first state is gone")
    if step in world.tainted:
        raise Violation("damage", f"rank {me} loads the checkpoint of step {step}, which is known to be damaged")
    units = {*layout.stages[layout.stage_of(me)].units, *layout.held_by(me)}
    store.create((at for at in (*layout.owned(me), *layout.replicated(me)) if at[0] in units), step)
