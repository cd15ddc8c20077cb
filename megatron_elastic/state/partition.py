"""Partition: how one unit's parameters lie in a flat tensor, and how that is cut into K slices.

It depends on the unit alone, so that slice k means the same elements on every rank, also on one that has none of the
unit's modules and only keeps slices of it. Parameters are ordered into segments that the optimizer treats alike.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from megatron_elastic.layout import UnitShape
from megatron_elastic.numerics.kernels import BLOCK
from megatron_elastic.state.optimizer import SIGNED

_ALIGN = BLOCK
"""Elements: every parameter starts on a 64-byte boundary even in bf16, so kernels take the same path everywhere; and
no block of a norm is cut."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Elements [start, end) of a slice that are treated alike.

    ``counted``: they enter the gradient norm on the rank that owns them (what all tensor-parallel ranks hold alike is
    counted on the first one only, and what moves by a sign nowhere).
    """

    start: int
    end: int
    group: int
    counted: bool


class Partition:
    """Places in one unit's flat tensors.

    Attributes:
        part: which of the unit's parts it is (``Layout.part_of``).
        starts: where each parameter begins, in the model's order.
        sizes: elements of each.
        slice_size: elements of a slice; the last ones may be padding.
        dtype: of the parameters.

    ``tp``: how many ranks share tensors; ``ep``: among how many teams of them a cell divides experts.
    """

    def __init__(self, shape: UnitShape, num_slices: int, part: int, tp: int, ep: int = 1) -> None:
        self.shape = shape
        members, tp_index = shape.divided(tp, ep), part % tp
        self.part = part
        self.num_slices = num_slices
        self.dtype: torch.dtype = getattr(torch, shape.dtype)
        # Segment bounds must not depend on the tensor-parallel index: the update kernel rounds a segment's tail
        # differently, and what all tensor-parallel ranks hold alike has to stay alike.
        def counted(group: int, shared: bool) -> bool:
            return group != SIGNED and (shared or tp_index == 0)

        starts: dict[int, int] = {}
        self._segments: list[Segment] = []
        offset = 0
        groups = sorted({member.group for member in members})
        for treatment in itertools.product(groups, (True, False)):
            begin = offset
            for index, member in enumerate(members):
                if (member.group, member.runs > 0) == treatment:
                    starts[index] = offset
                    offset += -(-member.size // _ALIGN) * _ALIGN
            if offset > begin:
                self._segments.append(Segment(begin, offset, treatment[0], counted(*treatment)))
        self.starts = tuple(starts[index] for index in range(len(members)))
        self.sizes = [member.size for member in members]
        self._counted = [
            (start, start + member.size)
            for start, member in zip(self.starts, members, strict=True)
            if counted(member.group, member.runs > 0)
        ]
        self.slice_size = -(-offset // (num_slices * _ALIGN)) * _ALIGN

    @property
    def size(self) -> int:
        """Elements of the whole flat tensor."""
        return self.slice_size * self.num_slices

    def slice_of(self, flat: torch.Tensor, k: int) -> torch.Tensor:
        """View of slice k of a flat tensor of this unit."""
        return flat[k * self.slice_size : (k + 1) * self.slice_size]

    def elements(self, k: int) -> int:
        """How many elements of slice k are a parameter's, and in a segment that is counted."""
        low, high = k * self.slice_size, (k + 1) * self.slice_size
        return sum(max(min(end, high) - max(start, low), 0) for start, end in self._counted)

    def segments(self, k: int) -> list[Segment]:
        """The segments of slice k, relative to its start; padding belongs to none."""
        low, high = k * self.slice_size, (k + 1) * self.slice_size
        return [
            Segment(max(s.start, low) - low, min(s.end, high) - low, s.group, s.counted)
            for s in self._segments
            if s.start < high and s.end > low
        ]
