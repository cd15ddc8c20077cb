"""Adoption: make a layout true on this rank, with what was decided about the step: one function for each decision.

All begin alike (``_edit``): the layout is the present one, and what the old one made of this rank is gone. Then state
becomes what was decided, and the rank's ``Standing`` with it. Then copies are made (``_copy``) and training goes on.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from functools import partial
from typing import NamedTuple

from megatron_elastic.adaptor.model import groups
from megatron_elastic.adaptor.training import building, intermission, step
from megatron_elastic.adaptor.training.recutting import Preparation, Recutting
from megatron_elastic.adaptor.training.tenure import Tenure
from megatron_elastic.adaptor.training.trainer import Trainer
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
from megatron_elastic.cluster.title import entitle
from megatron_elastic.layout import Transfer, decode
from megatron_elastic.pipeline.resumption import remainder
from megatron_elastic.state.copying import SliceId
from megatron_elastic.state.store import StateStore


class _Edit(NamedTuple):
    """A layout that has become the present one."""

    store: StateStore
    moves: Sequence[Transfer]
    """Copies from or to this rank."""
    kept: Collection[SliceId]
    """What of this rank's states is live."""
    began: float
    ended: float
    """``time.time()``."""


def adopt(trainer: Trainer, decision: Decision) -> None:
    """Make the decided layout true on this rank; afterwards it trains under it, or is a spare."""
    match decision:
        case Forward():
            forward(trainer, decision)
        case Back():
            back(trainer, decision)
        case Resume():
            resume(trainer, decision)
        case Reload():
            reload(trainer, decision)


def forward(trainer: Trainer, decision: Forward) -> None:
    """Somebody was past the vote of the step: finish it with that vote."""
    vote = decision.vote
    edit = _edit(trainer, decision, decision.gather)
    if edit is None:
        return
    edit.store.return_to(vote.step, edit.kept)
    edit.store.apply(trainer.update(vote))
    trainer.standing = standing.forward(trainer.standing, vote)
    _copy(trainer, edit, vote.step)
    tenure = _train(trainer, edit)
    if tenure is not None:
        step.complete(trainer, tenure, vote)


def back(trainer: Trainer, decision: Back) -> None:
    """Nobody was: do the step again from its start."""
    edit = _edit(trainer, decision, decision.gather)
    if edit is None:
        return
    _return_to_before(trainer, edit, decision.step)
    _copy(trainer, edit, decision.step - 1)
    _train(trainer, edit)


def resume(trainer: Trainer, decision: Resume) -> None:
    """Nobody was: go on with the step from what is left of it."""
    edit = _edit(trainer, decision, decision.gather, decision.kept)
    if edit is None:
        return
    _return_to_before(trainer, edit, decision.step)
    if trainer.tenure is not None:
        leader = trainer.layout.cell_of(trainer.rank).leader
        grains = trainer.ramp.grains(decision.step)
        trainer.tenure.remainder = remainder(trainer.config.schedule, trainer.layout, decision.kept, leader, grains)
    _copy(trainer, edit, decision.step - 1)
    _train(trainer, edit)


def reload(trainer: Trainer, decision: Reload) -> None:
    """State is lost: go back to a checkpoint."""
    edit = _edit(trainer, decision, False)
    if edit is None:
        return
    trainer.standing = standing.reload(trainer.standing, decision.step)
    trainer.hooks.at("reload")
    edit.store.retire(())
    if trainer.standing.member:
        done = decision.step - 1
        trainer.agree()
        with trainer.odometer.patient():
            building.load(trainer, edit.store, done)
        building.tell(trainer)  # all who knew it of some may be dead
        trainer.saving.go_back(done)
    _copy(trainer, edit, decision.step - 1)
    _train(trainer, edit)


def enter(trainer: Trainer, decision: Enter, gather: bool = False) -> None:
    """The layout was planned, and the step is the first one under it. ``gather``: it begins with distributing weights,
    of which nobody has any.
    """
    edit = _edit(trainer, decision, gather)
    # At once: from now on this rank reports as a member.
    trainer.standing = standing.enter(trainer.standing, decision.step)
    if edit is None:
        assert not trainer.standing.member, f"rank {trainer.rank} is let in before it was ready"
        return
    edit.store.return_to(decision.step - 1, edit.kept)
    _copy(trainer, edit, decision.step - 1)
    edit.store.copy_in_background()


def switch(trainer: Trainer, tenure: Tenure) -> None:
    """Between two steps: ``enter`` the planned layout, as all members do now, or begin to get what that takes."""
    plan = tenure.plan
    assert plan is not None
    fits = trainer.fits(decode(plan.layout))
    if not fits and _follow(trainer, tenure, plan):
        return
    intermission.complete_save(trainer)  # by the ranks that began it
    tenure.replay.finish()
    trainer.await_parameters(tenure)
    step.verify(trainer, tenure)  # nobody would look at what was noted under this layout, and damage must not be copied
    first = trainer.standing.step
    if not fits:
        reshape(trainer, tenure, plan)
        return
    trainer.hooks.at("switch")
    enter(trainer, _entry(trainer, plan, first))
    if trainer.rank == tenure.layout.ranks[0]:  # of those that were there before: who enters does not come here
        trainer.control.send(Switched(rank=trainer.rank, epoch=plan.epoch, step=first))


def _follow(trainer: Trainer, tenure: Tenure, plan: Plan) -> bool:
    """Begin with some more of the states that this rank is to have in cells of another shape, if there are any that can
    follow the present ones while training goes on.
    """
    if not trainer.follows:
        return False
    if tenure.preparation is None:
        tenure.preparation = _prepare(trainer, tenure, plan)
        if trainer.device.is_host:
            tenure.preparation.make_room(trainer.make_room)
    if tenure.preparation.following.complete:
        return False
    tenure.preparation.following.begin(trainer.standing.step - 1)
    trainer.standing = standing.lacks(trainer.standing, True)
    return True


def _prepare(trainer: Trainer, tenure: Tenure, plan: Plan) -> Preparation:
    return Preparation(
        trainer.transport, tenure.layout, tenure.store, plan, trainer.odometer.dials, trainer.make_store,
        partial(trainer.hooks.at, "recut"),
    )  # fmt: skip


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def reshape(trainer: Trainer, tenure: Tenure, plan: Plan) -> None:
    """``switch`` to cells of another shape. That cannot be taken back, so it is done only when everybody has what it
    needs for it, and until then all keep what they have: the coordinator knows, and says so.
    """
    began, first = time.monotonic(), trainer.standing.step
    preparation = tenure.preparation or _prepare(trainer, tenure, plan)
    trainer.recut = preparation.end(first)
    pieces = time.monotonic()
    trainer.control.send(Recut(rank=trainer.rank, epoch=plan.epoch, step=first))
    trainer.hooks.at("switch")
    trainer.control.wait((Enter,), timeout=trainer.config.wait_timeout)
    agreed = time.monotonic()
    come_into(trainer, trainer.recut)
    if trainer.rank == tenure.layout.ranks[0]:
        ended = time.monotonic()
        trainer.event("reshaped", step=first, ms=_ms(ended - began), pieces_ms=_ms(pieces - began),
                      agree_ms=_ms(agreed - pieces), model_ms=_ms(ended - agreed), steps=preparation.following.steps)


def come_into(trainer: Trainer, new: Recutting) -> None:
    """The layout with cells of another shape is in force. May be repeated, until it is true here."""
    plan, layout = new.plan, new.layout
    trainer.store = new.store
    if trainer.rank in layout.places:
        with trainer.odometer.patient():
            trainer.take_shape(layout, None if new.room is None else new.room.accumulator)
            trainer.stage.partitions = new.partitions
            if new.room is not None:
                trainer.stage.units = dict(new.room.units)
            trainer.make_groups(layout)
    enter(trainer, _entry(trainer, plan, new.step), gather=True)
    trainer.recut = None


def _entry(trainer: Trainer, plan: Plan, step: int) -> Enter:
    """What a plan amounts to for who was there before: it is in force from ``step`` on."""
    return Enter(epoch=plan.epoch, layout=plan.layout, step=step, shapes=plan.shapes, saved=trainer.saving.saved,
                 program=plan.program)  # fmt: skip


# ---- what all decisions share ------------------------------------------------------------------


def _edit(trainer: Trainer, decision: Decision, gather: bool, work: Sequence[Kept] = ()) -> _Edit | None:
    """Make the layout the present one. None if this rank has nothing yet, and so nothing more to do.

    ``work``: what cells go on from. What this rank has done of a step besides does not count any more.
    """
    began = time.time()
    trainer.hooks.at("edit")
    layout, store = decode(decision.layout), trainer.store
    trainer.reach(layout)
    trainer.loss_scales.return_to(decision.step)
    own = trainer.control.moves(decision.epoch)
    member = trainer.rank in layout.ranks
    trainer.layout, trainer.tenure = layout, None
    trainer.standing = standing.edited(
        trainer.standing, layout.epoch, decision.step, member, gather, isinstance(decision, Reload),
        decision.vote if isinstance(decision, Forward) else None,
    )  # fmt: skip
    # With the layout, at once: from now on this rank reports as one that is in it.
    _keep(trainer, [kept for kept in work if member and kept.leader == layout.cell_of(trainer.rank).leader])
    # Who died before it was let in is lost to this rank, but never was in a layout.
    trainer.transport.advance(layout.epoch, {*layout.lost, *trainer.control.interrupt.lost})
    trainer.saving.abandon(decision.saved)
    if member:
        groups.edit(layout, trainer.rank)
    else:
        entitle(f"rank {trainer.rank} (spare)")
    if store is None:
        if not member:
            _tell_free(trainer)
        return None
    if member:
        trainer.stage.learn(decision.shapes, layout)
        with trainer.odometer.patient():  # modules may have to be made
            trainer.stage.hold(layout)
        trainer.tenure = building.begin_tenure(trainer, layout, store, decision.program)
    ended = time.time()
    trainer.hooks.at("promote")
    kept = store.held() if own.kept is None else own.kept
    return _Edit(store, own.moves, [(unit, k) for unit, k, _ in kept], began, ended)


def _keep(trainer: Trainer, mine: Sequence[Kept]) -> None:
    """Let what this rank has done of the step be what is kept of it, or nothing."""
    if not mine:
        trainer.work = None
        return
    assert trainer.work is not None, f"rank {trainer.rank} is to go on from what it has not"
    trainer.work.keep(mine[0])


def _return_to_before(trainer: Trainer, edit: _Edit, step: int) -> None:
    """Let states be as before ``step``, also where the rank left in the one before and was stopped in its update."""
    edit.store.return_to(step - 1, edit.kept)
    if (owed := standing.owes(trainer.standing, step)) is not None:
        trainer.loss_scales.return_to(owed.step)
        edit.store.apply(trainer.update(owed))
    trainer.standing = standing.back(trainer.standing, step)


def _copy(trainer: Trainer, edit: _Edit, done: int) -> None:
    """Begin to make copies, of states after ``done`` steps; what this rank is to own is here when this returns.

    A spare has given away what it was asked for, and has nothing any more.
    """
    tenure, layout, store, moves = trainer.tenure, trainer.layout, edit.store, edit.moves
    trainer.hooks.at("replicate")
    store.replicate(moves, layout, done)
    if tenure is not None:
        tenure.copying = store.replicating
    if needed := [move for move in moves if move.role == "owner"]:
        store.settle(wait=needed)
    if tenure is None:
        store.copy_in_background()
        store.flush()
        store.retire(())
        _tell_free(trainer)
    else:
        store.retire((*layout.owned(trainer.rank), *layout.replicated(trainer.rank)))


def _tell_free(trainer: Trainer) -> None:
    """Tell that nobody needs anything of this spare."""
    trainer.control.send(Settled(rank=trainer.rank, epoch=trainer.layout.epoch))


def _train(trainer: Trainer, edit: _Edit) -> Tenure | None:
    """A member's recovery is over: training goes on. None for a spare."""
    if trainer.tenure is not None:
        trainer.control.send(
            Recovered(
                rank=trainer.rank, epoch=trainer.layout.epoch,
                edit_ms=(edit.ended - edit.began) * 1e3, state_ms=(time.time() - edit.ended) * 1e3,
            )
        )  # fmt: skip
        edit.store.copy_in_background()
        trainer.hooks.at("resume")
    return trainer.tenure
