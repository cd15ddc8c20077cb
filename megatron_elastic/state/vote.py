"""Vote: the last exchange before a step is applied. Who gets past it knows that the step can be finished by the others.

A rank enters the vote only when the gradients of all slices it owns or replicates are here. The vote is an
all-reduce, so a rank past it knows that every rank had entered: every slice's gradient exists at its owner and its
replica, and the step can be rolled forward whoever dies now.

What is voted on are the partial results that the step's global numbers are made of, each contributed by exactly one
rank and added to zeros, then combined in canonical order: the numbers do not depend on placement. Only a grain that is
cut has several contributors, whose sums in single precision are added up in double.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from megatron_elastic.comm.group import Group
from megatron_elastic.layout import Layout


@dataclass(frozen=True, slots=True)
class Ballot:
    """What one rank contributes: squared norms of the slices it owns, (loss sum, tokens) of its grains or their parts.

    ``informed``: it knows of a planned layout. When all ranks do, they switch to it after the step.
    """

    norms: Mapping[tuple[int, int], float]
    losses: Mapping[int, tuple[float, float]]
    informed: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """What everybody knows after the vote."""

    grad_norm: float
    loss: float
    tokens: int
    switch: bool


def vote(layout: Layout, group: Group, tp_index: int, ballot: Ballot) -> Outcome:
    """Exchange ballots over ``group`` (all ranks of the layout) and combine them. Raises what its waits raise."""
    slices, tp, grains = layout.num_slices, layout.cell_size, layout.num_grains
    norms = len(layout.units) * slices * tp
    numbers = torch.zeros(norms + 2 * grains + 1, dtype=torch.float64)
    for (unit, k), value in ballot.norms.items():
        numbers[(unit * slices + k) * tp + tp_index] = value
    for grain, (loss, tokens) in ballot.losses.items():
        numbers[norms + 2 * grain] = loss
        numbers[norms + 2 * grain + 1] = tokens
    numbers[-1] = float(ballot.informed)
    group.transport.run(group.all_reduce(numbers, torch.Tensor.add_))
    *values, informed = numbers.tolist()
    tokens = math.fsum(values[norms + 1 :: 2])
    return Outcome(
        grad_norm=math.sqrt(math.fsum(values[:norms])),
        loss=math.fsum(values[norms::2]) / max(tokens, 1.0),
        tokens=round(tokens),
        switch=informed == len(layout.ranks),
    )
