"""Perfetto: the traces of all ranks as one file in the Trace Event Format, which ui.perfetto.dev opens.

Every rank is a process. Its first track has the steps, in them the phases (operations, exchanges, the parts of a
recovery), and in those the waits, which name who was waited for; tracks below have what went on beside. An arrow goes
from where a message was sent to the wait that it ended. The process ``job`` has recoveries, with the parts that the
records give, and the other events. Times are microseconds since the trace begins.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_elastic.observe.place import epochs
from megatron_elastic.observe.records import RecordsError, read_checked_events
from megatron_elastic.observe.run import read_layout
from megatron_elastic.observe.telling import tell
from megatron_elastic.observe.tracing.entries import MAIN, Wait
from megatron_elastic.observe.tracing.reading import RankTrace, Traces, answer

PARTS = ("detect_ms", "interrupt_ms", "plan_ms", "edit_ms", "state_ms", "redo_ms")
_JOB, _RECOVERIES, _EVENTS = 0, 1, 2
"""The process of the job, and its tracks."""
_STEPS = 1
"""A rank's first track."""
_OTHERS = {-1: "the coordinator", -2: "the disk"}

Event = dict[str, Any]


def write(run_dirs: Sequence[Path], path: Path) -> int:
    """Merge the traces of a job into ``path``, compressed if it ends with ``.gz``; returns how many events it has.

    ``run_dirs``: the job's run directory, or those of its nodes where each has its own; the first has the records.
    Raises RecordsError, OSError.
    """
    events = list(merged(Traces.read(run_dirs), _records(run_dirs[0]), _units(run_dirs[0])))
    text = json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, separators=(",", ":"))
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode(), mtime=0))
    else:
        path.write_text(text)
    return len(events)


def merged(traces: Traces, records: Sequence[Mapping[str, Any]], units: Sequence[str]) -> Iterator[Event]:
    """The events of the file. ``units``: their names, as far as they are known."""
    begin = min(piece.begun for trace in traces.ranks.values() for piece in trace.pieces())
    end = max(piece.ended for trace in traces.ranks.values() for piece in trace.pieces())
    yield from _names(traces)
    for trace in traces.ranks.values():
        yield from _steps(trace, begin)
        yield from _phases(trace, begin)
        yield from _beside(trace, begin, units)
    yield from _arrows(traces, begin)
    yield from _recoveries(traces, records, begin, end)


def _names(traces: Traces) -> Iterator[Event]:
    named = {_JOB: "job", **{_pid(rank): f"rank {rank} on {t.origin.host}" for rank, t in traces.ranks.items()}}
    tracks = {(_JOB, _RECOVERIES): "recoveries", (_JOB, _EVENTS): "events"}
    tracks.update({(_pid(rank), _STEPS): "steps" for rank in traces.ranks})
    for pid, name in named.items():
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
    for (pid, tid), name in tracks.items():
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}


def _steps(trace: RankTrace, begin: int) -> Iterator[Event]:
    for section in trace.sections():
        args = {"step": section.step, "from_commit_to_commit": section.whole}
        yield _slice(_pid(trace.rank), f"step {section.step}", "step", section.begun, section.ended, begin, args)


def _phases(trace: RankTrace, begin: int) -> Iterator[Event]:
    pid = _pid(trace.rank)
    for piece in trace.pieces():
        phase = piece.phase
        args: dict[str, Any] = {"step": phase.step}
        if phase.stage is not None:
            args |= {"stage": phase.stage, "chunk": phase.chunk}
        if phase.grain is not None:
            args["grain"] = phase.grain
        name = phase.name if phase.grain is None else f"{phase.name} {phase.grain}"
        yield _slice(pid, name, "phase", piece.begun, piece.ended, begin, args)
    for wait in trace.waits:
        if wait.lane == MAIN and wait.ended > wait.begun:
            yield _slice(pid, f"wait for {_whom(wait)}", "wait", wait.begun, wait.ended, begin, _awaited(trace, wait))


def _beside(trace: RankTrace, begin: int, units: Sequence[str]) -> Iterator[Event]:
    """What has a lane of its own: several at a time, so that they are no slices of one track."""
    awaited: dict[int, list[str]] = defaultdict(list)
    for wait in trace.waits:
        awaited[wait.lane] += (trace.text(tag) for tag in wait.tags)
    for lane, begun in trace.begun.items():
        ended = trace.ended.get(lane)
        if ended is None:
            continue  # it was given up
        unit = begun.unit
        name = begun.name if unit is None else f"{begun.name} {units[unit] if unit < len(units) else f'unit {unit}'}"
        common = {"name": name, "cat": "beside", "pid": _pid(trace.rank), "tid": _STEPS,
                  "id2": {"local": f"{trace.rank}.{lane}"}}  # fmt: skip
        yield {"ph": "b", "ts": _us(begun.at, begin), "args": {"messages": awaited[lane]}, **common}
        yield {"ph": "e", "ts": _us(ended, begin), **common}


def _arrows(traces: Traces, begin: int) -> Iterator[Event]:
    senders, number = traces.senders(), 0
    for trace in traces.ranks.values():
        for wait in trace.waits:
            if wait.lane != MAIN or wait.ended == wait.begun:
                continue
            for tag in wait.tags:
                found = answer(senders, trace.rank, tag, wait.ended)
                if found is None or found[1].at < begin:
                    continue
                number += 1
                arrow = {"name": trace.channel(tag), "cat": "message", "id": number, "tid": _STEPS}
                yield {"ph": "s", "pid": _pid(found[0]), "ts": _us(found[1].at, begin), **arrow}
                yield {"ph": "f", "bp": "e", "pid": _pid(trace.rank), "ts": _us(wait.ended, begin), **arrow}


def _recoveries(traces: Traces, records: Sequence[Mapping[str, Any]], begin: int, end: int) -> Iterator[Event]:
    """Recoveries and events that fall into the trace. A recovery ends with the commit of its step."""
    commits: dict[int, int] = {}
    for rank in sorted(traces.ranks, reverse=True):  # the lowest rank's counts
        commits.update({commit.step: commit.at for commit in traces.ranks[rank].commits})
    for record in records:
        at = round(record["time"] * 1e9)
        if record["kind"] == "recovered" and record["step"] in commits:
            until = commits[record["step"]]
            cursor = until - round(record["mttr_ms"] * 1e6)
            yield _slice(_JOB, f"recovered: {record['cause']}", "recovered", cursor, until, begin, dict(record))
            for part in PARTS:
                following = cursor + round(record[part] * 1e6)
                yield _slice(_JOB, part.removesuffix("_ms"), "part", cursor, min(following, until), begin, {})
                cursor = following
        elif begin <= at <= end:
            yield {"ph": "i", "s": "t", "name": record["kind"], "cat": "event", "pid": _JOB, "tid": _EVENTS,
                   "ts": _us(at, begin), "args": {"what": tell(record), **record}}  # fmt: skip


def _slice(pid: int, name: str, what: str, begun: int, ended: int, begin: int, args: Mapping[str, Any]) -> Event:
    duration = (ended - begun) / 1e3
    return {"ph": "X", "name": name, "cat": what, "pid": pid, "tid": _STEPS, "ts": _us(begun, begin), "dur": duration,
            "args": args}  # fmt: skip


def _whom(wait: Wait) -> str:
    ranks = [str(rank) for rank in wait.whom if rank >= 0]
    told = [_OTHERS[each] for each in wait.whom if each in _OTHERS]
    if ranks:
        told.append(f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}")
    return " and ".join(told) or "nobody"


def _awaited(trace: RankTrace, wait: Wait) -> dict[str, Any]:
    return {"whom": wait.whom, "messages": [trace.text(tag) for tag in wait.tags], "tasks": wait.lanes}


def _pid(rank: int) -> int:
    return rank + 1


def _us(at: int, begin: int) -> float:
    return (at - begin) / 1e3


def _records(run_dir: Path) -> list[dict[str, Any]]:
    return read_checked_events(run_dir) if (run_dir / "events.jsonl").is_file() else []


def _units(run_dir: Path) -> Sequence[str]:
    known = epochs(run_dir)
    try:
        return read_layout(run_dir, known[-1]).units if known else ()
    except RecordsError:
        return ()
