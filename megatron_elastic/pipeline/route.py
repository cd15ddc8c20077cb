"""Route: from whom a cell's operations take what they need, and to whom they give what they make.

A grain passes the positions of the layout's way in turn, forward, and back again. In an ordinary step the neighbours of
an operation are the cells that compute the same samples at the positions before and after, so re-routed grains, cut
ones and stages of different widths need no special case. In a step that is resumed they are those who do, or have done,
the work there (``resumption``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron_elastic.layout import Layout, Part
from megatron_elastic.pipeline.program import Op

Neighbours = tuple[tuple[int, Part], ...]
"""Cells, by their leaders, and the samples that are exchanged with each, in their order."""


class Leg(NamedTuple):
    """An operation of a cell on its part of a grain, and its neighbours."""

    op: Op
    part: Part
    sources: Neighbours
    """Who makes its input: of a forward the activation, of a backward the gradient of the output."""
    targets: Neighbours
    """Who needs its result: of a forward the activation, of a backward the gradient of the input."""


def usual(layout: Layout, leader: int, ops: Sequence[Op]) -> tuple[Leg, ...]:
    """The operations of a cell in a step that nothing has interrupted."""
    stage, way = layout.stage_of(leader), layout.way

    def at(position: int, part: Part) -> Neighbours:
        if not 0 <= position < len(way):
            return ()
        return tuple((cell.leader, common) for cell, common in layout.common(way[position].stage, part))

    legs = []
    for op in ops:
        part, here = layout.part(leader, op.grain), layout.position(stage, op.chunk)
        if op.kind == "backward_weight":
            legs.append(Leg(op, part, (), ()))
        elif op.kind == "forward":
            legs.append(Leg(op, part, at(here - 1, part), at(here + 1, part)))
        else:
            legs.append(Leg(op, part, at(here + 1, part), at(here - 1, part)))
    return tuple(legs)


def first_of(legs: Sequence[Leg], grains: int) -> tuple[Leg, ...]:
    """Of these, what a step of the first ``grains`` grains has. In the same order, nobody waits in a circle."""
    return tuple(leg for leg in legs if leg.op.grain < grains)
