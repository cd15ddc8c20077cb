"""Simulate: runs a program without a model, to know how long a step takes and which cells wait.

The executor's rules: a cell does its operations in order, each as soon as what it needs has arrived; sends cost the
sender no time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from megatron_elastic.layout import Layout
from megatron_elastic.pipeline.program import Op, Program, Result, live, needs, result, walk
from megatron_elastic.pipeline.schedule import interleaved, one_forward_one_backward
from megatron_elastic.plan.cost import Costs


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
    chunks: int = 1,
) -> Timeline:
    """Run ``program`` and return when everything happens. Raises ProgramError if it has a cycle.

    ``duration(leader, stage, operation)`` and ``transfer(result)``, from one stage to another, are in milliseconds.
    """
    spans: dict[int, list[Span]] = {leader: [] for leader in program.cells}
    ready: dict[Result, float] = {}
    for leader, stage, op in walk(program, layout, chunks):
        start = spans[leader][-1].end if spans[leader] else 0.0
        for need in needs(layout, chunks, leader, stage, op):
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
    chunks = layout.num_chunks
    units = [
        [[costs.units[unit] for unit in chunk if layout.home(unit) == stage] for chunk in layout.chunks(stage)]
        for stage in range(layout.pipeline_size)
    ]
    forward = [[sum(unit.forward_ms for unit in held) for held in stage] for stage in units]
    backward = [[sum(unit.backward_ms for unit in held) for held in stage] for stage in units]

    def fraction(leader: int, grain: int) -> float:
        return layout.part(leader, grain).size / layout.samples

    def run(program: Program) -> tuple[Program, Timeline]:
        timeline = simulate(
            program,
            layout,
            lambda leader, stage, op: (
                (forward if op.kind == "forward" else backward)[stage][op.chunk] * fraction(leader, op.grain)
            ),
            lambda result: costs.transfer_ms(costs.boundary_bytes * fraction(result.leader, result.grain)),
            chunks,
        )
        return program, timeline

    usual = run(interleaved(layout, chunks))
    bounds = costs.pace_of(layout).live
    if chunks > 1 or bounds == tuple(range(layout.pipeline_size, 0, -1)):
        return usual
    return min(usual, run(one_forward_one_backward(layout, live=bounds)), key=lambda found: found[1].makespan)
