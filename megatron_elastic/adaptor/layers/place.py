"""Place: of what unit, or expert, something is drawn now, and how many regions of its own kind that had before.

Megatron's tracker keeps it among its states, which recomputation restores.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from megatron_elastic.numerics import keyed

_PLACE = "megatron-elastic-place"


def begin(*coordinates: int | str) -> None:
    """A unit begins: let it draw from a key of these coordinates."""
    get_cuda_rng_tracker().states_[_PLACE] = keyed.seed_default_generator(*coordinates), 0


def next_region() -> tuple[int, int]:
    """The unit's key, and how many regions it had before this one."""
    states = get_cuda_rng_tracker().states_
    key, regions = states.get(_PLACE, (0, 0))
    states[_PLACE] = key, regions + 1
    return key, regions


@contextmanager
def aside() -> Iterator[int]:
    """Something inside begins for itself, as often as it likes; then the unit goes on as after one region.

    Yields what may be among the coordinates of what begins.
    """
    key, region = next_region()
    states = get_cuda_rng_tracker().states_
    after = states[_PLACE]
    try:
        yield keyed.key(key, region)
    finally:
        keyed.seed_default_generator(key, region, "after")
        states[_PLACE] = after
