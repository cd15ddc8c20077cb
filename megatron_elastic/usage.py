"""Usage: how commands describe themselves."""

from __future__ import annotations

import argparse
import textwrap
from itertools import groupby


class Formatter(argparse.HelpFormatter):
    """Descriptions and epilogs are paragraphs, which are filled; lines that begin with a space stay as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        filled: list[str] = []
        for kept, group in groupby(text.splitlines(), key=lambda line: not line or line.startswith(" ")):
            lines = list(group)
            filled += lines if kept else textwrap.wrap(" ".join(lines), width, break_on_hyphens=False)
        return "\n".join(indent + line for line in filled)


def is_number(text: str) -> bool:
    """Whether ``float`` reads it."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def dest(flag: str) -> str:
    """The name under which argparse keeps a flag's value."""
    return flag.removeprefix("--").replace("-", "_")


def count(text: str) -> int:
    """A flag's value: a number from 1 on. Raises argparse.ArgumentTypeError."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 1 on")
    return int(text)
