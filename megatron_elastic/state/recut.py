"""Recut: which pieces slices of units are put together from that are divided among more or fewer teams than they were.

Under another tensor-parallel size the parts of a unit hold other parts of its parameters, under another expert-parallel
size those of a unit of experts other experts. All else keeps its parts, but the ranks that keep them may be others,
because cells are. What a rank needs it takes from what it has, or gets from one that has it, owner or replica; those
keep theirs until the layout is true, so that nothing is lost if it never becomes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from megatron_elastic.layout import EXPERTS, Layout, ParameterShape, UnitShape
from megatron_elastic.state.partition import Partition


class _Runs(NamedTuple):
    """``size`` elements so many ``times``, each ``stride`` after the one before, from ``start`` on."""

    start: int
    size: int
    times: int = 1
    stride: int = 1

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """View of them, as [times, size]."""
        length = (self.times - 1) * self.stride + self.size
        return tensor[self.start : self.start + length].unfold(0, self.size, self.stride)

    def skip(self, runs: int) -> _Runs:
        """All but the first ones."""
        return self._replace(start=self.start + runs * self.stride, times=self.times - runs)

    def within(self, limit: int) -> int:
        """How many of them, from the first on, are in the slice of ``limit`` elements in which the first begins."""
        room = limit - self.start % limit - self.size
        return 0 if room < 0 else min(self.times, room // self.stride + 1)


class Piece(NamedTuple):
    """Elements of a unit that are moved together. Where they are is relative to the slice."""

    source: tuple[int, int]
    """(slice, part) before."""
    here: _Runs
    target: tuple[int, int]
    """(slice, part) after."""
    there: _Runs

    @property
    def size(self) -> int:
        """Elements."""
        return self.here.times * self.here.size


class Delivery(NamedTuple):
    """A piece from one rank to another, or to itself."""

    piece: Piece
    src: int
    dst: int


def pieces(unit: int, shape: UnitShape, old: Layout, new: Layout) -> Iterator[Piece]:
    """What the slices of a unit are made of, which has this ``shape``, in the order of those of ``new``.

    The layouts have units and slices in common. Padding between parameters is left out where slices are made of several
    pieces: it is 0.
    """
    before = Partition(shape, old.num_slices, 0, old.tp, old.ep)
    if (old.tp, old.num_parts(unit)) == (new.tp, new.num_parts(unit)):
        whole = _Runs(0, before.slice_size)
        for part in range(new.num_parts(unit)):
            for k in range(new.num_slices):
                yield Piece((k, part), whole, (k, part), whole)
        return
    assert shape.experts or not old.units[unit].startswith(EXPERTS), f"unit {old.units[unit]} cannot be cut anew"
    after, each = Partition(shape, new.num_slices, 0, new.tp, new.ep), len(shape.members)
    for expert in range(shape.experts or 1):
        (source, first), (target, last) = (
            divmod(expert, shape.experts // layout.ep) if shape.experts else (0, 0) for layout in (old, new)
        )
        for index, member in enumerate(shape.members):
            start, stop = before.starts[first * each + index], after.starts[last * each + index]
            for (r, here), (q, there) in _shares(member, old.tp, new.tp):
                yield from _within_slices(
                    source * old.tp + r, here._replace(start=start + here.start), before.slice_size,
                    target * new.tp + q, there._replace(start=stop + there.start), after.slice_size,
                )  # fmt: skip


_Share = tuple[int, _Runs]
"""Of a parameter: whose, by tensor-parallel index, and which elements of what that one has."""


def _shares(member: ParameterShape, old: int, new: int) -> Iterator[tuple[_Share, _Share]]:
    """What ``new`` tensor-parallel ranks have of a parameter, and which of ``old`` ones have had it."""
    if not member.runs:
        for q in range(new):  # of those that have it all, the one that is most likely the same
            yield (q * old // new, _Runs(0, member.size)), (q, _Runs(0, member.size))
        return
    had, has = (member.size // member.runs // ranks for ranks in (old, new))
    for q in range(new):
        for r in range(q * has // had, -(-(q + 1) * has // had)):
            low, high = max(q * has, r * had), min((q + 1) * has, (r + 1) * had)
            size, runs = high - low, member.runs
            if had == has == size:  # they follow on one another
                size, runs = size * runs, 1
            here, there = _Runs(low - r * had, size, runs, had), _Runs(low - q * has, size, runs, has)
            yield (r, here), (q, there)


def _within_slices(
    part: int, here: _Runs, before: int, target: int, there: _Runs, after: int
) -> Iterator[Piece]:
    """Pieces of runs in a part, which are to be others in a ``target``, such that no slice's end is in one.

    ``before``, ``after``: elements of a slice. Runs are relative to the part, and those of pieces to the slice.
    """
    while here.times:
        times, size = min(here.within(before), there.within(after)), here.size
        if times:
            yield _piece(part, here._replace(times=times), before, target, there._replace(times=times), after)
            here, there = here.skip(times), there.skip(times)
            continue
        offset = 0
        while offset < size:
            i, j = here.start + offset, there.start + offset
            length = min(size - offset, before - i % before, after - j % after)
            yield _piece(part, _Runs(i, length), before, target, _Runs(j, length), after)
            offset += length
        here, there = here.skip(1), there.skip(1)


def _piece(part: int, here: _Runs, before: int, target: int, there: _Runs, after: int) -> Piece:
    (k, i), (to, j) = divmod(here.start, before), divmod(there.start, after)
    return Piece((k, part), here._replace(start=i), (to, target), there._replace(start=j))


def deliveries(unit: int, shape: UnitShape, old: Layout, new: Layout) -> Iterator[Delivery]:
    """Who gives which piece to whom, so that owners and replicas of ``new`` have what they keep; all ranks get the same
    answer. A rank that has a piece takes its own; else the owner gives it.
    """
    for piece in pieces(unit, shape, old, new):
        owner, copies = old.owner(unit, *piece.source), old.copies(unit, *piece.source)
        for dst in (new.owner(unit, *piece.target), *new.copies(unit, *piece.target)):
            yield Delivery(piece, dst if dst in copies else owner, dst)
