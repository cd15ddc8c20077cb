"""Bench: finds a benchmark of the checkout by name and becomes it."""

from __future__ import annotations

import argparse
import ast
import os
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from megatron_elastic import usage

_FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"
_APART = ("chaos",)
"""Has a command of its own."""
_PROGRAMS = "programs"
"""The room of what jobs of benchmarks run."""
_SOURCES = "they come with the sources: clone the repository and install it with pip install --editable ."


def rooms() -> dict[str, str]:
    """The benchmarks, room by room, each with the room that it is in; none if this is not installed from a checkout.

    A benchmark is a module with a function ``main`` in a room of ``benchmarks/``.
    """
    return {path.stem: room.name for room in sorted(_FOLDER.glob("*/")) if room.name != _PROGRAMS
            for path in sorted(room.glob("*.py")) if "\ndef main(" in path.read_text()}


def _told(name: str, room: str) -> str:
    """A line or more on what a benchmark measures: what its file begins with."""
    begins = _begins(_FOLDER / room / f"{name}.py").partition("``megatron-elastic")[0]
    what = begins.replace("``", "").replace("\n", " ").strip(": ")
    return textwrap.fill(what, 80, initial_indent=f"  {name:12s} ", subsequent_indent=" " * 15)


def _begins(path: Path) -> str:
    return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n\n")[0]


def available() -> list[str]:
    """Names of the benchmarks; empty when the package is not installed from a checkout."""
    return [name for name in rooms() if name not in _APART]


def _list() -> str:
    """All benchmarks, under what those of their room are about."""
    told: dict[str, list[str]] = {}
    for name, room in rooms().items():
        if name not in _APART:
            told.setdefault(room, [_begins(_FOLDER / room / "__init__.py")]).append(_told(name, room))
    return "\n\n".join(map("\n".join, told.values()))


def make_parser() -> argparse.ArgumentParser:
    """What ``megatron-elastic bench`` takes; each benchmark parses the rest."""
    parser = argparse.ArgumentParser(
        prog="megatron-elastic bench", formatter_class=usage.Formatter,
        description="Measure. Progress goes to stderr; the last line of stdout is one JSON object.",
        epilog=f"NAME is one of these.\n\n{_list()}\n\nexample:\n  megatron-elastic bench "
        "recovery --nproc-per-node 8 --repeat 5\n\nmegatron-elastic bench NAME --help tells more.",
    )
    parser.add_argument("name", metavar="NAME", choices=available() or None, help="what to measure")
    parser.add_argument("arguments", metavar="ARGS", nargs=argparse.REMAINDER, help="the benchmark's flags")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """``megatron-elastic bench NAME [ARGS]``: does not return unless NAME cannot be run."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    names = available()
    if not names:
        print(f"megatron-elastic bench: error: there are no benchmarks in {_FOLDER}; {_SOURCES}", file=sys.stderr)
        return 2
    if not arguments or arguments[0] in ("-h", "--help"):
        print(make_parser().format_help(), end="")
        return 0 if arguments else 2
    name, rest = arguments[0], arguments[1:]
    if name not in names:
        print(f"megatron-elastic bench: error: there is no benchmark {name!r}; one of {', '.join(names)}",
              file=sys.stderr)
        return 2
    return become(name, rest)


def become(name: str, arguments: Sequence[str]) -> int:
    """Go on as a benchmark of the checkout, so that signals and the exit code are its own. Returns if there is none."""
    if name in rooms():
        os.execv(sys.executable, [sys.executable, str(_FOLDER), name, *arguments])
    print(f"megatron-elastic: error: there is no {name!r} in {_FOLDER}; {_SOURCES}", file=sys.stderr)
    return 2
