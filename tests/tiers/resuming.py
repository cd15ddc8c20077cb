"""Resuming: ``--passed FILE`` leaves out the tests that passed in a call before, and adds those that pass now."""

from __future__ import annotations

from pathlib import Path
from typing import IO

import pytest

_file = pytest.StashKey[IO[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--passed FILE``."""
    parser.addoption("--passed", type=Path, metavar="FILE", help="leave out tests that FILE lists; list what passes")


def pytest_configure(config: pytest.Config) -> None:
    """Open the list; workers of xdist only read it."""
    path = config.getoption("passed")
    if path is not None and not hasattr(config, "workerinput"):
        config.stash[_file] = path.open("a", buffering=1)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Close it."""
    if _file in config.stash:
        config.stash[_file].close()
        del config.stash[_file]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what passed."""
    path = config.getoption("passed")
    if path is not None and path.exists():
        passed = set(path.read_text().splitlines())
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in passed])
        items[:] = [item for item in items if item.nodeid not in passed]


class Listing:
    """Adds to the list."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._failed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """The test has passed when its teardown has, too."""
        if not report.passed:
            self._failed.add(report.nodeid)
        elif report.when == "teardown" and report.nodeid not in self._failed:
            print(report.nodeid, file=self._file)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Have reports listed."""
    if _file in session.config.stash:
        session.config.pluginmanager.register(Listing(session.config.stash[_file]))
