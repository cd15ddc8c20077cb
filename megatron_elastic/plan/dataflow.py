"""Dataflow: which cell computes which samples when micro-batches may change their size.

The other way, ``reroute``, moves whole grains and so keeps every number bit for bit. Here every cell of a stage
computes a part of every micro-batch instead: the micro-batches of the global batch stay as many and in the same order,
and a stage of width w cuts each into w ranges. Neighbouring stages may cut differently; a cell sends to whom it shares
samples with. Gradients are sums over samples, so global batch and gradient scale stay what they were.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Samples(NamedTuple):
    """Samples ``start`` to ``stop - 1`` of the global batch."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """How many they are."""
        return self.stop - self.start


class Exchange(NamedTuple):
    """What one cell sends to one of the next stage; cells are counted from 0 in each stage. Gradients go back."""

    sender: int
    receiver: int
    samples: Samples


def resize(num_samples: int, micro_batches: int, width: int) -> tuple[tuple[Samples, ...], ...]:
    """[cell][micro-batch] = the samples that a cell of a stage of ``width`` cells computes.

    The cells' ranges of a micro-batch follow one another and differ by at most one sample in size, as do the cells'
    totals. A range may be empty when there are more cells than samples. Raises ValueError unless all are positive.
    """
    if min(num_samples, micro_batches, width) < 1:
        raise ValueError(
            f"samples, micro-batches and cells must be positive, got {num_samples}, {micro_batches} and {width}"
        )
    shares: list[list[Samples]] = [[] for _ in range(width)]
    turn = 0  # the cell whose turn it is to take a sample that is left over
    for index in range(micro_batches):
        start = num_samples * index // micro_batches
        low, extra = divmod(num_samples * (index + 1) // micro_batches - start, width)
        for cell, share in enumerate(shares):
            stop = start + low + ((cell - turn) % width < extra)
            share.append(Samples(start, stop))
            start = stop
        turn = (turn + extra) % width
    return tuple(map(tuple, shares))


def exchanges(senders: Sequence[Samples], receivers: Sequence[Samples]) -> Iterator[Exchange]:
    """Who sends what over a stage boundary, for one micro-batch, given both stages' ranges in the order of their cells.

    At most as many as both stages have cells, less one. Raises ValueError if the stages have different samples.
    """
    if (senders[0].start, senders[-1].stop) != (receivers[0].start, receivers[-1].stop):
        raise ValueError(
            f"the sending stage has samples {senders[0].start} to {senders[-1].stop - 1} of the micro-batch, but the "
            f"receiving one {receivers[0].start} to {receivers[-1].stop - 1}"
        )
    sender = receiver = 0
    while sender < len(senders) and receiver < len(receivers):
        common = Samples(
            max(senders[sender].start, receivers[receiver].start), min(senders[sender].stop, receivers[receiver].stop)
        )
        if common.start < common.stop:
            yield Exchange(sender, receiver, common)
        if senders[sender].stop <= receivers[receiver].stop:
            sender += 1
        else:
            receiver += 1
