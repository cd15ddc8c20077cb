"""Tables: persistent maps, of which a new one shares with the old one all that has not changed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from immutables import Map

K = TypeVar("K")
V = TypeVar("V")


def without(table: Map[K, V], keys: Iterable[K]) -> Map[K, V]:
    """A map without some keys, whether they were there or not."""
    left = table.mutate()
    for key in keys:
        left.pop(key, None)
    return left.finish()
