"""Replayed: one emulated job whose ranks come and go as a trace says.

It begins with all ranks on one node, whose launcher stays and coordinates. A slot that goes is a rank that is killed;
one that comes is a node of one rank, whose launcher is killed when it goes again.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import CHECKOUT, JobFailed, cli, free_port, pid_of, progress

from emulated.availability import Change
from emulated.job import SCRIPT, Variant, drawn, flags_of_job, flags_under, reason_of
from megatron_elastic.cluster.wire.token import TOKEN_VARIABLE, make_token
from megatron_elastic.emulation.profile import Profile
from megatron_elastic.observe.goodput import goodput
from megatron_elastic.observe.records import read_events, read_metrics

FIRST = 4
"""Step after which time counts. The first also warms things up; those between give the undisturbed rate."""
_FIRST_LIMIT = 300.0
"""Seconds until then at most."""
_STEPS = 1_000_000
"""More than will be done."""


class Job:
    """A job with ``slots`` ranks at the beginning."""

    def __init__(self, run_dir: Path, slots: int, flags: Sequence[str]) -> None:
        self.run_dir = run_dir
        self._flags = [*flags, "--elastic-run-dir", str(run_dir)]
        self._env = {**os.environ, "PYTHONPATH": str(CHECKOUT), TOKEN_VARIABLE: make_token()}
        self._port = free_port()
        self._nodes: dict[int, subprocess.Popen[bytes]] = {}
        self._started = 0
        self._ranks = set(range(slots))
        """Slots whose first rank has not been killed."""
        self._first = self._start(slots)

    @property
    def ended(self) -> bool:
        """Whether the launcher of the first node has ended."""
        return self._first.poll() is not None

    def wait(self, seconds: float) -> None:
        """Until then, or until the job has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._first.wait(max(0.0, seconds))

    def change(self, change: Change) -> None:
        """Let a slot come or go."""
        if change.comes:
            self._nodes[change.slot] = self._start(1)
        elif change.slot in self._ranks:
            self._ranks.remove(change.slot)
            os.kill(pid_of(self.run_dir, change.slot), signal.SIGKILL)
        else:
            node = self._nodes.pop(change.slot)
            node.kill()
            node.wait()

    def end(self) -> None:
        """End all that is left of it."""
        for process in (self._first, *self._nodes.values()):
            process.send_signal(signal.SIGINT)
        for process in (self._first, *self._nodes.values()):
            process.wait()

    def _start(self, ranks: int) -> subprocess.Popen[bytes]:
        command = [*cli(), "run", "--nproc-per-node", str(ranks), "--node-rank", str(self._started), "--master-addr",
                   "127.0.0.1", "--master-port", str(self._port), SCRIPT, *self._flags]  # fmt: skip
        with self.run_dir.with_suffix(f".{self._started}.out").open("wb") as sink:
            self._started += 1
            return subprocess.Popen(command, cwd=CHECKOUT, stdout=sink, stderr=subprocess.STDOUT, env=self._env)


def replay(
    run_dir: Path, options: argparse.Namespace, profile: Path, variant: Variant, happens: Sequence[Change]
) -> dict[str, Any]:
    """Run a job for ``options.minutes`` while ``happens``, and tell what it has done. Raises JobFailed."""
    slots, seconds = options.layout.ranks, 60 * options.minutes
    flags = [*flags_of_job(options, _STEPS), *flags_under(variant, profile), "--elastic-slow", "off",
             "--elastic-slices", str(slots)]  # fmt: skip
    job = Job(run_dir, slots, flags)
    try:
        begun = _trains(job)
        for change in happens:
            job.wait(begun + change.at - time.monotonic())
            if job.ended:
                break
            job.change(change)
            progress(f"{variant.name}: {change.at:.0f} s, slot {change.slot} {'comes' if change.comes else 'goes'}")
        job.wait(begun + seconds - time.monotonic())
        ended = job.ended
    finally:
        job.end()
    return figures(run_dir, Profile.read(profile), seconds) | {"ended": _reason(run_dir) if ended else None}


def _reason(run_dir: Path) -> str:
    """Why a job has ended before its time."""
    reasons = [event["reason"] for event in read_events(run_dir) if event["kind"] == "failed"]
    return reason_of(reasons[-1]) if reasons else f"see {run_dir.with_suffix('.0.out')}"


def _trains(job: Job) -> float:
    """When (``time.monotonic()``) the job has done its first steps."""
    limit = time.monotonic() + _FIRST_LIMIT
    while FIRST not in _done(job.run_dir):
        if job.ended or time.monotonic() > limit:
            raise JobFailed(f"the job of {job.run_dir} does not train; see {job.run_dir.with_suffix('.0.out')}")
        job.wait(0.2)
    return time.monotonic()


def _done(run_dir: Path) -> dict[int, dict[str, Any]]:
    return read_metrics(run_dir) if (run_dir / "metrics.jsonl").exists() else {}


def figures(run_dir: Path, profile: Profile, seconds: float) -> dict[str, Any]:
    """Tokens by time from step FIRST on, in s and tokens, the undisturbed rate before it, and where time was lost, by
    cause, in s of the trace.
    """
    metrics, ended, size = read_metrics(run_dir), drawn(run_dir).ended, profile.emulation
    each = size.tokens / size.samples
    begun, before = ended[FIRST], metrics[FIRST]["consumed_samples"]
    done = [(round(ended[step] - begun, 3), round((line["consumed_samples"] - before) * each))
            for step, line in sorted(metrics.items()) if step >= FIRST and ended[step] - begun <= seconds]  # fmt: skip
    undisturbed = (before - metrics[1]["consumed_samples"]) * each / (begun - ended[1])
    events = read_events(run_dir)
    lost = goodput([line for _, line in sorted(metrics.items())], events).lost
    return {
        "tokens": done[-1][1],
        "undisturbed_tokens_per_s": round(undisturbed, 1),
        "recoveries": sum(event["kind"] == "recovered" for event in events),
        "fallbacks": sum(event["kind"] == "fallback" for event in events),
        "lost_s": {part.removesuffix("_ms"): round(ms / 1e3 / size.time_scale, 1) for part, ms in lost.items()},
        "done": done,
    }
