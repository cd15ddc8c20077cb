"""Bench: finds a benchmark of the checkout by name and becomes it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

_FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"
_SHARED = ("common", "forked")
"""What benchmarks have in common."""


def available() -> list[str]:
    """Names of the benchmarks; empty when the package is not installed from a checkout."""
    return sorted(path.stem for path in _FOLDER.glob("*.py") if path.stem not in _SHARED)


def main(argv: Sequence[str] | None = None) -> int:
    """``megatron-elastic bench NAME [ARGS]``: does not return unless NAME cannot be run."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    names = available()
    if not names:
        print(f"megatron-elastic bench: error: there are no benchmarks in {_FOLDER}; they come with the sources: "
              "clone the repository and install it with pip install --editable .", file=sys.stderr)
        return 2
    if not arguments or arguments[0] in ("-h", "--help"):
        print(f"usage: megatron-elastic bench NAME ...\n\nnames: {', '.join(names)}\n\n"
              "Progress goes to stderr; the last line of stdout is one JSON object.\n"
              "megatron-elastic bench NAME --help tells more.")
        return 0 if arguments else 2
    name, rest = arguments[0], arguments[1:]
    if name not in names:
        print(f"megatron-elastic bench: error: there is no benchmark {name!r}; one of {', '.join(names)}",
              file=sys.stderr)
        return 2
    # In place of this process, so that signals and the exit code are the benchmark's own.
    os.execv(sys.executable, [sys.executable, str(_FOLDER / f"{name}.py"), *rest])
