"""Cells of another shape, in plans and on tensors: whatever the sizes, everything is somewhere, and once."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_elastic.layout import EXPERTS, Cell, Layout, ParameterShape, Stage, UnitShape, gpt_units
from megatron_elastic.plan import NoLayout, improve, reshape
from megatron_elastic.state.partition import Partition
from megatron_elastic.state.recut import deliveries, pieces
from tests.tiers.examples import examples

TP = st.sampled_from([1, 2, 3, 4, 6])
SIZES = st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4), (4, 2), (2, 4), (4, 4)])


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Some, one with cells lost; their grains are multiples of what cells of any size compute at once."""
    (cp, ep), tp, pp, dp = draw(SIZES), draw(TP), draw(st.integers(1, 2)), draw(st.integers(1, 5))
    units, stage_units = gpt_units(2 * pp, pp, draw(st.booleans()), positions=True, routed=range(0, 2 * pp, 2))
    size = tp * max(cp, ep)
    layout = Layout.grid(
        tp=tp, pp=pp, dp=dp, stage_units=stage_units, units=units, num_grains=12 * 4 * cp // max(cp, ep),
        num_slices=draw(st.integers(1, 5)), replicas=draw(st.integers(0, 2)), cp=cp, ep=ep,
        ranks_per_host=draw(st.sampled_from([None, size, 2 * size, size + 1])),
    )  # fmt: skip
    if dp == 1 or draw(st.booleans()):
        return layout
    kept = improve(layout, {}, 1, most_cells=pp * (dp - 1))
    assert kept is not None and kept[1] is not None
    return replace(kept[1], most_cells=draw(st.sampled_from([None, pp * (dp - 1)])))


def enough(layout: Layout, tp: int, cp: int, ep: int) -> bool:
    """Whether each stage has the ranks for a cell of these sizes."""
    teams = [stage.width * layout.cell_size // tp for stage in layout.stages]
    return min(teams) >= max(cp, ep)


@settings(max_examples=examples(400), deadline=None)
@given(layout=layouts(), tp=TP, sizes=SIZES)
def test_cells_are_put_together_anew(layout: Layout, tp: int, sizes: tuple[int, int]) -> None:
    """Of teams that stay together, or of what both sizes have in common, in their stages; slices are even at once."""
    cp, ep = sizes
    if not enough(layout, tp, cp, ep):
        with pytest.raises(NoLayout, match="a cell is to be"):
            reshape(layout, tp, cp, ep, 9)
        return
    new, together = reshape(layout, tp, cp, ep, 9), math.gcd(tp, layout.tp)
    new.validate()
    assert (new.cp, new.ep, new.tp, new.epoch, new.num_batches) == (cp, ep, tp, 9, layout.num_batches)
    assert (new.units, new.lost, new.hosts, new.num_slices) == (
        layout.units, layout.lost, layout.hosts, layout.num_slices
    )  # fmt: skip
    assert {*new.ranks, *new.spares} == {*layout.ranks, *layout.spares}
    for before, after in zip(layout.stages, new.stages, strict=True):
        assert before.units == after.units and not after.waiting
        assert set(teams(after, together)) <= set(teams(before, together))
        assert after.width == before.width * layout.cell_size // tp // new.teams
    assert improve(replace(new, most_cells=len(new.cells)), {}, 10) is None, "it is even"


def teams(stage: Stage, size: int) -> Iterator[tuple[int, ...]]:
    """The ranks of a stage that stay together, so many at a time."""
    for cell in stage.cells:
        yield from (cell.ranks[at : at + size] for at in range(0, len(cell.ranks), size))


def test_cells_are_of_one_host_where_that_is_possible() -> None:
    """Six ranks on three hosts, of which one has three and one a single one."""
    units, stage_units = gpt_units(1, 1, True, positions=False, routed=[0])
    layout = Layout.grid(tp=1, pp=1, dp=6, stage_units=stage_units, units=units, num_grains=6, num_slices=6, replicas=1)
    apart = replace(layout, hosts=((0, 2, 3), (1,), (4, 5)))
    assert [cell.ranks for cell in reshape(apart, 1, 1, 2, 1).stages[0].cells] == [(0, 2), (4, 5), (3, 1)]
    pairs = [cell.ranks for cell in reshape(apart, 2, 1, 1, 1).stages[0].cells]
    assert pairs == [(0, 2), (3, 1), (4, 5)], "tensor-parallel ranks, too"


def test_what_cannot_be_divided_is_refused() -> None:
    units, stage_units = gpt_units(1, 1, True, positions=False, routed=[0])
    layout = Layout.grid(tp=1, pp=1, dp=6, stage_units=stage_units, units=units, num_grains=9, num_slices=6, replicas=1)
    with pytest.raises(NoLayout, match="one must divide the other"):
        reshape(layout, 1, 2, 3, 1)
    with pytest.raises(NoLayout, match="9 micro-batches of a step cannot be computed 2 at a time"):
        reshape(layout, 1, 1, 2, 1)
    assert reshape(layout, 1, 1, 3, 1).num_grains == 3


class Matrix(NamedTuple):
    """A parameter of a model: its ``shape``, and the dimension that tensor-parallel ranks share, if any; with a
    ``stride`` of two it is two matrices one after the other, of which each rank has a part.
    """

    shape: tuple[int, int]
    group: int = 0
    dim: int | None = None
    stride: int = 1

    @property
    def told(self) -> ParameterShape:
        """What is told of it, as ``adaptor.model.units`` does."""
        size = self.shape[0] * self.shape[1]
        if self.dim is None:
            return ParameterShape(size, self.group)
        runs = self.stride * (1, self.shape[0])[self.dim]
        return ParameterShape(size, self.group, runs, self.shape[self.dim] // self.stride)

    def share(self, values: torch.Tensor, tp: int, index: int) -> torch.Tensor:
        """A rank's of the whole ``values``, as Megatron cuts them (``_initialize_affine_weight_cpu``)."""
        if self.dim is None:
            return values.flatten()
        pieces = torch.split(values, self.shape[self.dim] // tp // self.stride, dim=self.dim)
        return torch.cat(pieces[index::tp], dim=self.dim).flatten()


@st.composite
def models(draw: st.DrawFn) -> list[Matrix]:
    """Parameters that up to a dozen ranks can share."""
    def one() -> Matrix:
        dim, stride = draw(st.sampled_from([(None, 1), (0, 1), (0, 2), (1, 1)]))
        rows, columns = draw(st.integers(1, 4)), draw(st.integers(1, 4))
        shape = (12 * stride * rows if dim == 0 else rows, 12 * columns if dim == 1 else columns)
        return Matrix(shape, draw(st.integers(0, 1)), dim, stride)

    return [one() for _ in range(draw(st.integers(1, 4)))]


_Slices = dict[tuple[int, int], torch.Tensor]


def cut(layout: Layout, unit: int, shape: UnitShape, model: list[Matrix], values: list[list[torch.Tensor]]) -> _Slices:
    """[slice, part] of a unit whose values are those, whole: [expert, or 0][parameter]."""
    found = {}
    for part in range(layout.num_parts(unit)):
        place, tp = divmod(part, layout.tp)
        partition = Partition(shape, layout.num_slices, part, layout.tp, layout.ep)
        flat, share = torch.zeros(partition.size), shape.experts // layout.ep
        mine = values[place * share : (place + 1) * share] if share else values
        every = [matrix.share(each, layout.tp, tp) for of in mine for matrix, each in zip(model, of, strict=True)]
        for start, own in zip(partition.starts, every, strict=True):
            flat[start : start + own.numel()] = own
        for k in range(layout.num_slices):
            found[k, part] = partition.slice_of(flat, k)
    return found


def move(unit: int, shape: UnitShape, old: Layout, new: Layout, before: _Slices, after: _Slices) -> None:
    """Slices put together from pieces are ``after``; no element comes twice."""
    made = {at: torch.zeros_like(flat) for at, flat in after.items()}
    for piece in pieces(unit, shape, old, new):
        target = piece.there.of(made[piece.target])
        assert not target.any()
        target.copy_(piece.here.of(before[piece.source]))
    assert all(torch.equal(made[at], after[at]) for at in after)


@settings(max_examples=examples(2000), deadline=None)
@given(layout=layouts(), tp=TP, sizes=SIZES, model=models())
def test_pieces_make_what_would_have_been_cut_so(
    layout: Layout, tp: int, sizes: tuple[int, int], model: list[Matrix]
) -> None:
    """Every element of every slice that is a parameter's, once, and back again."""
    assume(enough(layout, tp, *sizes))
    new = reshape(layout, tp, *sizes, 9)
    for unit, name in list(enumerate(layout.units))[:3]:
        experts = 8 if name.startswith(EXPERTS) else 0
        shape = UnitShape(tuple(matrix.told for matrix in model), "float32", experts)
        numbers, values = itertools.count(1), []
        for _ in range(max(experts, 1)):
            values.append([torch.rand(matrix.shape) + next(numbers) for matrix in model])
        before, after = (cut(each, unit, shape, model, values) for each in (layout, new))
        move(unit, shape, layout, new, before, after)
        move(unit, shape, new, layout, after, before)


DENSE = UnitShape((ParameterShape(72, 0, 6, 12), ParameterShape(16, 1), ParameterShape(96, 0, 2, 12)), "float32")
SHAPE = UnitShape(DENSE.members, "float32", experts=8)


@settings(max_examples=examples(200), deadline=None)
@given(layout=layouts(), tp=TP, sizes=SIZES)
def test_who_keeps_a_slice_gets_all_of_it_from_who_has_it(layout: Layout, tp: int, sizes: tuple[int, int]) -> None:
    """And nothing that it has."""
    assume(enough(layout, tp, *sizes))
    new = reshape(layout, tp, *sizes, 9)
    for unit, name in enumerate(layout.units):
        shape = SHAPE if name.startswith(EXPERTS) else DENSE
        got = Counter((piece, dst) for piece, _, dst in deliveries(unit, shape, layout, new))
        wanted = Counter(
            (piece, dst)
            for piece in pieces(unit, shape, layout, new)
            for dst in (new.owner(unit, *piece.target), *new.copies(unit, *piece.target))
        )
        assert got == wanted
        for piece, src, dst in deliveries(unit, shape, layout, new):
            holders = (layout.owner(unit, *piece.source), *layout.copies(unit, *piece.source))
            assert src in holders and (src == dst or dst not in holders)


def test_a_unit_of_experts_that_cannot_be_told_apart_is_not_cut() -> None:
    units, stage_units = gpt_units(1, 1, True, positions=False, routed=[0])
    layout = Layout.grid(tp=1, pp=1, dp=2, stage_units=stage_units, units=units, num_grains=2, num_slices=2, replicas=1)
    with pytest.raises(AssertionError, match="cannot be cut anew"):
        list(pieces(units.index("experts.0"), DENSE, layout, reshape(layout, 1, 1, 2, 1)))
    assert Cell((0, 1), (0,)) in reshape(layout, 1, 1, 2, 1).stages[0].cells
