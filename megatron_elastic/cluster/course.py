"""Course: where a job stands: its layout and epoch, and what is the same for all its ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_elastic.cluster.ledger import Ledger
from megatron_elastic.cluster.messages import Hello
from megatron_elastic.layout import Layout, UnitShape


@dataclass(slots=True)
class Course:
    """The present layout of a job, and its epochs."""

    layout: Layout | None = None
    """The last one that was sent to the ranks; None until they all came up."""
    epoch: int = 0
    """The one that was begun last; the layout's, or that of a recovery which has none yet."""
    newest_epoch: int = 0
    """The highest one ever given to a layout; ``epoch`` stays behind it while a change is planned."""
    first: Hello | None = None
    """What the first rank said; all others must agree with it."""
    shapes: dict[int, UnitShape] = field(default_factory=dict)
    """Of the units that some rank has built."""

    ledger: Ledger | None = None
    """Its committed steps; None until they all came up."""

    def new_epoch(self) -> int:
        """An epoch that nothing had before."""
        self.newest_epoch += 1
        return self.newest_epoch
