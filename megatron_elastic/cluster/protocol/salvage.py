"""Salvage: what of a step that nobody has voted is kept, so that only the rest of it is computed.

It is told by cells: what all ranks of one have added to their sums is done, whatever becomes of the others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from megatron_elastic.cluster.messages import Kept, Report, WorkDone
from megatron_elastic.layout import Cell, Layout


class Counted(NamedTuple):
    """Passes, forward or backward, of a grain through a chunk."""

    kept: int
    """Done before the fault, and they count."""
    redone: int
    """Of cells that are lost, done or not, or whose work is: others do them."""


class Needed:
    """What the cells of some ranks have to know of what is kept of a step, to go on with it under ``layout``: all that
    anybody keeps of the grains of which they do, or keep, anything (``pipeline.resumption``).
    """

    def __init__(self, layout: Layout, kept: Collection[Kept]) -> None:
        self._layout = layout
        self._of_leader = {each.leader: each for each in kept}
        self._of_grain: dict[int, set[int]] = {}
        """Leaders of the cells that keep something of each."""
        for each in kept:
            for number in each.numbers:
                self._of_grain.setdefault(number // layout.num_chunks, set()).add(each.leader)

    def of(self, ranks: Iterable[int]) -> list[Kept]:
        """That of the cells of these ranks."""
        layout, grains = self._layout, set[int]()
        for leader in {layout.places[rank][1].leader for rank in ranks if rank in layout.places}:
            grains.update(layout.cells[leader].share)
            if (own := self._of_leader.get(leader)) is not None:
                grains.update(number // layout.num_chunks for number in own.numbers)
        leaders = sorted({leader for grain in grains for leader in self._of_grain.get(grain, ())})
        return [self._about(self._of_leader[leader], grains) for leader in leaders]

    def _about(self, each: Kept, grains: Collection[int]) -> Kept:
        chunks = self._layout.num_chunks
        added, live, half = ([number for number in numbers if number // chunks in grains]
                             for numbers in (each.added, each.live, each.half))
        return Kept(leader=each.leader, added=added, live=live, half=half)


def kept(
    old: Layout, new: Layout, step: int, reports: Mapping[int, Report], before: Collection[Kept],
    wrong: Collection[int],
) -> tuple[Kept, ...]:
    """What cells go on from under ``new``, which comes after ``old``. Who is not among them begins the step anew.

    ``before``: what was kept if ``step`` was being resumed under ``old``. Who has not made that layout true tells of
    what it did before, which others do again unless it was kept. ``wrong``: ranks that may have computed with damaged
    weights. What they had a part in does not count, nor do sums that have any of it in them; and if the step is being
    resumed, it is not known what that was.
    """
    if not _comparable(old, new) or (wrong and before):
        return ()
    spoiled = _spoiled(old, set(wrong)) if wrong else set()
    counted = {each.leader for each in before}
    found = []
    for stage, each in enumerate(new.stages):
        for cell in each.cells:
            mine = [reports[rank] for rank in cell.ranks]
            current = cell.leader in counted or all(report.layout == old.epoch for report in mine)
            if current and _stays(cell, stage, old):
                found += _agreed(cell.leader, [report.work for report in mine], step)
    chunks = old.num_chunks
    return tuple(each for each in found if spoiled.isdisjoint(number // chunks for number in each.numbers))


def count(old: Layout, what: Collection[Kept], grains: int) -> Counted:
    """The passes of a step of ``old`` and of so many ``grains``, of which ``what`` is kept."""
    chunks = old.num_chunks
    done = sum(2 * len(each.added) + len(each.live) + len(each.half) for each in what)
    by_leader = {each.leader: each for each in what}
    redone = 0
    for index, stage in enumerate(old.stages):
        of_stage = {
            number
            for cell in stage.cells
            if (each := by_leader.get(cell.leader)) is not None
            for number in each.numbers
        }
        for cell in stage.cells:
            if cell.leader not in by_leader:
                share = [grain for grain in cell.share if grain < grains]
                numbers = {grain * chunks + chunk for grain in share
                           for chunk in range(len(old.chunks(index)))}  # fmt: skip
                redone += 2 * len(numbers - of_stage)
    return Counted(done, redone)


def _comparable(old: Layout, new: Layout) -> bool:
    """Whether a grain is the same work in both: no part of one is cut, and every unit stays in its stage."""
    whole = not any(cell.parts for layout in (old, new) for stage in layout.stages for cell in stage.cells)
    return whole and [stage.units for stage in old.stages] == [stage.units for stage in new.stages]


def _spoiled(layout: Layout, wrong: set[int]) -> set[int]:
    """Grains that cells with any of these ranks compute."""
    return {
        grain for stage in layout.stages for cell in stage.cells if not wrong.isdisjoint(cell.ranks)
        for grain in cell.share
    }  # fmt: skip


def _stays(cell: Cell, stage: int, old: Layout) -> bool:
    before = old.places.get(cell.leader)
    return before is not None and before[0] == stage and before[1].ranks == cell.ranks


def _agreed(leader: int, work: Collection[WorkDone | None], step: int) -> list[Kept]:
    """What all ranks of a cell have. A forward that some have not done is done again; sums must be the same."""
    told = [each for each in work if each is not None and each.step == step]
    if len(told) < len(work):
        return []
    first = told[0]
    if any((each.added, each.half) != (first.added, first.half) for each in told):
        return []
    live = sorted(set(first.live).intersection(*(each.live for each in told)))
    return [Kept(leader=leader, added=first.added, live=live, half=first.half)]
