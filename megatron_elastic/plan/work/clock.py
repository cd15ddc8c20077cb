"""Clock: at which of its clocks each cell should run, when it is known who computes what.

The slowest cell is made as fast as it can be within what its device and its host allow, and in order to save energy
nobody is faster than needed for that. All clocks are multiples of the *base* clock, at which costs were measured.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from megatron_elastic.layout import Layout
from megatron_elastic.plan.costs.cost import Costs
from megatron_elastic.plan.costs.power import PowerModel

_MOST_TRIED = 300
"""Steps that are simulated to save energy, at most."""
_ROUNDING = 1e-9
"""Relative difference below which two times are the same."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What clocks there are, and which may be used.

    Attributes:
        steps: allowed clocks, ascending; 1.0 is the base clock.
        highest: of single cells, by leader, where that is less: as for their temperature.
    """

    steps: tuple[float, ...]
    highest: Mapping[int, float] | None = None

    @classmethod
    def under(cls, layout: Layout, costs: Costs) -> Limits:
        """Of the cells of ``layout``: as slow as their slowest ranks."""
        known = costs.clocking.highest if costs.clocking is not None else {}
        if not known:
            return cls(costs.clock_steps)
        found = {leader: [known[rank] for rank in cell.ranks if rank in known] for leader, cell in layout.cells.items()}
        return cls(costs.clock_steps, {leader: min(each) for leader, each in found.items() if each})

    def of(self, leader: int | None, power: PowerModel) -> tuple[float, ...]:
        """The clocks that a cell may have by itself; at least the lowest. None: one that is like most."""
        most = self.steps[-1] if leader is None else (self.highest or {}).get(leader, self.steps[-1])
        fit = tuple(step for step in self.steps
                    if step <= most and (power.device_w is None or power.watts(step) <= power.device_w))  # fmt: skip
        return fit or self.steps[:1]


@dataclass(frozen=True, slots=True)
class Budget:
    """What the cells of one layout may have. Made by ``of``.

    Attributes:
        allowed: clocks of each cell by itself, ascending.
        devices: of each cell on each host.
    """

    allowed: Mapping[int, tuple[float, ...]]
    devices: Mapping[int, Mapping[int, int]]
    power: PowerModel

    @classmethod
    def of(cls, layout: Layout, limits: Limits, power: PowerModel) -> Budget:
        """Of the cells of ``layout`` that compute something."""
        working = [cell for stage in layout.stages for cell in stage.cells if not cell.shadow]
        usual, special = limits.of(None, power), limits.highest or {}
        return cls(
            {cell.leader: limits.of(cell.leader, power) if cell.leader in special else usual for cell in working},
            {cell.leader: Counter(map(layout.host_of, cell.ranks)) for cell in working},
            power,
        )  # fmt: skip

    def affords(self, clocks: Mapping[int, float]) -> bool:
        """Whether no host's devices take more than it has."""
        return self.power.host_w is None or max(self.used(clocks).values()) <= self.power.host_w * (1 + _ROUNDING)

    def used(self, clocks: Mapping[int, float]) -> defaultdict[int, float]:
        """Watts of each host's devices, if there is a limit."""
        found: defaultdict[int, float] = defaultdict(float)
        if self.power.host_w is not None:
            for leader, clock in clocks.items():
                for host, devices in self.devices[leader].items():
                    found[host] += devices * self.power.watts(clock)
        return found

    def has_left(self, leader: int, watts: float, used: Mapping[int, float]) -> bool:
        """Whether the hosts of a cell have so many more for each of its devices."""
        return self.power.host_w is None or all(
            used[host] + devices * watts <= self.power.host_w * (1 + _ROUNDING)
            for host, devices in self.devices[leader].items()
        )


class Load(NamedTuple):
    """Milliseconds that a cell computes in a step: those that its clock divides, and those that are so at any clock."""

    clocked: float
    fixed: float = 0.0

    def at(self, clock: float) -> float:
        """Milliseconds at a clock."""
        return self.clocked / clock + self.fixed

    def clock(self, longest: float) -> float:
        """With which it computes ``longest`` ms; infinite if with none."""
        left = longest - self.fixed
        if left <= longest * _ROUNDING:
            return math.inf if self.clocked or left < 0 else 0.0
        return self.clocked / left


def loads(layout: Layout, costs: Costs) -> dict[int, Load]:
    """What each working cell computes in a step, by leader."""
    found = {}
    for index, stage in enumerate(layout.stages):
        units = [costs.units[unit] for unit in layout.at_home(index)]
        clocked = sum(unit.grain_ms * unit.clock_share for unit in units)
        fixed = sum(unit.grain_ms * (1 - unit.clock_share) for unit in units)
        for cell in stage.cells:
            if not cell.shadow:
                many = layout.load(cell) * costs.slow.get(cell.leader, 1.0)
                found[cell.leader] = Load(many * clocked, many * fixed)
    return found


def speeds(layout: Layout, costs: Costs, clocks: Mapping[int, float]) -> dict[int, float]:
    """How fast cells are, all their units together, as multiples of what is usual at the base clock; 1 if not there."""
    found = {}
    for leader in {*clocks, *costs.slow}.intersection(layout.cells):
        units = layout.at_home(layout.stage_of(leader))
        times = costs.times_as_long(units, clocks.get(leader, 1.0)) * costs.slow.get(leader, 1.0)
        found[leader] = 1 / times
    return found


def slowest_allowed(loads: Mapping[int, Load], budget: Budget, longest: float) -> dict[int, float] | None:
    """The lowest clock of each cell with which none computes longer than ``longest`` ms; None if that cannot be."""
    clocks: dict[int, float] = {}
    known: dict[tuple[Load, tuple[float, ...]], float] = {}
    """Many cells do the same."""
    for leader, load in loads.items():
        allowed = budget.allowed[leader]
        clock = known.get((load, allowed))
        if clock is None:
            at = bisect_left(allowed, load.clock(longest * (1 + _ROUNDING)))
            if at == len(allowed):
                return None
            clock = known[load, allowed] = allowed[at]
        clocks[leader] = clock
    return clocks if budget.affords(clocks) else None


def balance(loads: Mapping[int, Load], budget: Budget) -> dict[int, float]:
    """The clocks with which the cell that computes longest is done earliest, each as low as it can be for that.

    Exact: that time is a load at one of its clocks, and if some time can be kept, so can longer ones. Where the watts
    of a host are not enough even for the lowest clocks, these are taken.
    """
    times = _times(loads, budget)
    at = bisect_left(times, True, key=lambda longest: slowest_allowed(loads, budget, longest) is not None)
    found = slowest_allowed(loads, budget, times[at]) if at < len(times) else None
    return found or {leader: budget.allowed[leader][0] for leader in loads}


def _times(loads: Mapping[int, Load], budget: Budget) -> list[float]:
    """All that cells can take at their clocks, ascending."""
    kinds = {(load, budget.allowed[leader]) for leader, load in loads.items()}
    return sorted({load.at(step) for load, allowed in kinds for step in allowed})


def foreseen(layout: Layout, costs: Costs) -> dict[int, float]:
    """Clocks with which a step takes as long as with those that ``clocks`` finds, by leader; for comparing layouts.

    Under 'performance' these are those. To save energy no step gets longer, so these are the base clock, or what is
    allowed of it. ``costs.clocking`` and ``costs.power`` must be known.
    """
    assert costs.power is not None and costs.clocking is not None
    budget = Budget.of(layout, Limits.under(layout, costs), costs.power)
    if costs.clocking.mode == "performance":
        return _raised(balance(loads(layout, costs), budget), budget, 1.0)
    return _raised({leader: allowed[0] for leader, allowed in budget.allowed.items()}, budget, 1.0)


def clocks(layout: Layout, costs: Costs, step_ms: Callable[[Mapping[int, float]], float]) -> dict[int, float]:
    """The clock of each working cell, by leader, by the mode of ``costs.clocking``.

    performance: the bottleneck as fast as it may be; who waits for it stays at the base clock, so that a pipeline is
    filled no slower, unless its host's watts are needed elsewhere. energy: of all such clocks, and the same with lower
    ones for who waits, those with the least energy for which a step takes no longer than at the base clock; of the
    first few hundred, as each is a step to simulate.
    ``step_ms``: what a step takes with some clocks. ``costs.power`` must be known.
    """
    base = foreseen(layout, costs)
    assert costs.power is not None and costs.clocking is not None
    if costs.clocking.mode == "performance":
        return base
    work, power, limits = loads(layout, costs), costs.power, Limits.under(layout, costs)
    budget = Budget.of(layout, limits, power)
    longest = step_ms(base) * (1 + _ROUNDING)
    best, least, tries = base, _joules(layout, work, base, power, longest), 0
    for time in _times(work, budget):
        found = slowest_allowed(work, budget, time)
        if found is None:
            continue
        for floor in limits.steps:
            tried = _raised(found, budget, floor)
            joules = _joules(layout, work, tried, power, longest)
            if joules < least and tries < _MOST_TRIED:
                tries += 1
                if step_ms(tried) <= longest:
                    best, least = tried, joules
    return best


def _raised(clocks: Mapping[int, float], budget: Budget, floor: float) -> dict[int, float]:
    """None below ``floor``, as far as devices and hosts allow it."""
    raised, used = dict(clocks), budget.used(clocks)
    for leader, allowed in budget.allowed.items():
        wanted = max((step for step in allowed if step <= max(floor, clocks[leader])), default=allowed[0])
        if wanted <= clocks[leader]:
            continue
        more = budget.power.watts(wanted) - budget.power.watts(clocks[leader])
        if budget.has_left(leader, more, used):
            raised[leader] = wanted
            for host, devices in budget.devices[leader].items():
                used[host] += devices * more
    return raised


def _joules(
    layout: Layout, work: Mapping[int, Load], clocks: Mapping[int, float], power: PowerModel, step_ms: float
) -> float:
    """Of all devices in a step that takes ``step_ms``."""
    busy = {leader: load.at(clocks[leader]) for leader, load in work.items()}
    each = (power.joules(ms, max(step_ms - ms, 0.0), clocks[leader]) for leader, ms in busy.items())
    return layout.cell_size * sum(each)
