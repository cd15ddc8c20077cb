"""Layout: the immutable value that says which ranks compute what, and who owns which slice.

Vocabulary. A *cell* is the smallest set of ranks that computes one stage for some grains. It consists of *teams* of
tensor-parallel ranks: as many as the larger of the context- and the expert-parallel size, of which the smaller divides
the larger. As many teams in a row as the context-parallel size have a part each of the sequences of one micro-batch;
a grain is a micro-batch of each of these rows. As many in a row as the expert-parallel size have a part each of the
experts. A *stage* is a run of units and the cells that hold them. A *slice* is 1/K of a unit's optimizer state; it is
owned by a cell of the unit's home stage, in which one of the ranks that hold the same part of the unit owns that part
of the slice (``Tables.keepers``). A cell is named by its leader, the rank of place 0.

A grain is computed by one cell of each stage. Where grains can be cut (``Layout.samples``), several cells of a stage
may share one, each computing a part; the stages before and after may cut it elsewhere, or not at all.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_elastic.layout.cell import Cell
from megatron_elastic.layout.errors import LayoutError
from megatron_elastic.layout.invariants import problems
from megatron_elastic.layout.stage import Stage
from megatron_elastic.layout.tables import Tables
from megatron_elastic.layout.text import read, table, write


@dataclass(frozen=True, slots=True)
class Layout(Tables):
    """Tables that are to fulfil the invariants. Build the first one with ``Layout.grid``."""

    @classmethod
    def grid(
        cls,
        *,
        tp: int,
        pp: int,
        dp: int,
        stage_units: Sequence[Sequence[int]],
        units: Sequence[str],
        num_grains: int,
        num_slices: int,
        replicas: int,
        ranks_per_host: int | None = None,
        samples: int = 1,
        cp: int = 1,
        ep: int = 1,
    ) -> Layout:
        """The fault-free layout of ``dp`` cells a stage. In Megatron's order: t + tp * (team + teams * (d + dp * p)).

        Grain g goes to column g % dp; slice k of a unit is owned by cell k % dp of its home stage, and its replicas are
        in the cells after that one, on other hosts first. ``ranks_per_host`` is None where all ranks are on one host.
        Raises LayoutError when the arguments do not fit together.
        """
        if min(tp, pp, dp, cp, ep, num_grains, num_slices) < 1:
            raise LayoutError(
                f"sizes must be positive: tp {tp}, pp {pp}, dp {dp}, cp {cp}, ep {ep}, grains {num_grains}, "
                f"slices {num_slices}"
            )
        size = tp * max(cp, ep)
        if len(stage_units) != pp:
            raise LayoutError(f"units are given for {len(stage_units)} stages, but the pipeline has {pp}")
        if replicas < 0:
            raise LayoutError(f"replicas must be 0 or more, got {replicas}")
        stages = tuple(
            Stage(
                units=tuple(stage_units[p]),
                cells=tuple(
                    Cell(
                        ranks=tuple(at + size * (d + dp * p) for at in range(size)),
                        grains=tuple(range(d, num_grains, dp)),
                    )
                    for d in range(dp)
                ),
            )
            for p in range(pp)
        )
        home = {unit: p for p in reversed(range(pp)) for unit in stage_units[p]}
        if set(home) != set(range(len(units))):
            raise LayoutError(f"the stages hold units {sorted(home)}, but there are units 0..{len(units) - 1}")
        world = size * pp * dp
        per_host = ranks_per_host or world
        hosts = tuple(tuple(range(at, min(at + per_host, world))) for at in range(0, world, per_host))
        by_stage = [[cell.leader for cell in stage.cells] for stage in stages]
        copies = [[_after(cells, d, per_host, replicas) for d in range(min(dp, num_slices))] for cells in by_stage]
        layout = cls(
            epoch=0,
            num_slices=num_slices,
            num_replicas=replicas,
            num_grains=num_grains,
            units=tuple(units),
            stages=stages,
            owners=tuple(tuple(by_stage[home[unit]][k % dp] for k in range(num_slices)) for unit in range(len(units))),
            replicas=tuple(
                tuple(copies[home[unit]][k % dp] for k in range(num_slices)) for unit in range(len(units))
            ),
            spares=(),
            lost=(),
            hosts=hosts,
            samples=samples,
            cp=cp,
            ep=ep,
        )
        layout.validate()
        return layout

    def validate(self) -> None:
        """Raise LayoutError, saying what is wrong, unless every invariant of a layout holds."""
        for problem in problems(self):
            raise LayoutError(f"layout of epoch {self.epoch}: {problem}")

    def to_json(self) -> str:
        """Stable JSON: the same text for equal layouts; one stage and one unit a line."""
        return write(self)

    @classmethod
    def from_json(cls, text: str | bytes) -> Layout:
        """Read what ``to_json`` wrote, and validate it. Raises LayoutError."""
        layout = read(cls, text)
        layout.validate()
        return layout

    def __str__(self) -> str:
        """A compact table for people: one stage a line, each cell as ranks:grains."""
        return table(self)


def _after(leaders: Sequence[int], index: int, per_host: int, count: int) -> tuple[int, ...]:
    """The ``count`` cells that are to hold copies of what cell ``index`` owns; fewer where there are not so many.

    One of each other host first, then a second one of each; those of the same host come last. ``leaders`` ascend.
    """
    n, here = len(leaders), leaders[index] // per_host
    # From as many steps on as the host has cells, so that the cells of a host spread over those of the next.
    step = bisect_left(leaders, (here + 1) * per_host) - bisect_left(leaders, here * per_host)
    seen = Counter({here: n})
    turns = []
    for i in range(n):
        leader = leaders[(index + step + i) % n]
        turns.append((seen[leader // per_host], leader))
        seen[leader // per_host] += 1
        if len(seen) > count:  # enough other hosts: what comes later would come later
            break
    ordered = sorted(turns, key=lambda turn: turn[0])
    return tuple(leader for _, leader in ordered if leader != leaders[index])[:count]
