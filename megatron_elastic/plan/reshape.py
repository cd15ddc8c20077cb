"""Reshape: cells of another tensor-, context- or expert-parallel size, made of the ranks that are in cells.

Tensor-parallel ranks stay together, or as many of them as both sizes have in common: their teams are put together, or
told apart, to cells of another size. Units stay in their stages; grains, which are as many micro-batches as a cell
computes at once, get other numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from megatron_elastic.layout import Cell, Layout, Stage
from megatron_elastic.plan.errors import NoLayout
from megatron_elastic.plan.growth import even

_Team = tuple[int, ...]


def reshape(layout: Layout, tp: int, cp: int, ep: int, epoch: int) -> Layout:
    """The layout of ``epoch`` with these tensor-, context- and expert-parallel sizes.

    A slice goes to the cell that its keeper gets into, where that is possible. Ranks that are left over are spares;
    spares wait for no place any more. Raises NoLayout if there cannot be such cells.
    """
    if max(cp, ep) % min(cp, ep):
        raise NoLayout(f"context-parallel size {cp} with expert-parallel size {ep}: one must divide the other; change "
                       "one of them")
    batches = max(cp, ep) // cp
    num_grains, rest = divmod(layout.num_batches, batches)
    if rest:
        raise NoLayout(f"{layout.num_batches} micro-batches of a step cannot be computed {batches} at a time, as cells "
                       f"of expert-parallel size {ep} do: ask for a size that divides them")
    teams, size = max(cp, ep), tp * max(cp, ep)
    stages = []
    for index, stage in enumerate(layout.stages):
        ranks = _cells(layout, stage, tp, teams)
        if not ranks:
            raise NoLayout(f"a cell is to be {size} ranks, and stage {index} has {stage.width * layout.cell_size}: ask "
                           "for smaller sizes, or for fewer stages first")
        cells = (Cell(each, tuple(range(i, num_grains, len(ranks)))) for i, each in enumerate(ranks))
        stages.append(Stage(stage.units, tuple(cells)))
    leaders = {rank: cell.leader for stage in stages for cell in stage.cells for rank in cell.ranks}
    most = layout.most_cells
    new = replace(
        layout, epoch=epoch, stages=tuple(stages), cp=cp, ep=ep, num_grains=num_grains,
        spares=tuple(sorted({*layout.ranks, *layout.spares}.difference(leaders))),
        most_cells=None if most is None else max(most * layout.cell_size // size, len(stages)),
    )  # fmt: skip
    owners, replicas = [], []
    for unit in range(len(layout.units)):
        home = [cell.leader for cell in stages[layout.home(unit)].cells]
        of_unit = [_slice(layout, unit, k, leaders, home) for k in range(layout.num_slices)]
        owners.append(tuple(owner for owner, _ in of_unit))
        replicas.append(tuple(copies for _, copies in of_unit))
    return even(replace(new, owners=tuple(owners), replicas=tuple(replicas)), epoch)


def _cells(layout: Layout, stage: Stage, tp: int, teams: int) -> list[_Team]:
    """Ranks of the cells of so many teams each, of ``tp`` ranks."""
    together = math.gcd(layout.tp, tp)
    some = [cell.ranks[at : at + together] for cell in stage.cells for at in range(0, layout.cell_size, together)]
    return _bundles(layout, _bundles(layout, some, tp // together), teams)


def _bundles(layout: Layout, some: Iterable[_Team], size: int) -> list[_Team]:
    """So many of them put together; those of one host come together where that is possible. Some may be left over."""
    by_host: dict[int, list[_Team]] = {}
    for team in some:
        by_host.setdefault(layout.host_of(team[0]), []).append(team)
    whole: list[_Team] = []
    rest: list[_Team] = []
    for here in by_host.values():
        there = len(here) // size * size
        whole += here[:there]
        rest += here[there:]
    every = [*whole, *rest]
    return [
        tuple(rank for team in every[at : at + size] for rank in team)
        for at in range(0, len(every) - size + 1, size)
    ]


def _slice(
    layout: Layout, unit: int, k: int, leaders: dict[int, int], home: Sequence[int]
) -> tuple[int, tuple[int, ...]]:
    """Owner and replicas of a slice. ``leaders``: of the cell that a rank gets into; ``home``: those of its stage."""
    there = [
        leaders.get(layout.keepers(layout.cells[leader], unit, k)[0])
        for leader in (layout.owners[unit][k], *layout.replicas[unit][k])
    ]
    owner = next((leader for leader in there if leader in home), None)
    owner = home[k % len(home)] if owner is None else owner
    return owner, tuple(dict.fromkeys(leader for leader in there if leader not in (None, owner)))
