"""Adoption: make a layout true on this rank, with what was decided about the step: one function for each decision.

All begin alike (``_edit``): the layout is the present one, and what the old one made of this rank is gone. Then state
becomes what was decided, and the rank's ``Standing`` with it. Then copies are made (``_copy``) and training goes on.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megatron_elastic.adaptor.model import groups
from megatron_elastic.adaptor.training import building, intermission, step
from megatron_elastic.adaptor.training.tenure import Tenure
from megatron_elastic.adaptor.training.trainer import Trainer
from megatron_elastic.cluster import standing
from megatron_elastic.cluster.messages import Commit, Recovered, Settled, Switched
from megatron_elastic.layout import Layout, Transfer, transfers
from megatron_elastic.plan import everything
from megatron_elastic.state.copying import SliceId
from megatron_elastic.state.store import StateStore


class _Edit(NamedTuple):
    """A layout that has become the present one."""

    store: StateStore
    began: float
    ended: float
    """``time.time()``."""


def adopt(trainer: Trainer, commit: Commit) -> None:
    """Make the committed layout true on this rank; afterwards it trains under it, or is a spare."""
    match commit.decision:
        case "forward":
            forward(trainer, commit)
        case "back":
            back(trainer, commit)
        case "reload":
            reload(trainer, commit)
        case "switch":
            enter(trainer, commit)


def forward(trainer: Trainer, commit: Commit) -> None:
    """Somebody was past the vote of the step: finish it with that vote."""
    vote = commit.vote
    assert vote is not None
    edit = _edit(trainer, commit)
    if edit is None:
        return
    edit.store.return_to(vote.step, _sound(trainer, commit))
    edit.store.apply(trainer.update(vote))
    trainer.standing = standing.forward(trainer.standing, vote)
    _copy(trainer, edit.store, _moves(trainer, commit), vote.step)
    tenure = _resume(trainer, edit)
    if tenure is not None:
        step.complete(trainer, tenure, vote)


def back(trainer: Trainer, commit: Commit) -> None:
    """Nobody was: do the step again from its start."""
    edit = _edit(trainer, commit)
    if edit is None:
        return
    edit.store.return_to(commit.step - 1, _sound(trainer, commit))
    trainer.standing = standing.back(trainer.standing, commit.step)
    _copy(trainer, edit.store, _moves(trainer, commit), commit.step - 1)
    _resume(trainer, edit)


def reload(trainer: Trainer, commit: Commit) -> None:
    """State is lost: go back to a checkpoint."""
    edit = _edit(trainer, commit)
    if edit is None:
        return
    trainer.standing = standing.reload(trainer.standing, commit.step)
    trainer.hooks.at("reload")
    edit.store.retire(())
    if trainer.standing.member:
        building.load(trainer, edit.store, commit.step - 1)
    _copy(trainer, edit.store, _moves(trainer, commit), commit.step - 1)
    _resume(trainer, edit)


def enter(trainer: Trainer, commit: Commit) -> None:
    """The layout was planned, and the step is the first one under it."""
    edit = _edit(trainer, commit)
    assert edit is not None, f"rank {trainer.rank} is let in before it was ready"
    # At once: from now on this rank reports as a member.
    trainer.standing = standing.enter(trainer.standing, commit.step)
    # What a spare holds has been overtaken by the steps it did not take part in.
    edit.store.return_to(commit.step - 1, _sound(trainer, commit))
    _copy(trainer, edit.store, _moves(trainer, commit), commit.step - 1)
    edit.store.copy_in_background()


def switch(trainer: Trainer, tenure: Tenure) -> None:
    """Between two steps: ``enter`` the planned layout, as all members do now."""
    plan = tenure.plan
    assert plan is not None
    intermission.complete_save(trainer)  # by the ranks that began it
    tenure.replay.finish()
    trainer.await_parameters(tenure)
    trainer.hooks.at("switch")
    trainer.transport.add_peers(plan.addresses)
    first = trainer.standing.step
    enter(
        trainer,
        Commit(
            epoch=plan.epoch, layout=plan.layout, decision="switch", step=first, vote=None, held=plan.held,
            shapes=plan.shapes, gather=False, saved=trainer.saving.first - 1,
        ),
    )  # fmt: skip
    if trainer.rank == tenure.layout.ranks[0]:  # of those that were there before: who enters does not come here
        trainer.control.send(Switched(rank=trainer.rank, epoch=plan.epoch, step=first))


# ---- what a commit says to this rank -----------------------------------------------------------


def _sound(trainer: Trainer, commit: Commit) -> Iterator[SliceId]:
    """What this rank holds that may be used."""
    return ((unit, k) for unit, k, _ in commit.held.get(trainer.rank, ()))


def _moves(trainer: Trainer, commit: Commit) -> Sequence[Transfer]:
    """The copies to be made. After a reload all is there but what stages keep for each other."""
    layout = trainer.layout
    return transfers(layout, everything(layout) if commit.decision == "reload" else commit.held)


# ---- what all decisions share ------------------------------------------------------------------


def _edit(trainer: Trainer, commit: Commit) -> _Edit | None:
    """Make the layout the present one. None if this rank has nothing yet, and so nothing more to do."""
    began = time.time()
    trainer.hooks.at("edit")
    layout, store = Layout.from_json(commit.layout), trainer.store
    member = trainer.rank in layout.ranks
    trainer.layout, trainer.tenure = layout, None
    trainer.standing = standing.edited(trainer.standing, layout.epoch, member, commit.gather)
    trainer.transport.advance(layout.epoch, layout.lost)
    trainer.saving.abandon(commit.saved)
    if member:
        groups.edit(layout, trainer.rank)
    if store is None:
        if not member:
            _tell_free(trainer)
        return None
    if member:
        trainer.stage.learn(commit.shapes, layout)
        trainer.stage.hold(layout)
        trainer.tenure = trainer.begin_tenure(layout, store)
    ended = time.time()
    trainer.hooks.at("promote")
    return _Edit(store, began, ended)


def _copy(trainer: Trainer, store: StateStore, moves: Sequence[Transfer], done: int) -> None:
    """Begin to make copies, of states after ``done`` steps; what this rank is to own is here when this returns.

    A spare has given away what it was asked for, and has nothing any more.
    """
    tenure, layout = trainer.tenure, trainer.layout
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


def _resume(trainer: Trainer, edit: _Edit) -> Tenure | None:
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
