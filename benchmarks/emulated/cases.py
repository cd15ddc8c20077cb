"""Cases: which cells are lost at once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_elastic.layout import Layout

WHERE = ("same", "different")


@dataclass(frozen=True, slots=True)
class Case:
    """``lost`` cells, of one stage or of ``different`` ones; ``ranks``: all of theirs, which are killed."""

    lost: int
    where: str
    ranks: tuple[int, ...]

    def limit_share(self, layout: Layout) -> float:
        """What is left to compute with, as a share of what there was."""
        return 1 - self.lost / len(layout.cells)


def most_of_a_stage(stages: int, width: int, counts: Sequence[int], where: Sequence[str]) -> int:
    """How many cells of one stage are lost at once, in any of the cases."""
    same = [count for count in counts if count == 1 or ("same" in where and count < width)]
    different = [math.ceil(count / stages) for count in counts if "different" in where]
    return max([*same, *different], default=0)


def cases(layout: Layout, counts: Sequence[int], where: Sequence[str]) -> Iterator[Case]:
    """All cases; a single cell is in one stage. Those that would take all cells of a stage are left out.

    Lost are cells of different columns as long as there are any: of the second stage, or of it and those that follow.
    """
    stages, width = layout.pipeline_size, layout.stages[0].width
    for count in counts:
        for place in WHERE:
            if (place != where[0] if count == 1 else place not in where):
                continue
            at = [((1 if place == "same" else 1 + i) % stages, i % width) for i in range(count)]
            if place == "different" and count > width:  # the same stage has another column each time round
                at = [((1 + i) % stages, (i + i // stages) % width) for i in range(count)]
            cells = dict.fromkeys(layout.stages[stage].cells[column].leader for stage, column in at)
            if len(cells) == count and all(
                any(cell.leader not in cells for cell in stage.cells) for stage in layout.stages
            ):
                ranks = (rank for leader in cells for rank in layout.cells[leader].ranks)
                yield Case(count, place, tuple(ranks))
