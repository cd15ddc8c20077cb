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
_OTHERS = ("common", "forked", "launcher", "namespaces", "turns", "watching", "chaos")
"""What benchmarks have in common, and what is a command of its own."""
_SOURCES = "they come with the sources: clone the repository and install it with pip install --editable ."


def available() -> list[str]:
    """Names of the benchmarks; empty when the package is not installed from a checkout."""
    return sorted(path.stem for path in _FOLDER.glob("*.py") if path.stem not in _OTHERS)


def _told(name: str) -> str:
    """A line or more on what a benchmark measures: what its file begins with."""
    begins = (ast.get_docstring(ast.parse((_FOLDER / f"{name}.py").read_text())) or "").partition("\n\n")[0]
    what = begins.partition("``megatron-elastic")[0].replace("``", "").replace("\n", " ").strip(": ")
    return textwrap.fill(what, 80, initial_indent=f"  {name:12s} ", subsequent_indent=" " * 15)


def make_parser() -> argparse.ArgumentParser:
    """What ``megatron-elastic bench`` takes; each benchmark parses the rest."""
    parser = argparse.ArgumentParser(
        prog="megatron-elastic bench", formatter_class=usage.Formatter,
        description="Measure. Progress goes to stderr; the last line of stdout is one JSON object.",
        epilog="NAME is one of\n\n" + "\n".join(map(_told, available())) + "\n\nexample:\n  megatron-elastic bench "
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
    """Go on as a program of the checkout, so that signals and the exit code are its own. Returns if there is none."""
    path = _FOLDER / f"{name}.py"
    if path.is_file():
        os.execv(sys.executable, [sys.executable, str(path), *arguments])
    print(f"megatron-elastic: error: there is no {path}; {_SOURCES}", file=sys.stderr)
    return 2
