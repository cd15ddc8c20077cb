"""Simulate: runs a program without a model, to know how long a step takes and which cells wait.

The executor's rules: a cell does its operations in order, each as soon as what it needs has arrived; sends cost the
sender no time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import NamedTuple

from megatron_elastic.layout import Layout
from megatron_elastic.pipeline.program import Op, Program, Result, check, live, result, walk
from megatron_elastic.pipeline.schedule import one_forward_one_backward, split_backward, usual
from megatron_elastic.plan.costs.cost import Costs
from megatron_elastic.plan.costs.exchange import Phases


class Span(NamedTuple):
    """When an operation runs, in milliseconds from the start of the step."""

    op: Op
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """What each cell, named by its leader, does when."""

    spans: Mapping[int, tuple[Span, ...]]

    @property
    def makespan(self) -> float:
        """Milliseconds from the first operation's start to the last one's end."""
        return max((spans[-1].end for spans in self.spans.values() if spans), default=0.0)

    def busy(self, leader: int) -> float:
        """Milliseconds in which the cell computes."""
        return sum(span.end - span.start for span in self.spans[leader])

    def idle(self, leader: int) -> float:
        """Milliseconds of the step in which the cell waits."""
        return self.makespan - self.busy(leader)

    def peak(self, leader: int) -> int:
        """The most activations that the cell has live at a time."""
        return max(live(tuple(span.op for span in self.spans[leader])), default=0)


def simulate(
    program: Program,
    layout: Layout,
    duration: Callable[[int, int, Op], float],
    transfer: Callable[[Result], float] = lambda _: 0.0,
    begins: Mapping[int, float] | None = None,
) -> Timeline:
    """Run ``program`` and return when everything happens. Raises ProgramError if it has a cycle.

    ``duration(leader, stage, operation)`` and ``transfer(result)``, from one stage to another, are in milliseconds;
    so is when cells can begin, by leader (default: at once).
    """
    spans: dict[int, list[Span]] = {leader: [] for leader in program.cells}
    ready: dict[Result, float] = {}
    for leader, stage, op, needs in walk(program, layout):
        start = spans[leader][-1].end if spans[leader] else (begins or {}).get(leader, 0.0)
        for need in needs:
            start = max(start, ready[need] + (transfer(need) if need.stage != stage else 0.0))
        end = start + duration(leader, stage, op)
        spans[leader].append(Span(op, start, end))
        if (made := result(leader, stage, op)) is not None:
            ready[made] = end
    return Timeline({leader: tuple(of) for leader, of in spans.items()})


def fastest(layout: Layout, costs: Costs) -> tuple[Program, Timeline]:
    """The 1F1B program of ``layout`` that takes least by ``costs``, and a step of it without the overhead.

    It is the usual one, interleaved where stages have several chunks, or one with more live activations where
    ``Costs.pace`` finds them of use.
    """
    programs = [usual(layout)]
    bounds = costs.pace_of(layout).live
    if layout.num_chunks == 1 and bounds != tuple(range(layout.pipeline_size, 0, -1)):
        programs.append(one_forward_one_backward(layout, live=bounds))
    return min(((program, run(program, layout, costs)) for program in programs), key=lambda found: found[1].makespan)


def scheduled(schedule: str, layout: Layout) -> Program:
    """What all cells do in a step under ``--elastic-schedule``: ``1f1b``, or ``split``. As ``schedule.for_cell``."""
    program = usual(layout)
    return split_backward(program, layout) if schedule == "split" else program


@dataclass(frozen=True, slots=True)
class Step:
    """From vote to vote, as when each is like the one before: weights come, the passes, and gradients go.

    Attributes:
        line: of the passes. A cell begins when its weights are there, whether or not others have theirs.
        ms: of all.
    """

    line: Timeline
    ms: float

    @classmethod
    def of(
        cls, program: Program, layout: Layout, costs: Costs, clocks: Mapping[int, float] | None = None,
        phases: Mapping[int, Phases] | None = None,
    ) -> Step:
        """Of ``program``. ``clocks`` as ``run`` has them. ``phases``: the layout's, if they are known already."""
        phases = costs.cell_phases(layout) if phases is None else phases
        begins = {leader: each.spread_ms for leader, each in phases.items()}
        line = run(program, layout, costs, clocks, begins)
        ends = {leader: spans[-1].end for leader, spans in line.spans.items() if spans}
        last = max((ends.get(leader, each.spread_ms) + each.reduce_ms for leader, each in phases.items()), default=0.0)
        return cls(line, max(last, line.makespan) + costs.overhead_ms)


def _sums(a: Sequence[float], b: Sequence[float]) -> list[float]:
    return [x + y for x, y in zip(a, b, strict=True)]


@dataclass(slots=True)
class _Cell:
    """A cell that does what it can do next."""

    ops: Iterator[Op]
    places: Sequence[int]
    """Of its chunks, on the way of a grain."""
    now: float
    next: Op | None = None
    """What it has to wait for before it can do it."""
    spans: list[Span] = field(default_factory=list)


def run(
    program: Program, layout: Layout, costs: Costs, clocks: Mapping[int, float] | None = None,
    begins: Mapping[int, float] | None = None,
) -> Timeline:
    """Simulate with the times that units take by ``costs``; half of a backward is for the weights' gradients, and where
    a chunk is recomputed, its forward comes before it.

    ``clocks``: of cells that do not run at that at which costs were measured, by leader, as a multiple of it.
    ``begins`` as ``simulate`` has them.
    """
    of_cells = clocks or {}

    @cache
    def times(stage: int, clock: float) -> Mapping[str, Sequence[float]]:
        """Of each kind of operation on a whole grain, by chunk."""
        units = [[costs.units[unit].at(clock) for unit in chunk if layout.home(unit) == stage]
                 for chunk in layout.chunks(stage)]  # fmt: skip
        forward = [sum(unit.forward_ms for unit in held) for held in units]
        backward = [sum(unit.backward_ms for unit in held) for held in units]
        half = [ms / 2 for ms in backward]
        again = [ms if layout.recomputes(stage, chunk) else 0.0 for chunk, ms in enumerate(forward)]
        return {"forward": forward, "backward": _sums(again, backward), "backward_input": _sums(again, half),
                "backward_weight": half}  # fmt: skip

    def of_cell(leader: int, stage: int) -> Mapping[str, Sequence[float]]:
        """The same as slow as a cell is."""
        usual, slow = times(stage, of_cells.get(leader, 1.0)), costs.slow.get(leader, 1.0)
        return usual if slow == 1.0 else {kind: [ms * slow for ms in of] for kind, of in usual.items()}

    each = {cell.leader: of_cell(cell.leader, index) for index, stage in enumerate(layout.stages)
            for cell in stage.cells}  # fmt: skip
    parts = {(leader, part.grain): part.size / layout.samples for leader, cell in layout.cells.items()
             for part in cell.parts}  # fmt: skip
    if not parts:
        return _run_whole(program, layout, each, costs.transfer_ms(costs.boundary_bytes), begins or {})

    return simulate(
        program,
        layout,
        lambda leader, stage, op: each[leader][op.kind][op.chunk] * parts.get((leader, op.grain), 1.0),
        lambda made: costs.transfer_ms(costs.boundary_bytes * parts.get((made.leader, made.grain), 1.0)),
        begins,
    )


def _run_whole(
    program: Program, layout: Layout, times: Mapping[int, Mapping[str, Sequence[float]]], transfer_ms: float,
    begins: Mapping[int, float],
) -> Timeline:
    """What ``simulate`` finds, where no grain is cut. Then a place on the way and a grain name what is made, which is
    several times as fast; a coordinator simulates hundreds of steps at a loss.

    ``times``: by leader and kind of operation, of each chunk.
    """
    grains, way = layout.num_grains, layout.way
    hops = [transfer_ms if one.stage != other.stage else 0.0 for one, other in pairwise(way)]
    outputs: list[float | None] = [None] * (len(way) * grains)
    gradients: list[float | None] = [None] * (len(way) * grains)
    waiting: dict[int, list[int]] = {}
    """By index of an output, or of a gradient behind all these."""
    cells = {
        leader: _Cell(iter(ops), [layout.position(stage, chunk) for chunk in range(len(layout.chunks(stage)))],
                      begins.get(leader, 0.0))
        for leader, ops in program.cells.items() for stage in [layout.stage_of(leader)]
    }  # fmt: skip
    ready = deque(cells)
    while ready:
        leader = ready.popleft()
        cell, ms = cells[leader], times[leader]
        while (op := cell.next or next(cell.ops, None)) is not None:
            cell.next = op
            here = cell.places[op.chunk]
            at, start = here * grains + op.grain, cell.now
            if op.kind == "forward":
                wanted = [(outputs, at - grains, hops[here - 1])] if here else []
            elif op.kind == "backward_weight":
                wanted = [(gradients, at, 0.0)]
            elif here + 1 < len(way):
                wanted = [(outputs, at, 0.0), (gradients, at + grains, hops[here])]
            else:
                wanted = [(outputs, at, 0.0)]
            for made, index, hop in wanted:
                done = made[index]
                if done is None:
                    waiting.setdefault(index + len(outputs) * (made is gradients), []).append(leader)
                    break
                start = max(start, done + hop)
            else:
                cell.now, cell.next = start + ms[op.kind][op.chunk], None
                cell.spans.append(Span(op, start, cell.now))
                if op.kind == "forward":
                    outputs[at] = cell.now
                    ready.extend(waiting.pop(at, ()))
                elif op.kind != "backward_weight":
                    gradients[at] = cell.now
                    ready.extend(waiting.pop(at + len(outputs), ()))
                continue
            break
    if waiting:
        check(program, layout)
    return Timeline({leader: tuple(cell.spans) for leader, cell in cells.items()})
