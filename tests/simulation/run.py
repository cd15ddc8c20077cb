"""Run: one history, many of them, and the smallest one that still shows what is wrong."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import Pool

from tests.simulation import aims
from tests.simulation.errors import Violation
from tests.simulation.scenario import Scenario
from tests.simulation.world import World

_CHUNK = 50
_TRIES = 8
"""Other ways that chance may take in a smaller scenario before it counts as sound."""


@dataclass(slots=True)
class Total:
    """What some histories came to."""

    seeds: int = 0
    events: int = 0
    steps: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    violations: list[tuple[int, str]] = field(default_factory=list)

    def add(self, other: Total) -> None:
        """Count another one's too."""
        self.seeds += other.seeds
        self.events += other.events
        self.steps += other.steps
        self.faults.update(other.faults)
        self.ends.update(other.ends)
        self.violations += other.violations


def simulate(scenario: Scenario, lines: list[str] | None = None) -> tuple[World, Violation | None]:
    """Run one history to its end; the second result is what was wrong with it."""
    world = World(scenario, lines)
    try:
        world.run()
    except Violation as violation:
        return world, violation
    return world, None


def some(seeds: range, policy: str | None = None, near: str | None = None) -> Total:
    """Run the histories of these seeds; all under the ``policy`` if one is given, and ``near`` a mutant."""
    total = Total(seeds=len(seeds))
    for seed in seeds:
        scenario = aims.scenario(near, seed)
        world, violation = simulate(scenario if policy is None else replace(scenario, policy=policy))
        total.events += world.count
        total.steps += world.written - world.start_step
        total.faults.update(world.kinds)
        if violation is not None:
            total.violations.append((seed, str(violation)))
        elif world.outcome is not None:
            total.ends["finished" if world.outcome.ok else " ".join(world.outcome.reason.split()[:3])] += 1
    return total


def many(
    first: int, last: int, jobs: int, until: float = float("inf"), policy: str | None = None, near: str | None = None
) -> Iterator[Total]:
    """Run the histories of a range of seeds in some processes, until ``time.monotonic()`` says so; chunk by chunk."""
    chunks = (range(at, min(at + _CHUNK, last)) for at in range(first, last, _CHUNK))
    if jobs == 1:
        for chunk in chunks:
            yield some(chunk, policy, near)
            if time.monotonic() > until:
                return
        return
    with Pool(jobs) as pool:
        for total in pool.imap_unordered(partial(some, policy=policy, near=near), chunks):
            yield total
            if time.monotonic() > until:
                pool.terminate()
                return


def shrunk(scenario: Scenario, kind: str) -> Scenario:
    """A smaller scenario with a violation of the same kind. Chance goes another way where less happens."""
    smaller = True
    while smaller:
        smaller = False
        for candidate in scenario.smaller():
            for turn in range(_TRIES):
                seed = scenario.seed + 1_000_003 * turn
                violation = simulate(replace(candidate, seed=seed))[1]
                if violation is not None and violation.kind == kind:
                    scenario, smaller = replace(candidate, seed=seed), True
                    break
            if smaller:
                break
    return scenario
