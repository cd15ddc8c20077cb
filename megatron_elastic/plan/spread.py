"""Spread: which cell gets the next copy, so that all keep evenly many and those of a slice are on different hosts."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set

from megatron_elastic.layout import Cell, Layout

_Turn = tuple[bool, bool, int, int]
"""Whether the cell is a shadow, whether its host is taken, how many copies it keeps, its leader: the least is next."""


class Spread:
    """The cells of each stage in the order in which they are to be given copies.

    Args:
        layout: says on which hosts they are.
        stages: the cells of each by their leaders.
        keeping: leader -> how many copies it keeps so far.
    """

    def __init__(self, layout: Layout, stages: Sequence[Mapping[int, Cell]], keeping: Counter[int]) -> None:
        self._host_of = layout.host_of
        self._stages = stages
        self._keeping = keeping
        self._order: dict[int, list[tuple[bool, int, int]]] = {}
        """[stage] = its cells in order, of the stages that were asked for; most never are."""
        self._hosts: dict[int, set[int]] = {}

    def change(self, leader: int, by: int) -> None:
        """The cell keeps so many more copies."""
        for stage, order in self._order.items():
            if (cell := self._stages[stage].get(leader)) is not None:
                del order[bisect_left(order, self._entry(cell))]
                self._keeping[leader] += by
                insort(order, self._entry(cell))
                return
        self._keeping[leader] += by

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
        stages = range(len(self._stages))
        least = (self._least(stage, taken, hosts) for stage in stages)
        turns = list(self._ready(stages, taken, hosts, ready)) or [turn for turn in least if turn is not None]
        if here is not None:
            turns = [turn for turn in turns if not turn[1]] or [here]
        return min(turns)[-1]

    def _ready(
        self, stages: Collection[int], taken: Collection[int], hosts: Collection[int], ready: Collection[int]
    ) -> Iterator[_Turn]:
        for stage in stages:
            for leader in self._stages[stage].keys() & set(ready).difference(taken):
                shadow = self._stages[stage][leader].shadow
                yield shadow, self._host_of(leader) in hosts, self._keeping[leader], leader

    def _least(self, stage: int, taken: Collection[int], hosts: Set[int]) -> _Turn | None:
        """The next one of a stage, if it has any that is not taken."""
        if stage not in self._order:
            cells = self._stages[stage]
            self._order[stage] = sorted(map(self._entry, cells.values()))
            self._hosts[stage] = set(map(self._host_of, cells))
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
