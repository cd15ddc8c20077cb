"""Slots: when work is due, in the usual order of chunks that are placed and sized in any way.

A grain goes through the model at such a pace, forward and back, that each layer has as much time as a forward and a
backward of it take. So there is room between two passes of a grain for those of others, and whoever waits for none has
something to do. Of a V of even chunks as much is kept as with 1F1B, and a step is shorter.
``pipeline.schedule`` makes the order, and here it is known how much it keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_elastic.layout import Layout, Position

_PACE = 3
"""Slots for a forward and a backward of a layer."""


@dataclass(frozen=True, slots=True)
class Slots:
    """Of one grain.

    Attributes:
        forward, backward: [position] = its slot.
        apart: slots from a grain to the next: what the busiest stage has to do for one, if a layer takes one forward
            and two backward.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    apart: int

    @classmethod
    def of(cls, layout: Layout) -> Slots:
        """Of a layout."""
        return cls.along(layout.way, layout.units)

    @classmethod
    def along(cls, way: Sequence[Position], names: Sequence[str]) -> Slots:
        """Of a way, with the names of all units. A position without a layer takes a slot, too."""
        sizes = [max(1, sum(names[unit].startswith("layer.") for unit in position.units)) for position in way]
        of_stage = [0] * (1 + max(position.stage for position in way))
        for position, size in zip(way, sizes, strict=True):
            of_stage[position.stage] += size
        whole, forward, backward, before = sum(sizes), [], [], 0
        for size in sizes:
            forward.append(_PACE * before)
            before += size
            backward.append(_PACE * (2 * whole - before))
        return cls(tuple(forward), tuple(backward), _PACE * max(of_stage))

    def live(self, position: int) -> int:
        """How many grains at most are between forward and backward there at a time."""
        return -((self.forward[position] - self.backward[position]) // self.apart)
