"""Vote: the last exchange before a step is applied. Who gets past it knows that the step can be finished by the others.

A rank enters the vote only when the gradients of all slices it owns or replicates are here. Nobody hears the outcome
before all ballots have been added up, so a rank past the vote knows that every rank had entered: every slice's gradient
exists at its owner and its replica, and the step can be rolled forward whoever dies now.

What is voted on are the partial results that the step's global numbers are made of, each contributed by exactly one
rank. They are added up exactly (``numerics.exact_sum``), so the numbers do not depend on placement, and in a tree over
the ranks in order, whose neighbours are of one stage: a message has the same size however many slices and grains there
are, and nobody gets more than a few for each level. Only the first rank, which has them all, rounds and tells.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from megatron_elastic.comm.group import Group
from megatron_elastic.numerics.exact_sum import SIZE, float_of, write_sum


@dataclass(frozen=True, slots=True)
class Ballot:
    """What one rank contributes: squares of the gradients of the slices it owns, added up in blocks; (loss sum, tokens)
    of its grains or their parts.

    ``informed``: it knows of a planned layout. When all ranks do, they switch to it after the step. ``measures``: what
    else is to be added up; everybody's have the same names. ``finite``: all gradients were that it has computed; else
    the norm is not, whatever sums and norms say.
    """

    squares: npt.NDArray[np.float64]
    losses: Mapping[int, tuple[float, float]]
    informed: bool = False
    measures: Mapping[str, Sequence[float]] = field(default_factory=dict)
    finite: bool = True


@dataclass(frozen=True, slots=True)
class Outcome:
    """What everybody knows after the vote."""

    grad_norm: float
    loss: float
    tokens: int
    switch: bool
    measures: Mapping[str, float]


def vote(group: Group, ballot: Ballot) -> Outcome:
    """Exchange ballots over ``group`` (all ranks of the layout) and combine them. Raises what its waits raise."""
    names = sorted(ballot.measures)
    numbers, told = torch.from_numpy(count(ballot)), torch.zeros(4 + len(names), dtype=torch.float64)
    group.transport.run(group.reduce_exact(numbers, torch.Tensor.add_))
    if group.index == 0:
        told.copy_(torch.tensor(add_up(numbers.numpy()), dtype=torch.float64))
    group.transport.run(group.broadcast_from_root(told))
    squares, loss, tokens, *measures, informed = told.tolist()
    return Outcome(
        grad_norm=math.sqrt(squares), loss=loss / max(tokens, 1.0), tokens=round(tokens), switch=informed == group.size,
        measures=dict(zip(names, measures, strict=True)),
    )  # fmt: skip


def count(ballot: Ballot) -> npt.NDArray[np.int64]:
    """A ballot as numbers, which add up to those of everybody."""
    losses, tokens = zip(*ballot.losses.values(), strict=True) if ballot.losses else ((), ())
    squares = ballot.squares if ballot.finite else np.append(ballot.squares, math.inf)
    measures = (ballot.measures[name] for name in sorted(ballot.measures))
    sums: list[npt.ArrayLike] = [squares, losses, tokens, *measures]
    numbers = np.zeros(len(sums) * SIZE + 1, dtype=np.int64)
    for at, values in enumerate(sums):
        write_sum(values, numbers[at * SIZE : (at + 1) * SIZE])
    numbers[-1] = ballot.informed
    return numbers


def add_up(numbers: npt.NDArray[np.int64]) -> tuple[float, ...]:
    """Squared norm, loss sum, tokens, measures by name, and how many are informed."""
    sums = (float_of(numbers[start : start + SIZE]) for start in range(0, len(numbers) - 1, SIZE))
    return *sums, float(numbers[-1])
