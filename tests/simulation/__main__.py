"""Run histories: ``python -m tests.simulation --seeds 0:1000``; ``--seed N --trace`` shows one."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

from tests.simulation.errors import Violation
from tests.simulation.scenario import Scenario
from tests.simulation.world import World


def simulate(scenario: Scenario, lines: list[str] | None = None) -> tuple[World, Violation | None]:
    """Run one history to its end; the second result is what was wrong with it."""
    world = World(scenario, lines)
    try:
        world.run()
    except Violation as violation:
        return world, violation
    return world, None


def _range(first: int, last: int) -> dict[str, object]:
    events = steps = 0
    kinds: Counter[str] = Counter()
    ends: Counter[str] = Counter()
    violations: list[tuple[int, str]] = []
    for seed in range(first, last):
        try:
            world, violation = simulate(Scenario.of(seed))
        except Exception as error:
            violations.append((seed, f"simulation: {error!r}"))
            continue
        events += world.count
        steps += world.written
        kinds.update(world.kinds)
        if violation is not None:
            violations.append((seed, str(violation)))
        elif world.outcome is not None:
            ends["ok" if world.outcome.ok else world.outcome.reason[:32]] += 1
    return {"seeds": last - first, "events": events, "steps": steps, "faults": kinds, "ends": ends,
            "violations": violations}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", default="0:1000")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--trace", action="store_true")
    args = parser.parse_args()
    if args.seed is not None:
        lines: list[str] | None = [] if args.trace else None
        try:
            world, violation = simulate(Scenario.of(args.seed), lines)
        finally:
            print("\n".join(lines or ()))
        print(world.scenario)
        print(violation or world.outcome)
        return int(violation is not None)
    first, last = map(int, args.seeds.split(":"))
    begun = time.monotonic()
    total = _range(first, last)
    print(json.dumps({**total, "violations": len(total["violations"]), "elapsed": time.monotonic() - begun}))
    by: dict[str, list[int]] = {}
    for seed, text in total["violations"]:
        by.setdefault(text[:70], []).append(seed)
    for text, seeds in sorted(by.items(), key=lambda each: -len(each[1]))[:20]:
        print(len(seeds), seeds[:4], text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
