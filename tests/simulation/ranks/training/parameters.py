"""Parameters: what a model rank computes with, as the numbers of steps that they are after."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from megatron_elastic.cluster.rank import standing
from tests.simulation.errors import Violation

if TYPE_CHECKING:
    from tests.simulation.ranks.rank import Rank, Waits
    from tests.simulation.ranks.training.tenure import Tenure


class Parameters:
    """Those of the units that a rank holds."""

    def __init__(self) -> None:
        self.steps: dict[int, int | None] = {}
        """Unit -> after how many steps its parameters here are; None if that is not known."""
        self.shapes: set[int] = set()
        """Units whose shapes are known here."""

    def hold(self, units: Iterable[int]) -> None:
        """Hold these units from now on; parameters of new ones are of no step."""
        self.steps = {unit: self.steps.get(unit) for unit in units}
        self.shapes.update(self.steps)

    def forget(self) -> None:
        """Models are made anew; shapes stay known."""
        self.steps = {}

    def gathered(self, step: int) -> None:
        """Their owners have sent them as after ``step`` steps."""
        self.steps = dict.fromkeys(self.steps, step)

    def outdated(self) -> None:
        """Their owners begin to send new ones."""
        self.steps = dict.fromkeys(self.steps)

    def check(self, units: Iterable[int], rank: int, step: int) -> None:
        """Raise Violation unless ``rank`` can compute ``step`` with these units."""
        for unit in units:
            if self.steps[unit] != step - 1:
                raise Violation("wrong weights", f"rank {rank} computes step {step} with unit {unit} as after "
                                                 f"{self.steps[unit]} steps")


def gather(rank: Rank, tenure: Tenure, done: int) -> Waits:
    """Have everybody's as after ``done`` steps, if some may be of other ones."""
    if rank.standing.stale:
        yield rank.transport.meeting(tenure.layout, "gather", done + 1)
        rank.parameters.gathered(done)


def await_all(rank: Rank, tenure: Tenure) -> Waits:
    """Return when all are here that are on their way."""
    now = rank.standing
    if now.gathering:
        step = now.vote.step if now.vote is not None else now.step - 1
        yield rank.transport.meeting(tenure.layout, "params", step)
        rank.parameters.gathered(step)
        rank.standing = standing.distributed(rank.standing)
