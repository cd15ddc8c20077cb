"""Invariants: what must hold for a layout to be one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from itertools import chain

from megatron_elastic.layout.part import Part
from megatron_elastic.layout.tables import Tables


def problems(layout: Tables) -> Iterator[str]:
    """What is wrong with a layout, the fundamental first; nothing for a valid one."""
    if layout.epoch < 0 or layout.num_slices < 1 or layout.num_grains < 1:
        yield f"epoch {layout.epoch}, {layout.num_slices} slices, {layout.num_grains} grains: out of range"
    if layout.most_cells is not None and layout.most_cells < 1:
        yield f"at most {layout.most_cells} cells: out of range"
    if layout.samples < 1:
        yield f"grains of {layout.samples} samples: out of range"
    if not layout.stages or not all(stage.cells for stage in layout.stages):
        yield "there is a stage without cells" if layout.stages else "there are no stages"
        return
    members = [rank for stage in layout.stages for cell in stage.cells for rank in cell.ranks]
    known = sorted([*members, *layout.spares, *layout.lost])
    if known[0] < 0 or len(set(known)) < len(known):
        for rank, count in Counter([*members, *layout.spares, *layout.lost]).items():
            if count > 1 or rank < 0:
                yield f"rank {rank} is listed {count} times among cells, spares and lost"
    if list(layout.spares) != sorted(layout.spares) or list(layout.lost) != sorted(layout.lost):
        yield f"spares {layout.spares} and lost {layout.lost} must be ascending"
    sizes = {len(cell.ranks) for stage in layout.stages for cell in stage.cells}
    if len(sizes) != 1 or 0 in sizes:
        yield f"cells have {sorted(sizes)} ranks, but all must have the same number"
    if min(layout.cp, layout.ep) < 1 or any(size % max(layout.cp, layout.ep) for size in sizes):
        yield f"cells of {sorted(sizes)} ranks cannot have {layout.cp} context- and {layout.ep} expert-parallel indices"
        return
    if max(layout.cp, layout.ep) % min(layout.cp, layout.ep):
        yield f"context-parallel size {layout.cp} and expert-parallel size {layout.ep}: one must divide the other"
        return
    if sorted(chain.from_iterable(layout.hosts)) != known:
        yield f"hosts {layout.hosts} must list each of the ranks in cells, the spares and the lost once"
    for index, stage in enumerate(layout.stages):
        parts = sorted(part for cell in stage.cells for part in cell.parts)
        whole = chain.from_iterable(cell.grains for cell in stage.cells)
        grains = sorted([*whole, *{part.grain for part in parts}])
        if len(grains) != layout.num_grains or grains != list(range(layout.num_grains)):
            yield f"stage {index} computes grains {grains}, not each of 0..{layout.num_grains - 1} once"
        yield from _part_problems(layout, index, parts)
        for cell in stage.cells:
            if cell.parts and len({part.grain for part in cell.parts}) < len(cell.parts):
                yield f"cell {cell.leader} of stage {index} has several parts of one grain: {cell.parts}"
    waiting = [each for stage in layout.stages for each in stage.waiting]
    kept = [rank for rank, _ in waiting]
    if len(set(kept)) < len(kept) or not set(kept).issubset(layout.spares):
        yield f"ranks {sorted(kept)} wait for the places that they had: they must be spares, each once"
    if any(stage.waiting != tuple(sorted(stage.waiting)) for stage in layout.stages) or any(
        not 0 <= place < max(sizes) for _, place in waiting
    ):
        yield f"(rank, place) of those that wait must ascend, with places in cells of {max(sizes)} ranks: {waiting}"
    yield from _unit_problems(layout)


def _part_problems(layout: Tables, stage: int, parts: Sequence[Part]) -> Iterator[str]:
    """What is wrong with a stage's parts of grains, which ascend: those of a grain must follow one another."""
    reached = {part.grain: 0 for part in parts}
    for part in parts:
        if part.start != reached[part.grain] or not part.start < part.stop:
            yield f"stage {stage} computes samples {part.start} to {part.stop} of grain {part.grain} out of turn"
        reached[part.grain] = part.stop
    for grain, stop in reached.items():
        if stop != layout.samples:
            yield f"stage {stage} computes {stop} samples of grain {grain}, which has {layout.samples}"


def _unit_problems(layout: Tables) -> Iterator[str]:
    seen: set[int] = set()
    reached = -1
    for index, stage in enumerate(layout.stages):
        if list(stage.units) != sorted(set(stage.units)):
            yield f"stage {index} lists units {stage.units}, but they must ascend"
        new = sorted({*stage.units} - seen)
        if new[:1] <= [reached]:
            yield f"stage {index} begins units {new}, but they must come after {reached}, where the stage before begins"
            return
        reached = new[0]
        seen.update(new)
    if not seen.issuperset(layout.recomputed) or list(layout.recomputed) != sorted(set(layout.recomputed)):
        yield f"units {layout.recomputed} are recomputed: they must ascend, and be among those of stages"
    if seen != set(range(len(layout.units))) or len(set(layout.units)) != len(layout.units):
        yield f"the stages hold units {sorted(seen)}, but the names are {layout.units}"
        return
    for what, table in (("owners", layout.owners), ("replicas", layout.replicas)):
        if len(table) != len(layout.units) or any(len(row) != layout.num_slices for row in table):
            yield f"{what} must have {len(layout.units)} rows of {layout.num_slices} slices"
            return
    leaders = [{cell.leader for cell in stage.cells} for stage in layout.stages]
    for index, stage in enumerate(layout.stages):
        for cell in stage.cells:
            others = seen.difference(stage.units) if cell.incoming else ()
            if list(cell.incoming) != sorted(set(cell.incoming).intersection(others)):
                yield f"cell {cell.leader} of stage {index} lists incoming units {cell.incoming}: must be others'"
    everywhere = set().union(*leaders)
    for unit in range(len(layout.units)):
        yield from _slice_problems(layout, unit, leaders[layout.home(unit)], everywhere)


def _slice_problems(layout: Tables, unit: int, home: Collection[int], everywhere: Collection[int]) -> Iterator[str]:
    """What is wrong with a unit's owners and replicas. ``home``: leaders of its home stage; ``everywhere``: of all."""
    name = layout.units[unit]
    for k, (owner, copies) in enumerate(zip(layout.owners[unit], layout.replicas[unit], strict=True)):
        if owner not in home:
            yield f"slice {k} of {name} is owned by {owner}, who leads no cell of home stage {layout.home(unit)}"
        for copy in copies:
            if copy not in everywhere:
                yield f"a replica of slice {k} of {name} is at {copy}, who leads no cell"
        if owner in copies or len(set(copies)) < len(copies):
            yield f"slice {k} of {name} has its owner {owner} and its replicas {copies} not in different cells"
