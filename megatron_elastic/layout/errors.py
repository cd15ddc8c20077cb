"""What layouts raise."""

from __future__ import annotations


class LayoutError(Exception):
    """A layout is inconsistent, or was asked for something that it does not contain."""


class SliceLost(Exception):
    """No live rank holds part ``tp`` of this slice, so that no transfer can bring it back."""

    def __init__(self, unit: int, slice: int, tp: int) -> None:
        super().__init__(f"no live rank holds slice {slice} of unit {unit}, tensor-parallel index {tp}")
        self.unit = unit
        self.slice = slice
        self.tp = tp
