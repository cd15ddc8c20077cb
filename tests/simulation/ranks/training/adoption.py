"""Adoption: make a layout true on this model rank, with what was decided about the step.

All decisions begin alike (``_edit``): the layout is the present one, and what the old one made of this rank is gone.
Then state becomes what was decided, and the rank's ``Standing`` with it. Then copies are made (``_copy``) and training
goes on.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

from megatron_elastic.cluster.messages import (
    Back,
    Decision,
    Enter,
    Forward,
    Kept,
    Plan,
    Recovered,
    Recut,
    Reload,
    Resume,
    Settled,
    Switched,
)
from megatron_elastic.cluster.rank import standing
from megatron_elastic.layout import Transfer
from megatron_elastic.pipeline.resumption import remainder
from tests.simulation.errors import Violation
from tests.simulation.layouts import decoded
from tests.simulation.ranks.store import SliceId, Store
from tests.simulation.ranks.training import building, parameters, step
from tests.simulation.ranks.training.recutting import Preparation, Recutting
from tests.simulation.ranks.training.tenure import Tenure
from tests.simulation.ranks.training.verification import verify
from tests.simulation.ranks.work import grains

if TYPE_CHECKING:
    from tests.simulation.ranks.rank import Rank, Waits


class _Edit(NamedTuple):
    """A layout that has become the present one."""

    store: Store
    moves: Sequence[Transfer]
    """Copies from or to this rank."""
    kept: Collection[SliceId]
    """What of this rank's states is live."""


def adopt(rank: Rank, decision: Decision) -> Waits:
    """Make the decided layout true on this rank; afterwards it trains under it, or is a spare."""
    match decision:
        case Forward():
            yield from _forward(rank, decision)
        case Back() | Resume():
            yield from _back(rank, decision)
        case Reload():
            yield from _reload(rank, decision)


def _forward(rank: Rank, decision: Forward) -> Waits:
    """Somebody was past the vote of the step: finish it with that vote."""
    vote = decision.vote
    edit: _Edit | None = yield from _edit(rank, decision, decision.gather)
    if edit is None:
        return
    edit.store.return_to(vote.step, edit.kept)
    step.apply(rank, edit.store, vote.step)
    rank.standing = standing.forward(rank.standing, vote)
    yield from _copy(rank, edit, vote.step)
    tenure = _train(rank)
    if tenure is not None:
        yield from step.complete(rank, tenure, vote)


def _back(rank: Rank, decision: Back | Resume) -> Waits:
    """Nobody was: do the step again from its start, or go on with it from what is left of it."""
    work = decision.kept if isinstance(decision, Resume) else ()
    edit: _Edit | None = yield from _edit(rank, decision, decision.gather, work)
    if edit is None:
        return
    edit.store.return_to(decision.step - 1, edit.kept)
    if (owed := standing.owes(rank.standing, decision.step)) is not None:
        step.apply(rank, edit.store, owed.step)
    rank.standing = standing.back(rank.standing, decision.step)
    if isinstance(decision, Resume) and rank.tenure is not None:
        leader, some = rank.layout.cell_of(rank.rank).leader, grains(rank.layout, decision.step)
        rank.tenure.remainder = [leg.op for leg in remainder("1f1b", rank.layout, decision.kept, leader, some).legs]
    yield from _copy(rank, edit, decision.step - 1)
    _train(rank)


def _reload(rank: Rank, decision: Reload) -> Waits:
    """State is lost: go back to a checkpoint."""
    edit: _Edit | None = yield from _edit(rank, decision, False)
    if edit is None:
        return
    rank.standing = standing.reload(rank.standing, decision.step)
    edit.store.retire(())
    if rank.standing.member:
        yield rank.world.delay(0.05)
        rank.control.check()
        building.load(rank, edit.store, decision.step - 1)
        building.tell(rank)  # all who knew it of some may be dead
    yield from _copy(rank, edit, decision.step - 1)
    _train(rank)


def enter(rank: Rank, decision: Enter, gather: bool = False, program: bytes | None = None) -> Waits:
    """The layout was planned, and the step is the first one under it. ``gather``: it begins with distributing weights,
    of which nobody has any. ``program``: in what order cells do their work, packed; None: in the usual one.
    """
    edit: _Edit | None = yield from _edit(rank, decision, gather)
    if rank.tenure is not None:
        rank.tenure.program = program
    # At once: from now on this rank reports as a member.
    rank.standing = standing.enter(rank.standing, decision.step)
    if edit is None:
        if rank.standing.member:
            raise Violation("too early", f"rank {rank.rank} is let in before it was ready")
        return
    edit.store.return_to(decision.step - 1, edit.kept)
    yield from _copy(rank, edit, decision.step - 1)
    rank.copies.begin()


def switch(rank: Rank, tenure: Tenure) -> Waits:
    """Between two steps: ``enter`` the planned layout, as all members do now, or begin to get what that takes."""
    plan, store = tenure.plan, tenure.store
    assert plan is not None
    fits = store.fits(decoded(plan.layout))
    if not fits and _follow(rank, tenure, plan):
        return
    if rank.world.keeps:
        yield lambda: rank.copies.all_arrived() and not store.busy
        store.settle()
    yield from parameters.await_all(rank, tenure)
    yield from verify(rank, tenure)
    first = rank.standing.step
    if not fits:
        yield from _reshape(rank, tenure, plan)
        return
    yield from enter(
        rank, Enter(epoch=plan.epoch, layout=plan.layout, step=first, shapes=plan.shapes, saved=rank.save_first - 1),
        program=plan.program,
    )
    if rank.rank == tenure.layout.ranks[0]:  # of those that were there before: who enters does not come here
        rank.control.send(Switched(rank=rank.rank, epoch=plan.epoch, step=first))


def _follow(rank: Rank, tenure: Tenure, plan: Plan) -> bool:
    """Begin with some more of the states that this rank is to have in cells of another shape, if there are any that can
    follow the present ones while training goes on.
    """
    if rank.world.keeps:
        return False
    if tenure.preparation is None:
        tenure.preparation = Preparation(rank, tenure.layout, tenure.store, plan)
    if tenure.preparation.complete:
        return False
    tenure.preparation.begin(rank.standing.step - 1)
    rank.standing = standing.lacks(rank.standing, True)
    return True


def _reshape(rank: Rank, tenure: Tenure, plan: Plan) -> Waits:
    """``switch`` to cells of another shape: done only when everybody has what it needs for it, as the coordinator says;
    until then all keep what they have.
    """
    step = rank.standing.step
    preparation = tenure.preparation or Preparation(rank, tenure.layout, tenure.store, plan)
    yield from preparation.all_here(step - 1)
    yield rank.world.delay(0.02)
    rank.control.check()
    rank.recut = preparation.end(step)
    rank.control.send(Recut(rank=rank.rank, epoch=plan.epoch, step=step))
    yield (Enter,)
    yield from come_into(rank, rank.recut)


def come_into(rank: Rank, new: Recutting) -> Waits:
    """The layout with cells of another shape is in force. May be repeated, until it is true here."""
    rank.store = new.store
    rank.parameters.forget()
    yield from enter(
        rank,
        Enter(epoch=new.plan.epoch, layout=new.plan.layout, step=new.step, shapes=new.plan.shapes,
              saved=rank.save_first - 1),
        gather=True,
    )  # fmt: skip
    rank.recut = None


# ---- what all decisions share ------------------------------------------------------------------


def _edit(rank: Rank, decision: Decision, gather: bool, work: Sequence[Kept] = ()) -> Waits:
    """Make the layout the present one. Returns None if this rank has nothing yet, and so nothing more to do.

    ``work``: what cells go on from. What this rank has done of a step besides does not count any more.
    """
    me, layout, store = rank.rank, decoded(decision.layout), rank.store
    rank.transport.reach(layout)
    own = rank.control.moves(decision.epoch)
    yield from rank.transport.find(layout, [rank for move in own.moves for rank in (move.src, move.dst)])
    member = me in layout.places
    rank.layout, rank.tenure = layout, None
    rank.standing = standing.edited(
        rank.standing, layout.epoch, decision.step, member, gather, isinstance(decision, Reload),
        decision.vote if isinstance(decision, Forward) else None,
    )  # fmt: skip
    # With the layout, at once: from now on this rank reports as one that is in it.
    _keep(rank, decision.step, [kept for kept in work if member and kept.leader == layout.cell_of(me).leader])
    # Who died before it was let in is lost to this rank, but never was in a layout.
    rank.transport.advance(layout.epoch, {*layout.lost, *rank.control.lost})
    rank.copies.advance(layout.epoch)
    rank.save_first, rank.saved = decision.saved + 1, min(rank.saved, decision.saved)
    if store is None:
        if not member:
            _tell_free(rank)
        return None
    if member:
        rank.parameters.shapes.update(decision.shapes)
        rank.parameters.hold(layout.held_by(me))
        rank.tenure = Tenure(layout, store)
    yield rank.world.delay(0.005)
    kept = store.held() if own.kept is None else own.kept
    for unit, k, _ in kept:
        state = store.live.get((unit, k))
        if state is not None and state.told is not None and state.told < layout.epoch:
            raise Violation("damage", f"rank {me} is to keep its copy of slice {unit, k}, which is known to be damaged")
    return _Edit(store, own.moves, {(unit, k) for unit, k, _ in kept})


def _keep(rank: Rank, step: int, mine: Sequence[Kept]) -> None:
    """Let what this rank has done of the step be what is kept of it, or nothing."""
    if not mine:
        rank.work = None
    elif rank.work is None or rank.work.step != step:
        raise Violation("sums", f"rank {rank.rank} is to go on from {mine[0]}, and has nothing of it")
    else:
        rank.work.keep(mine[0])


def _copy(rank: Rank, edit: _Edit, done: int) -> Waits:
    """Begin to make copies, of states after ``done`` steps; what this rank is to own is here when this is over.

    A spare has given away what it was asked for, and has nothing any more.
    """
    layout, store, moves, copies = rank.layout, edit.store, edit.moves, rank.copies
    copies.replicate(moves, layout, done)
    needed = [(move.unit, move.slice) for move in moves if move.role == "owner" and move.dst == rank.rank]
    if needed:
        yield lambda: copies.sent_here(needed)
    if any(move.role == "owner" for move in moves):
        copies.pull()
        store.settle()
    if rank.tenure is None:
        copies.begin()
        yield lambda: not store.busy
        store.retire(())
        _tell_free(rank)
    else:
        store.retire((*layout.owned(rank.rank), *layout.replicated(rank.rank)))


def _tell_free(rank: Rank) -> None:
    """Tell that nobody needs anything of this spare."""
    rank.control.send(Settled(rank=rank.rank, epoch=rank.layout.epoch))


def _train(rank: Rank) -> Tenure | None:
    """A member's recovery is over: training goes on. None for a spare."""
    if rank.tenure is not None:
        rank.control.send(Recovered(rank=rank.rank, epoch=rank.layout.epoch, edit_ms=1.0, state_ms=1.0))
        rank.copies.begin()
    return rank.tenure
