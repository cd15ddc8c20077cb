"""Recutting: what a model rank is to have in cells of another shape, made while it keeps what it has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_elastic.cluster.messages import Plan
from megatron_elastic.layout import Layout
from tests.simulation.errors import Violation
from tests.simulation.layouts import decoded
from tests.simulation.ranks.store import SliceId, State, Store

if TYPE_CHECKING:
    from tests.simulation.ranks.meeting import Meeting
    from tests.simulation.ranks.rank import Rank, Waits

_Told = dict[tuple[int, int, int], tuple[int, bool]]
"""(unit, slice, part) of a rank's states -> after how many steps they are, and whether they are damaged."""


@dataclass(frozen=True, slots=True)
class Recutting:
    """One rank's part in a planned layout, from ``step`` on. ``store``: None if it is in no cell any more."""

    plan: Plan
    step: int
    store: Store | None


class Preparation:
    """What becomes one rank's part in a planned layout, in some rounds, while all of the present one prepare it."""

    def __init__(self, rank: Rank, present: Layout, held: Store, plan: Plan) -> None:
        self._rank = rank
        self._present = present
        self._held = held
        self._plan = plan
        self._layout = decoded(plan.layout)
        self._rounds = 1 + plan.epoch % 3
        """To come; the same number on all ranks."""
        self._begun: tuple[Meeting, int, float] | None = None
        """What is under way: with whom, of states after so many steps, and when it is here at the earliest."""
        self._missed = 0
        self._made: dict[SliceId, State] = {}

    @property
    def complete(self) -> bool:
        """Whether everything is begun."""
        return self._rounds == 0

    @property
    def up_to_date(self) -> bool:
        """Whether all that is begun is here, and has done the steps since."""
        return self._begun is None

    def begin(self, step: int) -> None:
        """Begin with some more, of states after ``step`` steps."""
        rank, held = self._rank, self._held
        if self._begun is not None:
            raise Violation("too early", f"rank {rank.rank} begins with more before it has what it began with")
        self._rounds -= 1
        told: _Told = {held.part(at): (state.step, state.bad) for at, state in held.live.items()}
        meeting = rank.transport.meeting(self._present, f"recut {self._rounds}", step, told)
        self._begun, self._missed = (meeting, step, rank.world.now + rank.world.rng.random()), 0

    def look(self) -> None:
        """Have what has arrived."""
        if self._begun is None:
            return
        meeting, step, here = self._begun
        if set(meeting.members) <= meeting.posted.keys() and self._rank.world.now >= here:
            self._begun = None
            self._receive(meeting, step)

    def apply(self, step: int) -> None:
        """Do a step on what is here, and later on what comes."""
        self._missed += 1
        for state in self._made.values():
            state.grad = True
            state.apply(step, f"what rank {self._rank.rank} is to have")

    def all_here(self, step: int) -> Waits:
        """All at once, of states after ``step`` steps, which do not change meanwhile."""
        while not self.complete:
            self.begin(step)
            assert self._begun is not None
            yield self._begun[0]
            self._receive(self._begun[0], step)
            self._begun = None
            yield self._rank.world.delay(0.02)
            self._rank.control.check()

    def end(self, step: int) -> Recutting:
        """What has become of it before ``step``."""
        me, new, held = self._rank.rank, self._layout, self._held
        if me not in new.places:
            return Recutting(self._plan, step, None)
        store = Store(me, new, held.keeps)
        for at in (*new.owned(me), *new.replicated(me)):
            state = (held.live if self._stays(*at) else self._made).get(at)
            if state is None or state.step != step - 1 or not self.up_to_date:
                raise Violation("invented", f"rank {me} comes into other cells without slice {at} before step {step}")
            store.live[at] = state
        return Recutting(self._plan, step, store)

    def _receive(self, exchange: Meeting, step: int) -> None:
        """Put together what was given: a part of all units in each round."""
        me, old, new, plan = self._rank.rank, self._present, self._layout, self._plan
        if me not in new.places:
            return
        for unit, k in (*new.owned(me), *new.replicated(me)):
            if unit not in plan.shapes:
                raise Violation("no shape", f"rank {me} is to keep a slice of unit {unit}")
            if unit % (1 + plan.epoch % 3) != self._rounds or self._stays(unit, k):
                continue
            bad = False
            for at in _sources(old, new, unit, k, new.part_of(unit, me)):
                src = me if me in old.copies(*at) else old.owner(*at)
                done, damaged = exchange.posted[src].get(at, (None, False))
                if done != step:
                    raise Violation("invented", f"rank {src} is to give of {at} after {step} steps, and has {done}")
                bad |= damaged
            self._made[unit, k] = state = State(step, bad)
            state.step += self._missed

    def _stays(self, unit: int, k: int) -> bool:
        """Whether a slice that the rank is to keep is one that it has."""
        same = (self._present.tp, self._present.num_parts(unit)) == (self._layout.tp, self._layout.num_parts(unit))
        part = self._layout.part_of(unit, self._rank.rank)
        return same and self._held.live.get((unit, k)) is not None and self._held.part((unit, k)) == (unit, k, part)


def _sources(old: Layout, new: Layout, unit: int, k: int, part: int) -> list[tuple[int, int, int]]:
    """What a part of a slice is put together from: the same, or perhaps anything of the unit."""
    if (old.tp, old.num_parts(unit)) == (new.tp, new.num_parts(unit)):
        return [(unit, k, part)]
    return [(unit, slice, index) for slice in range(old.num_slices) for index in range(old.num_parts(unit))]
