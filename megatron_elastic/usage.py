"""Usage: how commands describe themselves."""

from __future__ import annotations

import argparse
import sys
import textwrap
from itertools import groupby
from pathlib import Path

EMPTY = "its name is empty, as of a variable that is not set: name one, or leave the flag out"
"""Of a file or folder: it would be where the command is started."""


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


def is_amount(value: object) -> bool:
    """Whether it is a number from 0 on that a float can hold: integers of JSON may have any length."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= sys.float_info.max


def dest(flag: str) -> str:
    """The name under which argparse keeps a flag's value."""
    return flag.removeprefix("--").replace("-", "_")


def count(text: str) -> int:
    """A flag's value: a number from 1 on. Raises argparse.ArgumentTypeError."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 1 on")
    return int(text)


def path(text: str) -> Path:
    """A flag's value: the name of a file or folder. Raises argparse.ArgumentTypeError."""
    if not text:
        raise argparse.ArgumentTypeError(EMPTY)
    return Path(text)
