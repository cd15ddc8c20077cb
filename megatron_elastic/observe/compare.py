"""Compare: do two runs agree bit for bit?"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_elastic import usage
from megatron_elastic.observe.records import RecordsError, is_run, read_digest, read_metrics

_COMPARED = (("loss", "loss"), ("grad_norm", "gradient norm"))
"""Fields of a metrics line that must agree by their ``_hex``, and what people call them."""

_OF_SLICES = (" (states are hashed by slices, of which there are by default as many as cells of a stage: give both "
              "jobs the same --elastic-slices)")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Difference:
    """The first thing in which two runs differ: where, what, and how each run has it."""

    where: str
    what: str
    a: str
    b: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}\n  a: {self.a}\n  b: {self.b}"


def compare(a: Path, b: Path) -> Difference | None:
    """The first difference of two runs, by step and then in the final digest; None if they agree bit for bit.

    A step or file that only one run has is a difference, and so is a digest that both lack: equal losses alone do not
    show that the weights agree. Raises RecordsError for what is no run directory, and for damaged records.
    """
    for run_dir in (a, b):
        _require_run(run_dir)
    return _compare_metrics(a, b) or _compare_digests(a, b)


def _require_run(run_dir: Path) -> None:
    if is_run(run_dir):
        return
    if not run_dir.is_dir():
        raise RecordsError(f"{run_dir}: no such directory")
    if not (run_dir / "digest.json").is_file():
        raise RecordsError(f"{run_dir} has no records of a run (neither metrics.jsonl nor digest.json)")


def _compare_metrics(a: Path, b: Path) -> Difference | None:
    if missing := _missing("metrics.jsonl", a, b):
        return missing
    ours, theirs = read_metrics(a), read_metrics(b)
    for step in sorted({*ours, *theirs}):
        if step not in ours or step not in theirs:
            return Difference(
                f"step {step}", "recorded in only one run", _presence(step in ours), _presence(step in theirs)
            )
        for field, name in _COMPARED:
            key = f"{field}_hex"
            if key not in ours[step] or ours[step][key] != theirs[step].get(key):
                return Difference(
                    f"step {step}", f"{name} differs", _number(ours[step], field), _number(theirs[step], field)
                )
    return None


def _compare_digests(a: Path, b: Path) -> Difference | None:
    if missing := _missing("digest.json", a, b):
        return missing
    ours, theirs = read_digest(a), read_digest(b)
    for field in ("step", "slices"):
        if ours.get(field) != theirs.get(field):
            hint = _OF_SLICES if field == "slices" else ""
            return Difference("digest", f"{field} differs{hint}", str(ours.get(field)), str(theirs.get(field)))
    units = ours.get("units", {}), theirs.get("units", {})
    for name in [*units[0], *(name for name in units[1] if name not in units[0])]:
        if units[0].get(name) != units[1].get(name):
            return Difference(
                "digest", f"unit {name} differs", units[0].get(name, "missing"), units[1].get(name, "missing")
            )
    if ours.get("sha256") is None or ours["sha256"] != theirs.get("sha256"):
        return Difference("digest", "sha256 differs", str(ours.get("sha256")), str(theirs.get("sha256")))
    return None


def _missing(name: str, a: Path, b: Path) -> Difference | None:
    there = (a / name).is_file(), (b / name).is_file()
    if all(there):
        return None
    what = "there in only one run" if any(there) else "missing in both runs: nothing shows that their weights agree"
    return Difference(name, what, _presence(there[0]), _presence(there[1]))


def _presence(there: bool) -> str:
    return "present" if there else "missing"


def _number(record: dict[str, Any], field: str) -> str:
    return f"{record.get(field)!r}  {record.get(f'{field}_hex')}"


def make_parser() -> argparse.ArgumentParser:
    """The flags of ``megatron-elastic compare``."""
    parser = argparse.ArgumentParser(
        prog="megatron-elastic compare",
        description="Compare every step's loss and gradient norm, and the final state of all slices, bit for bit.",
        epilog="Exit status: 0 identical, 1 different (the first difference is printed; a step or file that only one "
        "has is one, too), 2 no run directory, or damaged records."
        "\n\nexample:\n  megatron-elastic compare runs/undisturbed runs/disturbed",
        formatter_class=usage.Formatter,
    )
    parser.add_argument("a", type=Path, metavar="RUN_A", help="run directory")
    parser.add_argument("b", type=Path, metavar="RUN_B", help="run directory")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """``megatron-elastic compare RUN_A RUN_B``: 0 if they agree bit for bit, 1 if not, 2 if that cannot be told."""
    args = make_parser().parse_args(argv)
    try:
        difference = compare(args.a, args.b)
    except RecordsError as error:
        print(f"megatron-elastic compare: error: {error}", file=sys.stderr)
        return 2
    if difference is not None:
        print(f"different at {difference}")
        return 1
    steps, sha256 = len(read_metrics(args.a)), read_digest(args.a)["sha256"]
    print(f"identical: {steps} steps and the final state (sha256 {sha256[:16]})")
    return 0
