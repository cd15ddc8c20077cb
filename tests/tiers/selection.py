"""Selection: marks tests for the tiers (CONTRIBUTING.md), as a plugin of pytest.

``pure``: starts no processes that wait for each other; many run at once. ``gate``: starts some (a job), and is in
``gate.txt``. ``long``: any other job, with its part of ``scripts/long.sh`` as a mark, too. Marks only select: who names
a test runs it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiers.parts import PARTS, part_of

GATE = Path(__file__).parent / "gate.txt"
_STARTS = {"jobs", "launch"}
"""Fixtures that start jobs; who has one needs no mark ``job``."""


def gate_lines() -> list[str]:
    """What ``gate.txt`` lists: modules, functions or single cases. What is behind a ``#`` is for people."""
    lines = (line.partition("#")[0].strip() for line in GATE.read_text().splitlines())
    return [line for line in lines if line]


def names(nodeid: str) -> set[str]:
    """All that a line of ``gate.txt`` could have to mean this test: its module, its function, itself."""
    return {nodeid, nodeid.partition("[")[0], nodeid.partition("::")[0]}


def pytest_configure(config: pytest.Config) -> None:
    """Make the parts known as marks."""
    for part in PARTS:
        config.addinivalue_line("markers", f"{as_mark(part)}: belongs to this part of scripts/long.sh")


def as_mark(part: str) -> str:
    """A part's name, as ``-m`` takes it."""
    return part.replace("-", "_")


@pytest.hookimpl(tryfirst=True)  # before ``-m`` deselects by these marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark ``items``. Raises pytest.UsageError for a line of ``gate.txt`` that means none of all tests."""
    gate, met = set(gate_lines()), set[str]()
    for item in items:
        if item.get_closest_marker("job") is None and _STARTS.isdisjoint(getattr(item, "fixturenames", ())):
            item.add_marker("pure")
            continue
        listed = names(item.nodeid) & gate
        met |= listed
        for mark in ("gate",) if listed else ("long", as_mark(part_of(item.path.stem))):
            item.add_marker(mark)
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS and gate - met:  # all tests were collected
        raise pytest.UsageError(f"{GATE.name} lists what is no job (any more): {', '.join(sorted(gate - met))}")
