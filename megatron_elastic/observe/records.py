"""Records: the files of a run. ``RunRecords`` writes them, and the ``read_*`` functions read them.

A run directory holds ``metrics.jsonl`` (one line a committed step), ``events.jsonl`` (one line an event),
``layouts/EPOCH.json``, with ``--elastic-profile measured`` ``profile.json`` and, once training is done,
``digest.json``. JSON has no infinities and no NaN: such numbers are written as null, and the ``*_hex`` fields keep what
they were.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from megatron_elastic.layout import Layout

_NAMED = 4
"""Run directories that are named where somebody has named none, at most."""

METRICS = (
    "step", "loss", "loss_hex", "grad_norm", "grad_norm_hex", "lr", "consumed_samples",
    "step_ms", "epoch", "world_size", "tokens_per_s",
)  # fmt: skip
"""Fields of a metrics line, in order."""

EVENT = ("time", "kind", "epoch")
"""Fields that every event has, in order."""

RECOVERED = (
    "cause", "ranks", "step", "decision", "detect_ms", "interrupt_ms", "plan_ms", "edit_ms", "state_ms", "redo_ms",
    "mttr_ms",
)  # fmt: skip
"""Fields of a ``recovered`` event, in order, after time, kind and epoch; further ones may follow."""

_PACED = ("ranks", "times")
_OF_KIND = {
    kind: (*EVENT, *fields)
    for kind, fields in {
        "started": ("train_iters",), "recovered": RECOVERED, "fallback": ("lost_steps",),
        "hello": ("rank", "pid", "host"), "slow": _PACED, "well": _PACED,
        "copying": ("ranks", "done", "bytes", "units", "sources"),
        "progress": ("what", "busy", "done_bytes", "all_bytes", "seconds"),
    }.items()
}  # fmt: skip
"""Kind of an event -> what is read of it."""

_TYPES: Mapping[str, tuple[type, ...]] = {
    name: types
    for types, names in {
        (str,): ("kind", "loss_hex", "grad_norm_hex", "cause", "decision", "host", "what"),
        (int,): ("epoch", "step", "consumed_samples", "world_size", "train_iters", "rank", "pid", "busy"),
        (int, float): ("time", "step_ms", "tokens_per_s", "detect_ms", "interrupt_ms", "plan_ms", "edit_ms", "state_ms",
                       "redo_ms", "mttr_ms", "times", "done_bytes", "all_bytes", "seconds"),
        (type(None), int, float): ("loss", "grad_norm", "lr"),
        (list,): ("ranks", "lost_steps", "done", "bytes", "units", "sources"),
    }.items()
    for name in names
}  # fmt: skip
"""Field that is read -> what it may be."""
_CALLED = {str: "text", int: "a whole number", float: "a number", list: "a list"}

_SHOWN = 40
"""Characters of a damaged value that are told."""

_BLOCK = 4096
"""Bytes that are read at once from the end of a file; a line has some 300."""


class RecordsError(Exception):
    """Records are missing, cannot be read, or would be written against their format."""


class RunRecords:
    """Writes the records of a run; every line is in the file when the call returns. Not thread-safe."""

    def __init__(self, run_dir: Path) -> None:
        """Open the records in ``run_dir``, which is made if missing; existing files are appended to."""
        self._dir = Path(run_dir)
        (self._dir / "layouts").mkdir(parents=True, exist_ok=True)
        # Unbuffered and in append mode: a line is one write, and nothing is left behind in a process that dies.
        self._metrics = open_lines(self._dir / "metrics.jsonl")
        self._events = open_lines(self._dir / "events.jsonl")

    def metrics(self, record: Mapping[str, Any]) -> None:
        """Append the line of one committed step: exactly the fields ``METRICS``, else RecordsError."""
        if set(record) != set(METRICS):
            missing, unknown = sorted(set(METRICS) - set(record)), sorted(set(record) - set(METRICS))
            raise RecordsError(f"a metrics line lacks fields {missing} and has unknown fields {unknown}")
        append(self._metrics, _line({name: record[name] for name in METRICS}))

    def event(self, kind: str, epoch: int, at: float | None = None, **fields: Any) -> None:
        """Append one event, stamped with the time of day ``at`` (seconds; None: now). Raises RecordsError for an
        incomplete recovery.
        """
        if kind == "recovered":
            if missing := [name for name in RECOVERED if name not in fields]:
                raise RecordsError(f"a recovered event lacks fields {missing}")
            fields = {name: fields[name] for name in RECOVERED} | fields
        stamp = {"time": time.time() if at is None else at, "kind": kind, "epoch": epoch}
        append(self._events, _line({**stamp, **fields}))

    def layout(self, layout: Layout) -> None:
        """Write ``layouts/EPOCH.json``."""
        _replace(self._dir / "layouts" / f"{layout.epoch}.json", layout.to_json())

    def digest(self, digest: Mapping[str, Any]) -> None:
        """Write ``digest.json``, as ``digest.combine`` made it."""
        _replace(self._dir / "digest.json", json.dumps(digest, indent=2) + "\n")

    def profile(self, text: str) -> None:
        """Write ``profile.json``, what units were measured to cost, over an older one."""
        _replace(self._dir / "profile.json", text)

    def scale_table(self, text: str) -> None:
        """Write ``scale_table.json``, how fast the job would be with other numbers of devices, over an older one."""
        _replace(self._dir / "scale_table.json", text)

    def close(self) -> None:
        """Close the files."""
        self._metrics.close()
        self._events.close()


def read_metrics(run_dir: Path) -> dict[int, dict[str, Any]]:
    """Metrics lines by step, without half a line at the end, which is being written or was when the writer was killed.

    Raises RecordsError when the file is missing, damaged, or has a step twice.
    """
    path = run_dir / "metrics.jsonl"
    result: dict[int, dict[str, Any]] = {}
    for number, record in enumerate(_read_lines(path), start=1):
        step = record.get("step")
        if not isinstance(step, int):
            raise RecordsError(f"{path}:{number} has no step")
        if step in result:
            raise RecordsError(f"{path}:{number} records step {step} a second time; each step must be there once")
        result[step] = record
    return result


def newest_step(run_dir: Path) -> int:
    """Step of the last metrics line; -1 if there is none that can be read. Takes no longer however many there are."""
    path = run_dir / "metrics.jsonl"
    try:
        with path.open("rb") as file:
            line, _ = _last_line(file)
        step = _parse(line.decode(), str(path)).get("step")
    except (OSError, UnicodeDecodeError, RecordsError):
        return -1
    return step if isinstance(step, int) else -1


def is_run(run_dir: Path) -> bool:
    """Whether this is a run directory. Raises RecordsError where that cannot be seen."""
    try:
        return (run_dir / "metrics.jsonl").is_file()
    except OSError as error:
        raise RecordsError(f"cannot look into {run_dir}: {error.strerror}") from None


def has_finished(run_dir: Path) -> bool:
    """Whether the job there has: its digest is the last that is written."""
    return (run_dir / "digest.json").exists()


def check_run(run_dir: Path) -> None:
    """Raises RecordsError if this is no run directory, and names those that are in it."""
    if is_run(run_dir):
        return
    if not run_dir.is_dir():
        raise RecordsError(f"there is no directory {run_dir}")
    inside = [path.parent for depth in ("*", "*/*") for path in run_dir.glob(f"{depth}/metrics.jsonl")]
    if not inside and (run_dir / "logs").is_dir():
        raise RecordsError(f"{run_dir} has logs and no metrics.jsonl: records are on the node that coordinates, "
                           "which is node 0 unless that was lost; look there, or ask it as HOST:PORT")
    newest = sorted(inside, key=lambda path: (path / "metrics.jsonl").stat().st_mtime, reverse=True)
    raise RecordsError(
        f"{run_dir} has no metrics.jsonl: it is no run directory"
        + (f"; in it are {', '.join(map(str, newest[:_NAMED]))}" if newest else "")
    )


def recent_metrics(run_dir: Path, most: int = 1 << 21) -> list[dict[str, Any]]:
    """The last ``most`` bytes of metrics, by line, of a job that may be writing on. Raises RecordsError, OSError."""
    path = run_dir / "metrics.jsonl"
    with path.open("rb") as file:
        begin = max(0, file.seek(0, os.SEEK_END) - most)
        file.seek(begin)
        lines = file.read().split(b"\n")[:-1]  # half a line may be there
    return [_parse(line.decode(errors="replace"), str(path)) for line in lines[1 if begin else 0 :]]


def read_events(run_dir: Path) -> list[dict[str, Any]]:
    """Events in the order they were written, without half a line at the end. Raises RecordsError when the file is
    missing or damaged.
    """
    return _read_lines(run_dir / "events.jsonl")


def read_checked_events(run_dir: Path) -> list[dict[str, Any]]:
    """The same, if all that is read of them is there; raises RecordsError else, too."""
    events = read_events(run_dir)
    for number, event in enumerate(events, start=1):
        check_event(event, f"{run_dir / 'events.jsonl'}:{number}")
    return events


def check_step(record: Mapping[str, Any], where: str) -> None:
    """Raises RecordsError if this is no metrics line."""
    check_fields(record, METRICS, where)


def check_event(event: Mapping[str, Any], where: str) -> None:
    """Raises RecordsError if what is read of such an event is not there, or is of another type."""
    check_fields(event, _OF_KIND.get(str(event.get("kind")), EVENT), where)


def check_fields(record: Mapping[str, Any], fields: Sequence[str], where: str) -> None:
    """Raises RecordsError if some of the fields are not there, or are of another type."""
    if missing := [name for name in fields if name not in record]:
        raise RecordsError(f"{where} is damaged: it lacks {', '.join(missing)}")
    for name in fields:
        if not isinstance(record[name], _TYPES[name]):
            raise RecordsError(f"{where} is damaged: {name} is {json.dumps(record[name])[:_SHOWN]}, where "
                               f"{_CALLED[_TYPES[name][-1]]} belongs")


def read_digest(run_dir: Path) -> dict[str, Any]:
    """The final digest. Raises RecordsError when it is missing or damaged."""
    path = run_dir / "digest.json"
    found = _parse(_read(path), str(path))
    units = found.get("units", {})
    hashes = [found.get("sha256", ""), *(units.values() if isinstance(units, dict) else (None,))]
    if not all(isinstance(sha256, str) for sha256 in hashes):
        raise RecordsError(f"{path} is damaged: what is in place of a hash is no text")
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise RecordsError(f"cannot read {path}: {error}") from None


def _read_lines(path: Path) -> list[dict[str, Any]]:
    whole = _read(path).rpartition("\n")[0]
    return [_parse(line, f"{path}:{number}") for number, line in enumerate(whole.splitlines(), start=1)]


def _parse(text: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise RecordsError(f"{where} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise RecordsError(f"{where} is not a JSON object")
    return value


def _line(record: Mapping[str, Any]) -> bytes:
    finite = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in record.items()
    }
    return json.dumps(finite, allow_nan=False).encode() + b"\n"


def open_lines(path: Path) -> io.FileIO:
    """Open a file of lines to append to. Half a line at its end, of a writer that was killed, is taken out."""
    file = path.open("ab", buffering=0)
    with path.open("rb") as lines:
        _, end = _last_line(lines)
    if file.tell() > end:
        file.truncate(end)
    return file


def _last_line(file: BinaryIO) -> tuple[bytes, int]:
    """The last whole line, and where it ends; empty and 0 without one. Reads little of what is before it."""
    start, read = file.seek(0, os.SEEK_END), b""
    while start:
        size = min(_BLOCK, start)
        start -= size
        file.seek(start)
        read = file.read(size) + read
        if (end := read.rfind(b"\n") + 1) and ((begin := read.rfind(b"\n", 0, end - 1) + 1) or not start):
            return read[begin:end], start + end
    return b"", 0


def append(file: io.FileIO, lines: bytes) -> None:
    """Append lines, all of them or none. Raises OSError."""
    size = os.fstat(file.fileno()).st_size
    if file.write(lines) < len(lines):  # the disk is full, and has taken the beginning
        file.truncate(size)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file.name)


def _replace(path: Path, text: str) -> None:
    """Write the file whole or not at all: readers may look at any moment."""
    partial = path.with_name(path.name + ".part")
    partial.write_text(text)
    os.replace(partial, path)
