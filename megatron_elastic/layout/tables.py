"""Tables: what a layout says, and what can be looked up in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron_elastic.layout.cell import Cell
from megatron_elastic.layout.errors import LayoutError
from megatron_elastic.layout.lookup import Lookup
from megatron_elastic.layout.part import Part
from megatron_elastic.layout.stage import Stage
from megatron_elastic.layout.unit import EXPERTS
from megatron_elastic.layout.way import Placement, Position, joined, way


@dataclass(frozen=True, slots=True)
class Tables:
    """Who computes and who owns what, at one epoch: the content of a ``Layout``.

    ``owners[unit][slice]`` is the leader of the owning cell, ``replicas[unit][slice]`` are those of the cells with a
    live copy: ``num_replicas`` of them, fewer where the stage has too few cells, more while slices move. ``spares`` are
    live ranks in no cell; ``lost`` are the dead, for ever. ``hosts`` lists all of them by failure domain. A grain can
    be cut between any of its ``samples``; if it is 1, grains stay whole. ``cp`` and ``ep`` are the context- and the
    expert-parallel size. Cells are formed until there are ``most_cells``, or if that is None as long as there are
    ranks. ``tied``: whether the end of the model computes with the embedding, which units do not show where both are in
    one stage; None: not known.
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
    cp: int = 1
    ep: int = 1
    most_cells: int | None = None
    tied: bool | None = None
    recomputed: tuple[int, ...] = ()
    _lookup: Lookup | None = field(default=None, init=False, repr=False, compare=False)

    # ---- sizes and membership --------------------------------------------------------------

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks in cells, ascending."""
        return self._index().ranks

    @property
    def cells(self) -> Mapping[int, Cell]:
        """All cells, by their leaders."""
        return self._index().cells

    @property
    def places(self) -> Mapping[int, tuple[int, Cell, int]]:
        """For all ranks in cells: the index of the stage, the cell, and the place in it."""
        return self._index().places

    @property
    def cell_size(self) -> int:
        """Ranks in a cell."""
        return len(self.stages[0].cells[0].ranks)

    @property
    def tp(self) -> int:
        """The tensor-parallel size."""
        return self.cell_size // self.teams

    @property
    def teams(self) -> int:
        """Into how many teams, of tensor-parallel ranks each, a cell is divided; ``cp`` of them share a micro-batch."""
        return max(self.cp, self.ep)

    @property
    def pipeline_size(self) -> int:
        """Number of stages."""
        return len(self.stages)

    @property
    def num_chunks(self) -> int:
        """Chunks of the stage that has most; one but for virtual pipeline stages."""
        return max(map(len, self._index().chunks))

    @property
    def loops(self) -> int:
        """How often a grain passes all stages in turn; 1 also where chunks are placed in any other way."""
        placement, chunks = self.placement or ("v", 1)
        return chunks if placement == "loop" else 1

    @property
    def placement(self) -> tuple[Placement, int] | None:
        """How chunks are placed on the stages, and of how many each; None: in no way that has a name."""
        return self._index().placement

    @property
    def way(self) -> tuple[Position, ...]:
        """The positions that a grain passes, forward; then it goes back."""
        return self._index().way

    @property
    def num_batches(self) -> int:
        """Micro-batches of the global batch."""
        return self.num_grains * self.batches

    @property
    def batches(self) -> int:
        """Micro-batches of a grain."""
        return self.teams // self.cp

    def chunks(self, stage: int) -> tuple[tuple[int, ...], ...]:
        """The units of each chunk of a stage. What it holds of another stage, a tied embedding, is in the last one."""
        return self._index().chunks[stage]

    def through(self, stages: int) -> tuple[int, ...]:
        """The stages that a grain passes, in turn, if there are so many and chunks are placed as they are here.

        Where they are placed in no way that is known, that is a loop of as many as the stage has that has most.
        """
        present = tuple(position.stage for position in self.way)
        if stages == self.pipeline_size:
            return present
        placement, chunks = self.placement or ("loop", self.num_chunks)
        return joined(way(placement, stages, chunks))

    @property
    def is_tied(self) -> bool:
        """Whether the end of the model computes with the embedding. Where nobody knows and both are in one stage, it
        counts as tied.
        """
        return 0 in self.stages[self.way[-1].stage].units if self.tied is None else self.tied

    def recomputes(self, stage: int, chunk: int) -> bool:
        """Whether a chunk of a stage keeps only its input from forward to backward, and makes the forward again then.

        After units have moved, one that has any of the units that are recomputed does.
        """
        return any(unit in self.recomputed for unit in self.way[self.position(stage, chunk)].units)

    def task_of(self, rank: int) -> object:
        """What ``rank`` does with a grain that it gets. In layouts in which it is equal a grain takes it as long.

        Raises LayoutError for a rank in no cell.
        """
        stage, cell, _ = self._place(rank)
        chunks = tuple((units, self.recomputes(stage, chunk)) for chunk, units in enumerate(self.chunks(stage)))
        return cell.ranks, cell.shadow, self.samples, self.cp, self.ep, chunks

    def position(self, stage: int, chunk: int) -> int:
        """Which place on the way a chunk of a stage has. Raises KeyError if there is no such chunk."""
        return self._index().numbers[stage, chunk]

    def stage_of(self, rank: int) -> int:
        """Index of the stage that ``rank`` computes. Raises LayoutError for a rank in no cell."""
        return self._place(rank)[0]

    def cell_of(self, rank: int) -> Cell:
        """The cell that ``rank`` is in. Raises LayoutError for a rank in no cell."""
        return self._place(rank)[1]

    def place_of(self, rank: int) -> int:
        """Index of ``rank`` among the ranks of its cell. Raises LayoutError for a rank in no cell."""
        return self._place(rank)[2]

    def tp_index(self, rank: int) -> int:
        """Tensor-parallel index of ``rank``. Raises LayoutError for a rank in no cell."""
        return self._place(rank)[2] % self.tp

    def team_of(self, rank: int) -> int:
        """Which team of its cell ``rank`` is in. Raises LayoutError for a rank in no cell."""
        return self._place(rank)[2] // self.tp

    def cp_index(self, rank: int) -> int:
        """Context-parallel index of ``rank``. Raises LayoutError for a rank in no cell."""
        return self.team_of(rank) % self.cp

    def batch_of(self, rank: int) -> int:
        """Which micro-batch of a grain is the rank's. Raises LayoutError for a rank in no cell."""
        return self.team_of(rank) // self.cp

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
        if self._index().whole[stage].get(grain) is cell:
            return self.whole(grain)
        for other, part in self.sharers(stage, grain):
            if other.leader == cell.leader:
                return part
        raise LayoutError(f"rank {rank} computes nothing of grain {grain} at epoch {self.epoch}")

    def common(self, stage: int, part: Part) -> tuple[tuple[Cell, Part], ...]:
        """The cells of ``stage`` that compute samples of ``part``, and which, in their order.

        They are whom a cell of a neighbouring stage that computes ``part`` exchanges activations with.
        """
        if (whole := self._index().whole[stage].get(part.grain)) is not None:
            return ((whole, part),)
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

    def at_home(self, stage: int) -> tuple[int, ...]:
        """The units of a stage that have their home there: all but a tied embedding that comes first elsewhere."""
        return self._index().at_home[stage]

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

    def num_parts(self, unit: int) -> int:
        """Into how many parts a cell divides ``unit``: experts among ``ep`` teams, the rest in each team alike."""
        return self.tp * self.ep if self.units[unit].startswith(EXPERTS) else self.tp

    def part_of(self, unit: int, rank: int) -> int:
        """Which of the parts of ``unit`` the rank holds, if any. Raises LayoutError for a rank in no cell."""
        return self.place_of(rank) % self.num_parts(unit)

    def sharing(self, cell: Cell, unit: int, part: int) -> tuple[int, ...]:
        """The ranks of a cell that hold a part of ``unit``, if it holds the unit."""
        return cell.ranks[part :: self.num_parts(unit)]

    def keepers(self, cell: Cell, unit: int, slice: int) -> tuple[int, ...]:
        """[part] = the rank that keeps that part of a slice, in a cell that owns the slice or has a copy of it."""
        parts = self.num_parts(unit)
        at = slice * (self.cell_size // parts) // self.num_slices * parts
        return cell.ranks[at : at + parts]

    def owner(self, unit: int, slice: int, part: int) -> int:
        """The rank that owns part ``part`` of the slice."""
        return self.keepers(self._index().cells[self.owners[unit][slice]], unit, slice)[part]

    def copies(self, unit: int, slice: int, part: int) -> tuple[int, ...]:
        """The ranks with live copies of part ``part`` of the slice, besides its owner."""
        cells = self._index().cells
        return tuple(self.keepers(cells[leader], unit, slice)[part] for leader in self.replicas[unit][slice])

    def owned(self, rank: int) -> tuple[tuple[int, int], ...]:
        """(unit, slice) of everything ``rank`` owns, ascending; empty for ranks in no cell."""
        return self._index().owned.get(rank, ())

    def replicated(self, rank: int) -> tuple[tuple[int, int], ...]:
        """(unit, slice) of everything ``rank`` keeps a live copy of, ascending; empty for ranks in no cell."""
        return self._index().replicated.get(rank, ())

    @property
    def parts(self) -> tuple[tuple[int, int, int], ...]:
        """(unit, slice, part) of all there is."""
        return tuple(
            (unit, k, part)
            for unit in range(len(self.units))
            for k in range(self.num_slices)
            for part in range(self.num_parts(unit))
        )

    # ---- lookups ---------------------------------------------------------------------------

    def _index(self) -> Lookup:
        if self._lookup is None:
            keepers = self.keepers if self.teams > 1 else None
            lookup = Lookup(self.stages, self.owners, self.replicas, self.hosts, keepers)
            object.__setattr__(self, "_lookup", lookup)
        assert self._lookup is not None
        return self._lookup

    def _place(self, rank: int) -> tuple[int, Cell, int]:
        try:
            return self._index().places[rank]
        except KeyError:
            what = "is a spare" if rank in self.spares else "is lost" if rank in self.lost else "is unknown"
            raise LayoutError(f"rank {rank} is in no cell at epoch {self.epoch}: it {what}") from None
