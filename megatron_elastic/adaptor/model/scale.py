"""``megatron.core.pipeline_parallel.schedules``: what a loss is multiplied by before its backward pass.

So that small gradients do not vanish in fp16, Megatron computes those of a loss that is scaled, and divides them by the
scale when they have been summed up. Here they are as they should be when they get into a sum: sums may be of grains
that were computed in different ways, and have a limit.

Megatron also divides a loss by the rank's number of micro-batches, which has its part in what overflows. Ranks come and
go, and that must not change; so it is the number that each would have if there were as many columns as slices, which is
Megatron's own where the number of slices is the default.
"""

from __future__ import annotations

import argparse

import torch
from megatron.core.transformer import TransformerConfig

from megatron_elastic.adaptor.model import tokens
from megatron_elastic.layout import Layout
from megatron_elastic.numerics.exact import Accumulator


class LossFactor:
    """Multiplies losses, and lets an accumulator undo it.

    Args:
        layout: any of the job.
        scaled: whether the job scales losses at all.
    """

    def __init__(self, args: argparse.Namespace, layout: Layout, accumulator: Accumulator, scaled: bool) -> None:
        whole = not scaled or tokens.of_sums(args)
        self._shares = 1.0 if whole else layout.num_batches * layout.cp / layout.num_slices
        self._tokens = tokens.of_a_grain(args)
        self._accumulator = accumulator
        self._scaled = scaled
        self.set(1.0)

    def set(self, scale: float) -> None:
        """From now on losses are scaled so."""
        self._factor = scale / self._shares
        self._accumulator.factor = 1 / (self._factor * self._tokens)

    def install(self, config: TransformerConfig) -> None:
        """Let a model's backward passes begin with losses that are multiplied."""
        if self._scaled:
            config.grad_scale_func = self.apply

    def apply(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss, multiplied."""
        return loss * self._factor
