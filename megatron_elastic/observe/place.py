"""Place: where the records of a run are: a folder here, or what somebody else can see of one."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Protocol

import msgspec

from megatron_elastic.observe.records import RecordsError, check_run

_MOST = 4 << 20
"""Bytes of a file that are read at once."""
_LINES, _LOG = 200, 1 << 20
"""Of a log: the last ones, and the bytes that they are looked for in, however long it is."""


class Growth(msgspec.Struct, frozen=True, kw_only=True):
    """What was written since somebody has looked."""

    metrics: bytes
    """Of ``metrics.jsonl``; the last line may not be whole."""
    events: bytes
    layout: str | None
    """The newest, if it is of another epoch than the one that is known."""
    more: bool
    """Whether there is more than could be read at once."""
    age: float | None
    """Seconds since something was written; None if nothing was."""


class Place(Protocol):
    """What ``Run`` reads."""

    name: str
    """For people."""

    def grown(self, metrics: int, events: int, epoch: int) -> Growth:
        """What is there after so many bytes of both files, and after the layout of an epoch (-1: none is known).

        Raises RecordsError where that cannot be known.
        """

    def log(self, rank: int) -> str:
        """The end of a rank's log, or why it cannot be seen."""


class Folder:
    """A run directory. A ``Place``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = str(path)

    @classmethod
    def of_run(cls, path: Path) -> Folder:
        """Raises RecordsError if there are no records."""
        check_run(path)
        return cls(path)

    def grown(self, metrics: int, events: int, epoch: int) -> Growth:
        """See ``Place``."""
        files = [self.path / name for name in ("metrics.jsonl", "events.jsonl")]
        read = [_after(path, offset) for path, offset in zip(files, (metrics, events), strict=True)]
        newest = max(epochs(self.path), default=-1)
        written = max((path.stat().st_mtime for path in files if path.is_file()), default=None)
        return Growth(
            metrics=read[0], events=read[1], more=any(len(text) == _MOST for text in read),
            layout=layout_text(self.path, newest) if newest not in (-1, epoch) else None,
            age=None if written is None else max(0.0, time.time() - written),
        )  # fmt: skip

    def log(self, rank: int) -> str:
        """See ``Place``."""
        path = self.path / "logs" / f"rank{rank}.log"
        try:
            with path.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG))
                lines = file.read(_LOG).decode(errors="replace").splitlines()[-_LINES:]
            return "".join(f"{line}\n" for line in lines) or f"{path} is empty"
        except OSError as error:
            return f"cannot read {path}: {error.strerror}"


def epochs(run_dir: Path) -> list[int]:
    """Of the layouts on record, rising. What is in their folder besides does not count."""
    return sorted(int(path.stem) for path in (run_dir / "layouts").glob("*.json") if path.stem.isdecimal())


def layout_text(run_dir: Path, epoch: int) -> str:
    """The layout of an epoch, as JSON. Raises RecordsError."""
    path = run_dir / "layouts" / f"{epoch}.json"
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise RecordsError(f"cannot read {path}: {error}") from None


def _after(path: Path, offset: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(_MOST)
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise RecordsError(f"cannot read {path}: {error}") from None
