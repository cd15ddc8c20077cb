"""Damage: which copies of a slice and which checkpoints training may go on from.

A damaged copy counts as damaged until its rank has adopted a layout that was decided without it, and the weights until
a step has committed after they were sent anew: what was decided may be overtaken by the next fault.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from immutables import Map
from msgspec.structs import replace

from megatron_elastic.cluster.messages import Damaged, Event, Part
from megatron_elastic.cluster.protocol.job import Trust, without
from megatron_elastic.cluster.protocol.turn import Turn


def saved(turn: Turn, message: Event) -> None:
    """A checkpoint is complete."""
    step = message.fields["step"]
    assert isinstance(step, int)
    known(turn, step)


def known(turn: Turn, step: int) -> None:
    """A rank knows of the complete checkpoint of ``step``; 0: of none. Who was to tell of it may be gone. While damage
    is healed, some may still know of one that was given up.
    """
    trust = turn.job.trust
    if step > trust.newest_save and trust.verified is None:
        turn.set(trust=replace(trust, saves=(*trust.saves, step)))


def noted(turn: Turn, message: Damaged) -> None:
    """Verification has found damage."""
    layout, trust = turn.job.layout, turn.job.trust
    assert layout is not None
    for damage in message.found:
        unit = layout.units[damage.unit]
        turn.record("damaged", rank=damage.rank, unit=unit, slice=damage.slice, tp=damage.tp, what=damage.what,
                    step=message.step)
        turn.say(f"WARNING: damaged memory: {damage.what} of slice {damage.slice} of {unit} on rank {damage.rank}; it "
                 "is healed from a good copy")
    copies = {(damage.rank, (damage.unit, damage.slice, damage.tp)): None for damage in message.found
              if damage.what == "state"}
    verified = message.verified if trust.verified is None else min(message.verified, trust.verified)
    turn.set(trust=replace(trust, damaged=trust.damaged.update(copies), healing=True, verified=verified))


def undecided(trust: Trust) -> str | None:
    """If state may be lost because its copies differ: that, for people."""
    if not trust.damaged:
        return None
    ranks = sorted({rank for rank, _ in trust.damaged})
    return (f"the copies of a slice differ (ranks {ranks}) and nothing tells which is right; the state of step "
            f"{trust.verified} was sound. With --elastic-replicas 2 the majority would be")


def sound(trust: Trust, rank: int, parts: Iterable[Part]) -> list[Part]:
    """Of what a rank holds, what is not known to be damaged."""
    if not trust.damaged:
        return list(parts)
    return [part for part in parts if (rank, part) not in trust.damaged]


def go_back(turn: Turn) -> int | None:
    """Step of the newest checkpoint from before any damage, and forget newer ones; None without one."""
    trust = turn.job.trust
    saves = tuple(step for step in trust.saves if trust.verified is None or step <= trust.verified)
    turn.set(trust=replace(trust, saves=saves))
    return saves[-1] if saves else None


def adopted(turn: Turn, ranks: Collection[int]) -> None:
    """Ranks have made a layout true that was decided without their damaged copies: they have dropped them."""
    trust = turn.job.trust
    if trust.damaged:
        dropped = [each for each in trust.damaged if each[0] in ranks]
        turn.set(trust=replace(trust, damaged=without(trust.damaged, dropped)))


def healed(turn: Turn) -> None:
    """A step has committed after the recovery from damage."""
    if turn.job.trust.healing:
        turn.set(trust=replace(turn.job.trust, damaged=Map(), healing=False, verified=None))
