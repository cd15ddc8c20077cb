"""Way: the stages that a grain passes, in turn, forward; and the known ways to place chunks on stages.

Layouts do not record a placement: consecutive units that are at home in one stage are a *chunk*, and a grain passes the
chunks in the order of their units. So what a layout says of units says all, for any placement, equal chunks or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Literal, NamedTuple, get_args

Placement = Literal["loop", "v"]
"""How chunks are placed on the stages. ``loop``: a grain passes one of each stage in turn, and then the next of each;
``v``: it passes them down to the last stage, back up to the first, and so on."""
PLACEMENTS: tuple[Placement, ...] = get_args(Placement)


class Position(NamedTuple):
    """A place on the way of grains: a chunk of a stage."""

    stage: int
    chunk: int
    units: tuple[int, ...]
    """At home in the stage, ascending."""


def positions(stage_units: Sequence[Sequence[int]]) -> tuple[Position, ...]:
    """The way through stages with these units. A unit is at home in the first stage that holds it."""
    homes: dict[int, int] = {}
    for stage, units in enumerate(stage_units):
        for unit in units:
            homes.setdefault(unit, stage)
    chunks = [0] * len(stage_units)
    found = []
    for stage, run in groupby(sorted(homes), homes.__getitem__):
        found.append(Position(stage, chunks[stage], tuple(run)))
        chunks[stage] += 1
    return tuple(found)


def way(placement: Placement, stages: int, chunks: int) -> tuple[int, ...]:
    """[chunk in the order in which a grain passes them] = its stage, for ``chunks`` of each of ``stages``.

    Where a V turns two chunks of one stage follow one another, and become one chunk of a layout.
    """
    down = range(stages)
    return tuple(
        stage for chunk in range(chunks) for stage in (reversed(down) if placement == "v" and chunk % 2 else down)
    )


def joined(stages: Sequence[int]) -> tuple[int, ...]:
    """A way with what is twice in a row once, as layouts have it."""
    return tuple(stage for stage, _ in groupby(stages))


def placement_of(stages: Sequence[int]) -> tuple[Placement, int] | None:
    """How a way of a layout came about: the placement, and chunks of each stage; None if it is none of the known."""
    count = max(stages) + 1
    most = max(stages.count(stage) for stage in range(count))
    for placement in PLACEMENTS:
        for chunks in range(1, 2 * most + 1):
            if joined(way(placement, count, chunks)) == tuple(stages):
                return placement, chunks
    return None
