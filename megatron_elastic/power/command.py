"""Command: ``megatron-elastic clocks``. What jobs have set on this machine, and setting back what they have left."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_elastic import usage
from megatron_elastic.power.regulator import noted, notes, restore_left_behind

_DESCRIPTION = """\
Clocks of devices that jobs have set on this machine (--elastic-dvfs), as they have noted before they did so. A job sets
them back when it ends, and the next job here does for one whose agents were killed; restore does it at once."""
_EXAMPLES = """\
examples:
  megatron-elastic clocks show
  megatron-elastic clocks restore"""


def make_parser() -> argparse.ArgumentParser:
    """The flags of ``megatron-elastic clocks``."""
    parser = argparse.ArgumentParser(prog="megatron-elastic clocks", description=_DESCRIPTION, epilog=_EXAMPLES,
                                     formatter_class=usage.Formatter)  # fmt: skip
    parser.add_argument("action", choices=("show", "restore"), metavar="ACTION",
                        help="show: what is set, and by whom; restore: set back what jobs have left that are gone")
    parser.add_argument("--folder", type=Path, default=notes(), metavar="DIR",
                        help="where it is noted (default: this person's, %(default)s)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Do it; 1 if something could not be set back."""
    options = make_parser().parse_args(argv)
    before = noted(options.folder)
    for note in before:
        whose = "of a job that runs" if note.held else "left by a job that is gone"
        for device, value in note.before.items():
            print(f"{note.actuator} {device}: {whose}; before: {value or 'as it was by itself'}")
    if not before:
        print(f"no clocks are set ({options.folder})")
    if options.action == "show":
        return 0
    trouble: list[str] = []
    restore_left_behind(trouble.append, options.folder)
    for each in trouble:
        print(f"megatron-elastic clocks: {each}", file=sys.stderr)
    left = {note.file for note in noted(options.folder)}
    back = sum(len(note.before) for note in before if note.file not in left)
    print(f"{back} set back")
    return 1 if trouble else 0
