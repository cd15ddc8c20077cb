"""What tests of the fleet share: jobs, small clusters, and a run that checks what must hold after every step."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

from megatron_elastic.fleet.admission import Member
from megatron_elastic.fleet.faults import NONE, Faults
from megatron_elastic.fleet.job import Job
from megatron_elastic.fleet.observation import Policy
from megatron_elastic.fleet.simulated.models import model_of
from megatron_elastic.fleet.simulated.outcome import Outcome
from megatron_elastic.fleet.simulated.simulation import Simulation
from megatron_elastic.fleet.speed_table import SpeedTable

KEEPS_GIVEN = ("fifo", "torchelastic", "rubick", "flextrain-pp", "flextrain-dp-pp", "elastic")
"""Policies under which no elastic job ever has fewer devices than it was submitted with."""


def job(
    index: int, submitted: float, duration: float, devices: int, deadline: float = inf, elastic: bool = True
) -> Job:
    """Elastic from 32 devices on, unless it should not be."""
    model = model_of(devices) if elastic else None
    return Job(index, f"job{index}", submitted, duration, devices, deadline, model)


def member(
    index: int, table: SpeedTable, given: int, devices: int = 0, remaining: float = 1e6, started: float = 0.0,
    changes: int = 0, deadline: float = inf, floor: int | None = None,
) -> Member:  # fmt: skip
    """A member with any table."""
    floor = given if floor is None else floor
    return Member(job(index, 0.0, 1e6, given, deadline), table, floor, devices, remaining, started, changes)


class Watched:
    """A simulation, with the devices of every job over time."""

    def __init__(
        self, jobs: Sequence[Job], total: int, policy: Policy[Any], faults: Faults = NONE, seed: int = 0
    ) -> None:
        self.held: dict[int, list[tuple[float, int]]] = {}
        self.simulation = Simulation(jobs, total, policy, faults, seed, self._look)

    def run(self) -> Outcome:
        """Until the end, looking at each step."""
        return self.simulation.run()

    def _look(self, seen: Simulation) -> None:
        owned: list[int] = []
        for index, course in seen.courses.items():
            devices = seen.placement.of(index)
            assert len(devices) == course.devices > 0
            owned += devices
            history = self.held.setdefault(index, [])
            if history and history[-1][0] == seen.now:
                history.pop()
            if not history or history[-1][1] != course.devices:
                history.append((seen.now, course.devices))
        assert len(set(owned)) == len(owned), "a device is held twice"
        assert set(owned) <= set(range(seen.total))
        assert 0 <= seen.leaving + seen.away <= seen.total - len(owned)
        assert seen.free == seen.total - len(owned) - seen.leaving - seen.away
