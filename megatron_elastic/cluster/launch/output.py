"""Output: which streams of this node's ranks are on the console, as torchrun's flags say, and their way there.

What a rank prints is in its log, whatever is shown. A thread reads the logs and prints what is new in them, so that a
console that stands still stops no rank.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from megatron_elastic.cluster.recording.screen import as_object
from megatron_elastic.config import UsageError

ROLE = "default"
"""What torchrun calls ranks."""
STDOUT, STDERR = 1, 2
BOTH = STDOUT | STDERR
_STREAMS = re.compile(r"[0-3]|\d+:[0-3](,\d+:[0-3])*")
_EVERY = 0.1
"""Seconds between two looks into the logs."""


@dataclass(frozen=True, slots=True)
class Console:
    """What is shown of a node's ranks. ``streams``: by local rank; who is not in it is not shown."""

    streams: Mapping[int, int] = field(default_factory=dict)
    role: str = ROLE
    as_json: bool = False

    def splits(self, local_rank: int) -> bool:
        """Whether a rank's stderr has a log of its own, because only one of its streams is shown."""
        return self.streams.get(local_rank, 0) in (STDOUT, STDERR)


def streams_shown(redirects: str | None, tee: str | None, only: str | None, ranks: int) -> dict[int, int]:
    """By local rank what torchrun would show: what is not redirected, and what is so and copied. Raises UsageError.

    Args:
        redirects, tee, only: values of ``--redirects``, ``--tee`` and ``--local-ranks-filter``; all None shows nothing.
        ranks: of this node.
    """
    if redirects is None and tee is None and only is None:
        return {}
    hidden, copied = _streams("--redirects", redirects or "0", ranks), _streams("--tee", tee or "0", ranks)
    shown = range(ranks) if only is None else _ranks(only)
    if not any(rank < ranks for rank in shown):
        raise UsageError(f"--local-ranks-filter {only}: none of them is here, where local ranks are 0 to {ranks - 1}")
    return {rank: what for rank in shown if rank < ranks and (what := BOTH & ~hidden[rank] | copied[rank])}


def _streams(flag: str, text: str, ranks: int) -> list[int]:
    if not _STREAMS.fullmatch(text):
        raise UsageError(f"{flag} {text}: expected 0 (none), 1 (stdout), 2 (stderr) or 3 (both), or that by local "
                         "rank, as 0:3,1:1")
    if ":" not in text:
        return [int(text)] * ranks
    given = dict(each.split(":") for each in text.split(","))
    return [int(given.get(str(rank), 0)) for rank in range(ranks)]


def _ranks(text: str) -> list[int]:
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise UsageError(f"--local-ranks-filter {text}: expected local ranks, as 0,1,2")
    return sorted({int(each) for each in text.split(",")})


class Echo:
    """Prints what comes into logs, line by line, in a thread."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._tails: list[_Tail] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="echo", daemon=True)
        self._thread.start()

    def follow(self, local_rank: int, rank: int, log: Path, errors: Path) -> None:
        """Show what a rank prints from now on: ``log``, and ``errors`` if that is another file."""
        shown = self._console.streams.get(local_rank, 0)
        one = shown == BOTH
        for stream, path in (((STDOUT, log),) if one else ((STDOUT, log), (STDERR, errors))):
            if stream & shown:
                to = sys.stderr if stream == STDERR else sys.stdout
                self._tails.append(_Tail(path, to, local_rank, rank, "both" if one else to.name.strip("<>")))

    def ended(self, rank: int) -> None:
        """A rank's process has ended: what is in its logs is all that there will be."""
        for tail in list(self._tails):
            if tail.rank == rank:
                tail.whole = True

    def close(self, limit: float) -> None:
        """Print what is left; what a console does not take within ``limit`` seconds is not shown."""
        self._over.set()
        self._thread.join(limit)

    def _work(self) -> None:
        over = False
        while not over:
            over = self._over.wait(_EVERY)
            for tail in list(self._tails):
                whole = tail.whole  # before its last lines are read
                self._show(tail, over or whole)
                if whole:
                    self._tails.remove(tail)

    def _show(self, tail: _Tail, over: bool) -> None:
        for line in tail.lines(over):
            if self._console.as_json:
                told = as_object("info", "output", line, rank=tail.rank, stream=tail.stream)
            else:
                told = f"[{self._console.role}{tail.local_rank}]:{line}"
            try:
                (sys.stdout if self._console.as_json else tail.to).write(f"{told}\n")
            except (OSError, ValueError):
                continue  # nobody looks any more; the log has it
        try:
            tail.to.flush()
        except (OSError, ValueError):
            return


class _Tail:
    """What is new in one log."""

    def __init__(self, path: Path, to: IO[str], local_rank: int, rank: int, stream: str) -> None:
        self.to = to
        self.local_rank = local_rank
        self.rank = rank
        self.stream = stream
        self.whole = False
        """Whether nothing is added to it any more."""
        self._path = path
        self._done = path.stat().st_size if path.exists() else 0
        self._rest = b""

    def lines(self, over: bool) -> list[str]:
        """Whole lines that are new; with ``over`` the last one, too, if it is not."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._done)
                new = file.read()
        except OSError:  # it has not begun
            new = b""
        self._done += len(new)
        # Bars that move return the carriage, and may never end a line. After a return, the end of its line may be due.
        whole, self._rest = (self._rest + new).splitlines(keepends=True), b""
        if not over and whole and not whole[-1].endswith(b"\n"):
            self._rest = whole.pop()
        return [line.decode(errors="replace").rstrip("\r\n") for line in whole]
