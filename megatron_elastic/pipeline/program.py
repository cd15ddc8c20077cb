"""Program: a pipeline schedule as data. For every cell an ordered list of operations on grains.

A stage's model may be cut into several *chunks*; in which order a grain passes those of all stages, the layout says
(``layout.way``). Peers are not part of a program: the input of grain g comes from the cells at the position before that
have g in the layout, so re-routed grains and stages of different widths need nothing special. Where cells of a stage
share a grain, an operation is on the cell's part of it, which the layout knows.

Generators are in ``schedule``; here are the text form and the checker.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from megatron_elastic.layout import Layout, Part, Position

Kind = Literal["forward", "backward", "backward_input", "backward_weight"]
KINDS: dict[str, Kind] = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weight"}
"""Kinds of operations, by their letter in a program's text. A backward is one B, or an I and later a W."""
_LETTERS = {kind: letter for letter, kind in KINDS.items()}


class ProgramError(Exception):
    """A program's text cannot be read, or the program cannot be executed as it is."""


class Op(NamedTuple):
    """One operation of a cell: a grain through one chunk of the cell's stage."""

    kind: Kind
    grain: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{_LETTERS[self.kind]}{self.grain}" + (f".{self.chunk}" if self.chunk else "")


@dataclass(frozen=True, slots=True)
class Program:
    """What each cell does in a step, in order; cells are named by their leaders' ranks."""

    cells: Mapping[int, tuple[Op, ...]]

    def __getitem__(self, leader: int) -> tuple[Op, ...]:
        """Operations of the cell led by ``leader``. Raises KeyError if the program has no such cell."""
        return self.cells[leader]

    def text(self) -> str:
        """One line a cell, for example ``4: F0 F2 B0 B2``, or ``4: F0.1 I0.1 W0.1`` in chunk 1; ``parse`` reads it."""
        return "".join(f"{leader}: {' '.join(map(str, ops))}".rstrip() + "\n" for leader, ops in self.cells.items())

    @classmethod
    def parse(cls, text: str) -> Program:
        """Read a program's text; blank lines and what follows a ``#`` are skipped. Raises ProgramError."""
        cells: dict[int, tuple[Op, ...]] = {}
        for number, line in enumerate(text.splitlines(), start=1):
            content = line.partition("#")[0].strip()
            if not content:
                continue
            leader, colon, ops = content.partition(":")
            if not colon or not leader.strip().isdecimal():
                raise ProgramError(f"line {number}: expected 'RANK: OPERATIONS', got {content!r}")
            if int(leader) in cells:
                raise ProgramError(f"line {number}: cell {int(leader)} has a second line")
            cells[int(leader)] = tuple(_parse_op(word, number) for word in ops.split())
        return cls(cells)


def pack(program: Program) -> bytes:
    """A program as it travels; ``unpack`` reads what one cell does, ``unpack_all`` the whole."""
    return zlib.compress(program.text().encode())


def unpack(data: bytes, leader: int) -> tuple[Op, ...]:
    """The operations of one cell of a packed program. Raises KeyError if it has no such cell."""
    head = f"{leader}:"
    for line in zlib.decompress(data).decode().splitlines():
        if line.startswith(head):
            return Program.parse(line)[leader]
    raise KeyError(leader)


def unpack_all(data: bytes) -> Program:
    """What all cells of a packed program do."""
    return Program.parse(zlib.decompress(data).decode())


def _parse_op(word: str, line: int) -> Op:
    match = re.fullmatch(r"([A-Z])(\d+)(?:\.(\d+))?", word)
    if match is None or match[1] not in KINDS:
        raise ProgramError(
            f"line {line}: {word!r} is no operation: expected one of {', '.join(KINDS)} and a grain, as F3, "
            "or also a chunk, as F3.1"
        )
    return Op(KINDS[match[1]], int(match[2]), int(match[3] or 0))


class Result(NamedTuple):
    """What an operation makes and others need: an activation, or the gradient of a chunk's input.

    ``leader`` names the cell that makes it, of its part of the grain.
    """

    what: Literal["output", "input gradient"]
    stage: int
    chunk: int
    grain: int
    leader: int

    def __str__(self) -> str:
        return f"the {self.what} of grain {self.grain} at stage {self.stage}" + (
            f", chunk {self.chunk}" if self.chunk else ""
        )


def result(leader: int, stage: int, op: Op) -> Result | None:
    """What ``op`` of a cell of ``stage`` makes that other operations may need."""
    if op.kind == "backward_weight":
        return None
    return Result("output" if op.kind == "forward" else "input gradient", stage, op.chunk, op.grain, leader)


def needs(layout: Layout, leader: int, stage: int, op: Op) -> Iterator[Result]:
    """What must be there before ``op`` of a cell of ``stage``.

    A loss is a mean over the whole grain: the cells at the end of the model that share one begin its backward when all
    know how many tokens there are.
    """
    chunk, grain, way = op.chunk, op.grain, layout.way
    if op.kind == "backward_weight":
        yield Result("input gradient", stage, chunk, grain, leader)
        return
    part, here = layout.part(leader, grain), layout.position(stage, chunk)
    if op.kind == "forward":
        if here > 0:
            yield from _made(layout, "output", way[here - 1], part)
        return
    yield Result("output", stage, chunk, grain, leader)
    if here + 1 < len(way):
        yield from _made(layout, "input gradient", way[here + 1], part)
    else:
        yield from _made(layout, "output", way[here], layout.whole(grain))


def _made(
    layout: Layout, what: Literal["output", "input gradient"], at: Position, part: Part
) -> Iterator[Result]:
    """By the cells that compute ``part`` there."""
    for cell, _ in layout.common(at.stage, part):
        yield Result(what, at.stage, at.chunk, part.grain, cell.leader)


def walk(program: Program, layout: Layout) -> Iterator[tuple[int, int, Op, tuple[Result, ...]]]:
    """(leader, stage, operation, what it needs) of the whole program in an order in which it can be executed.

    Each cell goes as far as it can before the next one. Raises ProgramError, naming what waits for what, when no cell
    can go on before all have come to their ends.
    """
    stage_of = {cell.leader: index for index, stage in enumerate(layout.stages) for cell in stage.cells}
    position = dict.fromkeys(program.cells, 0)
    done: set[Result] = set()
    waiting: dict[Result, list[int]] = {}
    blocked: dict[int, Result] = {}
    wanted: dict[int, tuple[Result, ...]] = {}
    ready = deque(program.cells)
    while ready:
        leader = ready.popleft()
        stage, ops = stage_of[leader], program.cells[leader]
        blocked.pop(leader, None)
        while position[leader] < len(ops):
            op = ops[position[leader]]
            wants = wanted.pop(leader, None) or tuple(needs(layout, leader, stage, op))
            missing = next((need for need in wants if need not in done), None)
            if missing is not None:
                wanted[leader] = wants
                waiting.setdefault(missing, []).append(leader)
                blocked[leader] = missing
                break
            yield leader, stage, op, wants
            position[leader] += 1
            if (made := result(leader, stage, op)) is not None:
                done.add(made)
                ready.extend(waiting.pop(made, ()))
    if blocked:
        stuck = "; ".join(
            f"cell {leader} cannot do {program.cells[leader][position[leader]]} before {missing}"
            for leader, missing in sorted(blocked.items())
        )
        raise ProgramError(f"the program has a cycle, so it never ends: {stuck}")


def check(program: Program, layout: Layout, max_live: int | Mapping[int, int] | None = None) -> None:
    """Raise ProgramError unless ``program`` computes a step of ``layout``.

    Every grain goes forward and backward (at once, or in two parts) exactly once through every chunk of every stage, in
    the cells that have it; the cells' orders and the operations' dependencies contain no cycle; and no cell ever has
    more than ``max_live`` activations (for all cells, or by leader), counted as ``live`` does.
    """
    _check_complete(program, layout)
    for _ in walk(program, layout):
        pass
    if max_live is not None:
        for leader, ops in program.cells.items():
            limit = max_live if isinstance(max_live, int) else max_live[leader]
            if (peak := max(live(ops), default=0)) > limit:
                raise ProgramError(
                    f"cell {leader} has {peak} live activations at a time, more than the {limit} allowed: generate the "
                    "program with a lower limit, or give the stage fewer units"
                )


def live(ops: tuple[Op, ...]) -> Iterator[int]:
    """After each operation of a cell, how many (grain, chunk) have begun forward and not ended their whole backward."""
    now = 0
    for op in ops:
        now += 1 if op.kind == "forward" else 0 if op.kind == "backward_input" else -1
        yield now


def _check_complete(program: Program, layout: Layout) -> None:
    cells = {cell.leader: cell for stage in layout.stages for cell in stage.cells}
    if set(program.cells) != set(cells):
        raise ProgramError(f"the program is for cells {sorted(program.cells)}, but the layout has {sorted(cells)}")
    for leader, ops in program.cells.items():
        actual = Counter(ops)
        expected: Counter[Op] = Counter()
        for grain in cells[leader].share:
            for chunk in range(len(layout.chunks(layout.stage_of(leader)))):
                expected[Op("forward", grain, chunk)] = 1
                halves = Op("backward_input", grain, chunk), Op("backward_weight", grain, chunk)
                split = any(half in actual for half in halves)
                expected.update(halves if split else [Op("backward", grain, chunk)])
        if actual != expected:
            missing = " ".join(map(str, expected - actual)) or "nothing"
            surplus = " ".join(map(str, actual - expected)) or "nothing"
            raise ProgramError(f"cell {leader} misses {missing} and has {surplus} too much")
