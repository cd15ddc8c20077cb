"""Trust: which copies of a slice and which checkpoints training may go on from."""

from __future__ import annotations

from collections.abc import Iterable

from megatron_elastic.cluster.messages import Damaged
from megatron_elastic.cluster.recovery import Part


class Trust:
    """What is known to be damaged, until a new layout has healed it, and the checkpoints there are."""

    def __init__(self) -> None:
        self.saves: list[int] = []
        """Steps of the complete checkpoints, ascending."""
        self.healing = False
        """Whether the weights of some rank are not to be trusted."""
        self._damaged: set[tuple[int, Part]] = set()
        """(rank, part of a slice) of copies."""
        self._verified: int | None = None
        """Step of the newest state that can be trusted, if damage says that the present one cannot."""

    @property
    def newest_save(self) -> int:
        """Step of the newest complete checkpoint; 0 without one."""
        return self.saves[-1] if self.saves else 0

    @property
    def undecided(self) -> str | None:
        """If state may be lost because its copies differ: that, for people."""
        if not self._damaged:
            return None
        ranks = sorted({rank for rank, _ in self._damaged})
        return (f"the copies of a slice differ (ranks {ranks}) and nothing tells which is right; the state of step "
                f"{self._verified} was sound. With --elastic-replicas 2 the majority would be")

    def damaged(self, message: Damaged) -> None:
        """Verification has found damage."""
        for damage in message.found:
            if damage.what == "state":
                self._damaged.add((damage.rank, (damage.unit, damage.slice, damage.tp)))
        self.healing = True
        self._verified = message.verified if self._verified is None else min(message.verified, self._verified)

    def sound(self, rank: int, parts: Iterable[Part]) -> list[Part]:
        """Of what a rank holds, what is not known to be damaged."""
        return [part for part in parts if (rank, part) not in self._damaged]

    def go_back(self) -> int | None:
        """Step of the newest checkpoint from before any damage, and forget newer ones; None without one."""
        self.saves = [step for step in self.saves if self._verified is None or step <= self._verified]
        return self.saves[-1] if self.saves else None

    def healed(self) -> None:
        """All that was damaged has been replaced."""
        self._damaged.clear()
        self.healing, self._verified = False, None
