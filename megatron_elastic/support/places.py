"""Places: whether checkpoints and data are where they can be used."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import NoReturn

from megatron_elastic import usage
from megatron_elastic.config import UsageError

SOURCES = "whether an index is of the present data is told by the sizes and times of their files"
"""Why data cannot be in an object store."""

PLACES = {
    **dict.fromkeys(("--load", "--save", "--pretrained-checkpoint"),
                    "a checkpoint gets its name once it is whole, which object stores cannot do"),
    **dict.fromkeys(("--data-path", "--train-data-path", "--valid-data-path", "--test-data-path"), SOURCES),
}  # fmt: skip
"""Where checkpoints and data are, and why not in an object store."""


class Parser(argparse.ArgumentParser):
    """One that raises UsageError and does not end the process."""

    def error(self, message: str) -> NoReturn:
        """What argparse finds."""
        raise UsageError(message)


def check_data(argv: Sequence[str]) -> None:
    """Raise UsageError if data that a command line of Megatron-LM's ``pretrain_gpt.py`` names are not there."""
    parser = Parser(add_help=False, allow_abbrev=False)
    flags = [flag for flag in PLACES if flag.endswith("data-path")]
    for flag in flags:
        parser.add_argument(flag, nargs="*", default=[])
    parser.add_argument("--sft", action="store_true")
    given = vars(parser.parse_known_args(list(argv))[0])
    for flag in flags:
        for place in given[usage.dest(flag)]:
            if usage.is_number(place) and not given["sft"]:
                continue  # the share of the data set that follows
            for path in (place,) if given["sft"] else (f"{place}.idx", f"{place}.bin"):
                if not os.path.exists(path):
                    raise UsageError(f"{flag} {place}: {path} does not exist; name data that are there, without the "
                                     "ending of their names")


def check_places(args: argparse.Namespace) -> None:
    """Raise UsageError if something is to be in an object store, which Megatron reads through clients of its own."""
    for flag, why in PLACES.items():
        given = getattr(args, usage.dest(flag), None) or ()
        for place in map(str, given if isinstance(given, list) else (given,)):
            if place.startswith(("msc://", "s3://")):
                raise UsageError(f"{flag} {place} does not work with --elastic: {why}; name a folder that all nodes "
                                 "share, and copy")
