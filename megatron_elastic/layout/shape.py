"""UnitShape: what has to be known of a unit by who keeps its slices, without having its modules."""

from __future__ import annotations

from typing import NamedTuple

import msgspec


class ParameterShape(NamedTuple):
    """A parameter as it is where nobody shares it; the same in every layout.

    Tensor-parallel ranks share each of its ``runs`` of elements evenly: a matrix that is cut along its rows is one run,
    one that is cut along its columns as many as it has rows. Gate and projection of a gated MLP, one after the other
    in one matrix, are two. Without runs all ranks hold the same.
    """

    size: int
    """Elements."""
    group: int
    """Of the optimizer."""
    runs: int = 0
    rows: int = 1
    """Into how many a run can be cut at most, all alike."""


class UnitShape(msgspec.Struct, frozen=True):
    """A unit's parameters, in the model's order; the same on every rank, whatever its place in a cell, and in every
    layout.
    """

    members: tuple[ParameterShape, ...]
    dtype: str
    """Type of all of them, as torch names it: ``float32``."""
    experts: int = 0
    """If not 0, the unit has so many experts one after the other, all alike, and ``members`` are those of one."""

    def divided(self, tp: int, ep: int) -> tuple[ParameterShape, ...]:
        """What a rank has of the parameters where ``tp`` ranks share tensors, and ``ep`` teams of them the experts."""
        each = tuple(
            whole._replace(size=whole.size // tp, rows=whole.rows // tp) if whole.runs else whole
            for whole in self.members
        )
        return each * (self.experts // ep) if self.experts else each
