"""Standing: where one rank stands between the steps and layouts of a job, and how each decision changes it.

Pure functions from one value to the next: the trainer asks them, and so do model ranks in simulations. A layout is made
true in two parts, because the next fault may come in between. ``edited``: the rank is in the new layout. Then, once its
state is what was decided, ``forward``, ``back``, ``reload`` or ``enter``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from msgspec.structs import replace

from megatron_elastic.cluster.messages import Damaged, Report, VoteResult, WorkDone
from megatron_elastic.layout import Holdings, Layout, SlicePart


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rank stands. What depends on its layout begins anew with each (``edited``)."""

    rank: int
    step: int
    """The step in progress: the number of committed steps plus one."""
    vote: VoteResult | None = None
    """Result of the vote of ``step``, once past it."""
    last: VoteResult | None = None
    """Result of the newest vote whose step this rank has finished."""
    owed: VoteResult | None = None
    """Result of the vote of the step that it left in, as long as its states may not have done that update."""

    epoch: int
    """Of the layout that it has made true, whole or in part."""
    member: bool
    """Whether it is in a cell of that layout."""
    stale: bool = False
    """Whether its weights may not be what their owners hold: all members begin the next step with distributing them.

    That takes everybody, so all members of a layout have the same answer: the coordinator's (``edited``).
    """
    reloading: bool = False
    """Whether its layout came with going back to a checkpoint, and no step of it has committed here."""
    gathering: bool = False
    """Whether weights of the newest step may still be on their way here."""
    planned: int = 0
    """Epoch of the newest layout that it has been told of to switch to; 0 without one."""
    agreed: bool = False
    """Whether all members know of that one, and none lacks anything: the switch is due after the step, or the next part
    of what they need for it."""
    lacking: bool = False
    """Whether something that it needs in that one is on its way."""
    damaged: Damaged | None = None
    """Damage that it has found."""


# ---- training under one layout ---------------------------------------------------------------


def built(standing: Standing) -> Standing:
    """It has its part of the model. The weights in it are yet to be made equal."""
    return replace(standing, stale=True)


def told(standing: Standing, epoch: int) -> Standing:
    """It has been told of a planned layout."""
    return replace(standing, planned=epoch)


def informed(standing: Standing) -> bool:
    """Whether it says in the vote that it knows what to switch to, and has all of it that is begun; not if a fault has
    overtaken that layout.
    """
    return standing.planned > standing.epoch and not standing.lacking


def lacks(standing: Standing, lacking: bool) -> Standing:
    """Something that it needs in the planned layout is on its way, or all of that is here."""
    return replace(standing, lacking=lacking)


def voted(standing: Standing, vote: VoteResult, agreed: bool) -> Standing:
    """The step in progress has been voted. ``agreed``: every member was ``informed``."""
    assert vote.step == standing.step, f"rank {standing.rank} votes on step {vote.step} in step {standing.step}"
    return replace(standing, vote=vote, agreed=agreed)


def spoiled(standing: Standing, found: Damaged) -> Standing:
    """It has found damage: the step in progress cannot be voted."""
    return replace(standing, damaged=found)


def distributing(standing: Standing) -> Standing:
    """The step's weights begin to be sent."""
    return replace(standing, gathering=True)


def distributed(standing: Standing) -> Standing:
    """All weights of the newest step are here."""
    return replace(standing, gathering=False)


def committed(standing: Standing) -> Standing:
    """The step in progress is finished: voted, applied, its weights here or on their way."""
    assert standing.vote is not None, f"rank {standing.rank} finishes step {standing.step}, which was not voted"
    return replace(standing, step=standing.step + 1, vote=None, last=standing.vote, stale=False, reloading=False)


# ---- a new layout ------------------------------------------------------------------------------


def report(
    standing: Standing, epoch: int, layout: Layout, held: Sequence[SlicePart] | None,
    versions: Mapping[int, Sequence[SlicePart]], now: float, newest: int, saved: int, work: WorkDone | None = None,
) -> Report:
    """What it says when it is interrupted for ``epoch``.

    ``layout``: the one that it is in. ``held`` and ``versions`` as in the message; ``held`` is None if it has no part
    of the model yet. ``newest``: the epoch of the newest layout in force, as the interrupt says; who has that one and
    just what it asks for need not list it.
    ``saved``, ``work``: as in the message.
    """
    parts = held or ()
    brief = layout.epoch == newest and Holdings.of(layout).of_rank(standing.rank) == set(parts)
    return Report(
        rank=standing.rank, epoch=epoch, member=standing.member, step=standing.step, vote=standing.vote,
        last=standing.last, held=None if brief else list(parts), built=held is not None,
        versions={steps: list(parts) for steps, parts in versions.items()},
        stale=standing.stale or standing.gathering, layout=standing.epoch, saved=saved, interrupted_at=now,
        work=work, reloading=standing.reloading, damaged=standing.damaged,
    )  # fmt: skip


def edited(
    standing: Standing, epoch: int, step: int, member: bool, gather: bool, reloading: bool = False,
    vote: VoteResult | None = None,
) -> Standing:
    """A new layout is the present one.

    ``step``: the one that was decided about; a member is in it from now on, and past its ``vote`` if it has one. If
    this layout is replaced before more of it is true, the report must not tell of an older step: others have done some
    since, if this rank was no member. Nor of a vote of before, if the step is done again. Who leaves as others finish
    the step has what it takes to finish it as well: others may have to have its states. If it comes to that before
    it has (``owed``), the next decision has to see to it.
    ``gather``: its members have to distribute the weights. Who was stale before has reported it, so that the answer is
    for everybody; and it reports it again if this layout is replaced before a step of it commits. What a rank alone
    remembers must not count: it would wait for others who do not know. ``reloading``: its state will be a checkpoint's.
    """
    if member:
        standing = replace(standing, step=step, vote=vote)
    elif standing.member and vote is not None:
        standing = replace(standing, step=step + 1, vote=None, owed=vote)
    if vote is None:
        standing = replace(standing, last=_before(standing.last, step))
    return replace(
        standing, epoch=epoch, member=member, stale=member and gather, gathering=False, planned=0, agreed=False,
        lacking=False, reloading=reloading, damaged=None,
    )  # fmt: skip


def forward(standing: Standing, vote: VoteResult) -> Standing:
    """Its states have done the update of ``vote``. A member finishes that step; the part of a spare in it ends here."""
    if standing.member:
        return replace(standing, step=vote.step, vote=vote, owed=None)
    return replace(standing, step=vote.step + 1, vote=None, owed=None)


def owes(standing: Standing, step: int) -> VoteResult | None:
    """Result of the vote whose update its states have yet to do to be as before ``step``, if there is one."""
    return standing.owed if standing.owed is not None and standing.owed.step == step - 1 else None


def back(standing: Standing, step: int) -> Standing:
    """Its states are as before ``step``, which is done again or resumed, and so is whatever came after it."""
    return replace(standing, step=step, vote=None, last=_before(standing.last, step), owed=None)


def _before(vote: VoteResult | None, step: int) -> VoteResult | None:
    return vote if vote is not None and vote.step < step else None


def reload(standing: Standing, step: int) -> Standing:
    """``back``, to a checkpoint: every member has only its own part of it."""
    return replace(back(standing, step), stale=standing.member)


def enter(standing: Standing, step: int) -> Standing:
    """It takes part from ``step`` on; or goes on with it, if it was a member before."""
    return back(standing, step)
