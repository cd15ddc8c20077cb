"""Trace: the jobs of a cluster, from files as ElasticFlow, Helios, Acme, Philly and Alibaba publish them.

Columns are found by their names, whatever their order and whatever else there is.
"""

from __future__ import annotations

import gzip
import json
import random
import re
import tarfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from math import ceil, isfinite
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from megatron_elastic.fleet.job import Job
from megatron_elastic.fleet.simulated.models import SMALL, model_of
from megatron_elastic.plan import tabular
from megatron_elastic.usage import is_number

Row = Mapping[str, str]
_TIGHTNESS = (0.5, 1.5)
"""A deadline is drawn so many durations after the submission, evenly, where the trace has none: ElasticFlow's way."""
_PAI_TASKS = (
    "job_name", "task_name", "inst_num", "status", "start_time", "end_time",
    "plan_cpu", "plan_mem", "plan_gpu", "gpu_type",
)  # fmt: skip
"""Alibaba's file of 2020 comes without its header."""


class TraceError(Exception):
    """A trace cannot be read: where, why, and what is needed."""


class Entry(NamedTuple):
    """A job of a trace. Times are in seconds."""

    name: str
    submitted: float
    duration: float
    devices: int
    deadline: float | None = None


@dataclass(slots=True)
class Trace:
    """One cluster's jobs by submission, how many lines were left out, by reason, and columns that say nothing here."""

    name: str
    entries: list[Entry]
    left_out: Counter[str] = field(default_factory=Counter)
    unknown: tuple[str, ...] = ()

    def jobs(self, elastic_from: int, seed: int) -> list[Job]:
        """As the simulation takes them: times from the first submission on; large ones elastic.

        ``elastic_from``: devices from which on a job is elastic; it is taken for the largest model of FlexTrain's table
        that is submitted with at most as many (the small one if there is none).
        """
        draw = random.Random(seed)
        begin = min((entry.submitted for entry in self.entries), default=0.0)
        jobs = []
        for index, entry in enumerate(self.entries):
            tightness = draw.uniform(*_TIGHTNESS)
            deadline = entry.submitted + tightness * entry.duration if entry.deadline is None else entry.deadline
            model = (model_of(entry.devices) or SMALL) if entry.devices >= elastic_from else None
            jobs.append(
                Job(index, entry.name, entry.submitted - begin, entry.duration, entry.devices, deadline - begin, model)
            )
        return jobs


class _LeftOut(Exception):
    """A line is no job that ran on devices."""


@dataclass(frozen=True, slots=True)
class _Format:
    """``read`` makes entries of rows; every row has ``columns``, in lower case, and may have ``optional`` ones."""

    name: str
    columns: tuple[str, ...]
    read: Callable[[Row], Entry]
    optional: tuple[str, ...] = ()


def read(path: Path) -> list[Trace]:
    """The traces in a file: one of a .csv or .json (also .gz), or of each of those in a .tar, .tar.gz or .tgz.

    Raises TraceError if something is no trace, OSError if there is no such file.
    """
    if path.name.lower().endswith((".tar", ".tar.gz", ".tgz")):
        members = sorted(_members(path))
        if not members:
            raise TraceError(f"{path}: there is no .csv or .json in it")
        alike = Counter(_stem(member.name) for member, _ in members)
        return [
            _trace(f"{path}:{member}", _stem(member.name if alike[_stem(member.name)] == 1 else str(member)), data)
            for member, data in members
        ]
    return [_trace(str(path), _stem(path.name), path.read_bytes())]


def _stem(name: str) -> str:
    """A file's name without what says of which kind it is: what people call the cluster."""
    return re.sub(r"(\.csv|\.json)?(\.gz)?$", "", name, flags=re.IGNORECASE)


def _members(path: Path) -> Iterator[tuple[PurePath, bytes]]:
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                name = PurePath(member.name)
                if member.isfile() and name.suffix.lower() in (".csv", ".json") and not name.name.startswith("."):
                    file = archive.extractfile(member)
                    assert file is not None
                    yield name, file.read()
    except (tarfile.TarError, EOFError, gzip.BadGzipFile) as error:
        raise TraceError(f"{path}: it cannot be unpacked ({error})") from None


def _trace(name: str, cluster: str, data: bytes) -> Trace:
    """``name``: of the file, where something is wrong in it."""
    trace = Trace(cluster, [])
    try:
        text = tabular.text(data, packed=name.lower().endswith(".gz"))
        rows = _philly(name, text, trace) if text.lstrip()[:1] in ("[", "{") else _csv(name, text, trace)
    except ValueError as error:
        raise TraceError(f"{name}: {error}") from None
    trace.entries = sorted(rows, key=lambda entry: (entry.submitted, entry.name))
    if not trace.entries:
        left_out = ", ".join(f"{count} {reason}" for reason, count in trace.left_out.items()) or "it has no lines"
        raise TraceError(f"{name}: there is no job in it that ran on devices ({left_out})")
    return trace


def _csv(name: str, text: str, trace: Trace) -> Iterable[Entry]:
    lines = tabular.rows(text)
    header = [column.strip().lower() for column in next(lines, (0, []))[1]]
    if len(header) == len(_PAI_TASKS) and is_number(header[2]):
        lines, header = tabular.rows(text), list(_PAI_TASKS)
    found = next((form for form in _FORMATS if set(form.columns) <= set(header)), None)
    if found is None:
        closest = max(_FORMATS, key=lambda form: len(set(form.columns) & set(header)))
        missing = ", ".join(column for column in closest.columns if column not in header)
        raise TraceError(
            f"{name}: its columns ({', '.join(header) or 'none'}) are those of no trace that is known. Closest is "
            f"{closest.name}, which needs {', '.join(closest.columns)}: {missing} is missing. Others: "
            + "; ".join(f"{form.name}: {', '.join(form.columns)}" for form in _FORMATS if form is not closest)
            + "; Philly: its cluster_job_log (JSON)"
        )
    trace.unknown = tuple(name for name in header if name and name not in (*found.columns, *found.optional))
    entries = []
    for number, cells in lines:
        if not cells:
            continue
        row = dict(zip(header, (cell.strip() for cell in cells), strict=False))
        try:
            entries.append(_checked(found.read(row)))
        except _LeftOut as reason:
            trace.left_out[str(reason)] += 1
        except (ValueError, KeyError) as error:
            raise TraceError(f"{name}, line {number}: {error} ({found.name})") from None
    return _by_job(entries) if found.name == "Alibaba 2020" else entries


def _checked(entry: Entry) -> Entry:
    if entry.devices < 1:
        raise _LeftOut("without devices")
    if not (isfinite(entry.submitted) and isfinite(entry.duration)):
        raise ValueError("a time is not finite")
    if entry.duration <= 0:
        raise _LeftOut("without duration")
    return entry


def _number(row: Row, column: str) -> float:
    if row.get(column, "") == "":
        raise ValueError(f"{column} is empty")
    try:
        return float(row[column])
    except ValueError:
        raise ValueError(f"{column} is {row[column]!r}, which is no number") from None


def _devices(row: Row, column: str) -> int:
    """Parts of a device count as a whole one."""
    number = _number(row, column)
    if not isfinite(number):
        raise ValueError(f"{column} is {row[column]!r}, which is no number of devices")
    return ceil(number)


def _moment(row: Row, column: str) -> float:
    """Seconds, from a number of them or from a date and time; without a zone that is UTC."""
    text = row.get(column, "")
    if text in ("", "None", "null"):
        raise _LeftOut(f"without {column}")
    if is_number(text):
        return float(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{column} is {text!r}, which is neither seconds nor a date and time") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _elasticflow(row: Row) -> Entry:
    deadline = _number(row, "deadline") if row.get("deadline") else None
    devices = _devices(row, "num_gpu")
    return Entry(row["job_id"], _moment(row, "submission_time"), _number(row, "duration"), devices, deadline)


def _helios(row: Row) -> Entry:
    if not row["duration"]:
        raise _LeftOut("without duration")
    return Entry(row["job_id"], _moment(row, "submit_time"), _number(row, "duration"), _devices(row, "gpu_num"))


def _alibaba_2020(row: Row) -> Entry:
    """A task of a job: so many instances, each with ``plan_gpu`` hundredths of a device; submitted when it starts."""
    if not row["plan_gpu"]:
        raise _LeftOut("without devices")
    begin = _moment(row, "start_time")
    hundredths = _devices(row, "inst_num") * _devices(row, "plan_gpu")
    return Entry(row["job_name"], begin, _moment(row, "end_time") - begin, hundredths)


def _by_job(tasks: Sequence[Entry]) -> Iterator[Entry]:
    """Tasks of a job run together, from the first start to the last end, on the devices of all (here in hundredths)."""
    jobs: dict[str, list[Entry]] = {}
    for task in tasks:
        jobs.setdefault(task.name, []).append(task)
    for name, parts in jobs.items():
        begin = min(task.submitted for task in parts)
        end = max(task.submitted + task.duration for task in parts)
        yield Entry(name, begin, end - begin, ceil(sum(task.devices for task in parts) / 100))


def _alibaba_2023(row: Row) -> Entry:
    begin = _moment(row, "scheduled_time")
    duration = _moment(row, "deletion_time") - begin
    return Entry(row["name"], _moment(row, "creation_time"), duration, _devices(row, "num_gpu"))


_FORMATS = (
    _Format("ElasticFlow", ("job_id", "submission_time", "duration", "num_gpu"), _elasticflow, ("deadline",)),
    _Format("Helios", ("job_id", "submit_time", "duration", "gpu_num"), _helios),
    _Format("Alibaba 2020", ("job_name", "inst_num", "plan_gpu", "start_time", "end_time"), _alibaba_2020),
    _Format("Alibaba 2023", ("name", "num_gpu", "creation_time", "scheduled_time", "deletion_time"), _alibaba_2023),
)


def _philly(name: str, text: str, trace: Trace) -> Iterable[Entry]:
    """``cluster_job_log``: a job runs for as long as its attempts together, on the devices of the last that has any."""
    try:
        log = json.loads(text)
    except json.JSONDecodeError as error:
        raise TraceError(f"{name}: it is no JSON ({error})") from None
    if not isinstance(log, list):
        raise TraceError(f"{name}: it is no list of jobs, as Philly's cluster_job_log is")
    entries = []
    for number, job in enumerate(log):
        try:
            entries.append(_checked(_philly_job(job)))
        except _LeftOut as reason:
            trace.left_out[str(reason)] += 1
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise TraceError(
                f"{name}, job {number}: {type(error).__name__} {error}; Philly's jobs have jobid, submitted_time and "
                "attempts, which have start_time, end_time and detail with gpus"
            ) from None
    return entries


def _philly_job(job: Mapping[str, Any]) -> Entry:
    duration, devices = 0.0, 0
    for attempt in job["attempts"]:
        times = {key: str(attempt[key] or "") for key in ("start_time", "end_time")}
        count = sum(len(server["gpus"]) for server in attempt["detail"])
        try:
            duration += _moment(times, "end_time") - _moment(times, "start_time")
        except _LeftOut:
            continue
        devices = count or devices
    submitted = _moment({"submitted_time": str(job["submitted_time"] or "")}, "submitted_time")
    return Entry(str(job["jobid"]), submitted, duration, devices)
