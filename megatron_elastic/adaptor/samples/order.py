"""``megatron.training.datasets.data_samplers``: which sample comes when.

There a sampler hands out micro-batches one after the other, to one data-parallel rank. Here it is asked which sample
has a *place* in the order in which a job takes them, so that whoever computes a grain can ask, in whatever order.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

from megatron_elastic.config import UsageError

Order = Callable[[int], int]
"""The number of the sample that comes in a place; places and samples count from 0."""


def order_of(args: argparse.Namespace, samples: int) -> Order:
    """What ``--dataloader-type`` says of a data set of so many samples. Raises UsageError if it has too few."""
    if getattr(args, "dataloader_type", "single") == "single":
        return in_order
    return Cyclic(samples, args.micro_batch_size, args.data_parallel_size, args.data_sharding)


def in_order(place: int) -> int:
    """``MegatronPretrainingSampler``: the samples as they are numbered."""
    return place


class Cyclic:
    """``MegatronPretrainingRandomSampler``: in every epoch all samples in another order, drawn from its number.

    Micro-batches go to ``columns`` data-parallel ranks in turn: those of the flags, whatever ranks there are. With
    ``sharding`` each of these has its own stretch of the samples. An epoch ends, for all, where samples are too few for
    one more micro-batch of each.
    """

    def __init__(self, samples: int, micro_batch: int, columns: int, sharding: bool) -> None:
        self._turn = micro_batch * columns
        self._each = samples // self._turn * micro_batch
        """Samples that a column takes in an epoch."""
        self._drawn = self._each if sharding else samples // micro_batch * micro_batch
        if not self._each:
            raise UsageError(f"--dataloader-type cyclic: a data set has {samples} samples, too few for one micro-batch "
                             f"of each data-parallel rank ({self._turn}): give it more, or use single")
        self._micro_batch = micro_batch
        self._columns = columns
        self._sharding = sharding
        self._epoch = -1
        self._shuffled = torch.empty(0, dtype=torch.int64)

    def __call__(self, place: int) -> int:
        epoch, place = divmod(place, self._each * self._columns)
        turn, place = divmod(place, self._turn)
        column, place = divmod(place, self._micro_batch)
        nth = turn * self._micro_batch + place
        shuffled = self._of(epoch)
        if self._sharding:
            return column * self._each + int(shuffled[nth])
        return int(shuffled[nth * self._columns + column])

    def _of(self, epoch: int) -> torch.Tensor:
        """The order of an epoch. Who reads ahead is one epoch further at times, so this may be drawn again."""
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(epoch)
            self._shuffled, self._epoch = torch.randperm(self._drawn, generator=generator), epoch
        return self._shuffled
