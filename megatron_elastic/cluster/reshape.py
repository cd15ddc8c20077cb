"""Reshape: a change of layout that is planned, not forced by a loss: ranks enter, slices spread.

Nobody is interrupted for it. The ranks that are to enter build their part of the model first; then everybody is told,
and the vote of the first step that all ranks enter knowing of the plan makes them switch at that step's end.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_elastic.layout import Layout


@dataclass(slots=True)
class Reshape:
    """One planned change, until it is true or a loss overtakes it."""

    layout: Layout
    goal: Layout | None
    """What ``layout`` is to lead to, if that is another one."""
    entrants: frozenset[int]
    """Ranks that are in no cell yet."""
    ready: set[int] = field(default_factory=set)
    """Entrants that have built what they need."""
    announced: bool = False
    """Whether the ranks that train have been told; from then on they may switch at the end of any step."""

    @property
    def missing(self) -> frozenset[int]:
        """Entrants that are still building."""
        return self.entrants - self.ready
