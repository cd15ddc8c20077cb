"""Run histories from the command line.

``--seeds A:B`` runs a range, ``--minutes M --fresh`` new ones; ``--seed N`` one, with ``--trace`` for all that happens
in it and ``--shrink`` for a smaller one that goes wrong the same way, which ``--scenario`` runs; with ``--near MUTANT``
they are histories of the kind in which that defect shows. ``--mutants`` says at which seed each known defect is found,
and with ``--keep`` writes that down for the tests (``found.json``).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from dataclasses import replace

from tests.simulation import aims, mutants, run
from tests.simulation.scenario import Scenario

_COMMAND = "python -m tests.simulation"


def main() -> int:
    """Run; the exit code is 1 if anything was violated."""
    parser = argparse.ArgumentParser(prog=_COMMAND, description=__doc__)
    parser.add_argument("--seeds", default="0:1000", metavar="A:B")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--fresh", action="store_true", help="begin at a seed that nobody has chosen")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--scenario", metavar="JSON")
    parser.add_argument("--policy", metavar="NAME", help="all histories under this one")
    parser.add_argument("--near", metavar="MUTANT", choices=mutants.MUTANTS, help="histories that come near this one")
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--shrink", action="store_true")
    parser.add_argument("--mutants", nargs="*", metavar="NAME")
    parser.add_argument("--limit", type=int, default=mutants.LIMIT, help="seeds after which a mutant is not found")
    parser.add_argument("--keep", action="store_true", help="write down at which seeds mutants were found")
    args = parser.parse_args()
    if args.mutants is not None:
        return _mutants(args.mutants or list(mutants.MUTANTS), args.limit, args.keep)
    if args.seed is not None or args.scenario is not None:
        scenario = (aims.scenario(args.near, args.seed) if args.scenario is None
                    else Scenario.from_json(args.scenario))
        scenario = scenario if args.policy is None else replace(scenario, policy=args.policy)
        return _one(scenario, args.trace, args.shrink)
    first, last = map(int, args.seeds.split(":"))
    if args.fresh:
        first = random.SystemRandom().randrange(1 << 40)
        last = first + (1 << 30)
    return _many(first, last, args.jobs, args.minutes, args.policy, args.near)


def _one(scenario: Scenario, trace: bool, shrink: bool) -> int:
    violation = run.simulate(scenario)[1]
    if violation is not None and shrink:
        scenario = run.shrunk(scenario, violation.kind)
        print(f"{_COMMAND} --trace --scenario '{scenario.to_json()}'")
    lines: list[str] | None = [] if trace else None
    try:
        world, violation = run.simulate(scenario, lines)
    finally:
        print("\n".join(lines or ()))
    print(scenario)
    print(f"VIOLATION {violation}" if violation is not None else world.outcome)
    return int(violation is not None)


def _many(first: int, last: int, jobs: int, minutes: float, policy: str | None, near: str | None) -> int:
    again = _COMMAND if near is None else f"{_COMMAND} --near {near}"
    begun, total = time.monotonic(), run.Total()
    said = begun
    for part in run.many(first, last, jobs, begun + 60 * minutes, policy, near):
        total.add(part)
        for seed, text in part.violations:
            print(f"\n{again} --seed {seed} --trace   # {text[:300]}", file=sys.stderr, flush=True)
        if time.monotonic() - said > 5:
            said = time.monotonic()
            rate = total.seeds / (said - begun)
            print(f"{total.seeds} seeds, {rate:.0f} a second, {len(total.violations)} violations", file=sys.stderr)
    elapsed = time.monotonic() - begun
    print(json.dumps({
        "first": first, "seeds": total.seeds, "events": total.events, "steps": total.steps,
        "faults": dict(sorted(total.faults.items())), "ends": dict(total.ends.most_common(12)),
        "violations": len(total.violations), "elapsed": round(elapsed, 1),
    }))  # fmt: skip
    return int(bool(total.violations))


def _mutants(names: list[str], limit: int, keep: bool) -> int:
    found: dict[str, int] = {}
    for name in names:
        begun = time.monotonic()
        for seed in range(limit):
            scenario = aims.scenario(name, seed)
            with mutants.put_back(name):
                violation = run.simulate(scenario)[1]
            if violation is not None and run.simulate(scenario)[1] is None:  # else it is no defect that was put back
                found[name] = seed
                print(f"{name}: found at seed {seed}, after {time.monotonic() - begun:.1f} s: "
                      f"{str(violation).strip()[:160]!r}", flush=True)
                break
        else:
            print(f"{name}: NOT FOUND in {limit} seeds", flush=True)
    if keep:
        mutants.FOUND.write_text(json.dumps(found, indent=2) + "\n")
    return int(len(found) < len(names))


if __name__ == "__main__":
    sys.exit(main())
