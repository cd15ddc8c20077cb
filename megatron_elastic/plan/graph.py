"""Graph: which units each stage holds, and how many cells, so that the slowest stage is as fast as it can be.

Exact, by dynamic programming over the layers. The embeddings go with the first layer, the head with the last. Memory of
a device at a stage with k stages from it to the end: parameters, its share of the optimizer's state, and the
activations of k grains, as 1F1B keeps them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from megatron_elastic.plan.cost import Costs
from megatron_elastic.plan.loss import NoLayout

_Matrix = NDArray[np.float64]
_ROUNDING = 1e-9
"""Relative difference below which two times are the same."""


@dataclass(frozen=True, slots=True)
class Graph:
    """Units (ascending indices; a tied embedding also in the last stage) and number of cells of every stage."""

    stage_units: tuple[tuple[int, ...], ...]
    widths: tuple[int, ...]
    slowest_ms: float
    """Milliseconds that the slowest stage computes in a step."""


class Planner:
    """Plans graphs for one model.

    Args:
        names: the units, as in ``Layout.units``.
        tied: whether the last stage needs the embedding too.
        grains: of the global batch; a cell of a stage of width w computes ceil(grains / w) of them.
    """

    def __init__(self, names: Sequence[str], costs: Costs, tied: bool, grains: int) -> None:
        layers = [unit for unit, name in enumerate(names) if name.startswith("layer.")]
        if not layers:
            raise NoLayout(f"a pipeline is cut between layers, but the units {', '.join(names)} contain none")
        self._costs = costs
        self._tied = tied
        self._grains = grains
        # Block b is layer b; the first takes the units before it along, the last the units after it.
        ends = [*layers[1:], len(names)]
        self._blocks = [range(0 if b == 0 else layers[b], end) for b, end in enumerate(ends)]
        size = len(layers)
        below = np.tri(size + 1, dtype=bool)
        self._time = self._between([cost.grain_ms for cost in costs.units])
        self._time[below] = np.inf
        self._parameters = self._between([cost.parameter_bytes for cost in costs.units])
        self._optimizer = self._between([cost.optimizer_bytes for cost in costs.units])
        self._activations = self._between([cost.activation_bytes for cost in costs.units])

    @property
    def layers(self) -> int:
        """How many layers there are; no more stages than that."""
        return len(self._blocks)

    def split(self, widths: Sequence[int], held: Sequence[AbstractSet[int]] | None = None, slack: float = 0.0) -> Graph:
        """The best units for stages of the given widths: slowest stage first, then bytes that have to be moved.

        ``held[s]`` are the units whose state the cells of stage s have already (default: nobody has anything, and
        moving does not count). Of all graphs whose slowest stage takes at most 1 + ``slack`` times the least possible,
        the one that moves least is taken. Raises NoLayout when the units do not fit.
        """
        stages = len(widths)
        self._check_stages(stages)
        loads = [self._load(stages, stage, width) for stage, width in enumerate(widths)]
        best = _start(self.layers)
        for load in loads:
            best = np.maximum(best[:, None], load).min(axis=0)
        slowest = float(best[-1])
        if math.isinf(slowest):
            raise NoLayout(self._too_big(widths))
        limit = slowest * (1 + slack) * (1 + _ROUNDING)
        total = _start(self.layers)
        choices = []
        for stage, load in enumerate(loads):
            moved = np.where(load <= limit, self._moved(held[stage]) if held else 0.0, np.inf)
            costs = total[:, None] + moved
            choices.append(costs.argmin(axis=0))
            total = costs.min(axis=0)
        ends = [self.layers]
        for choice in reversed(choices):
            ends.append(int(choice[ends[-1]]))
        cuts = ends[::-1]
        taken = max(float(load[a, b]) for load, (a, b) in zip(loads, pairwise(cuts), strict=True))
        return Graph(self._units(cuts), tuple(widths), taken)

    def widths(self, stages: int, cells: int) -> tuple[int, ...]:
        """How to distribute ``cells`` over ``stages`` so that ``split`` finds the fastest slowest stage possible.

        Cells that do not make the slowest stage faster go where a cell has most to do. Raises NoLayout when there are
        too few.
        """
        self._check_stages(stages)
        if cells < stages:
            raise NoLayout(f"{stages} pipeline stages need at least as many cells, but {cells} are left")
        found = self._cover(stages, cells, math.inf)
        if found is None:
            raise NoLayout(self._too_big((cells // stages,) * stages))
        # All times that can matter lie between these; the answer is one of n * time(a, b).
        low, high = 0.0, self._grains * float(self._time[0, -1])
        while high - low > high * _ROUNDING:
            middle = (low + high) / 2
            better = self._cover(stages, cells, middle)
            if better is None:
                low = middle
            else:
                # The cover's own slowest stage may be well below what was asked for.
                high = min(middle, self._slowest(better))
                found = better
        cuts, widths = found
        spread = list(widths)
        for _ in range(cells - sum(spread)):
            times = [
                float(self._time[a, b]) * math.ceil(self._grains / width)
                for (a, b), width in zip(pairwise(cuts), spread, strict=True)
            ]
            spread[max(range(stages), key=lambda stage: (times[stage], -stage))] += 1
        return tuple(spread)

    # ---- matrices over (first block, block after the last) ----------------------------------

    def _between(self, per_unit: Sequence[float]) -> _Matrix:
        """[a, b] = the sum over the units of blocks a to b - 1."""
        until = np.cumsum([0.0, *(sum(per_unit[unit] for unit in block) for block in self._blocks)])
        return until[None, :] - until[:, None]

    def _memory(self, stages: int, stage: int) -> tuple[_Matrix, _Matrix]:
        """Bytes that do not depend on the width, and bytes that are divided by it."""
        fixed = self._parameters + (stages - stage) * self._activations
        if self._tied and 0 < stage == stages - 1:
            fixed = fixed + self._costs.units[0].parameter_bytes
        return fixed, self._optimizer

    def _load(self, stages: int, stage: int, width: int) -> _Matrix:
        """Milliseconds of a step at a stage of blocks a to b - 1; infinite where they do not fit its memory."""
        load = self._time * math.ceil(self._grains / width)
        if self._costs.memory_bytes is not None:
            fixed, divided = self._memory(stages, stage)
            load = np.where(fixed + divided / width > self._costs.memory_bytes, np.inf, load)
        return load

    def _moved(self, held: AbstractSet[int]) -> _Matrix:
        """Bytes of optimizer state that cells which have that of ``held`` have to receive."""
        costs = enumerate(self._costs.units)
        return self._between([0.0 if unit in held else cost.optimizer_bytes for unit, cost in costs])

    def _cover(self, stages: int, cells: int, limit: float) -> tuple[list[int], list[int]] | None:
        """(cuts, widths) that need the fewest cells so that no stage takes longer than ``limit``; None if too many."""
        with np.errstate(divide="ignore", invalid="ignore"):
            each = np.floor(np.minimum(limit / self._time * (1 + _ROUNDING), self._grains))
            by_time = np.where(each >= 1, np.ceil(self._grains / each), np.inf)
        by_time[np.isinf(self._time)] = np.inf
        by_time[self._time == 0] = 1
        needed = _start(self.layers)
        choices, needs = [], []
        for stage in range(stages):
            need = by_time
            if self._costs.memory_bytes is not None:
                fixed, divided = self._memory(stages, stage)
                room = self._costs.memory_bytes - fixed
                with np.errstate(divide="ignore", invalid="ignore"):
                    by_memory = np.where(divided > 0, np.ceil(divided / room - _ROUNDING), 1.0)
                need = np.where((room < 0) | ((room == 0) & (divided > 0)), np.inf, np.maximum(need, by_memory))
            total = needed[:, None] + need
            choices.append(total.argmin(axis=0))
            needs.append(need)
            needed = total.min(axis=0)
        if needed[-1] > cells:
            return None
        cuts = [self.layers]
        for choice in reversed(choices):
            cuts.append(int(choice[cuts[-1]]))
        cuts.reverse()
        return cuts, [int(need[a, b]) for need, (a, b) in zip(needs, pairwise(cuts), strict=True)]

    def _slowest(self, cover: tuple[list[int], list[int]]) -> float:
        cuts, widths = cover
        return max(
            float(self._time[a, b]) * math.ceil(self._grains / width)
            for (a, b), width in zip(pairwise(cuts), widths, strict=True)
        )

    # ---- small things -----------------------------------------------------------------------

    def _units(self, cuts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        stages = [tuple(unit for block in self._blocks[a:b] for unit in block) for a, b in pairwise(cuts)]
        if self._tied and len(stages) > 1:
            stages[-1] = (0, *stages[-1])
        return tuple(stages)

    def _check_stages(self, stages: int) -> None:
        if not 1 <= stages <= self.layers:
            raise NoLayout(f"{self.layers} layers can make 1 to {self.layers} pipeline stages, not {stages}")

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
