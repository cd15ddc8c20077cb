"""Work: what a model rank has done of a step, grain by grain. Its sums are what was added to them: (unit, grain)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from megatron_elastic.cluster.messages import Kept, WorkDone
from megatron_elastic.layout import Layout
from megatron_elastic.pipeline.program import Op
from tests.simulation.errors import Violation


def grains(layout: Layout, step: int) -> int:
    """How many grains a step has: one more each, up to all of the layout's."""
    return min(step, layout.num_grains)


class Work:
    """One rank's, of one step. Numbers are as in ``Kept``."""

    def __init__(self, step: int, grains: int) -> None:
        self.step = step
        self.grains = grains
        self.added: set[int] = set()
        self.live: set[int] = set()
        self.half: set[int] = set()
        self.sums: list[tuple[int, int]] = []

    def do(self, op: Op, units: Sequence[int], most: int) -> None:
        """An operation is done on a chunk with these units; a stage has so many chunks at most."""
        number = op.grain * most + op.chunk
        if op.kind == "forward":
            self.live.add(number)
        elif op.kind == "backward_input" and number in self.live:
            self.live.remove(number)
            self.half.add(number)
        elif number in (self.half if op.kind == "backward_weight" else self.live) and number not in self.added:
            (self.half if op.kind == "backward_weight" else self.live).remove(number)
            self.added.add(number)
            self.sums += [(unit, op.grain) for unit in units]
        else:
            raise Violation("sums", f"{op} of step {self.step} comes too early, or again")

    def progress(self) -> WorkDone:
        """What has been done."""
        return WorkDone(
            step=self.step, grains=self.grains, added=sorted(self.added), live=sorted(self.live),
            half=sorted(self.half),
        )

    def keep(self, kept: Kept) -> None:
        """Go on from what is kept."""
        if (sorted(self.added), sorted(self.half)) != (kept.added, kept.half) or not self.live.issuperset(kept.live):
            raise Violation("sums", f"{kept} is kept of step {self.step}, but there are {sorted(self.added)}, "
                                    f"{sorted(self.live)}, {sorted(self.half)}")
        self.live = set(kept.live)


def check_sums(layout: Layout, step: int, sums: Mapping[int, Collection[tuple[int, int]]]) -> None:
    """Raise Violation unless each grain is in exactly one of the sums of each unit of each stage. ``sums``: by rank."""
    for index, stage in enumerate(layout.stages):
        expected = Counter((unit, grain) for unit in stage.units for grain in range(grains(layout, step)))
        for place in range(layout.cell_size):
            found = Counter(each for cell in stage.cells for each in sums[cell.ranks[place]])
            if found != expected:
                raise Violation("sums", f"the sums of step {step} in stage {index} lack {sorted(expected - found)} and "
                                        f"have {sorted(found - expected)} too much")
