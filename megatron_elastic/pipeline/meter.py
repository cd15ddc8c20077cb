"""Meter: what each unit takes in time and in activations, measured while training runs.

Hooks tell where a pass is: a unit's forward lasts until the next unit's begins, its backward until the gradients of its
parameters are there. That costs a look at the clock for each unit and pass. What a forward keeps for its backward, and
the first half of a backward for the second, is counted once, in the first grain that passes its chunk. Times are of the
processor: a device that computes on its own is not waited for.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch

from megatron_elastic.pipeline.work import Addition


class Measured(NamedTuple):
    """What one unit takes for a grain: mean milliseconds, and bytes kept from its forward to its backward, and from the
    first half of that to the second, if it is known.
    """

    forward_ms: float
    backward_ms: float
    activation_bytes: int
    late_bytes: int | None = None


class Meter:
    """Times the passes of one rank's stage under one layout, unit by unit.

    Args:
        parameters: by unit, what a forward reads without having to keep it for the backward.
        chunks: of the stage, which a grain passes one after the other.
        halves: whether backwards may be in two parts later, though they are not yet.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor], chunks: int = 1, halves: bool = False) -> None:
        self._chunks, self._halves = chunks, halves
        self._kept = {tensor.untyped_storage().data_ptr(): unit for unit, tensor in parameters.items()}
        """Storages that are there in any case, and whose they are."""
        self._activations: dict[int, dict[str, int]] = {}
        """By chunk and unit; of a chunk when its first forward is over."""
        self._late: dict[int, dict[str, int]] = {}
        """The same of what the first half of a backward keeps."""
        self._seconds: tuple[dict[str, float], dict[str, float]] = (defaultdict(float), defaultdict(float))
        self._grains = [0.0, 0.0]
        """Grains that have passed since the last look: forward, backward."""
        self._pass: int | None = None
        """0 in a forward, 1 in a backward, None in neither."""
        self._unit = ""
        self._mark = 0.0
        self._begun, self._pipeline, self._steps = time.perf_counter(), 0.0, 0
        self._waited, self._passed = 0.0, 0.0
        """Of the step in progress: seconds of waits, and half of the grains that have passed either way."""
        self.busy, self.grains = 0.0, 0.0
        """Seconds of all steps that were not waited, and the grains that they were for."""

    def go_on(self, before: Meter) -> None:
        """The same is done with a grain as was under the layout of the meter ``before``."""
        self.busy, self.grains = before.busy, before.grains

    # ---- what is measured --------------------------------------------------------------------

    @contextmanager
    def pipeline(self) -> Iterator[None]:
        """Around all the passes of a step."""
        begun = time.perf_counter()
        self._waited, self._passed = 0.0, 0.0
        yield
        took = time.perf_counter() - begun
        self._pipeline += took
        self._steps += 1
        self.busy += took - self._waited
        self.grains += self._passed

    @contextmanager
    def forward(self, grains: float = 1.0, chunk: int = 0) -> Iterator[None]:
        """Around the forward pass of a grain, or of a fraction of one, through a chunk."""
        with self._measure(0, grains):
            if chunk in self._activations:
                yield
                return
            activations: dict[str, int] = defaultdict(int)
            counted: set[int] = set()  # of this pass: memory that is free after it is others' again
            with torch.autograd.graph.saved_tensors_hooks(partial(self._count, activations, counted), _same):
                yield
            self._activations[chunk] = {unit: round(size / grains) for unit, size in activations.items()}

    @contextmanager
    def backward(self, grains: float = 1.0) -> Iterator[None]:
        """Around the backward pass of a grain or of a fraction of one, or around its first part."""
        with self._measure(1, grains):
            yield

    def asks_for_halves(self, chunk: int) -> bool:
        """Whether a backward through a chunk is to be done in two parts, to see what is kept between them."""
        return self._halves and chunk not in self._late

    def keep(self, grains: float, chunk: int, due: Iterable[Addition]) -> None:
        """The first part of a backward is over; ``due``: what the second one has to do."""
        if chunk in self._late:
            return
        late: dict[str, int] = defaultdict(int)
        counted: set[int] = set()
        for each in due:
            weight, tensors = each.kept()
            unit = self._kept.get(weight.untyped_storage().data_ptr(), "")
            for tensor in tensors:
                late[unit] += self._new(counted, tensor)
        self._late[chunk] = {unit: round(size / grains) for unit, size in late.items()}

    @contextmanager
    def backward_weight(self) -> Iterator[None]:
        """Around the second part of a backward pass; the first has been counted."""
        with self._measure(1, 0.0):
            yield

    def enter(self, unit: str) -> None:
        """A unit's forward begins. Recomputing it is a part of its backward."""
        if self._pass == 0:
            if self._unit:
                self._charge(self._unit)
            self._unit = unit

    def leave(self, unit: str) -> None:
        """What was computed of a unit's backward since the last look is over."""
        if self._pass == 1:
            self._charge(unit)
            self._unit = unit

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a wait that no unit is to be charged for."""
        begun = time.perf_counter()
        yield
        took = time.perf_counter() - begun
        self._mark += took
        self._waited += took

    # ---- what was measured -------------------------------------------------------------------

    def read(self) -> tuple[dict[str, Measured], float] | None:
        """Units' means since the last look, and the mean ms of a step outside its passes. None if there was no step."""
        seconds, grains, now = self._seconds, self._grains, time.perf_counter()
        elsewhere = now - self._begun - self._pipeline
        steps, activations = self._steps, self._activations
        kept, late = ({unit: size for of in each.values() for unit, size in of.items()}
                      for each in (activations, self._late))  # fmt: skip
        seen = len(self._late) == self._chunks
        self._seconds, self._grains = (defaultdict(float), defaultdict(float)), [0.0, 0.0]
        self._begun, self._pipeline, self._steps = now, 0.0, 0
        if not steps or not all(grains) or len(activations) < self._chunks:
            return None
        units = {
            unit: Measured(
                1e3 * seconds[0][unit] / grains[0], 1e3 * seconds[1][unit] / grains[1], kept.get(unit, 0),
                late.get(unit, 0) if seen else None,
            )
            for unit in {**seconds[0], **seconds[1]}
        }  # fmt: skip
        return units, 1e3 * elsewhere / steps

    # ---- inside ------------------------------------------------------------------------------

    @contextmanager
    def _measure(self, which: int, grains: float) -> Iterator[None]:
        self._pass, self._unit, self._mark = which, "", time.perf_counter()
        try:
            yield
        finally:
            if self._unit:
                self._charge(self._unit)
            self._pass = None
            self._grains[which] += grains / self._chunks
            self._passed += grains / 2 / self._chunks

    def _charge(self, unit: str) -> None:
        assert self._pass is not None
        now = time.perf_counter()
        self._seconds[self._pass][unit] += now - self._mark
        self._mark = now

    def _count(self, activations: dict[str, int], counted: set[int], tensor: torch.Tensor) -> torch.Tensor:
        activations[self._unit] += self._new(counted, tensor)
        return tensor

    def _new(self, counted: set[int], tensor: torch.Tensor) -> int:
        """Bytes that a tensor takes besides those ``counted``, among which it is from now on."""
        storage = tensor.untyped_storage()
        where = storage.data_ptr()
        if where in self._kept or where in counted:
            return 0
        counted.add(where)
        return storage.nbytes()


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
