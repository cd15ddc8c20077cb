"""Graph: which units each stage holds, and how many cells, so that the slowest stage is as fast as it can be.

Exact, by dynamic programming over the layers and what is before and after them: the embeddings, and the head. Memory of
a device at a stage with k stages from it to the end: parameters, its share of the optimizer's state, and the
activations of k grains, as 1F1B keeps them, or of all stages' where backwards are in two.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np
from numpy.typing import NDArray

from megatron_elastic.layout import MTP, Layout, positions
from megatron_elastic.plan.costs.cost import Costs, live_activations, own
from megatron_elastic.plan.costs.keeping import Keeping
from megatron_elastic.plan.errors import NoLayout

_Matrix = NDArray[np.float64]
_ROUNDING = 1e-9
"""Relative difference below which two times are the same."""


@dataclass(frozen=True, slots=True)
class Graph:
    """Units (ascending indices; a tied embedding also where the model ends) and number of cells of every stage."""

    stage_units: tuple[tuple[int, ...], ...]
    widths: tuple[int, ...]
    slowest_ms: float = 0.0
    """Milliseconds that the slowest stage computes in a step; 0 where nobody has asked."""

    @classmethod
    def of(cls, layout: Layout, widths: Sequence[int] | None = None) -> Graph:
        """That of a layout, with other widths maybe."""
        return cls(tuple(stage.units for stage in layout.stages),
                   tuple(widths or (stage.width for stage in layout.stages)))


class Planner:
    """Plans graphs for one model.

    Args:
        names: the units, as in ``Layout.units``.
        tied: whether the end of the model needs the embedding too, for a tied output layer or further predictions.
        grains: of the global batch.
        samples: of a grain, between which it can be cut; a cell of a stage of width w computes
            ceil(grains * samples / w) of all samples.
        split: whether the schedule has backwards in two, and so keeps more activations.
        recompute: whether stages whose activations do not fit may make their forwards again.
    """

    def __init__(
        self, names: Sequence[str], costs: Costs, tied: bool, grains: int, samples: int = 1, split: bool = False,
        recompute: bool = False,
    ) -> None:
        layers = [unit for unit, name in enumerate(names) if name.startswith("layer.")]
        if not layers:
            raise NoLayout(f"a pipeline is cut between layers, but the units {', '.join(names)} contain none")
        self._names = names
        self._costs = costs
        self._tied = tied
        self._split = split
        self._recompute = recompute
        self._grain = samples
        self._samples = grains * samples
        self._layers = len(layers)
        # A pipeline can be cut between any two of these, and nowhere else. Further predictions are made with the head.
        end = next((unit for unit, name in enumerate(names) if name.startswith(MTP)), len(names) - 1)
        cuts = sorted({0, *layers, end, len(names)})
        self._blocks = [range(start, end) for start, end in pairwise(cuts)]
        size = len(self._blocks)
        below = np.tri(size + 1, dtype=bool)
        self._time = self._between([cost.grain_ms / samples for cost in costs.units])
        self._time[below] = np.inf
        self._forward = self._between([cost.forward_ms / samples for cost in costs.units])
        self._parameters = self._between([cost.parameter_bytes for cost in costs.units])
        self._optimizer = self._between([cost.optimizer_bytes for cost in costs.units])
        self._activations = self._between([cost.activation_bytes for cost in costs.units])

    @property
    def blocks(self) -> int:
        """How many there are, between which the pipeline can be cut: no more stages than that."""
        return len(self._blocks)

    def keep(self, stage_units: Sequence[tuple[int, ...]], widths: Sequence[int]) -> Graph:
        """The graph of the given units, which may be several chunks a stage. Raises NoLayout when they do not fit."""
        kept = self._kept(stage_units, widths, again=False)
        loads = [self._load_of(stage_units, stage, width, kept[stage]) for stage, width in enumerate(widths)]
        if math.isinf(max(loads)) and self._recompute:
            less = self._kept(stage_units, widths, again=True)
            for stage, width in enumerate(widths):
                if math.isinf(loads[stage]):
                    loads[stage] = self._load_of(stage_units, stage, width, less[stage], again=True)
        if math.isinf(max(loads)):
            raise NoLayout(self._too_big(widths))
        return Graph(tuple(stage_units), tuple(widths), max(loads))

    def split(
        self, widths: Sequence[int], held: Sequence[AbstractSet[int]] | None = None, slack: float = 0.0,
        samples: Sequence[float] | None = None,
    ) -> Graph:
        """The best units for stages of the given widths: slowest stage first, then bytes that have to be moved.

        ``held[s]`` are the units whose state the cells of stage s have already (default: nobody has anything, and
        moving does not count). Of all graphs whose slowest stage takes at most 1 + ``slack`` times the least possible,
        the one that moves least is taken. ``samples``: how many, at the usual speed, take each stage as long as a step
        does; None: an even share of all, as if no cell was slow. Raises NoLayout when the units do not fit.
        """
        stages = len(widths)
        self._check_stages(stages)
        many = self._shares(widths) if samples is None else samples
        loads = [self._load(stages, stage, width, many[stage]) for stage, width in enumerate(widths)]
        best = _start(self.blocks)
        for load in loads:
            best = np.maximum(best[:, None], load).min(axis=0)
        slowest = float(best[-1])
        if math.isinf(slowest):
            raise NoLayout(self._too_big(widths))
        limit = slowest * (1 + slack) * (1 + _ROUNDING)
        total = _start(self.blocks)
        choices = []
        for stage, load in enumerate(loads):
            moved = np.where(load <= limit, self._moved(held[stage]) if held else 0.0, np.inf)
            costs = total[:, None] + moved
            choices.append(costs.argmin(axis=0))
            total = costs.min(axis=0)
        ends = [self.blocks]
        for choice in reversed(choices):
            ends.append(int(choice[ends[-1]]))
        cuts = ends[::-1]
        taken = max(float(load[a, b]) for load, (a, b) in zip(loads, pairwise(cuts), strict=True))
        return Graph(self._units(cuts), tuple(widths), taken)

    def interleave(
        self, widths: Sequence[int], through: Sequence[int], held: Sequence[AbstractSet[int]] | None = None,
        samples: Sequence[float] | None = None,
    ) -> Graph:
        """Good units for stages of the given widths, which a grain passes as ``through`` says, some several times.

        If none comes twice, this is ``split``. Else first the slowest chunk is as fast as it can be; then cuts are
        moved as long as of the two stages beside one the slower gets faster. ``held`` and ``samples`` as for ``split``.
        Raises NoLayout when the units do not fit, or are too few.
        """
        if len(through) == len(widths):
            return self.split(widths, held, samples=samples)
        many = self._shares(widths) if samples is None else samples
        graph = self.split(
            [widths[stage] for stage in through], None if held is None else [held[stage] for stage in through],
            samples=[many[stage] for stage in through],
        )
        cuts = self._balanced(self._cuts(graph.stage_units), many, through)
        units: list[set[int]] = [set() for _ in widths]
        for stage, part in zip(through, self._units(cuts), strict=True):
            units[stage].update(part)
        return self.keep([tuple(sorted(each)) for each in units], widths)

    def _balanced(self, cuts: Sequence[int], times: Sequence[float], through: Sequence[int]) -> list[int]:
        """These cuts between chunks, moved one block at a time. ``times``: as many samples each stage computes."""
        cuts = list(cuts)
        loads = [0.0] * len(times)
        for stage, (a, b) in zip(through, pairwise(cuts), strict=True):
            loads[stage] += float(self._time[a, b]) * times[stage]
        moved = True
        while moved:
            moved = False
            for part, by in product(range(1, len(cuts) - 1), (-1, 1)):
                before, after, at = through[part - 1], through[part], cuts[part] + by
                if not cuts[part - 1] < at < cuts[part + 1]:
                    continue
                block = by * float(self._time[min(at, cuts[part]), max(at, cuts[part])])
                new = loads[before] + block * times[before], loads[after] - block * times[after]
                if max(new) < max(loads[before], loads[after]) * (1 - _ROUNDING):
                    loads[before], loads[after] = new
                    cuts[part] = at
                    moved = True
        return cuts

    def widths(self, stages: int, cells: int, most: int | None = None) -> tuple[int, ...]:
        """How to distribute ``cells`` over ``stages`` so that ``split`` finds the fastest slowest stage possible.

        No stage gets more than ``most`` cells (default: any number). Those that do not make the slowest stage faster go
        where a cell has most to do. Raises NoLayout when there are too few.
        """
        self._check_stages(stages)
        if cells < stages:
            raise NoLayout(f"{stages} pipeline stages need at least as many cells, but {cells} are left")
        most = cells if most is None else most
        by_memory = [self._least_by_memory(stages, stage) for stage in range(stages)]
        by_memory = [np.where(least > most, np.inf, least) for least in by_memory]
        if self._cells(by_memory, math.inf, most) > cells:
            raise NoLayout(self._too_big((cells // stages,) * stages))
        # The fastest slowest stage is a number of samples times the time of some blocks. It is searched by halving; a
        # limit that cannot be kept moves the lower end to the next such time.
        low, high = 0.0, self._samples * float(self._time[0, -1])
        while high - low > high * _ROUNDING:
            middle = (low + high) / 2
            if self._cells(by_memory, middle, most) <= cells:
                high = middle
            else:
                low = self._next(middle)
        return self._spread(*self._cover(by_memory, high, most), cells, most)

    def widen(self, stage_units: Sequence[tuple[int, ...]], cells: int) -> tuple[int, ...]:
        """How to distribute ``cells`` over stages of the given units so that the slowest one is as fast as possible.

        Raises NoLayout when there are too few for the stages' memory.
        """
        cuts = self._cuts(stage_units)
        stages = len(stage_units)
        least = [self._least_by_memory(stages, stage)[a, b] for stage, (a, b) in enumerate(pairwise(cuts))]
        if sum(least) > cells:
            raise NoLayout(self._too_big((cells // stages,) * stages))
        return self._spread(cuts, [int(cells) for cells in least], cells, cells)

    def _spread(self, cuts: Sequence[int], widths: Sequence[int], cells: int, most: int) -> tuple[int, ...]:
        """``widths`` and what is left of ``cells``, each given to the stage that is the slowest just then."""
        spread = list(widths)
        each = [float(self._time[a, b]) for a, b in pairwise(cuts)]
        slowest = [(-ms * math.ceil(self._samples / spread[at]), at) for at, ms in enumerate(each)]
        heapq.heapify(slowest)
        for _ in range(cells - sum(widths)):
            while spread[slowest[0][1]] == most:
                heapq.heappop(slowest)
            at = slowest[0][1]
            spread[at] += 1
            heapq.heapreplace(slowest, (-each[at] * math.ceil(self._samples / spread[at]), at))
        return tuple(spread)

    def _shares(self, widths: Sequence[int]) -> list[float]:
        """Samples of the fullest cell of each stage, where none is slow."""
        return [math.ceil(self._samples / width) for width in widths]

    # ---- matrices over (first block, block after the last) ----------------------------------

    def _between(self, per_unit: Sequence[float]) -> _Matrix:
        """[a, b] = the sum over the units of blocks a to b - 1."""
        until = np.cumsum([0.0, *(sum(per_unit[unit] for unit in block) for block in self._blocks)])
        return until[None, :] - until[:, None]

    def _memory(self, stages: int, stage: int, again: bool = False) -> tuple[_Matrix, _Matrix]:
        """Bytes that do not depend on the width, and bytes that are divided by it; ``again``: if it is recomputed."""
        live = live_activations(stages, stage, split=self._split)
        kept = live * self._activations
        if again:
            inlets = np.array([[self._costs.inlet_bytes(stage)]])
            put_off = stage if self._split else 0
            kept = np.minimum(kept, live * inlets + (1 + put_off) * self._activations)
        fixed = self._parameters + kept
        if self._tied and 0 < stage == stages - 1:
            fixed = fixed + self._costs.units[0].parameter_bytes
        return fixed, self._optimizer

    def _load(self, stages: int, stage: int, width: int, samples: float) -> _Matrix:
        """Milliseconds of so many samples at a stage of blocks a to b - 1; infinite where its memory is too small."""
        load = self._time * samples
        if self._costs.memory_bytes is not None:
            fixed, divided = self._memory(stages, stage)
            tight = np.full_like(load, np.inf)
            if self._recompute:
                less, _ = self._memory(stages, stage, again=True)
                slower = load + self._forward * samples
                tight = np.where(less + divided / width > self._costs.memory_bytes, np.inf, slower)
            load = np.where(fixed + divided / width > self._costs.memory_bytes, tight, load)
        return load

    def _kept(self, stage_units: Sequence[Sequence[int]], widths: Sequence[int], again: bool) -> list[float]:
        """Bytes of activations that a device of each stage keeps at a time at most, with any units; ``again``: if all
        chunks are recomputed.
        """
        way = positions(stage_units)
        keeping = Keeping(way, self._names)
        sizes, left = ([list[float]() for _ in stage_units] for _ in range(2))
        for number, position in enumerate(way):
            size = float(sum(self._costs.units[unit].activation_bytes for unit in position.units))
            sizes[position.stage].append(size)
            left[position.stage].append(min(size, self._costs.inlet_bytes(number)) if again else size)
        grains = [math.ceil(self._samples / width / self._grain) for width in widths]
        return [
            keeping.most(stage, grains[stage], self._split, sizes[stage], left[stage]) for stage in range(len(sizes))
        ]

    def _load_of(
        self, stage_units: Sequence[Sequence[int]], stage: int, width: int, kept: float, again: bool = False
    ) -> float:
        """The same for any units, of whose activations so much is kept; ``again``: if they are recomputed."""
        units = [self._costs.units[unit] for unit in own(stage_units, stage)]
        if self._costs.memory_bytes is not None:
            fixed = kept + sum(unit.parameter_bytes for unit in units)
            if len(units) < len(stage_units[stage]):
                fixed += self._costs.units[0].parameter_bytes
            if fixed + sum(unit.optimizer_bytes for unit in units) / width > self._costs.memory_bytes:
                return math.inf
        each = sum(unit.grain_ms + again * unit.forward_ms for unit in units)
        return each / self._grain * math.ceil(self._samples / width)

    def _moved(self, held: AbstractSet[int]) -> _Matrix:
        """Bytes of optimizer state that cells which have that of ``held`` have to receive."""
        costs = enumerate(self._costs.units)
        return self._between([0.0 if unit in held else cost.optimizer_bytes for unit, cost in costs])

    def _least_by_memory(self, stages: int, stage: int) -> _Matrix:
        """Cells that a stage of blocks a to b - 1 needs at least for its memory; infinite where none are enough."""
        if self._costs.memory_bytes is None:
            return np.ones_like(self._time)
        fixed, divided = self._memory(stages, stage, self._recompute)
        room = self._costs.memory_bytes - fixed
        with np.errstate(divide="ignore", invalid="ignore"):
            least = np.where(divided > 0, np.ceil(divided / room - _ROUNDING), 1.0)
        return np.where((room < 0) | ((room == 0) & (divided > 0)), np.inf, least)

    def _least_by_time(self, limit: float, most: int) -> _Matrix:
        """Cells that a stage of blocks a to b - 1 needs at least, so that it takes no longer than ``limit``."""
        with np.errstate(divide="ignore", invalid="ignore"):
            samples = np.floor(np.minimum(limit / self._time * (1 + _ROUNDING), self._samples))
            least = np.where(samples >= 1, np.ceil(self._samples / samples), np.inf)
        least[np.isinf(self._time) | (least > most)] = np.inf
        least[self._time == 0] = 1
        return least

    def _cells(self, by_memory: Sequence[_Matrix], limit: float, most: int) -> float:
        """The fewest cells with which no stage takes longer than ``limit``."""
        by_time = self._least_by_time(limit, most)
        needed = _start(self.blocks)
        for least in by_memory:
            needed = (needed[:, None] + np.maximum(by_time, least)).min(axis=0)
        return float(needed[-1])

    def _cover(self, by_memory: Sequence[_Matrix], limit: float, most: int) -> tuple[list[int], list[int]]:
        """(cuts, widths) of stages that need the fewest cells with which none takes longer than ``limit``."""
        by_time = self._least_by_time(limit, most)
        needed = _start(self.blocks)
        choices = []
        for least in by_memory:
            total = needed[:, None] + np.maximum(by_time, least)
            choices.append(total.argmin(axis=0))
            needed = total.min(axis=0)
        cuts = [self.blocks]
        for choice in reversed(choices):
            cuts.append(int(choice[cuts[-1]]))
        cuts.reverse()
        widths = [int(max(by_time[a, b], least[a, b])) for least, (a, b) in zip(by_memory, pairwise(cuts), strict=True)]
        return cuts, widths

    def _next(self, limit: float) -> float:
        """The least time above ``limit`` that a stage can take."""
        with np.errstate(divide="ignore", invalid="ignore"):
            after = (np.floor(limit / self._time * (1 + _ROUNDING)) + 1) * self._time
        return float(np.nanmin(np.where(self._time > 0, after, np.nan)))

    # ---- small things -----------------------------------------------------------------------

    def _cuts(self, stage_units: Sequence[tuple[int, ...]]) -> list[int]:
        """First block of every stage, and the number of blocks."""
        starts = [block[0] for block in self._blocks]
        return [*(starts.index(own(stage_units, stage)[0]) for stage in range(len(stage_units))), self.blocks]

    def _units(self, cuts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        stages = [tuple(unit for block in self._blocks[a:b] for unit in block) for a, b in pairwise(cuts)]
        if self._tied and len(stages) > 1:
            stages[-1] = (0, *stages[-1])
        return tuple(stages)

    def _check_stages(self, stages: int) -> None:
        if not 1 <= stages <= self.blocks:
            raise NoLayout(f"{self._layers} layers, embedding and head can make 1 to {self.blocks} pipeline stages, "
                           f"not {stages}")

    def _too_big(self, widths: Sequence[int]) -> str:
        return (
            f"the model does not fit {len(widths)} pipeline stages of widths {', '.join(map(str, widths))} with "
            f"{self._costs.memory_bytes} bytes of memory a device: use more stages or cells, or recompute activations"
        )


def _start(size: int) -> _Matrix:
    """Nothing is placed yet: only the beginning can be reached, at no cost."""
    start = np.full(size + 1, np.inf)
    start[0] = 0.0
    return start
