"""Telling: what a failure needs besides its traceback, and what could not be tested here. A plugin of pytest."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import NamedTuple

import pytest

_LINES = 12
"""Last events of a run directory that are shown."""


class Start(NamedTuple):
    """When a test began: by the wall's clock, by a steady one, and what processors had done until then."""

    wall: float
    steady: float
    used: os.times_result


_started = pytest.StashKey[Start]()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, None, None]:
    """Note when the test begins."""
    item.stash[_started] = Start(time.time(), time.monotonic(), os.times())
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add to a failure how busy the machine was, its jobs' last events, and the command that runs it alone."""
    report = yield
    if report.failed:
        report.sections.append(("this test alone", f"bash scripts/test.sh '{item.nodeid}'"))
        report.sections.append(("machine", _machine(item)))
        for run_dir in _run_dirs(item):
            report.sections.append((f"last events of {run_dir}", _last_events(run_dir)))
    return report


def _machine(item: pytest.Item) -> str:
    _, begun, before = item.stash[_started]
    wall, now = time.monotonic() - begun, os.times()
    own = now.user + now.system - before.user - before.system
    children = now.children_user + now.children_system - before.children_user - before.children_system
    load = Path("/proc/loadavg").read_text().strip()
    return (f"load average {load} on {os.cpu_count()} processors; the test took {wall:.1f} s; of processors it had "
            f"{own:.1f} s, and its children that have ended {children:.1f} s")  # fmt: skip


def _run_dirs(item: pytest.Item) -> list[Path]:
    """Run directories of jobs that the test has started, as the fixtures that start some know them."""
    fixtures = getattr(item, "funcargs", {})
    if "launch" in fixtures:
        return [run.run_dir for run in fixtures["launch"].runs]
    if "jobs" in fixtures:
        begun = item.stash[_started].wall
        events = sorted(fixtures["jobs"].folder.glob("*/events.jsonl"))
        return [path.parent for path in events if path.stat().st_mtime >= begun]
    return []


def _last_events(run_dir: Path) -> str:
    try:
        return "\n".join((run_dir / "events.jsonl").read_text().splitlines()[-_LINES:])
    except OSError as error:
        return f"none: {error}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Write down what was skipped and why: ``scripts/test.sh`` tells it in its last line."""
    reasons: Counter[str] = Counter()
    for report in terminalreporter.getreports("skipped"):
        if isinstance(report.longrepr, tuple):
            reasons[report.longrepr[2].removeprefix("Skipped: ")] += 1
    path = config.rootpath / "build" / "not-tested.txt"
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as file:
        file.writelines(f"{reason} ({count})\n" for reason, count in sorted(reasons.items()))
