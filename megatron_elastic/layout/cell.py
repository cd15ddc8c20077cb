"""Cell: the ranks that compute one stage together."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_elastic.layout.part import Part


@dataclass(frozen=True, slots=True)
class Cell:
    """Ranks that compute one stage together for whole ``grains`` and for ``parts`` of others, at most one of each.

    ``ranks`` are ordered by expert-parallel index, and then by tensor-parallel index; a rank's *place* is its index
    here. A cell without grains is a *shadow*: it follows the others, receiving the stage's parameters after every step,
    and gets grains once it has caught up. That is how ranks join.
    ``incoming`` are units of other stages whose parameters it receives as well, because it is to compute them soon.
    That is how units move.
    """

    ranks: tuple[int, ...]
    grains: tuple[int, ...]
    incoming: tuple[int, ...] = ()
    parts: tuple[Part, ...] = ()

    @property
    def leader(self) -> int:
        """The rank of place 0, which names the cell."""
        return self.ranks[0]

    @property
    def name(self) -> str:
        """Its first and its last rank, for people."""
        return f"{self.ranks[0]}-{self.ranks[-1]}" if len(self.ranks) > 1 else f"{self.ranks[0]}"

    @property
    def shadow(self) -> bool:
        """Whether it only follows."""
        return not (self.grains or self.parts)

    @property
    def share(self) -> tuple[int, ...]:
        """The grains that it computes whole or a part of."""
        return self.grains if not self.parts else tuple(sorted((*self.grains, *(part.grain for part in self.parts))))
