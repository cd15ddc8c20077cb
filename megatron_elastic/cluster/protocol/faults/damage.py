"""Damage: which copies of a slice and which checkpoints training may go on from.

A damaged copy counts as damaged until its rank has adopted a layout that was decided without it, and the weights until
a step has committed after they were sent anew: what was decided may be overtaken by the next fault. A checkpoint that
may have been made of damaged copies counts as none, for good.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from immutables import Map
from msgspec.structs import replace

from megatron_elastic.cluster.messages import Damaged, Event
from megatron_elastic.cluster.protocol.job import Trust, without
from megatron_elastic.cluster.protocol.turn import Turn
from megatron_elastic.layout import Layout, SlicePart


def saved(turn: Turn, message: Event) -> None:
    """A checkpoint is complete."""
    step, trust = message.fields["step"], turn.job.trust
    assert isinstance(step, int)
    if trust.doubtful.get(step, message.epoch) < message.epoch:  # made anew
        turn.set(trust=replace(trust, doubtful=trust.doubtful.delete(step)))
    known(turn, step)


def not_saved(turn: Turn, message: Event) -> None:
    """A checkpoint could not be written, and was given up; or it takes longer than until the next is due."""
    newest, reason = turn.job.trust.newest_save, message.fields.get("reason")
    what = "is still being written" if reason is None else f"could not be written ({reason})"
    left = f"the newest is that of step {newest}" if newest else "there is none yet"
    turn.say(f"WARNING: the checkpoint of step {message.fields['step']} {what}; {left}", message.kind)


def known(turn: Turn, step: int) -> None:
    """A rank knows of the complete checkpoint of ``step``; 0: of none. Who was to tell of it may be gone."""
    trust = turn.job.trust
    if step > trust.newest_save and step not in trust.doubtful:
        turn.set(trust=replace(trust, saves=(*trust.saves, step)))


def noted(turn: Turn, message: Damaged) -> None:
    """Verification has found damage, and tells of it until it is healed."""
    layout, trust = turn.job.layout, turn.job.trust
    assert layout is not None
    new = [damage for damage in message.found if trust.found.get(damage, -1) < message.epoch]
    for damage in new:
        unit = layout.units[damage.unit]
        turn.record("damaged", rank=damage.rank, unit=unit, slice=damage.slice, tp=damage.part, what=damage.what,
                    step=message.step)
        turn.say(f"WARNING: damaged memory: {damage.what} of slice {damage.slice} of {unit} on rank {damage.rank}; it "
                 "is healed from a good copy", "damaged")
    copies = {(damage.rank, (damage.unit, damage.slice, damage.part)): None for damage in new if damage.what == "state"}
    verified = message.verified if trust.verified is None else min(message.verified, trust.verified)
    doubtful = trust.doubtful.update(dict.fromkeys(range(verified + 1, message.step), message.epoch))
    turn.set(trust=replace(
        trust, found=trust.found.update(dict.fromkeys(new, message.epoch)), damaged=trust.damaged.update(copies),
        verified=verified, doubtful=doubtful, saves=tuple(step for step in trust.saves if step not in doubtful),
    ))  # fmt: skip


def wrong(trust: Trust, layout: Layout) -> set[int]:
    """Ranks that may have computed the step with damaged weights: where those were damaged, or all that have them from
    an owner whose state was.
    """
    ranks: set[int] = set()
    for damage in trust.found:
        if damage.what == "weights":
            ranks.add(damage.rank)
        elif layout.owner(damage.unit, damage.slice, damage.part) == damage.rank:
            ranks.update(rank for rank in layout.ranks if damage.unit in layout.held_by(rank))
    return ranks


def undecided(trust: Trust) -> str | None:
    """If state may be lost because its copies differ, or are damaged: that, for people."""
    if not trust.damaged:
        return None
    ranks, parts = sorted({rank for rank, _ in trust.damaged}), [part for _, part in trust.damaged]
    newest = f"the state of step {trust.verified} was sound. With --elastic-replicas 2"
    if len(set(parts)) < len(parts):
        return (f"the copies of a slice differ (ranks {ranks}) and nothing tells which is right; {newest} "
                "the majority would be")
    return f"what is left of a slice is damaged (ranks {ranks}); {newest} there would be another copy"


def sound(trust: Trust, rank: int, parts: Iterable[SlicePart]) -> list[SlicePart]:
    """Of what a rank holds, what is not known to be damaged."""
    if not trust.damaged:
        return list(parts)
    return [part for part in parts if (rank, part) not in trust.damaged]


def adopted(turn: Turn, ranks: Collection[int]) -> None:
    """Ranks have made a layout true that was decided without their damaged copies: they have dropped them."""
    trust = turn.job.trust
    if trust.damaged:
        dropped = [each for each in trust.damaged if each[0] in ranks]
        turn.set(trust=replace(trust, damaged=without(trust.damaged, dropped)))


def healed(turn: Turn) -> None:
    """A step has committed after the recovery from damage."""
    if turn.job.trust.healing:
        turn.set(trust=replace(turn.job.trust, damaged=Map(), found=Map(), verified=None))
