"""Places: whether checkpoints and data are where they can be used."""

from __future__ import annotations

import argparse
import os
import struct
from collections.abc import Sequence
from typing import BinaryIO, NoReturn

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

_INDEX = struct.Struct("<9sQBQQ")
"""How Megatron's ``.idx`` begins: a word, a version, the type of tokens, numbers of sequences and of documents. Lengths
of sequences follow (int32), where they begin in ``.bin`` (int64), and which one each document begins with (int64)."""
_WORD = b"MMIDIDX\0\0"
_TOKEN = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 8, 7: 4, 8: 2}
"""Bytes of a token, by its type."""


class Parser(argparse.ArgumentParser):
    """One that raises UsageError and does not end the process."""

    def error(self, message: str) -> NoReturn:
        """What argparse finds."""
        raise UsageError(message)


def check_data(argv: Sequence[str]) -> None:
    """Raise UsageError if data that flags of Megatron-LM's ``pretrain_gpt.py`` name are missing or cut short."""
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
            if not given["sft"]:
                check_uncut(flag, place)


def check_uncut(flag: str, place: str) -> None:
    """Raise UsageError if ``place.idx`` or ``place.bin``, Megatron's indexed format, was cut short.

    What is no such index Megatron refuses itself.
    """
    try:
        with open(f"{place}.idx", "rb") as index:
            wanted, texts = _sizes(index)
            sizes = {f"{place}.idx": (os.fstat(index.fileno()).st_size, wanted),
                     f"{place}.bin": (os.stat(f"{place}.bin").st_size, texts)}  # fmt: skip
    except OSError as error:
        raise UsageError(f"{flag} {place}: it cannot be read ({error})") from None
    for path, (size, whole) in sizes.items():
        if size < whole:
            raise UsageError(f"{flag} {place}: {path} was cut short: it has {size} bytes of {whole}; copy or "
                             "prepare it again")


def _sizes(index: BinaryIO) -> tuple[int, int]:
    """How large an index must be at least, by its beginning, and its texts, by the last of them. 0: not known."""
    head = index.read(_INDEX.size)
    if not head.startswith(_WORD):
        return 0, 0
    if len(head) < _INDEX.size:
        return _INDEX.size, 0
    _, _, token, sequences, documents = _INDEX.unpack(head)
    begins = _INDEX.size + 4 * sequences
    wanted = begins + 8 * sequences + 8 * documents
    if not sequences or os.fstat(index.fileno()).st_size < wanted:
        return wanted, 0
    index.seek(begins - 4)
    (length,) = struct.unpack("<i", index.read(4))
    index.seek(begins + 8 * (sequences - 1))
    (begin,) = struct.unpack("<q", index.read(8))
    return wanted, begin + length * _TOKEN.get(token, 0)


def check_places(args: argparse.Namespace) -> None:
    """Raise UsageError if a name is empty, or in an object store, which Megatron reads through clients of its own."""
    for flag, why in PLACES.items():
        given = getattr(args, usage.dest(flag), None)
        for place in map(str, given if isinstance(given, list) else () if given is None else (given,)):
            if not place:
                raise UsageError(f"{flag}: {usage.EMPTY}")
            if place.startswith(("msc://", "s3://")):
                raise UsageError(f"{flag} {place} does not work with --elastic: {why}; name a folder that all nodes "
                                 "share, and copy")
