"""Compiler: run with a limit, and what it says where it fails."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

_TOLD = 4000
"""Characters of its output that an error has: the last ones, where it says why it ended."""


def run_compiler(command: Sequence[str], limit: float, waited: float = 0.0) -> None:
    """Run a compiler, or what runs one.

    Raises RuntimeError if it fails, or is not done within ``limit`` seconds, of which ``waited`` have passed before.
    """
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False,
            timeout=max(limit - waited, 0.0),
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"the compiler was not done within {limit:g} s: {' '.join(command)}") from None
    if done.returncode:
        raise RuntimeError(f"the compiler failed: {' '.join(command)}\n{done.stderr[-_TOLD:].strip()}")
