"""Unsteady: a job test that fails is run once more, alone, in a fresh process; if it passes then, the run goes on.

A plugin of pytest, at work with ``--once-more`` only, so that who runs a test by its name sees what it did. Pure tests
are never run again. What was unsteady is told, and listed in ``build/unsteady.json`` with both outputs.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from _pytest.runner import runtestprotocol

MOST = 2
"""Unsteady tests that a run may have."""
_LIMIT = 600.0
"""Seconds that the second time may take, start of the process and undisturbed jobs for comparison included."""
_UNSTEADY = "unsteady"
"""Property of a report that says where both outputs are; so workers of xdist tell it."""
_found = pytest.StashKey["Found"]()


class Found:
    """What was unsteady."""

    def __init__(self) -> None:
        self.tests: list[dict[str, str]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep it."""
        self.tests += [value for name, value in report.user_properties if name == _UNSTEADY and isinstance(value, dict)]


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--once-more``."""
    parser.addoption("--once-more", action="store_true",
                     help="run a job test that fails once more, in a fresh process, and tell if it passes then")


def pytest_configure(config: pytest.Config) -> None:
    """Nothing is unsteady yet."""
    config.stash[_found] = Found()
    config.pluginmanager.register(config.stash[_found])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run a job test, and a second time if it failed."""
    if not item.config.getoption("once_more") or item.get_closest_marker("pure") is not None:
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports = runtestprotocol(item, log=False, nextitem=nextitem)
    if any(report.failed for report in reports) and (found := _once_more(item, reports)) is not None:
        for report in reports:
            report.outcome, report.longrepr = "passed", None
        reports[-1].user_properties.append((_UNSTEADY, found))
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _once_more(item: pytest.Item, reports: Sequence[pytest.TestReport]) -> dict[str, str] | None:
    """What is to be told of the test if it passes the second time."""
    folder = _build(item.config) / "unsteady" / re.sub(r"[^\w.-]+", "-", item.nodeid)[-150:]
    folder.mkdir(parents=True, exist_ok=True)
    first, second = folder / "first.log", folder / "second.log"
    with first.open("w") as log:
        for report in reports:
            print(f"==== {report.when}: {report.outcome}", report.longreprtext, sep="\n", file=log)
            for title, text in report.sections:
                print(f"---- {title}", text, sep="\n", file=log)
    with second.open("w") as log:
        command = [sys.executable, "-m", "pytest", item.nodeid]
        try:
            code = subprocess.run(
                command, cwd=item.config.rootpath, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                timeout=_LIMIT, check=False,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            code = -1
    return {"test": item.nodeid, "first": str(first), "second": str(second)} if code == 0 else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """A line for each unsteady test."""
    for found in config.stash[_found].tests:
        terminalreporter.write_line(f"unsteady: {found['test']} (first: {found['first']}, second: {found['second']})")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write down what was unsteady; too many of them fail the run."""
    if hasattr(session.config, "workerinput"):
        return
    found = session.config.stash[_found].tests
    if session.config.getoption("once_more"):
        path = _build(session.config) / "unsteady.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(found, indent=2) + "\n")
    if len(found) > MOST and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _build(config: pytest.Config) -> Path:
    return config.rootpath / "build"
