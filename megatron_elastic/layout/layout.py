"""Layout: the immutable value that says which ranks compute what, and who owns which slice.

Vocabulary. A *cell* is the smallest set of ranks that computes one stage for some grains (its tensor-parallel ranks).
A *stage* is a run of units and the cells that hold them. A *slice* is 1/K of a unit's optimizer state; it is owned by
a cell of the unit's home stage, and each of the cell's ranks owns the part of its own tensor-parallel index. A cell is
named by its leader, the rank of tensor-parallel index 0.

A grain is computed by one cell of each stage. Where grains can be cut (``Layout.samples``), several cells of a stage
may share one, each computing a part; the stages before and after may cut it elsewhere, or not at all.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_elastic.layout.invariants import problems
from megatron_elastic.layout.lookup import Lookup
from megatron_elastic.layout.part import Part


class LayoutError(Exception):
    """A layout is inconsistent, or was asked for something that it does not contain."""


@dataclass(frozen=True, slots=True)
class Cell:
    """Ranks that compute one stage together for whole ``grains`` and for ``parts`` of others, at most one of each.

    ``ranks`` are ordered by tensor-parallel index. A cell without grains is a *shadow*: it follows the others,
    receiving the stage's parameters after every step, and gets grains once it has caught up. That is how ranks join.
    ``incoming`` are units of other stages whose parameters it receives as well, because it is to compute them soon.
    That is how units move.
    """

    ranks: tuple[int, ...]
    grains: tuple[int, ...]
    incoming: tuple[int, ...] = ()
    parts: tuple[Part, ...] = ()

    @property
    def leader(self) -> int:
        """The rank of tensor-parallel index 0, which names the cell."""
        return self.ranks[0]

    @property
    def shadow(self) -> bool:
        """Whether it only follows."""
        return not (self.grains or self.parts)

    @property
    def share(self) -> tuple[int, ...]:
        """The grains that it computes whole or a part of."""
        return self.grains if not self.parts else tuple(sorted((*self.grains, *(part.grain for part in self.parts))))


@dataclass(frozen=True, slots=True)
class Stage:
    """The units (ascending indices into ``Layout.units``) of one pipeline stage, and the cells that hold them.

    Units that follow one another are a *chunk*. All stages have as many; a grain passes the first chunk of each stage,
    then the second of each, and so on.
    """

    units: tuple[int, ...]
    cells: tuple[Cell, ...]

    @property
    def width(self) -> int:
        """Number of cells."""
        return len(self.cells)


@dataclass(frozen=True, slots=True)
class Layout:
    """Who computes and who owns what, at one epoch. Build the first one with ``Layout.grid``.

    ``owners[unit][slice]`` is the leader of the owning cell, ``replicas[unit][slice]`` are those of the cells with a
    live copy: ``num_replicas`` of them, fewer where the stage has too few cells, more while slices move. ``spares`` are
    live ranks in no cell; ``lost`` are the dead, for ever. ``hosts`` lists all of them by failure domain. A grain can
    be cut between any of its ``samples``; if it is 1, grains stay whole.
    """

    epoch: int
    num_slices: int
    num_replicas: int
    num_grains: int
    units: tuple[str, ...]
    stages: tuple[Stage, ...]
    owners: tuple[tuple[int, ...], ...]
    replicas: tuple[tuple[tuple[int, ...], ...], ...]
    spares: tuple[int, ...]
    lost: tuple[int, ...]
    hosts: tuple[tuple[int, ...], ...]
    samples: int = 1
    _lookup: Lookup | None = field(default=None, init=False, repr=False, compare=False)

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
    ) -> Layout:
        """The fault-free layout, in Megatron's rank order: rank = t + tp * (d + dp * p).

        Grain g goes to column g % dp; slice k of a unit is owned by cell k % dp of its home stage, and its replicas are
        in the cells after that one, on other hosts first. ``ranks_per_host`` is None where all ranks are on one host.
        Raises LayoutError when the arguments do not fit together.
        """
        if min(tp, pp, dp, num_grains, num_slices) < 1:
            raise LayoutError(
                f"sizes must be positive: tp {tp}, pp {pp}, dp {dp}, grains {num_grains}, slices {num_slices}"
            )
        if len(stage_units) != pp:
            raise LayoutError(f"units are given for {len(stage_units)} stages, but the pipeline has {pp}")
        if replicas < 0:
            raise LayoutError(f"replicas must be 0 or more, got {replicas}")
        stages = tuple(
            Stage(
                units=tuple(stage_units[p]),
                cells=tuple(
                    Cell(
                        ranks=tuple(t + tp * (d + dp * p) for t in range(tp)),
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
        world = tp * pp * dp
        per_host = ranks_per_host or world
        hosts = tuple(tuple(range(at, min(at + per_host, world))) for at in range(0, world, per_host))
        leaders = [[cell.leader for cell in stages[home[unit]].cells] for unit in range(len(units))]
        copies = [
            [_after([cell.leader for cell in stage.cells], d, per_host, replicas) for d in range(min(dp, num_slices))]
            for stage in stages
        ]
        layout = cls(
            epoch=0,
            num_slices=num_slices,
            num_replicas=replicas,
            num_grains=num_grains,
            units=tuple(units),
            stages=stages,
            owners=tuple(tuple(cells[k % dp] for k in range(num_slices)) for cells in leaders),
            replicas=tuple(
                tuple(copies[home[unit]][k % dp] for k in range(num_slices)) for unit in range(len(units))
            ),
            spares=(),
            lost=(),
            hosts=hosts,
            samples=samples,
        )
        layout.validate()
        return layout

    # ---- sizes and membership --------------------------------------------------------------

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks in cells, ascending."""
        return self._index().ranks

    @property
    def cell_size(self) -> int:
        """Ranks in a cell: the tensor-parallel size."""
        return len(self.stages[0].cells[0].ranks)

    @property
    def pipeline_size(self) -> int:
        """Number of stages."""
        return len(self.stages)

    @property
    def num_chunks(self) -> int:
        """Chunks of each stage; one but for virtual pipeline stages."""
        return len(self.chunks(0))

    def chunks(self, stage: int) -> tuple[tuple[int, ...], ...]:
        """The units of each chunk of a stage. What it holds of another stage, a tied embedding, is in the last one."""
        return self._index().chunks[stage]

    def stage_of(self, rank: int) -> int:
        """Index of the stage that ``rank`` computes. Raises LayoutError for a rank in no cell."""
        return self._place(rank)[0]

    def cell_of(self, rank: int) -> Cell:
        """The cell that ``rank`` is in. Raises LayoutError for a rank in no cell."""
        return self._place(rank)[1]

    def tp_index(self, rank: int) -> int:
        """Tensor-parallel index of ``rank``. Raises LayoutError for a rank in no cell."""
        return self._place(rank)[2]

    def host_of(self, rank: int) -> int:
        """Index of the failure domain that ``rank`` is in. Raises LayoutError for a rank that never was here."""
        try:
            return self._index().hosts[rank]
        except KeyError:
            raise LayoutError(f"rank {rank} is on no host at epoch {self.epoch}") from None

    # ---- grains and their parts --------------------------------------------------------------

    def sharers(self, stage: int, grain: int) -> tuple[tuple[Cell, Part], ...]:
        """The cells of ``stage`` that compute ``grain``, and what of it, in the order of its samples.

        Raises LayoutError if there are none.
        """
        if not 0 <= grain < self.num_grains or not 0 <= stage < self.pipeline_size:
            raise LayoutError(f"no cell of stage {stage} computes grain {grain} at epoch {self.epoch}")
        cell = self._index().whole[stage].get(grain)
        return self._index().cut[stage][grain] if cell is None else ((cell, self.whole(grain)),)

    def part(self, rank: int, grain: int) -> Part:
        """What the rank's cell computes of ``grain``. Raises LayoutError if that is nothing."""
        stage, cell, _ = self._place(rank)
        for other, part in self.sharers(stage, grain):
            if other.leader == cell.leader:
                return part
        raise LayoutError(f"rank {rank} computes nothing of grain {grain} at epoch {self.epoch}")

    def common(self, stage: int, part: Part) -> tuple[tuple[Cell, Part], ...]:
        """The cells of ``stage`` that compute samples of ``part``, and which, in their order.

        They are whom a cell of a neighbouring stage that computes ``part`` exchanges activations with.
        """
        shared = ((cell, other.common(part)) for cell, other in self.sharers(stage, part.grain))
        return tuple((cell, both) for cell, both in shared if both is not None)

    def whole(self, grain: int) -> Part:
        """All of a grain."""
        return Part(grain, 0, self.samples)

    def load(self, cell: Cell) -> float:
        """How many grains a cell computes; parts count by their samples."""
        return len(cell.grains) + sum(part.size for part in cell.parts) / self.samples

    # ---- units and slices ------------------------------------------------------------------

    def home(self, unit: int) -> int:
        """The first stage that holds ``unit``; the owners of its slices are cells of this stage."""
        try:
            return self._index().homes[unit]
        except KeyError:
            raise LayoutError(f"no stage holds unit {unit} at epoch {self.epoch}") from None

    def holders(self, unit: int) -> tuple[Cell, ...]:
        """Cells that hold ``unit``'s parameters: of its stages (a tied embedding has two), then those it moves to."""
        return self._index().holders[unit]

    def contributors(self, unit: int) -> tuple[Cell, ...]:
        """The cells that compute ``unit`` for some grains."""
        return self._index().contributors[unit]

    def held_by(self, rank: int) -> tuple[int, ...]:
        """Units whose parameters ``rank`` holds, ascending. Raises LayoutError for a rank in no cell."""
        stage, cell, _ = self._place(rank)
        return tuple(sorted({*self.stages[stage].units, *cell.incoming}))

    def owner(self, unit: int, slice: int, tp: int) -> int:
        """The rank that owns part ``tp`` of the slice."""
        return self._index().cells[self.owners[unit][slice]].ranks[tp]

    def copies(self, unit: int, slice: int, tp: int) -> tuple[int, ...]:
        """The ranks with live copies of part ``tp`` of the slice, besides its owner."""
        return tuple(self._index().cells[leader].ranks[tp] for leader in self.replicas[unit][slice])

    def owned(self, rank: int) -> tuple[tuple[int, int], ...]:
        """(unit, slice) of everything ``rank`` owns, ascending; empty for ranks in no cell."""
        return self._index().owned.get(rank, ())

    def replicated(self, rank: int) -> tuple[tuple[int, int], ...]:
        """(unit, slice) of everything ``rank`` keeps a live copy of, ascending; empty for ranks in no cell."""
        return self._index().replicated.get(rank, ())

    @property
    def parts(self) -> tuple[tuple[int, int, int], ...]:
        """(unit, slice, tensor-parallel index) of all there is."""
        return tuple(
            (unit, k, tp)
            for unit in range(len(self.units))
            for k in range(self.num_slices)
            for tp in range(self.cell_size)
        )

    # ---- validation ------------------------------------------------------------------------

    def validate(self) -> None:
        """Raise LayoutError, saying what is wrong, unless every invariant of a layout holds."""
        for problem in problems(self):
            raise LayoutError(f"layout of epoch {self.epoch}: {problem}")

    # ---- text ------------------------------------------------------------------------------

    def to_json(self) -> str:
        """Stable JSON: the same text for equal layouts; one stage and one unit a line."""

        def rows(values: Iterable[Any]) -> str:
            return "[\n    " + ",\n    ".join(json.dumps(value) for value in values) + "\n  ]"

        stages = (
            {"units": stage.units, "cells": [_cell_to_json(cell) for cell in stage.cells]} for stage in self.stages
        )
        parts = {
            "epoch": json.dumps(self.epoch),
            "num_slices": json.dumps(self.num_slices),
            "num_replicas": json.dumps(self.num_replicas),
            "num_grains": json.dumps(self.num_grains),
            **({"samples": json.dumps(self.samples)} if self.samples > 1 else {}),
            "units": json.dumps(self.units),
            "stages": rows(stages),
            "owners": rows(self.owners),
            "replicas": rows(self.replicas),
            "spares": json.dumps(self.spares),
            "lost": json.dumps(self.lost),
            "hosts": json.dumps(self.hosts),
        }
        return "{\n" + ",\n".join(f'  "{key}": {text}' for key, text in parts.items()) + "\n}\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Layout:
        """Read what ``to_json`` wrote, and validate it. Raises LayoutError."""
        try:
            data = json.loads(text)
            layout = cls(
                epoch=int(data["epoch"]),
                num_slices=int(data["num_slices"]),
                num_replicas=int(data["num_replicas"]),
                num_grains=int(data["num_grains"]),
                units=tuple(str(name) for name in data["units"]),
                stages=tuple(
                    Stage(
                        units=_ints(stage["units"]),
                        cells=tuple(
                            Cell(
                                _ints(cell["ranks"]),
                                _ints(cell["grains"]),
                                _ints(cell.get("incoming", ())),
                                tuple(Part(*_ints(part)) for part in cell.get("parts", ())),
                            )
                            for cell in stage["cells"]
                        ),
                    )
                    for stage in data["stages"]
                ),
                owners=tuple(_ints(row) for row in data["owners"]),
                replicas=tuple(tuple(_ints(copies) for copies in row) for row in data["replicas"]),
                spares=_ints(data["spares"]),
                lost=_ints(data["lost"]),
                hosts=tuple(_ints(host) for host in data["hosts"]),
                samples=int(data.get("samples", 1)),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise LayoutError(f"this is no layout in JSON: {type(error).__name__}: {error}") from None
        layout.validate()
        return layout

    def __str__(self) -> str:
        """A compact table for people: one stage a line, each cell as ranks:grains."""
        head = (
            f"epoch {self.epoch}: {len(self.ranks)} ranks, {self.pipeline_size} stages, cells of {self.cell_size}, "
            f"{self.num_grains} grains, {self.num_slices} slices; "
            f"spares {_spans(self.spares)}; lost {_spans(self.lost)}"
        )
        lines = [head]
        for index, stage in enumerate(self.stages):
            homes = [[self.units[unit] for unit in of if self.home(unit) == index] for of in self.chunks(index)]
            home = " ".join(f"{of[0]}..{of[-1]}" for of in homes)
            also = "".join(f"+{self.units[unit]}" for unit in stage.units if self.home(unit) != index)
            cells = "  ".join(
                f"{_spans(cell.ranks)}:[{' '.join(map(str, (*cell.grains, *cell.parts)))}]" for cell in stage.cells
            )
            lines.append(f"  stage {index}  {home}{also}  {cells}")
        return "\n".join(lines)

    # ---- lookups ---------------------------------------------------------------------------

    def _index(self) -> Lookup:
        if self._lookup is None:
            object.__setattr__(self, "_lookup", Lookup(self))
        assert self._lookup is not None
        return self._lookup

    def _place(self, rank: int) -> tuple[int, Cell, int]:
        try:
            return self._index().places[rank]
        except KeyError:
            what = "is a spare" if rank in self.spares else "is lost" if rank in self.lost else "is unknown"
            raise LayoutError(f"rank {rank} is in no cell at epoch {self.epoch}: it {what}") from None


def _cell_to_json(cell: Cell) -> dict[str, Any]:
    parts: dict[str, Any] = {"ranks": cell.ranks, "grains": cell.grains}
    if cell.incoming:
        parts["incoming"] = cell.incoming
    if cell.parts:
        parts["parts"] = cell.parts
    return parts


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


def _ints(values: Iterable[Any]) -> tuple[int, ...]:
    return tuple(int(value) for value in values)


def _spans(ranks: Sequence[int]) -> str:
    """``0-3,6`` for (0, 1, 2, 3, 6); a dash for nothing."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans) or "-"
