"""Program: a pipeline schedule as data. For every cell an ordered list of operations on grains.

Peers are not part of a program: the input of grain g at stage s comes from the cell of stage s-1 that has g in the
layout, so re-routed grains and stages of different widths need nothing special. A new kind of operation needs an entry
in ``KINDS`` and its dependencies in ``needs``.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from megatron_elastic.layout import Layout

Kind = Literal["forward", "backward"]
KINDS: dict[str, Kind] = {"F": "forward", "B": "backward"}
"""Kinds of operations, by their letter in a program's text."""
_LETTERS = {kind: letter for letter, kind in KINDS.items()}


class ProgramError(Exception):
    """A program's text cannot be read, or the program cannot be executed as it is."""


@dataclass(frozen=True, slots=True)
class Op:
    """One operation of a cell on one grain."""

    kind: Kind
    grain: int

    def __str__(self) -> str:
        return f"{_LETTERS[self.kind]}{self.grain}"


@dataclass(frozen=True, slots=True)
class Program:
    """What each cell does in a step, in order; cells are named by their leaders' ranks."""

    cells: Mapping[int, tuple[Op, ...]]

    def __getitem__(self, leader: int) -> tuple[Op, ...]:
        """Operations of the cell led by ``leader``. Raises KeyError if the program has no such cell."""
        return self.cells[leader]

    def text(self) -> str:
        """One line a cell, for example ``4: F0 F2 B0 B2``; ``parse`` reads it."""
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


def _parse_op(word: str, line: int) -> Op:
    match = re.fullmatch(r"([A-Z])(\d+)", word)
    if match is None or match[1] not in KINDS:
        raise ProgramError(
            f"line {line}: {word!r} is no operation: expected one of {', '.join(KINDS)} and a grain, as F3"
        )
    return Op(KINDS[match[1]], int(match[2]))


def one_forward_one_backward(layout: Layout) -> Program:
    """The 1F1B schedule: a cell of stage s runs ahead by as many forwards as stages follow, then alternates.

    It bounds the grains in flight in a cell of stage s by P - s. Meant for stages of equal widths with equal grains in
    each column; for others ``check`` tells whether it can be executed.
    """
    cells: dict[int, tuple[Op, ...]] = {}
    for index, stage in enumerate(layout.stages):
        for cell in stage.cells:
            warm_up = min(len(cell.grains), layout.pipeline_size - index - 1)
            forwards = [Op("forward", grain) for grain in cell.grains]
            backwards = [Op("backward", grain) for grain in cell.grains]
            ops = forwards[:warm_up]
            for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
                ops += [forward, backward]
            cells[cell.leader] = (*ops, *backwards[len(forwards) - warm_up :])
    return Program(cells)


def needs(layout: Layout, stage: int, op: Op) -> Iterator[tuple[int, Op]]:
    """(stage, operation) of everything that must be done before ``op`` at ``stage``."""
    if op.kind == "forward":
        if stage > 0:
            yield stage - 1, op
    else:
        yield stage, Op("forward", op.grain)
        if stage + 1 < layout.pipeline_size:
            yield stage + 1, op


def check(program: Program, layout: Layout, max_in_flight: int | None = None) -> None:
    """Raise ProgramError unless ``program`` computes a step of ``layout``.

    Every grain is computed forward and backward exactly once at every stage, by the cell that has it; the cells' orders
    and the operations' dependencies contain no cycle; and no cell has more than ``max_in_flight`` grains between their
    forward and their backward at a time.
    """
    _check_complete(program, layout)
    _check_order(program, layout)
    if max_in_flight is not None:
        for leader, ops in program.cells.items():
            if (peak := _peak_in_flight(ops)) > max_in_flight:
                raise ProgramError(
                    f"cell {leader} holds {peak} grains in flight, more than the {max_in_flight} allowed"
                )


def _check_complete(program: Program, layout: Layout) -> None:
    cells = {cell.leader: cell for stage in layout.stages for cell in stage.cells}
    if set(program.cells) != set(cells):
        raise ProgramError(f"the program is for cells {sorted(program.cells)}, but the layout has {sorted(cells)}")
    for leader, ops in program.cells.items():
        expected = Counter(Op(kind, grain) for kind in KINDS.values() for grain in cells[leader].grains)
        actual = Counter(ops)
        if actual == expected:
            continue
        missing = " ".join(map(str, expected - actual)) or "nothing"
        surplus = " ".join(map(str, actual - expected)) or "nothing"
        raise ProgramError(f"cell {leader} misses {missing} and has {surplus} too much")


def _check_order(program: Program, layout: Layout) -> None:
    """Execute the program symbolically, each cell as far as it can go, and see whether all come to their ends."""
    position = dict.fromkeys(program.cells, 0)
    done: set[tuple[int, Op]] = set()
    waiting: dict[tuple[int, Op], list[int]] = {}
    blocked: dict[int, tuple[int, Op]] = {}
    ready = deque(program.cells)
    while ready:
        leader = ready.popleft()
        stage, ops = layout.stage_of(leader), program.cells[leader]
        blocked.pop(leader, None)
        while position[leader] < len(ops):
            op = ops[position[leader]]
            missing = next((need for need in needs(layout, stage, op) if need not in done), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(leader)
                blocked[leader] = missing
                break
            done.add((stage, op))
            position[leader] += 1
            ready.extend(waiting.pop((stage, op), ()))
    if blocked:
        stuck = "; ".join(
            f"cell {leader} cannot do {program.cells[leader][position[leader]]} before {op} at stage {stage}"
            for leader, (stage, op) in sorted(blocked.items())
        )
        raise ProgramError(f"the program has a cycle, so it never ends: {stuck}")


def _peak_in_flight(ops: tuple[Op, ...]) -> int:
    peak = now = 0
    for op in ops:
        now += 1 if op.kind == "forward" else -1
        peak = max(peak, now)
    return peak
