"""What layouts raise."""

from __future__ import annotations


class LayoutError(Exception):
    """A layout is inconsistent, or was asked for something that it does not contain."""


class SliceLost(Exception):
    """No live rank holds a part of this slice, so that no transfer can bring it back."""

    def __init__(self, unit: int, slice: int, part: int) -> None:
        super().__init__(f"no live rank holds part {part} of slice {slice} of unit {unit}")
        self.unit = unit
        self.slice = slice
        self.part = part
