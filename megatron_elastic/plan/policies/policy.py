"""Policy: what is asked when ranks are lost or come, and what a policy foresees.

Asked by the coordinator: ``lose`` for the layout that goes on at once, ``cells`` for how many cells there should be
then, and ``arrange`` for the stages to work towards in the background. ``foresee`` plays that through without a job.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar

from megatron_elastic.layout import Holdings, Layout, transfers
from megatron_elastic.plan.choice import SCHEDULES, Way
from megatron_elastic.plan.costs.cost import Costs
from megatron_elastic.plan.growth import improve
from megatron_elastic.plan.loss import lose, release
from megatron_elastic.plan.migration import duration_ms, pause_ms

_MOST_LAYOUTS = 100
"""On the way from one layout to where a policy wants to be; more would mean that it does not know."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a policy makes of a loss.

    Attributes:
        layouts: that compute a step side by side, each its own grains; one but where pipelines have unlike stages.
        interim: what goes on at once, if that is another one.
        pause_ms: from the loss, once it is known, until training goes on: what has to be copied or loaded first.
        background_ms: of copying on the side until ``layouts`` are reached.
        redundant: whether every cell also computes the forwards of the next stage, when it would wait.
    """

    layouts: tuple[Layout, ...]
    interim: Layout | None = None
    pause_ms: float = 0.0
    background_ms: float = 0.0
    redundant: bool = False

    @property
    def grains(self) -> int:
        """Computed in a step."""
        return sum(layout.num_grains for layout in self.layouts)


class Policy:
    """One way to go on after a loss: here with what is left, moving nothing. It knows only what it is given."""

    name: ClassVar[str]
    idea: ClassVar[str]
    """In a line, with its source."""
    refusal: ClassVar[str | None] = None
    """Why a job cannot run under it: what it does is no layout. None: it can."""
    schedule: ClassVar[str | None] = None
    """The ``--elastic-schedule`` that is part of it, if it is not searched; None: it works with any."""

    restarts: ClassVar[bool] = False
    """Whether a loss takes all back to the newest checkpoint, if there is one."""

    def lose(
        self, layout: Layout, lost: Collection[int], held: Holdings, epoch: int, costs: Costs | None,
        schedules: Collection[str] = SCHEDULES,
    ) -> Layout:
        """The layout of ``epoch`` that goes on at once after ranks in ``lost`` died; raises what ``plan.lose`` does."""
        return lose(layout, lost, held, epoch, slow=None if costs is None else costs.slow)

    def uses_all(self, costs: Costs | None) -> bool:
        """Whether there are to be as many cells as can be made."""
        return True

    def cells(
        self, layout: Layout, there: int, costs: Costs | None, schedules: Collection[str] = SCHEDULES
    ) -> int:
        """How many of the cells that could be made, ``there`` in all, are to be; asked unless it ``uses_all``."""
        return there

    def arranges(self, costs: Costs | None) -> bool:
        """Whether ``arrange`` might want other stages than there are."""
        return False

    def ways(
        self, layout: Layout, costs: Costs | None, tied: bool, schedules: Collection[str] = SCHEDULES
    ) -> tuple[Way, ...]:
        """What ``arrange`` chooses from, if it compares anything."""
        return ()

    def arrange(
        self, layout: Layout, costs: Costs | None, tied: bool, schedules: Collection[str] = SCHEDULES
    ) -> Layout:
        """The stages to work towards with the cells of ``layout``; asked only if it ``arranges``. Raises NoLayout.

        Cells may be left out. ``schedules``: those that may be used.
        """
        return layout

    def usual_ms(self, layout: Layout, stage: int, costs: Costs | None) -> float | None:
        """What a grain should take in a cell of a stage, if who is slow is judged by that; None: by what it takes in
        the stage's other cells.
        """
        return None

    def foresee(
        self, layout: Layout, lost: Collection[int], costs: Costs, schedules: Collection[str] = SCHEDULES
    ) -> Outcome:
        """What becomes of ``layout`` when ``lost`` ranks die, all copies of slices being live. Raises NoLayout."""
        held = Holdings.of(layout).without(lost)
        interim = self.lose(layout, lost, held, layout.epoch + 1, costs, schedules)
        final = self.settle(interim, costs, schedules)
        return Outcome(
            (final,),
            interim=None if final.stages == interim.stages else interim,
            pause_ms=pause_ms(interim, held, costs),
            background_ms=duration_ms(transfers(final, Holdings.of(interim)), final, costs),
        )

    def settle(self, layout: Layout, costs: Costs | None, schedules: Collection[str] = SCHEDULES) -> Layout:
        """Where the coordinator leads ``layout`` in the background, if nothing else happens."""
        tied = layout.is_tied
        goal: Layout | None = None
        for _ in range(_MOST_LAYOUTS):
            there = len(layout.cells) + len(layout.spares) // layout.cell_size
            found = improve(
                layout, {}, layout.epoch + 1, goal,
                (lambda present: self.arrange(present, costs, tied, schedules)) if self.arranges(costs) else None,
                slow=None if costs is None else costs.slow,
                most_cells=None if self.uses_all(costs) else self.cells(layout, there, costs, schedules),
            )  # fmt: skip
            if found is None:
                return layout
            layout, goal = found
        raise AssertionError(f"policy {self.name} does not settle:\n{layout}")


def without_shadows(layout: Layout) -> Layout:
    """The same with the ranks of cells that only follow as spares: what they own or keep copies of, others do."""
    shadows = [rank for cell in layout.cells.values() if cell.shadow for rank in cell.ranks]
    return release(layout, shadows, layout.epoch) if shadows else layout


def apart(layout: Layout, stage_units: Sequence[tuple[int, ...]], grains: int, width: int = 1) -> Layout:
    """Pipelines of ``width`` cells a stage, as a layout of its own for so many grains of those of ``layout``."""
    return Layout.grid(
        tp=layout.cell_size, pp=len(stage_units), dp=width, stage_units=stage_units, units=layout.units,
        num_grains=grains, num_slices=1, replicas=0, samples=layout.samples,
    )  # fmt: skip
