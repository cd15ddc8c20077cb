"""Tally: what has come of all jobs: whether each is what it would have been, and what its faults have cost."""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from disturbed.under_fire.draw import Round
from disturbed.under_fire.job import STALL, Job
from megatron_elastic.observe.compare import compare
from megatron_elastic.observe.records import read_events, read_metrics


@dataclass(slots=True)
class Tally:
    """What has come of all jobs so far."""

    jobs: int = 0
    by_kind: dict[str, Counter[str]] = field(default_factory=partial(defaultdict, Counter))
    recovery_ms: dict[str, list[float]] = field(default_factory=partial(defaultdict, list))
    detect_ms: dict[str, list[float]] = field(default_factory=partial(defaultdict, list))
    decisions: Counter[str] = field(default_factory=Counter)
    lost_samples: int = 0
    repeated_samples: int = 0
    differing_steps: int = 0
    hangs: int = 0
    false_alarms: int = 0
    processes_left: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def faults(self) -> int:
        """How many have happened."""
        return sum(sum(each.values()) for each in self.by_kind.values())

    def add(self, round_: Round, job: Job, run_dir: Path, reference: Path, code: int) -> str | None:
        """Count what happened in a job. Returns what is wrong with it."""
        self.jobs += 1
        events = list(read_events(run_dir))
        for (kind, when), count in job.done.items():
            self.by_kind[kind][when] += count
        hanging = set()
        for event in events:
            match event["kind"]:
                case "injected":
                    fault = round_.injected[event["spec"]]
                    self.by_kind[fault.kind][fault.at] += 1
                    hanging |= {event["rank"]} if fault.kind in ("hang", "pause") else set()
                case "recovered":
                    self.recovery_ms[_cause(event)].append(event["mttr_ms"])
                    self.detect_ms[_cause(event)].append(event["detect_ms"])
                    self.decisions[event["decision"]] += 1
                case "suspected":
                    hanging.add(event["rank"])
        self.false_alarms += sum(event["kind"] == "hang" and event["rank"] not in hanging for event in events)
        self.hangs += job.stalled
        left = left_behind(run_dir)
        self.processes_left += left
        if job.stalled:
            return f"it hung: no line for {STALL:g} s"
        if code:
            return f"it ended with exit code {code}"
        if left:
            return f"{left} processes are left"
        return self._compare(round_.batch, read_metrics(reference), run_dir, reference)

    def _compare(
        self, batch: int, expected: Mapping[int, Mapping[str, Any]], run_dir: Path, reference: Path
    ) -> str | None:
        lines = read_metrics(run_dir)
        samples = [line["consumed_samples"] for _, line in sorted(lines.items())]
        self.lost_samples += batch * len(expected.keys() - lines.keys())
        self.repeated_samples += batch * (len(samples) - len(set(samples)))
        exact = ("loss_hex", "grad_norm_hex", "consumed_samples")
        common = lines.keys() & expected.keys()
        self.differing_steps += sum(any(lines[step][name] != expected[step][name] for name in exact) for step in common)
        difference = compare(reference, run_dir)
        return None if difference is None else str(difference)


def _cause(event: Mapping[str, Any]) -> str:
    return re.sub(r"\d+", "N", str(event["cause"]))


def left_behind(run_dir: Path) -> int:
    """Processes that still write logs of a job that is over."""
    logs, found = str(run_dir.resolve() / "logs"), 0
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            found += entry.name.isdecimal() and os.readlink(entry / "fd" / "1").startswith(logs)
    return found
