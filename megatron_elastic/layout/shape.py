"""UnitShape: what has to be known of a unit by who keeps its slices, without having its modules."""

from __future__ import annotations

import msgspec


class UnitShape(msgspec.Struct, frozen=True):
    """A unit's parameters, in the model's order; the same on every rank, whatever its place in a cell."""

    members: tuple[tuple[int, int, bool], ...]
    """Of each parameter: its elements, its optimizer group, and whether tensor-parallel ranks hold different parts."""
    dtype: str
    """Type of all of them, as torch names it: ``float32``."""
