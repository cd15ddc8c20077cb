"""Resumption: what is missing of a step that a fault has interrupted, and who does it.

What the survivors have added to their sums stays added, what they have begun they finish, and what they have sent over
a boundary of stages they have at hand (``work``). So of each grain and position (``route``) there is one cell that does
what is left: who keeps something of it, else whom the layout has for it. Results go to those alone who need them: a
forward needs the output of the position before, whoever has made it or will, a backward the gradient of the one behind.

Every cell does its operations in the order of the layout's timetable (``schedule``). In that, whatever an operation
needs has an earlier place in whichever cell it is done, so nobody waits in a circle. Pure: all ranks get the same plan
from the layout and from what is kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_elastic.cluster.messages import Kept
from megatron_elastic.layout import Layout
from megatron_elastic.pipeline.program import Op, ProgramError
from megatron_elastic.pipeline.route import Leg, Neighbours
from megatron_elastic.pipeline.schedule import in_halves, timetable

_State = Literal["missing", "live", "half", "added"]
"""Of a grain at a position: nothing is done; forward; forward and the input's gradient; all."""
_Item = tuple[int, int]
"""Grain, position."""


@dataclass(frozen=True, slots=True)
class Remainder:
    """What a cell does of a step that is resumed.

    Attributes:
        again: operations that it has done, whose results it gives to who needs them now.
        legs: operations that it is to do, in order.
    """

    again: tuple[Leg, ...]
    legs: tuple[Leg, ...]


def remainder(schedule: str, layout: Layout, kept: Iterable[Kept], leader: int, grains: int) -> Remainder:
    """What the cell led by ``leader`` does, under ``--elastic-schedule``, of a step of the first ``grains`` grains.

    All grains of the layout are whole.
    """
    return _Plan(schedule, layout, kept, grains).of(leader)


class _Plan:
    def __init__(self, schedule: str, layout: Layout, kept: Iterable[Kept], grains: int) -> None:
        self._layout = layout
        self._grains = grains
        self._split = schedule == "split"
        self._chunks, self._way = layout.num_chunks, layout.way
        self._place = timetable(layout)
        self._kept: dict[_Item, tuple[int, _State]] = {}
        """Who keeps what."""
        for cell in kept:
            of_state: tuple[tuple[_State, Sequence[int]], ...]
            of_state = ("added", cell.added), ("live", cell.live), ("half", cell.half)
            for state, numbers in of_state:
                for number in numbers:
                    self._keep(cell.leader, number, state)

    def _keep(self, leader: int, number: int, state: _State) -> None:
        grain, chunk = divmod(number, self._chunks)
        at = grain, self._layout.position(self._layout.stage_of(leader), chunk)
        if at in self._kept:
            raise ValueError(f"cells {self._kept[at][0]} and {leader} both keep grain {grain} at position {at[1]}")
        self._kept[at] = leader, state

    def _of(self, grain: int, position: int) -> tuple[int, _State]:
        """Who does what is left of a grain at a position, and how far it is."""
        known = self._kept.get((grain, position))
        if known is not None:
            return known
        ((cell, _),) = self._layout.sharers(self._way[position].stage, grain)
        return cell.leader, "missing"

    def of(self, leader: int) -> Remainder:
        again: list[Leg] = []
        halves: list[Leg] = []
        due: list[Leg] = []
        stage = self._layout.stage_of(leader)
        for op, state in self._passes(leader, stage):
            leg = self._leg(op, stage)
            if not _has_result(op, state):
                due.append(leg)
            elif leg.targets:
                again.append(leg)
            if op.kind == "backward" and state == "half":
                halves.append(_second_half(leg))
        due.sort(key=lambda leg: (self._place(leg.op, stage), leg.op))
        return Remainder(tuple(again), (*halves, *(_in_halves(due, stage) if self._split else due)))

    def _passes(self, leader: int, stage: int) -> Iterator[tuple[Op, _State]]:
        """The forward and the backward of all that is this cell's, and how far it is."""
        share = (grain for grain in self._layout.cells[leader].share if grain < self._grains)
        kept = {grain for (grain, _), (doer, _) in self._kept.items() if doer == leader}
        for grain in sorted(kept.union(share)):
            for chunk in range(len(self._layout.chunks(stage))):
                doer, state = self._of(grain, self._layout.position(stage, chunk))
                if doer == leader:
                    yield Op("forward", grain, chunk), state
                    yield Op("backward", grain, chunk), state

    def _leg(self, op: Op, stage: int) -> Leg:
        """Its result goes to the next position only if that lacks it."""
        here, step = self._layout.position(stage, op.chunk), 1 if op.kind == "forward" else -1
        sources, targets = self._at(op, here - step), self._at(op, here + step)
        if targets and _has_result(op, self._of(op.grain, here + step)[1]):
            targets = ()
        return Leg(op, self._layout.whole(op.grain), sources, targets)

    def _at(self, op: Op, position: int) -> Neighbours:
        if not 0 <= position < len(self._way):
            return ()
        return ((self._of(op.grain, position)[0], self._layout.whole(op.grain)),)


def _has_result(op: Op, state: _State) -> bool:
    """Whether a forward or backward has given what it gives to others."""
    return state != "missing" if op.kind == "forward" else state in ("half", "added")


def _second_half(leg: Leg) -> Leg:
    """What is left of a backward after its input's gradient."""
    return Leg(leg.op._replace(kind="backward_weight"), leg.part, (), ())


def _in_halves(legs: Sequence[Leg], put_off: int) -> Iterator[Leg]:
    """As ``schedule.in_halves``."""
    of_op = {leg.op: leg for leg in legs}
    for op in in_halves(of_op, put_off):
        if op.kind == "forward":
            yield of_op[op]
        else:
            leg = of_op[op._replace(kind="backward")]
            yield leg._replace(op=op) if op.kind == "backward_input" else _second_half(leg)


# ---- the proof --------------------------------------------------------------------------------

_Message = tuple[bool, int, int, int, int]
"""Whether it goes forward, grain, position where it was made, from whom, to whom."""


def check(layout: Layout, kept: Collection[Kept], remainders: Mapping[int, Remainder], grains: int) -> None:
    """Raise ProgramError unless the remainders of all cells make a whole step of ``grains`` grains of what is kept.

    Each grain is added exactly once at every position; whatever an operation needs is kept by a cell or made by another
    operation, and sent to it, and nothing else is sent; and nobody waits in a circle.
    """
    cells = {leader: _Cell(layout, leader) for leader in remainders}
    for each in kept:
        cells[each.leader].keep(each)
    messages: Counter[_Message] = Counter()
    for leader, of_cell in remainders.items():
        for leg in of_cell.again:
            messages.update(cells[leader].give(leg))
    at = dict.fromkeys(remainders, 0)
    moved = True
    while moved:
        moved = False
        for leader, of_cell in remainders.items():
            while at[leader] < len(of_cell.legs) and cells[leader].can(of_cell.legs[at[leader]], messages):
                messages.update(cells[leader].do(of_cell.legs[at[leader]]))
                at[leader] += 1
                moved = True
    stuck = [
        f"cell {leader} at {of_cell.legs[at[leader]].op}"
        for leader, of_cell in remainders.items()
        if at[leader] < len(of_cell.legs)
    ]
    if stuck:
        raise ProgramError(f"what these operations need never comes: {', '.join(stuck)}")
    if unread := +messages:
        raise ProgramError(f"nobody needs {sorted(unread)}")
    positions = len(layout.way)
    added = Counter(item for cell in cells.values() for item in cell.added.elements())
    expected = Counter((grain, position) for grain in range(grains) for position in range(positions))
    if added != expected:
        raise ProgramError(f"not added: {sorted(expected - added)}; added too often: {sorted(added - expected)}")


class _Cell:
    """A cell as it does its remainder."""

    def __init__(self, layout: Layout, leader: int) -> None:
        self.added: Counter[_Item] = Counter()
        self._leader, self._stage = leader, layout.stage_of(leader)
        self._layout, self._chunks = layout, layout.num_chunks
        self._live: set[_Item] = set()
        self._half: set[_Item] = set()
        self._made: set[tuple[bool, _Item]] = set()
        """Results that are at hand: whether of a forward, grain and position."""

    def keep(self, kept: Kept) -> None:
        added, live, half = (
            {self._item(*divmod(number, self._chunks)) for number in numbers}
            for numbers in (kept.added, kept.live, kept.half)
        )
        self.added.update(added)
        self._live, self._half = live, half
        self._made = {(True, item) for item in added | live | half} | {(False, item) for item in added | half}

    def _item(self, grain: int, chunk: int) -> _Item:
        return grain, self._layout.position(self._stage, chunk)

    def can(self, leg: Leg, messages: Counter[_Message]) -> bool:
        """Whether all is there; then the message that it takes is gone."""
        item = self._item(leg.op.grain, leg.op.chunk)
        forward = leg.op.kind == "forward"
        if not forward and item not in (self._half if leg.op.kind == "backward_weight" else self._live):
            return False
        step = 1 if forward else -1
        needed = [(forward, item[0], item[1] - step, source, self._leader) for source, _ in leg.sources]
        if not all(messages[each] for each in needed):
            return False
        messages.subtract(needed)
        return True

    def do(self, leg: Leg) -> list[_Message]:
        item = self._item(leg.op.grain, leg.op.chunk)
        match leg.op.kind:
            case "forward":
                self._live.add(item)
            case "backward":
                self._live.remove(item)
                self.added[item] += 1
            case "backward_input":
                self._live.remove(item)
                self._half.add(item)
            case "backward_weight":
                self._half.remove(item)
                self.added[item] += 1
                return []
        self._made.add((leg.op.kind == "forward", item))
        return self.give(leg)

    def give(self, leg: Leg) -> list[_Message]:
        """What it sends of a result that it has."""
        item, forward = self._item(leg.op.grain, leg.op.chunk), leg.op.kind == "forward"
        if (forward, item) not in self._made:
            raise ProgramError(f"cell {self._leader} is to send what {leg.op} makes, and has it not")
        return [(forward, *item, self._leader, target) for target, _ in leg.targets]
