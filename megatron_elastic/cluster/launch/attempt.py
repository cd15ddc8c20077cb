"""Attempt: a run directory is one job's. What one has left there that ended before its first step is not in the way."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from megatron_elastic.cluster.wire import Credentials, WireError, connect
from megatron_elastic.cluster.wire.address import FILE, address_of_own, read_address
from megatron_elastic.config import UsageError
from megatron_elastic.observe.records import RecordsError, has_finished, read_events

_RECORDS = ("metrics.jsonl", "events.jsonl")
_OTHERS = ("layouts", "profile.json", "scale_table.json", "data.made", FILE)
_LOCK = "lock"
_ANSWERS = 1.0
"""Seconds within which a coordinator takes a connection, if there is one."""
_PAUSE = 0.2
"""Seconds between two looks."""


def claim(run_dir: Path) -> None:
    """Let no other process begin a job there until this one ends. Raises UsageError if another has done so.

    Where files cannot be locked it does nothing; nor does it see other hosts where locks are each host's own.
    """
    # It is this process's, and so is the open file: both until it ends.
    file = os.open(run_dir / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(file)
        if isinstance(error, BlockingIOError | PermissionError):  # POSIX lets a file system choose
            raise UsageError(f"another process has begun a job in {run_dir}, and is still there; choose another "
                             "--elastic-run-dir, or end that job") from None


def put_away(run_dir: Path) -> None:
    """Move the records of such a job into ``attempt-N`` there, if there are any. Logs stay, and are added to, as other
    nodes may have begun to write theirs.

    Raises UsageError if the records are those of a job that has done a step or finished, or is still there.
    """
    taken = next((run_dir / name for name in _RECORDS if (run_dir / name).exists()), None)
    if taken is not None and (not _is_empty(run_dir / _RECORDS[0]) or has_finished(run_dir)):
        raise UsageError(f"{taken} is there already; choose another --elastic-run-dir, or move that run away")
    if not _failed(run_dir) and _answers(run_dir):
        raise UsageError(f"{taken or run_dir / FILE} is there already, of a job that is about to train; choose another "
                         "--elastic-run-dir, or end that job")
    if taken is None:
        return
    folder = next(path for number in itertools.count(1) if not (path := run_dir / f"attempt-{number}").exists())
    try:
        folder.mkdir()
        for name in (*_OTHERS, *_RECORDS):  # last what says that there is something to be moved
            if (run_dir / name).exists():
                (run_dir / name).rename(folder / name)
    except OSError as error:
        raise UsageError(f"{taken} is there already, and cannot be moved to {folder}: {error.strerror}; choose another "
                         "--elastic-run-dir") from None


def led(run_dir: Path, credentials: Credentials, patience: float, note: Callable[[str], None]) -> bool:
    """Whether the job of this token trains there already, and another node coordinates it since the first was lost.
    Until one does ``patience`` seconds may pass.
    """
    until, waits = time.monotonic() + patience, False
    while not _is_empty(run_dir / _RECORDS[0]) and (address := address_of_own(run_dir, credentials.token)) is not None:
        with contextlib.suppress(OSError, WireError, UsageError):
            connect(address.host, address.port, credentials, _ANSWERS, _ANSWERS).close()
            note(f"the job in {run_dir} is coordinated at {address.host}:{address.port} by now: this node joins it")
            return True
        if not waits:
            waits = True
            note(f"a job has trained in {run_dir}: if another node takes over from the first, this one joins it "
                 f"(within {patience:g} s)")
        if time.monotonic() > until:
            break
        time.sleep(_PAUSE)
    return False


def _is_empty(path: Path) -> bool:
    return not path.exists() or not path.stat().st_size


def _failed(run_dir: Path) -> bool:
    """Whether the job has said that it ends."""
    try:
        return any(event.get("kind") == "failed" for event in read_events(run_dir)[-1:])
    except RecordsError:
        return False


def _answers(run_dir: Path) -> bool:
    """Whether somebody coordinates there."""
    try:
        address = read_address(run_dir)
        with socket.create_connection((address.host, address.port), _ANSWERS):
            return True
    except (OSError, ValueError):
        return False
