"""Ramp: how large the global batch of each step is, which Megatron's ``--rampup-batch-size`` lets grow.

A step with a smaller batch computes the first grains of the full one. So grains keep their numbers, and layouts, which
say who computes which of all grains, do not change when the batch does.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import Any, NamedTuple


class Phase(NamedTuple):
    """Steps of one size."""

    first: int
    """The first of them; steps count from 1."""
    before: int
    """Samples that the steps before it take."""
    size: int
    """Samples of each."""


@dataclass(frozen=True, slots=True)
class Ramp:
    """The global batch of every step of a job.

    Attributes:
        grain: samples of a grain.
        phases: one after the other; the last one has the full batch.
        span: samples after which the batch is full; 0 if it always is.
    """

    grain: int
    phases: tuple[Phase, ...]
    span: int = 0

    @classmethod
    def of(cls, args: Any) -> Ramp:
        """From flags that have been checked: a namespace with Megatron-LM's names."""
        cp, ep = getattr(args, "context_parallel_size", 1), getattr(args, "expert_model_parallel_size", 1)
        grain, grows = args.micro_batch_size * max(ep // cp, 1), getattr(args, "rampup_batch_size", None)
        if grows is None:
            return cls(grain, (Phase(1, 0, args.global_batch_size),))
        start, increment, span = map(int, grows)
        return cls.growing(grain, start, increment, span, args.global_batch_size)

    @classmethod
    def growing(cls, grain: int, start: int, increment: int, span: int, full: int) -> Ramp:
        """From ``start`` to ``full`` samples, which are more, by ``increment`` each time, over ``span`` samples."""
        each = span / ((full - start) // increment)  # in floating point, as Megatron has it

        def after(consumed: int) -> int:
            return full if consumed > span else start + int(consumed / each) * increment

        phases = [Phase(1, 0, start)]
        while (phase := phases[-1]).size < full:
            first, before, size = phase
            grown = bisect_left(range(1, span // size + 1), True, key=lambda n: after(before + n * size) > size) + 1
            phases.append(Phase(first + grown, before + grown * size, after(before + grown * size)))
        return cls(grain, tuple(phases), span)

    def since(self, done: int, samples: int) -> Ramp | None:
        """The same for a job that goes on after ``done`` steps which took ``samples``.

        None if they would have taken fewer by this, or batches still grow and they took others.
        """
        natural = self.before(done + 1)
        if samples == natural:
            return self
        if samples > natural or samples <= self.span:
            return None
        full = self.phases[-1].size
        return Ramp(self.grain, (Phase(1, samples - done * full, full),))

    def samples(self, step: int) -> int:
        """Samples of the step."""
        return self._phase(step).size

    def grains(self, step: int) -> int:
        """Grains of the step: so many of the first ones."""
        return self.samples(step) // self.grain

    def before(self, step: int) -> int:
        """Samples that the steps before this one take."""
        first, before, size = self._phase(step)
        return before + (step - first) * size

    def steps(self, samples: int) -> int:
        """How many steps Megatron makes of ``--train-samples``.

        That is all which begin before so many are used up while the batch grows, and after that only whole ones.
        """
        begun = 0
        if self.span:
            limit = min(samples, self.span)
            first, before, size = self.phases[bisect_right(self.phases, limit, key=lambda phase: phase.before) - 1]
            begun = first + (limit - before) // size
        return begun + max(samples - self.before(begun + 1), 0) // self.phases[-1].size

    def _phase(self, step: int) -> Phase:
        return self.phases[bisect_right(self.phases, step, key=lambda phase: phase.first) - 1]
