"""UnitBuffer: one unit's parameters and gradient sums as flat tensors, cut into K slices.

The layout of the flat tensor depends on the unit alone, so that slice k means the same elements on every rank that
holds the unit. Parameters are ordered into segments that the optimizer treats alike.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_elastic.numerics.exact import Accumulator

_ALIGN = 32
"""Elements: every parameter starts on a 64-byte boundary even in bf16, so kernels take the same path everywhere."""


@dataclass(frozen=True, slots=True)
class Member:
    """A parameter of a unit and how the optimizer treats it.

    ``group``: index of its group (see ``state.optimizer``). ``sharded``: tensor-parallel ranks hold different parts of
    it; otherwise they all hold the same.
    """

    parameter: torch.nn.Parameter
    group: int
    sharded: bool


@dataclass(frozen=True, slots=True)
class Segment:
    """Elements [start, end) of a slice that are treated alike.

    ``counted``: they enter the gradient norm on this rank (what all tensor-parallel ranks hold alike is counted on
    the first one only).
    """

    start: int
    end: int
    group: int
    counted: bool


class UnitBuffer:
    """Flat storage of one unit on one rank.

    Args:
        index: the unit's number in the layout.
        members: its parameters, in the model's order; they become views of the flat storage.
        num_slices: K.
        tp_index: this rank's tensor-parallel index.
        accumulator: how gradients are summed.

    Raises ValueError when the parameters do not all have one type.
    """

    def __init__(
        self, index: int, members: Sequence[Member], num_slices: int, tp_index: int, accumulator: Accumulator
    ) -> None:
        self.index = index
        self.accumulator = accumulator
        # Segment bounds must not depend on the tensor-parallel index: the update kernel rounds a segment's tail
        # differently, and what all tensor-parallel ranks hold alike has to stay alike.
        self.members: list[tuple[Member, int]] = []
        self._segments: list[Segment] = []
        offset = 0
        for group, sharded in itertools.product(sorted({member.group for member in members}), (True, False)):
            start = offset
            for member in members:
                if (member.group, member.sharded) == (group, sharded):
                    self.members.append((member, offset))
                    offset += -(-member.parameter.numel() // _ALIGN) * _ALIGN
            if offset > start:
                self._segments.append(Segment(start, offset, group, sharded or tp_index == 0))
        self.slice_size = -(-offset // (num_slices * _ALIGN)) * _ALIGN
        size = self.slice_size * num_slices
        dtype = members[0].parameter.dtype
        if types := {str(member.parameter.dtype) for member in members} - {str(dtype)}:
            raise ValueError(
                f"the parameters of unit {index} have types {dtype} and {', '.join(types)}: cast them first"
            )
        self.params = torch.zeros(size, dtype=dtype)
        self.sums = torch.zeros(size, dtype=accumulator.dtype)
        for member, start in self.members:
            self._adopt(member.parameter, start)

    def slice_of(self, flat: torch.Tensor, k: int) -> torch.Tensor:
        """View of slice k of a flat tensor of this unit (``params``, ``sums``)."""
        return flat[k * self.slice_size : (k + 1) * self.slice_size]

    def segments(self, k: int) -> list[Segment]:
        """The segments of slice k, relative to its start; padding belongs to none."""
        low, high = k * self.slice_size, (k + 1) * self.slice_size
        return [
            Segment(max(s.start, low) - low, min(s.end, high) - low, s.group, s.counted)
            for s in self._segments
            if s.start < high and s.end > low
        ]

    def zero(self) -> None:
        """Forget all gradients of the step."""
        self.sums.zero_()
        for member, _ in self.members:
            member.parameter.grad = None

    def twin(self, parameter: torch.nn.Parameter) -> torch.nn.Parameter:
        """A second leaf over a member's memory, for another use of it; what the two uses contribute is summed apart.

        Autograd would add both in floating point first, and ranks that hold one use each do not.
        """
        start = next(start for member, start in self.members if member.parameter is parameter)
        twin = torch.nn.Parameter(parameter.detach())
        self._accumulate(twin, start)
        return twin

    def _adopt(self, parameter: torch.nn.Parameter, start: int) -> None:
        view = self.params[start : start + parameter.numel()]
        view.copy_(parameter.detach().view(-1))
        parameter.data = view.view_as(parameter)
        self._accumulate(parameter, start)

    def _accumulate(self, parameter: torch.nn.Parameter, start: int) -> None:
        sums = self.sums[start : start + parameter.numel()]

        def accumulate(p: torch.Tensor) -> None:
            assert p.grad is not None
            self.accumulator.add(sums, p.grad.view(-1))
            p.grad = None

        parameter.register_post_accumulate_grad_hook(accumulate)

