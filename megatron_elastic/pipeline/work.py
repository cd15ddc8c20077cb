"""Work: what a rank has done of the step in progress. It outlives layouts, so that another can go on from it.

It knows of each grain and chunk how far it is, and has what it takes to go on: input and output of a chunk between
forward and backward, or the input alone, weights' gradients that were put off, losses. And the *log*: all that was made
for other stages in this step, until it commits, so that what a cell loses can be done again in its stage alone. The
sums of gradients are in ``state.buffer``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from megatron_elastic.cluster.messages import Kept, WorkDone
from megatron_elastic.layout import Layout
from megatron_elastic.pipeline.program import Op

Item = tuple[int, int]
"""A grain and a chunk of this rank's stage."""


class Addition(Protocol):
    """A gradient that is due."""

    def add(self) -> None:
        """Add it to the sums."""

    def kept(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The weight whose gradient it is, and what is kept until then to compute it."""


class Work:
    """One rank's, of one step.

    Args:
        layout: under which it begins. Those in which it goes on have the same units in each stage.
        grains: that the step has, the first ones of the layout's.
        log_limit: bytes that the log may hold. What is more ends it, and nothing can go on from here.
    """

    def __init__(self, step: int, layout: Layout, grains: int, log_limit: float) -> None:
        self.step = step
        self.grains = grains
        self.added: set[Item] = set()
        """Whose gradients are in the sums."""
        self.live: dict[Item, tuple[torch.Tensor | None, torch.Tensor | None]] = {}
        """Input and output of what is between forward and backward; no output where it is recomputed."""
        self.half: set[Item] = set()
        """Of whose backward the weights' gradients are due yet."""
        self.due: dict[Item, Collection[Addition]] = {}
        """Those."""
        self.losses: dict[int, torch.Tensor] = {}
        """[loss sum, tokens] of what was computed here of each grain, where that was; at the end of the model."""
        self.measures: defaultdict[Item, dict[tuple[str, int], torch.Tensor]] = defaultdict(dict)
        """What else was measured, by name and layer."""
        self._chunks = layout.num_chunks
        self._end = layout.way[-1].chunk
        self._limit = log_limit
        self._log: dict[tuple[bool, Item], torch.Tensor] = {}
        """What was made: by a forward or not, and of what."""
        self._logged = 0
        self._torn = False
        """Whether a backward was abandoned in the middle: nobody knows what the sums hold."""

    @contextmanager
    def adding(self) -> Iterator[None]:
        """Around all that changes the sums."""
        torn, self._torn = self._torn, True
        yield
        self._torn = torn

    def log(self, op: Op, made: torch.Tensor) -> None:
        """Keep what an operation has made for another stage."""
        self._logged += made.nbytes
        if self._logged <= self._limit:
            self._log[_key(op)] = made
        else:
            self._log.clear()

    def logged(self, op: Op) -> torch.Tensor:
        """What an operation has made. Raises KeyError if it is not in the log."""
        return self._log[_key(op)]

    def progress(self) -> WorkDone | None:
        """What has been done, if that can be gone on from."""
        if self._torn or self._logged > self._limit:
            return None
        return WorkDone(
            step=self.step, grains=self.grains, added=self._numbers(self.added),
            live=self._numbers(self.live), half=self._numbers(self.half),
        )  # fmt: skip

    def keep(self, kept: Kept) -> None:
        """Forget what does not count: forwards that not all ranks of the cell have done."""
        known = {divmod(number, self._chunks) for number in kept.numbers}
        self.live = {item: tensors for item, tensors in self.live.items() if item in known}
        self._log = {key: made for key, made in self._log.items() if key[1] in known}
        self._logged = sum(made.nbytes for made in self._log.values())
        self.losses = {grain: loss for grain, loss in self.losses.items() if (grain, self._end) in known}
        self.measures = defaultdict(dict, {item: found for item, found in self.measures.items() if item in known})
        assert self._numbers((*self.added, *self.live, *self.half)) == sorted(kept.numbers)

    def measured(self, name: str) -> torch.Tensor | None:
        """All that was measured of this name, or of ``name/layer`` in that layer; flat. None if nothing was."""
        found = [value for measures in self.measures.values() for (of, layer), value in measures.items()
                 if name in (of, f"{of}/{layer}")]  # fmt: skip
        return torch.stack(found).view(-1) if found else None

    def _numbers(self, items: Collection[Item]) -> list[int]:
        return sorted(grain * self._chunks + chunk for grain, chunk in items)


def _key(op: Op) -> tuple[bool, Item]:
    return op.kind == "forward", (op.grain, op.chunk)
