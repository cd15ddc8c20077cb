"""The tests themselves: the gate does not decide by the clock or by chance, and tiers do as CONTRIBUTING.md says."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jobs import ROOT
from tests.tiers import pythons
from tests.tiers.long import parts
from tests.tiers.parts import PARTS, part_of
from tests.tiers.selection import gate_lines, names

TESTS = ROOT / "tests"
BY_CLOCK = TESTS / "tiers" / "by_clock.txt"
"""Functions outside the gate that decide by the clock, and never failed for it. Nothing is to be added."""

CLOCKS = {"monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time", "time_ns"}
DRAWS = {"betavariate", "choice", "choices", "gauss", "randbytes", "randint", "random", "randrange", "sample", "seed",
         "shuffle", "uniform"}  # fmt: skip


# ---- what decides ----------------------------------------------------------------------------


def _trees() -> Iterator[tuple[str, ast.FunctionDef]]:
    """Every function of modules with tests, and its name as ``gate.txt`` has names."""
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                yield f"{path.relative_to(ROOT)}::{node.name}", node


def _is_clock(node: ast.AST) -> bool:
    """``time.monotonic()`` and its like, or a time that is on record: ``event["detect_ms"]``."""
    if isinstance(node, ast.Call):
        function = node.func
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        return name in CLOCKS or (name == "time" and not node.args)
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.split("_")[-1] == "ms"


def _bounds_above(compare: ast.Compare, clocks: set[str]) -> Iterator[bool]:
    """Whether a time, or what was computed of one, must be below something that is none: busy machines may exceed that.
    That it is above something does not depend on the machine.
    """
    sides = [compare.left, *compare.comparators]
    timed = [any(_is_clock(part) or (isinstance(part, ast.Name) and part.id in clocks) for part in ast.walk(side))
             for side in sides]  # fmt: skip
    for index, how in enumerate(compare.ops):
        less, more = (index, index + 1) if isinstance(how, ast.Lt | ast.LtE) else (index + 1, index)
        yield isinstance(how, ast.Lt | ast.LtE | ast.Gt | ast.GtE) and timed[less] and not timed[more]


def _decides_by_clock(function: ast.FunctionDef) -> Iterator[str]:
    """Asserts that bound a time from above, outside of loops that look until something holds."""
    clocks: set[str] = set()
    polls = {id(node) for loop in ast.walk(function) if isinstance(loop, ast.While) for node in ast.walk(loop)}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and any(map(_is_clock, ast.walk(node.value))):
            clocks |= {name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)}
    for node in ast.walk(function):
        if not isinstance(node, ast.Assert) or id(node) in polls:
            continue
        for compare in ast.walk(node.test):
            if isinstance(compare, ast.Compare) and any(_bounds_above(compare, clocks)):
                yield f"line {node.lineno}: bounds a time"


def _waits_by_sleeping(function: ast.FunctionDef) -> Iterator[str]:
    """A sleep outside of a loop that looks at something, and of what is handed over to be done elsewhere."""
    elsewhere = {id(node) for outer in ast.walk(function) if isinstance(outer, ast.While | ast.Lambda)
                 for node in ast.walk(outer)}  # fmt: skip
    for node in ast.walk(function):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="asyncio"), attr="sleep"), args=[ast.Constant(value=0)]):
                pass
            case ast.Call(func=ast.Attribute(value=ast.Name(id="time" | "asyncio"), attr="sleep")):
                if id(node) not in elsewhere:
                    yield f"line {node.lineno}: sleeps"


def _draws_anew(function: ast.FunctionDef) -> Iterator[str]:
    """Examples, victims or seeds that are others every time."""
    for node in ast.walk(function):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="random"), attr=name), args=given):
                if name in DRAWS or name == "SystemRandom" or (name == "Random" and not given):
                    yield f"line {node.lineno}: draws anew"
            case ast.Attribute(attr="time_ns"):
                yield f"line {node.lineno}: takes a seed from the clock"
        if isinstance(node, ast.keyword) and node.arg == "derandomize" and getattr(node.value, "value", None) is False:
            yield f"line {node.value.lineno}: draws examples anew"


def test_nothing_in_the_gate_decides_by_the_clock_or_by_chance() -> None:
    known = {line.partition("#")[0].strip() for line in BY_CLOCK.read_text().splitlines()} - {""}
    gate = set(gate_lines())
    found = {
        name: [*_decides_by_clock(function), *_waits_by_sleeping(function), *_draws_anew(function)]
        for name, function in _trees()
    }
    found = {name: what for name, what in found.items() if what}
    assert {name: what for name, what in found.items() if name not in known} == {}
    assert sorted(known - set(found)) == [], "mended: take them out of by_clock.txt"
    assert [name for name in known if names(name) & gate] == [], "the gate does not decide by the clock"


# ---- the tiers -------------------------------------------------------------------------------


def test_what_parts_name_is_there() -> None:
    """Modules of tests that they run by their names."""
    words = [word for part in parts(1).values() for command in part.commands for word in command]
    named = {word.partition("::")[0] for word in words if word.startswith("tests/")}
    named.update(f"tests/{name}" for name in pythons.TESTS)
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []


def test_every_module_has_a_part() -> None:
    for path in TESTS.rglob("test_*.py"):
        assert part_of(path.stem) in PARTS


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Tests of their own, with the plugins of ours."""
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\nmarkers =\n    pure:\naddopts = -ra -p tests.tiers.unsteady -p tests.tiers.resuming\n"
    )
    return tmp_path


def run(project: Path, *flags: str) -> tuple[int, str]:
    """Exit code and output of pytest there."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *flags], cwd=project, env={**env, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


ONCE = """
import pathlib, pytest
def fails_once(name):
    path = pathlib.Path(name)
    if not path.exists():
        path.touch()
        raise AssertionError("the first time")
"""


@pytest.mark.parametrize("several", [(), ("--numprocesses", "2")], ids=["alone", "two workers"])
def test_what_fails_once_is_unsteady(project: Path, several: tuple[str, ...]) -> None:
    (project / "test_it.py").write_text(ONCE + "def test_one(): fails_once('one')\ndef test_two(): pass\n")
    code, output = run(project, "--once-more", *several)
    assert code == 0, output
    assert "2 passed" in output
    assert "unsteady: test_it.py::test_one (first: " in output
    (found,) = json.loads((project / "build" / "unsteady.json").read_text())
    assert found["test"] == "test_it.py::test_one"
    assert "the first time" in Path(found["first"]).read_text()
    assert "1 passed" in Path(found["second"]).read_text()


def test_what_fails_twice_has_failed(project: Path) -> None:
    (project / "test_it.py").write_text("def test_one(): assert 1 == 2\n")
    code, output = run(project, "--once-more")
    assert code == 1
    assert "FAILED test_it.py::test_one - assert 1 == 2" in output
    assert json.loads((project / "build" / "unsteady.json").read_text()) == []


@pytest.mark.parametrize("flags", [(), ("--once-more",)], ids=["not asked to", "pure"])
def test_what_is_not_run_again(project: Path, flags: tuple[str, ...]) -> None:
    (project / "test_it.py").write_text(ONCE + "@pytest.mark.pure\ndef test_one(): fails_once('one')\n")
    code, output = run(project, *flags)
    assert code == 1
    assert "unsteady" not in output


def test_three_unsteady_ones_fail_the_run(project: Path) -> None:
    tests = "".join(f"def test_{name}(): fails_once('{name}')\n" for name in "abc")
    (project / "test_it.py").write_text(ONCE + tests)
    code, output = run(project, "--once-more")
    assert code == 1
    assert output.count("\nunsteady: ") == 3


def test_what_passed_is_not_run_again(project: Path) -> None:
    (project / "test_it.py").write_text(ONCE + "def test_one(): fails_once('one')\ndef test_two(): pass\n")
    assert "1 failed, 1 passed" in run(project, "--passed", "passed")[1]
    assert (project / "passed").read_text() == "test_it.py::test_two\n"
    assert "1 passed, 1 deselected" in run(project, "--passed", "passed")[1]
    assert "2 deselected" in run(project, "--passed", "passed")[1]
