"""Measures: what passes find out besides losses and gradients: routers' losses, those of further predictions.

Megatron adds them up in tables of the process, as forward passes go, and reduces these over its groups when it logs.
Here they belong to what has been done of a grain, which may be done again, or by somebody else, and go with the vote.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

Measures = dict[tuple[str, int], torch.Tensor]
"""By name and number of the layer."""

NUM_ZEROS = "num_zeros"
"""What the vote calls the number of elements of the global gradient that are 0 (``--log-num-zeros-in-grad``)."""

_measures: Measures | None = None
"""Where they are noted."""


@contextmanager
def noted(measures: Measures) -> Iterator[None]:
    """Meanwhile what a pass measures is noted here. A pass that computes a layer again, notes the same."""
    global _measures
    _measures = measures
    try:
        yield
    finally:
        _measures = None


def note(name: str, layer: int, value: torch.Tensor) -> None:
    """Tell what was measured. The sum over all ranks that tell is what counts. Outside of ``noted`` nobody listens."""
    if _measures is not None:
        _measures[name, layer] = value.detach()
