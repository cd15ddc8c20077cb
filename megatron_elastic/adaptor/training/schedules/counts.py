"""Counts: which samples and steps lie behind a step, for the data, the learning rate and the optimizer.

All follow from what lay behind the job when it began, which its checkpoint says, from flags, and from steps that were
skipped for the sake of the loss scale. So a step that is redone gets the same, whoever does it.
"""

from __future__ import annotations

import argparse
import itertools

import torch
import torch.distributed

from megatron_elastic.adaptor.checkpoints.origin import Start
from megatron_elastic.adaptor.training.schedules.scales import LossScales
from megatron_elastic.cluster.messages import UNSCALED, Scaling
from megatron_elastic.plan.work.ramp import Ramp


class Counts:
    """Counts by step (1-based), as one rank knows them.

    Args:
        args: Megatron's flags.
        scales: know which steps were skipped.
        start: what lay behind the job; None for a rank that came later, which the others tell (``agree``).
    """

    def __init__(self, args: argparse.Namespace, scales: LossScales, start: Start | None) -> None:
        self._left_out = frozenset(getattr(args, "iterations_to_skip", None) or ())
        self._batch = args.global_batch_size
        self._scales = scales
        self._start = start

    @property
    def start(self) -> Start:
        """What lay behind the job when it began."""
        assert self._start is not None, "nobody has told what lay behind the job when it began"
        return self._start

    @property
    def first(self) -> int:
        """The first step that the job computes."""
        return next(step for step in itertools.count(self.start.done + 1) if not self.skips(step))

    def trained(self, done: int) -> bool:
        """Whether of so many steps the job has done one itself. It has where a rank came later, and is not told yet."""
        return self._start is None or done > self._start.done

    def ramp(self, args: argparse.Namespace) -> Ramp:
        """How large the batch of each step is, from which sample on."""
        ramp = Ramp.of(args)
        if self._start is None:
            return ramp
        ramp_since = ramp.since(self.start.done, self.start.samples)
        assert ramp_since is not None, "checked when the job began"
        return ramp_since

    def skips(self, step: int) -> bool:
        """Whether a step only takes its samples (``--iterations-to-skip``, which Megatron counts from 0)."""
        return step - 1 in self._left_out

    def number(self, step: int, scaled: bool = True) -> int:
        """Which of the optimizer's updates a step is, from 1, if it is one. ``scaled``: as in ``counted``."""
        skipped = self._scaling(step, scaled).skipped
        return self.start.updates + step - self.start.done - self._by_flags(step) - skipped

    def counted(self, step: int, ramp: Ramp, scaled: bool = True) -> int:
        """Samples before a step that the learning rate counts. ``scaled``: but for those of steps that were skipped for
        the sake of the loss scale.
        """
        taken = ramp.before(step) - self.start.samples
        skipped = self._scaling(step, scaled).samples
        return self.start.counted + taken - self._by_flags(step) * self._batch - skipped

    def agree(self) -> None:
        """Let all ranks of the layout know what lay behind the job, as some of them do. All of them call it."""
        told = torch.tensor([-1] * len(Start._fields) if self._start is None else self._start)
        torch.distributed.all_reduce(told, torch.distributed.ReduceOp.MAX)
        self._start = Start(*map(int, told.tolist()))
        assert self._start.done >= 0, "nobody knows what lay behind the job when it began"

    def _scaling(self, step: int, scaled: bool) -> Scaling:
        return self._scales.at(step) if scaled else UNSCALED

    def _by_flags(self, step: int) -> int:
        """Steps of the job before this one that the flags leave out; batches do not grow meanwhile."""
        return sum(self.start.done <= iteration < step - 1 for iteration in self._left_out)
