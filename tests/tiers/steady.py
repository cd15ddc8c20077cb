"""Steady: tests again and again beside busy processes, and how often each failed (``scripts/steady.sh``)."""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.jobs import ROOT

_BUSY = "while True: pass"


def main() -> int:
    """Run; the exit code is 1 if any test failed."""
    parser = argparse.ArgumentParser(prog="scripts/steady.sh", description=__doc__)
    parser.add_argument("tests", nargs="+", metavar="TEST", help="files, node ids, and other arguments of pytest")
    parser.add_argument("--runs", type=int, default=20, metavar="N", help="how often (default: 20)")
    parser.add_argument("--load", type=int, default=4, metavar="N", help="busy processes beside them (default: 4)")
    args, others = parser.parse_known_args()
    folder = ROOT / "build" / "steady"
    folder.mkdir(parents=True, exist_ok=True)
    runs: Counter[str] = Counter()
    failures: defaultdict[str, Counter[str]] = defaultdict(Counter)
    with _busy(args.load):
        for number in range(args.runs):
            outcomes = _run([*args.tests, *others], folder / f"{number}.log", folder / f"{number}.xml")
            bad = sum(how is not None for how in outcomes.values())
            print(f"run {number + 1} of {args.runs}: {len(outcomes)} tests, {bad} failed", file=sys.stderr, flush=True)
            for test, how in outcomes.items():
                runs[test] += 1
                if how is not None:
                    failures[test][how] += 1
    _table(runs, failures, folder)
    return int(bool(failures) or not runs)


@contextlib.contextmanager
def _busy(count: int) -> Iterator[None]:
    """Processes that take what they get of the processors."""
    processes = [subprocess.Popen([sys.executable, "-c", _BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _run(arguments: list[str], log: Path, report: Path) -> dict[str, str | None]:
    """How each test failed in a fresh process; None: it did not."""
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", f"--junit-xml={report}", *arguments]
    with log.open("w") as file:
        code = subprocess.run(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, check=False
        ).returncode
    if not report.exists():
        raise SystemExit(f"steady: pytest ended with {code} and without results; its last lines:\n"
                         + "\n".join(log.read_text().splitlines()[-20:]))  # fmt: skip
    outcomes: dict[str, str | None] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        trouble = next((child for child in case if child.tag in ("failure", "error")), None)
        if case.find("skipped") is None:
            how = None if trouble is None else ((trouble.get("message") or "?").splitlines() or ["?"])[0]
            outcomes[f"{case.get('classname')}::{case.get('name')}"] = how
    return outcomes


def _table(runs: Counter[str], failures: dict[str, Counter[str]], folder: Path) -> None:
    print(f"{len(runs)} tests, {sum(runs.values())} runs of tests, {len(failures)} tests failed; outputs: {folder}")
    for test, hows in sorted(failures.items(), key=lambda item: -item[1].total()):
        print(f"{hows.total():4} of {runs[test]:3}  {test}")
        for how, count in hows.most_common():
            print(f"{count:9}x  {how[:160]}")


if __name__ == "__main__":
    sys.exit(main())
