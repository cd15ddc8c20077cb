"""``torch.utils.data``: one sample, and a batch of them.

Whoever takes over a micro-batch has to read the same samples, and a data set that draws as it reads (Megatron-LM's for
filling in the middle, or one of the user's) goes on from what it has drawn before. So all generators that are known are
set by the job's seed and the sample's place in the job, before it is read.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from megatron_elastic.adaptor.samples.order import Order, in_order
from megatron_elastic.numerics.keyed import key

_reading = threading.Lock()
"""Some generators are everybody's."""


class Samples(Protocol):
    """Samples by their number."""

    def __getitem__(self, number: int) -> dict[str, Any]: ...
    def __len__(self) -> int: ...


class Reader:
    """Reads samples of one data set, one at a time.

    Args:
        data: a map-style data set; sample i is a dict. A blend has others inside.
        seed: of the job.
        order: in which they are taken.
    """

    def __init__(self, data: Samples, seed: int, order: Order = in_order) -> None:
        self._data = data
        self._seed = seed
        self._order = order
        self._generators = list(_generators(data))

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, place: int) -> dict[str, Any]:
        """The sample that comes in a place. What is drawn for it depends on that and the seed alone."""
        drawn = key("sample", self._seed, place)
        words = [drawn & 0xFFFFFFFF, drawn >> 32]
        with _reading:
            random.seed(drawn)
            np.random.seed(words)
            for generator in self._generators:
                generator.seed(words)
            return self._data[self._order(place)]


def _generators(data: Any, depth: int = 4) -> Iterator[np.random.RandomState]:
    """Those that a data set keeps, and the data sets inside it."""
    for value in vars(data).values() if hasattr(data, "__dict__") else ():
        if isinstance(value, np.random.RandomState):
            yield value
        elif depth:
            for inner in value if isinstance(value, list | tuple) else (value,):
                if hasattr(inner, "__getitem__") and hasattr(inner, "__dict__"):
                    yield from _generators(inner, depth - 1)


def collate(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One micro-batch, as PyTorch's ``DataLoader`` makes it: fields stacked, [micro-batch size, ...], also numbers."""
    from torch.utils.data import default_collate

    batch: dict[str, Any] = default_collate(list(samples))
    return batch
