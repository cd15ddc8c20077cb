"""Lock: of an open file: whom it is passed on to holds it too, and others can ask for it without taking it."""

from __future__ import annotations

import fcntl
import os
import struct
from pathlib import Path
from typing import BinaryIO

_FLOCK = struct.Struct("hhqqi4x")
"""``struct flock`` of Linux: type, whence, start, length, pid."""


def hold(file: BinaryIO) -> bool:
    """Take the lock until the file is closed by everybody who has it; False if somebody else has it."""
    try:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    except BlockingIOError:
        return False
    return True


def is_held(path: Path) -> bool:
    """Whether anybody holds the lock of a file."""
    try:
        with path.open("rb") as file:
            told = fcntl.fcntl(file, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0))
    except FileNotFoundError:
        return False
    return bool(_FLOCK.unpack(told)[0] != fcntl.F_UNLCK)
