"""Policies: what a job loses to failures, by what it does about them. Formulas and measured constants; all times in s.

Failures of the job come at random with one mean time between them (MTBF), also during a recovery: the time to the next
one is exponential, whatever went before. Goodput is the time that the samples would have taken without failures and
with all cells, by the time that they take.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

DONE = 0.5
"""Share of its part of the step that a cell has done when it is lost: on average half, as no moment is special."""


@dataclass(frozen=True, slots=True)
class Constants:
    """What the formulas are fed with, in s.

    The defaults are measured from ``kill -9`` to the next completed step, 8 ranks on 2 cores of an AMD EPYC, 2026-11-21
    (README.md, "Measured"). A step took about 0.2 s there, which is taken off, as the formulas count steps on their
    own. The others' are those of a tiny model, ours that of the largest one measured, where ours is longest.
    """

    restart: float = 15.1
    """Restart by torchrun, megatron-core 0.16.1: 15.3 less the step."""
    reentry: float = 2.4
    """NVRx in-process restart, tuned: 2.6 less the step."""
    timeout: float = 0.55
    """torchft nightly 2026.10.26, tuned: 0.75 less the step. Most of it is a timeout of gloo, of 0.5."""
    pause: float = 0.068
    """Ours but the redone work: the median with 100M parameters, PP1 x DP8; 0.013 with the tiny model."""
    checkpoint: float = 6.3
    """How long training waits for an asynchronous checkpoint. Published, not measured here: 7B parameters,
    https://pytorch.org/blog/reducing-checkpointing-times."""
    width: int = 8
    """Cells of the stage that loses one; for torchft replicas of the job."""


@dataclass(frozen=True, slots=True)
class Rejoin:
    """How a process that is started again comes to take part."""

    start: float
    """Until it could follow, in s."""
    steps: int
    """Whole steps, after the one in which it has started, until it has a part of the samples. A failure meanwhile
    begins them again."""


OURS = Rejoin(start=0.6, steps=3)
"""0.6 s with ``bench endurance --kills 20`` (README.md, "Measured"). With steps of 2 s, what replaced a rank that was
killed in step 3 followed from step 5 on and had grains from step 7 on: two layouts, each after a step that was entered
knowing of it (2 cores of an AMD EPYC, DP4, ``--elastic-respawn``, 2026-11-22)."""
TORCHFT = Rejoin(start=5.0, steps=1)
"""4 to 6 s measured, half of it imports; a replica that receives the state contributes nothing to that step."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What a job does about a failure.

    ``kept(step, mtbf)``: the goodput if a lost cell were replaced as soon as training goes on. ``overhead``: length of
    a step to that of the plain job when nothing fails, as measured. ``rejoin``: None where training goes on only once
    all cells are there again.
    """

    name: str
    title: str
    kept: Callable[[float, float], float]
    width: int
    rejoin: Rejoin | None = None
    overhead: float = 1.0

    def goodput(self, step: float, mtbf: float, *, absence: bool = False, overhead: bool = False) -> float:
        """Between 0 and 1, for steps of ``step`` s. ``absence`` and ``overhead`` say whether these are counted."""
        factor = self.overhead if overhead else 1.0
        share = self.kept(step * factor, mtbf) / factor
        if absence and self.rejoin is not None:
            share *= 1 - absent(step * factor, mtbf, self.rejoin, self.width)
        return share


def until_quiet(span: float, mtbf: float) -> float:
    """Expected time until ``span`` s without a failure have passed: M (e^(span/M) - 1); infinite if too large."""
    try:
        return mtbf * math.expm1(span / mtbf)
    except OverflowError:
        return math.inf


def daly_interval(checkpoint: float, mtbf: float) -> float:
    """Work between two checkpoints, in s, that costs least.

    J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", 2006, equation 37. Its
    first term is J. W. Young's, 1974.
    """
    if checkpoint >= 2 * mtbf:
        return mtbf
    half = checkpoint / (2 * mtbf)
    return math.sqrt(2 * checkpoint * mtbf) * (1 + math.sqrt(half) / 3 + half / 9) - checkpoint


def from_checkpoints(work: float, mtbf: float, stall: float, checkpoint: float) -> float:
    """Goodput with a checkpoint after each ``work`` s: work / (M e^(stall/M) (e^((work + checkpoint)/M) - 1)).

    Daly 2006, equation 13: exact for exponential failures, those during a restart or a checkpoint included.
    """
    return work / until_quiet(work + checkpoint, mtbf) * math.exp(-stall / mtbf)


def restarting(step: float, mtbf: float, stall: float, checkpoint: float) -> float:
    """Goodput with checkpoints at ends of steps, as often as costs least."""
    steps = daly_interval(checkpoint, mtbf) / step
    return max(from_checkpoints(max(1, whole) * step, mtbf, stall, checkpoint)
               for whole in (math.floor(steps), math.ceil(steps)))


def losing_step(step: float, mtbf: float, stall: float) -> float:
    """Goodput where a failure spoils the step that it happens in, which survivors still go through to its end.

    A step succeeds with the chance e^(-step/M), so it fails (e^(step/M) - 1) times before that on average, each time
    for the step and the stall.
    """
    failures = until_quiet(step, mtbf) / mtbf
    return step / (step + failures * (step + until_quiet(stall, mtbf)))


def redoing(step: float, mtbf: float, stall: float) -> float:
    """Goodput where a failure begins the step again at once: a checkpoint after each step that costs nothing."""
    return from_checkpoints(step, mtbf, stall, 0.0)


def resuming(step: float, mtbf: float, stall: float, width: int) -> float:
    """Goodput where the remaining cells compute what the lost one had done: (1 - redone/M) e^(-stall/M).

    A failure adds ``redone`` s of work, in which further ones come as in any other. A stall that is interrupted by a
    failure begins again.
    """
    redone = DONE * step / (width - 1)
    return max(0.0, 1 - redone / mtbf) * math.exp(-stall / mtbf)


def absent(step: float, mtbf: float, rejoin: Rejoin, width: int) -> float:
    """Share of the cells that are absent on average: (start + time until it takes part) / M / width, at most 1.

    What is left of the step in which it could follow is half a step on average.
    """
    away = rejoin.start + until_quiet((0.5 + rejoin.steps) * step, mtbf)
    return min(1.0, away / mtbf / width)


def policies(constants: Constants) -> list[Policy]:
    """The five, from the one that loses most to the one that loses least."""
    c = constants
    return [
        Policy("restart", "restart", lambda step, mtbf: restarting(step, mtbf, c.restart, c.checkpoint), c.width),
        Policy("nvrx", "NVRx-like", lambda step, mtbf: restarting(step, mtbf, c.reentry, c.checkpoint), c.width),
        # The overhead was measured with the others, on short steps; which part of it grows with them is not known.
        Policy("torchft", "torchft-like", lambda step, mtbf: losing_step(step, mtbf, c.timeout), c.width, TORCHFT,
               1.23),
        # "bitwise" at its worst: 0.99 of plain Megatron over gloo, which over our transport is at 0.87. "fast": 1.
        Policy("back", "redo the step", lambda step, mtbf: redoing(step, mtbf, c.pause), c.width, OURS, 1.14),
        Policy("resume", "resume", lambda step, mtbf: resuming(step, mtbf, c.pause, c.width), c.width, OURS, 1.14),
    ]
