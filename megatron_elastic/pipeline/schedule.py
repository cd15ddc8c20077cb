"""Schedule: generators of programs, for any layout: stages of any widths, whose cells have any grains.

How a generator works. Every grain gets a *round*, so that no cell has two grains in one round. Round and stage give
each operation a place in a timetable, in which whatever an operation needs has an earlier place; every cell does its
operations in that order. So no program can have a cycle, and each cell's order is found without simulating the others.
In a fault-free layout this is exactly the usual order. The distance between rounds bounds the live activations.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from megatron_elastic.layout import Layout
from megatron_elastic.pipeline.program import Op, Program
from megatron_elastic.plan.work.slots import Slots

_Place = Callable[[Op, int], int]
"""(operation, stage) -> place in the timetable."""


def for_cell(schedule: str, layout: Layout, leader: int) -> tuple[Op, ...]:
    """What a cell does in a step under ``--elastic-schedule``: ``split``, or 1F1B, which ``search`` begins with, too.

    Chunks are interleaved.
    """
    program = usual(layout, {leader})
    return (split_backward(program, layout) if schedule == "split" else program)[leader]


def timetable(layout: Layout) -> _Place:
    """The place of every operation in the order that ``for_cell`` has.

    Whatever an operation needs has an earlier place, in whichever cells of their stages the two are done.
    """
    match layout.placement:
        case "loop", 1:
            return _one_chunk(layout)
        case "loop", chunks:
            return _interleaved(layout, chunks)
    return _in_step(layout)


def usual(layout: Layout, leaders: Collection[int] | None = None) -> Program:
    """1F1B, which a job begins with: of one chunk a stage, of several that are interleaved, or of any others.

    As many grains as there are stages pass chunk 0 of a loop, then the same ones chunk 1, and so on. A cell of stage s
    of P never has more than (chunks - 1) * P + 2 * (P - s) - 1 live activations of a chunk then. With whole groups the
    order is Megatron's; a last group may be smaller here. ``leaders`` are the cells to make it for (default: all).
    """
    return _by_timetable(layout, timetable(layout), leaders)


def one_forward_one_backward(
    layout: Layout, leaders: Collection[int] | None = None, live: Sequence[int] | None = None
) -> Program:
    """The 1F1B schedule: a cell of stage s runs ahead by as many forwards as stages follow, then alternates.

    ``leaders`` are the cells to make it for (default: all). ``live[s]`` bounds the live activations of a cell of stage
    s; the default is P - s for stage s of P, and less than that cannot be asked for. ``plan.costs.cost`` says
    where more would help. Raises ValueError for bounds that are too low.
    """
    stages = layout.pipeline_size
    bounds = _fewest(layout) if live is None else list(live)
    if len(bounds) != stages or any(bound < stages - stage for stage, bound in enumerate(bounds)):
        raise ValueError(
            f"the live activations allowed at {stages} stages must be at least {stages}, one less at each stage, down "
            f"to 1, but are {bounds}"
        )
    return _by_timetable(layout, _one_chunk(layout, bounds), leaders)


def _one_chunk(layout: Layout, live: Sequence[int] | None = None) -> _Place:
    round_of = rounds(layout)
    windows = _windows(layout, round_of, live or _fewest(layout))

    # A forward takes one unit of time, a backward two, so rounds are three apart.
    def place(op: Op, stage: int) -> int:
        return 3 * round_of[op.grain] + stage + (0 if op.kind == "forward" else 3 * windows[stage] - 2)

    return place


def _fewest(layout: Layout) -> list[int]:
    """By stage, how many live activations a cell must be allowed."""
    return list(range(layout.pipeline_size, 0, -1))


def _windows(layout: Layout, round_of: Mapping[int, int], bounds: Sequence[int]) -> list[int]:
    """For each stage, how many rounds a backward comes after its forward, so that no cell exceeds its bound.

    Where a cell has a grain in every round this is the bound itself. It must become less from stage to stage, because
    backwards go the other way.
    """
    last = max(round_of.values())
    windows: list[int] = []
    for stage, bound in zip(layout.stages, bounds, strict=True):
        window = windows[-1] - 1 if windows else last + 1 + layout.pipeline_size
        for cell in stage.cells:
            used = sorted(round_of[grain] for grain in cell.share)
            window = min([window, *(later - sooner for sooner, later in zip(used, used[bound:], strict=False))])
        windows.append(window)
    return windows


def _interleaved(layout: Layout, chunks: int) -> _Place:
    stages = layout.pipeline_size
    round_of = rounds(layout)

    def place(op: Op, stage: int) -> int:
        group, member = divmod(round_of[op.grain], stages)
        turn = group * chunks * stages + member
        if op.kind == "forward":
            return 2 * (turn + op.chunk * stages + stage)
        # The last chunk's backward at the last stage comes right after its forward there.
        return 2 * (turn + (2 * chunks - op.chunk) * stages - 2 - stage) + 1

    return place


def _in_step(layout: Layout) -> _Place:
    """For chunks that are placed in any way, and may be of any size (``plan.work.slots``)."""
    round_of, slots = rounds(layout), Slots.of(layout)

    def place(op: Op, stage: int) -> int:
        at = layout.position(stage, op.chunk)
        return slots.apart * round_of[op.grain] + (slots.forward if op.kind == "forward" else slots.backward)[at]

    return place


def split_backward(program: Program, layout: Layout) -> Program:
    """The program with every backward in two: the input's gradient at once, the weights' gradient later.

    The stage before waits only for the first half, and the second fills what would be a bubble. Stage s puts it off for
    s other backwards, which raises its live activations by at most s: in a 1F1B program to P, what stage 0 has anyway.
    """
    stage_of = {cell.leader: index for index, stage in enumerate(layout.stages) for cell in stage.cells}
    return Program({leader: in_halves(ops, stage_of[leader]) for leader, ops in program.cells.items()})


def in_halves(ops: Iterable[Op], put_off: int) -> tuple[Op, ...]:
    """A cell's operations with every backward in two, the second part ``put_off`` other backwards later."""
    later: deque[Op] = deque()
    split: list[Op] = []
    for op in ops:
        if op.kind != "backward":
            split.append(op)
            continue
        split.append(Op("backward_input", op.grain, op.chunk))
        later.append(Op("backward_weight", op.grain, op.chunk))
        if len(later) > put_off:
            split.append(later.popleft())
    return (*split, *later)


def rounds(layout: Layout) -> Mapping[int, int]:
    """A round for every grain: the first in which all the cells that compute it are free, grain after grain."""
    taken = {cell.leader: 0 for stage in layout.stages for cell in stage.cells}
    sharers: list[list[int]] = [[] for _ in range(layout.num_grains)]
    for cell in (cell for stage in layout.stages for cell in stage.cells):
        for grain in cell.share:
            sharers[grain].append(cell.leader)
    result = {}
    for grain, leaders in enumerate(sharers):
        busy = 0
        for leader in leaders:
            busy |= taken[leader]
        free = ~busy & (busy + 1)  # the lowest bit that is not set
        for leader in leaders:
            taken[leader] |= free
        result[grain] = free.bit_length() - 1
    return result


def _by_timetable(layout: Layout, place: _Place, leaders: Collection[int] | None) -> Program:
    cells = {}
    for index, stage in enumerate(layout.stages):
        for cell in stage.cells:
            if leaders is None or cell.leader in leaders:
                ops = [
                    (place(op, index), op)
                    for grain in cell.share
                    for chunk in range(len(layout.chunks(index)))
                    for op in (Op("forward", grain, chunk), Op("backward", grain, chunk))
                ]
                cells[cell.leader] = tuple(op for _, op in sorted(ops))
    return Program(cells)
