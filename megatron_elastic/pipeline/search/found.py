"""Found: the program of a layout that a search finds, by what units cost.

Cells that no grain connects are put in order by themselves, and what is alike only once: pipelines side by side cost
no more than one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron_elastic.layout import Layout
from megatron_elastic.pipeline.program import Kind, Op, Program
from megatron_elastic.pipeline.schedule import in_halves, one_forward_one_backward, split_backward, usual
from megatron_elastic.pipeline.search.bound import lower_bound
from megatron_elastic.pipeline.search.candidates import NotFitting, best, v_shaped
from megatron_elastic.pipeline.search.problem import BACKWARD, FORWARD, INPUT, WEIGHT, Orders, Problem
from megatron_elastic.pipeline.search.recompute import also, choose
from megatron_elastic.plan.costs.cost import Costs
from megatron_elastic.plan.costs.fit import device_bytes

_KINDS: dict[Kind, int] = {"forward": FORWARD, "backward": BACKWARD, "backward_input": INPUT, "backward_weight": WEIGHT}
_NAMES = {number: kind for kind, number in _KINDS.items()}
_BRIEFLY = 0.01
"""Of the effort of a search: for greedy orders that nothing improves."""


@dataclass(frozen=True, slots=True)
class Found:
    """What was found for a layout.

    Attributes:
        program: of all cells.
        ms: that the passes of a step take with it.
        usual_ms: with 1F1B, interleaved if there are several chunks.
        bound_ms: that no program is below.
        names: the known schedules that were best, and ``search`` where another order is better.
        room: bytes of activations that were taken to fit a device at most.
        recomputed: the units whose chunks are recomputed, as the layout that it is for has to say.
    """

    program: Program
    ms: float
    usual_ms: float
    bound_ms: float
    names: tuple[str, ...]
    room: float
    recomputed: tuple[int, ...]


def find(
    layout: Layout, costs: Costs, speeds: Mapping[int, float] | None = None, room: float | None = None
) -> Found:
    """Search the program of a layout whose grains are whole. ``speeds``: of cells, by leader; 1 if not there.

    Where the costs do not say how much memory devices have, a cell may keep as many bytes of activations as ``room``,
    or if that is None as much as with ZB-H1, ``split``, and the chunks are recomputed that are so in ``layout``.
    Raises NotFitting if no program is known that fits, ValueError if grains are cut.
    """
    if any(cell.parts for cell in layout.cells.values()):
        raise ValueError("some micro-batches are cut between cells; programs are searched for whole ones")
    known = programs(layout)
    parts = [_Part(layout, costs, leaders, grains, known, speeds or {}, room)
             for leaders, grains in _connected(layout)]  # fmt: skip
    different = {part.key: part for part in reversed(parts)}
    chosen = {key: choose(part.problem, part.known) for key, part in different.items()}
    # A stage's cells are recomputed alike.
    positions = tuple(sorted({position for each in chosen.values() for position in each.recomputed}))
    chosen = {key: also(different[key].problem, each, positions) for key, each in chosen.items()}
    cells: dict[int, tuple[Op, ...]] = dict.fromkeys(layout.cells, ())
    for part in parts:
        cells.update(_program(chosen[part.key].best.orders, layout, part.leaders, part.grains))
    each = [chosen[part.key].best for part in parts]
    return Found(
        Program(cells), max(found.ms for found in each), max(part.usual_ms for part in different.values()),
        max(found.bound for found in each), tuple(dict.fromkeys(found.name for found in each)),
        max(limit for part in different.values() for limit in part.problem.limits),
        tuple(sorted(unit for position in positions for unit in layout.way[position].units))
        if costs.memory_bytes is not None else layout.recomputed,
    )  # fmt: skip


class _Part:
    """Cells that no grain connects with others, and what there is to be done."""

    def __init__(
        self, layout: Layout, costs: Costs, leaders: Sequence[int], grains: Sequence[int],
        known: Mapping[str, Program], speeds: Mapping[int, float], room: float | None,
    ) -> None:
        self.leaders, self.grains = leaders, grains
        self.problem = problem_of(layout, costs, leaders, grains, known, speeds, room)
        self.key = self.problem.route, self.problem.limits, self.problem.speed
        """The same where there is the same to be done."""
        self._layout, self._programs = layout, known

    @cached_property
    def known(self) -> dict[str, Orders]:
        """The known schedules, the usual one first."""
        found = {
            name: orders_of(program, self._layout, self.leaders, self.grains)
            for name, program in self._programs.items()
        }
        if self.problem.regular and self._layout.placement is not None and self._layout.placement[0] == "v":
            found["zb-v"] = v_shaped(self.problem)
        return found

    @property
    def usual_ms(self) -> float:
        """Of the usual schedule."""
        return self.problem.makespan(next(iter(self.known.values())))


def nearly(layout: Layout, costs: Costs, speeds: Mapping[int, float]) -> float:
    """Milliseconds of passes that ``find`` comes at least near to, from a few greedy orders; arguments as there. Where
    none fits the memory, what no program is below.
    """
    known = programs(layout) if costs.memory_bytes is None else {}
    parts = [problem_of(layout, costs, leaders, grains, known, speeds) for leaders, grains in _connected(layout)]
    return max(map(_nearly, {(part.route, part.limits, part.speed): part for part in parts}.values()))


def _nearly(problem: Problem) -> float:
    try:
        return best(problem, {}, _BRIEFLY).ms
    except NotFitting:
        return lower_bound(problem)


def bound_of(layout: Layout, costs: Costs, speeds: Mapping[int, float], room: float) -> float:
    """Milliseconds of passes that no program of a layout is below; arguments as those of ``find``."""
    return max(
        lower_bound(problem_of(layout, costs, leaders, grains, {}, speeds, room))
        for leaders, grains in _connected(layout)
    )


def fits(program: Program, layout: Layout, costs: Costs, room: float | None = None) -> bool:
    """Whether the memory of devices is enough for a program of ``layout``, as far as costs say, or else ``room``."""
    if costs.memory_bytes is None and room is None:
        return True
    return all(
        (problem if costs.memory_bytes is None else problem.recomputing(_recomputed(layout)))
        .fits(orders_of(program, layout, leaders, grains))
        for leaders, grains in _connected(layout)
        for problem in (problem_of(layout, costs, leaders, grains, {}, {}, room),)
    )  # fmt: skip


def _recomputed(layout: Layout) -> list[int]:
    """Positions whose chunks are recomputed."""
    return [at for at, position in enumerate(layout.way) if layout.recomputes(position.stage, position.chunk)]


def programs(layout: Layout) -> dict[str, Program]:
    """The known schedules that a layout can be computed with; the usual one comes first."""
    stages, first = layout.pipeline_size, usual(layout)
    if layout.num_chunks > 1:
        name = "interleaved" if layout.loops > 1 else "in-step"
        return {name: first, f"{name}-split": split_backward(first, layout)}
    ahead = one_forward_one_backward(layout, live=[2 * (stages - stage) - 1 for stage in range(stages)])
    stage_of = {leader: layout.stage_of(leader) for leader in ahead.cells}
    halves = {leader: in_halves(ops, 2 * stage_of[leader]) for leader, ops in ahead.cells.items()}
    return {"1f1b": first, "zb-h1": split_backward(first, layout), "zb-h2": Program(halves)}


def problem_of(
    layout: Layout, costs: Costs, leaders: Sequence[int], grains: Sequence[int], known: Mapping[str, Program],
    speeds: Mapping[int, float], room: float | None = None,
) -> Problem:
    """What cells, named by their leaders, have to do, with grains that they alone compute. All grains are whole."""
    device = {leader: index for index, leader in enumerate(leaders)}
    units = [[costs.units[unit] for unit in position.units] for position in layout.way]
    halves = tuple(sum(unit.backward_ms for unit in held) / 2 for held in units)
    kept = tuple(float(sum(unit.activation_bytes for unit in held)) for held in units)
    inlet = tuple(min(size, float(costs.inlet_bytes(at))) for at, size in enumerate(kept))
    route = tuple(
        tuple(device[layout.sharers(position.stage, grain)[0][0].leader] for position in layout.way)
        for grain in grains
    )
    problem = Problem(
        route=route,
        forward=tuple(sum(unit.forward_ms for unit in held) for held in units),
        backward=tuple(2 * half for half in halves), input=halves, weight=halves, kept=kept,
        late=tuple(float(sum(unit.late for unit in held)) for held in units),
        link=(costs.boundary_ms,) * len(units), limits=(float("inf"),) * len(leaders),
        speed=tuple(speeds.get(leader, 1.0) for leader in leaders), inlet=inlet,
    )  # fmt: skip
    if costs.memory_bytes is None:  # nothing says what would have to be recomputed
        problem = problem.recomputing(_recomputed(layout))
        if room is None:
            # What ``split`` keeps is more than the usual schedule does, and jobs are started with it as they are.
            return problem.within(problem.peaks(orders_of(list(known.values())[1], layout, leaders, grains)))
        return problem.within([room] * len(leaders))
    fixed = (max(device_bytes(layout, rank, costs) for rank in layout.cells[leader].ranks) for leader in leaders)
    return problem.within([max(costs.memory_bytes - each, 0.0) for each in fixed])


def orders_of(program: Program, layout: Layout, leaders: Sequence[int], grains: Sequence[int]) -> Orders:
    """Of these cells, as numbers; grains are counted in their order."""
    index, positions = {grain: number for number, grain in enumerate(grains)}, len(layout.way)
    found: Orders = []
    for leader in leaders:
        stage = layout.stage_of(leader)
        at = [layout.position(stage, chunk) for chunk in range(len(layout.chunks(stage)))]
        found.append([  # Numbers.of, without a call for each of so many
            (index[grain] * 4 + _KINDS[kind]) * positions + at[chunk] for kind, grain, chunk in program[leader]
        ])  # fmt: skip
    return found


def _program(
    orders: Orders, layout: Layout, leaders: Sequence[int], grains: Sequence[int]
) -> dict[int, tuple[Op, ...]]:
    way, chunks = layout.way, layout.num_chunks
    # One operation for all stages: (grain * 4 + kind) * chunks + chunk.
    every = [
        Op(_NAMES[kind], grain, chunk) for grain in grains for kind in range(len(_NAMES)) for chunk in range(chunks)
    ]
    positions, of = len(way), [position.chunk for position in way]
    return {
        leader: tuple([every[op // positions * chunks + of[op % positions]] for op in ops])
        for leader, ops in zip(leaders, orders, strict=True)
    }


def _connected(layout: Layout) -> list[tuple[list[int], list[int]]]:
    """Cells, stage after stage, and grains that have to do with each other."""
    parent: dict[int, int] = {leader: leader for leader in layout.cells}

    def root(leader: int) -> int:
        while parent[leader] != leader:
            parent[leader] = leader = parent[parent[leader]]
        return leader

    of_grain: list[int] = [-1] * layout.num_grains
    for leader, cell in layout.cells.items():
        for grain in cell.grains:
            if of_grain[grain] < 0:
                of_grain[grain] = leader
            parent[root(leader)] = root(of_grain[grain])
    found: dict[int, tuple[list[int], list[int]]] = {}
    for stage in layout.stages:
        for cell in stage.cells:
            if not cell.shadow:
                found.setdefault(root(cell.leader), ([], []))[0].append(cell.leader)
    for grain, leader in enumerate(of_grain):
        found[root(leader)][1].append(grain)
    return list(found.values())
