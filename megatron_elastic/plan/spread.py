"""Spread: which cell gets the next copy, so that all keep evenly many and those of a slice are on different hosts."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set

from megatron_elastic.layout import Cell, Layout, Stage

_Turn = tuple[bool, bool, int, int]
"""Whether the cell is a shadow, whether its host is taken, how many copies it keeps, its leader: the least is next."""


class Spread:
    """The cells of each stage in the order in which they are to be given copies.

    Args:
        layout: says on which hosts they are.
        keeping: leader -> how many copies it keeps so far.
    """

    def __init__(self, layout: Layout, stages: Sequence[Stage], keeping: Mapping[int, int]) -> None:
        self._host_of = layout.host_of
        self._cells = {cell.leader: (at, cell) for at, stage in enumerate(stages) for cell in stage.cells}
        self._keeping = {leader: keeping.get(leader, 0) for leader in self._cells}
        self._order = [sorted(map(self._entry, stage.cells)) for stage in stages]
        self._hosts = [{layout.host_of(cell.leader) for cell in stage.cells} for stage in stages]

    def change(self, leader: int, by: int) -> None:
        """The cell keeps so many more copies."""
        at, cell = self._cells[leader]
        order = self._order[at]
        del order[bisect_left(order, self._entry(cell))]
        self._keeping[leader] += by
        insort(order, self._entry(cell))

    def next(self, home: int, taken: Collection[int], ready: Collection[int]) -> int:
        """The cell of stage ``home`` to keep a copy besides those of ``taken``; of any stage if it has no other.

        So too if all would be on one host otherwise. One of the ``ready``, which have the state already, is taken
        before all others. There must be a cell left.
        """
        hosts = {self._host_of(leader) for leader in taken}
        if at_hand := list(self._ready([home], taken, hosts, ready)):
            return min(at_hand)[-1]
        here = self._least(home, taken, hosts)
        if here is not None and not (here[1] and len(hosts) == 1):
            return here[-1]
        stages = range(len(self._order))
        least = (self._least(stage, taken, hosts) for stage in stages)
        turns = list(self._ready(stages, taken, hosts, ready)) or [turn for turn in least if turn is not None]
        if here is not None:
            turns = [turn for turn in turns if not turn[1]] or [here]
        return min(turns)[-1]

    def _ready(
        self, stages: Collection[int], taken: Collection[int], hosts: Collection[int], ready: Collection[int]
    ) -> Iterator[_Turn]:
        for leader in ready:
            if leader not in taken and self._cells[leader][0] in stages:
                shadow = self._cells[leader][1].shadow
                yield shadow, self._host_of(leader) in hosts, self._keeping[leader], leader

    def _least(self, stage: int, taken: Collection[int], hosts: Set[int]) -> _Turn | None:
        """The next one of a stage, if it has any that is not taken."""
        crowded = self._hosts[stage] <= hosts
        first: _Turn | None = None
        for shadow, keeping, leader in self._order[stage]:
            if leader in taken:
                continue
            turn = shadow, self._host_of(leader) in hosts, keeping, leader
            if first is not None and turn[0] > first[0]:
                break
            if crowded or not turn[1]:
                return turn
            first = first or turn
        return first

    def _entry(self, cell: Cell) -> tuple[bool, int, int]:
        return cell.shadow, self._keeping[cell.leader], cell.leader


def away(layout: Layout, leaders: Iterable[int], everywhere: Iterable[int]) -> list[int]:
    """If the cells of a stage, which these lead, are on one host: those of ``everywhere`` that are on others."""
    hosts = {layout.host_of(leader) for leader in leaders}
    return [leader for leader in everywhere if layout.host_of(leader) not in hosts] if len(hosts) == 1 else []
