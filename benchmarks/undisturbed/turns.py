"""Turns: jobs that are compared step by step, each of them stopped while another trains.

Whole jobs one after the other are minutes apart, and in minutes a machine that others share becomes faster or slower by
more than what is to be told. Here all jobs are started, and all but one stand still (SIGSTOP): they take turns of a few
steps, in an order that rotates, so that what else the machine does hits all of them. A step in which a job stood still
does not count.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from common import CHECKOUT, SCRIPT, JobFailed, check, job_command

from megatron_elastic.observe.records import read_metrics

_MARK = "MEGATRON_ELASTIC_BENCH_JOB"
"""In the environment of all processes of a job, whoever started them: the job's name."""
WARM = 2
"""First steps of a job, which also warm things up."""
_POLL = 0.01
"""Seconds between two looks at how far a job is."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Turn:
    """What a job did in one turn.

    Attributes:
        step_ms: of each step that counts.
        cpu_ms: of the processors a step, all processes of the job together.
    """

    step_ms: Sequence[float]
    cpu_ms: float


class TakingTurns:
    """A job that trains in its turns only.

    Args:
        run_dir: where its records go, and beside it what it prints.
        ranks: how many.
        flags: of ``SCRIPT``; it must train for longer than it is asked to.
        checkout: whose state of the project it runs.
        around: entered for each of its turns.
    """

    def __init__(
        self, run_dir: Path, ranks: int, flags: Sequence[str], checkout: Path = CHECKOUT,
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:  # fmt: skip
        self._run_dir, self._ranks, self._around = run_dir, ranks, around
        self._output = run_dir.with_suffix(".out")
        self._command = job_command(run_dir, ranks, flags, SCRIPT)
        self._mark = uuid.uuid4().hex
        with self._output.open("wb") as sink:
            self._process = subprocess.Popen(
                self._command, cwd=checkout, stdout=sink, stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": str(checkout), _MARK: self._mark})  # fmt: skip
        self._steps = 0
        """Its last step when it was stopped."""

    def warm_up(self) -> None:
        """Let it start and do its first steps; it is stopped then. Raises JobFailed if it ends."""
        self._await(WARM)
        self._stop()

    def take(self, steps: int) -> Turn:
        """Let it do so many steps that count. Raises JobFailed if it ends or has lost a rank."""
        with self._around():
            self._signal(signal.SIGCONT)
            first = self._steps + 1  # it was stopped in this one
            self._await(first)
            before = self._cpu_ms()
            self._await(first + steps)
            cpu = self._cpu_ms() - before
            self._stop()
        metrics = read_metrics(self._run_dir)
        counted = [metrics[step] for step in range(first + 1, first + steps + 1)]
        if any(line["world_size"] < self._ranks for line in counted):
            raise JobFailed(f"the job of {self._run_dir} has lost ranks: its steps cannot be compared")
        return Turn([line["step_ms"] for line in counted], cpu / steps)

    def end(self) -> None:
        """End it, as Ctrl-C does."""
        self._process.send_signal(signal.SIGINT)
        self._signal(signal.SIGCONT)
        self._process.wait()

    def _await(self, step: int) -> None:
        """Until a step is recorded."""
        while self._recorded() < step:
            if self._process.poll() is not None:
                check(self._process.returncode, self._command, self._output)
                raise JobFailed(f"the job of {self._run_dir} ended before step {step}")
            time.sleep(_POLL)

    def _recorded(self) -> int:
        with suppress(FileNotFoundError):
            return (self._run_dir / "metrics.jsonl").read_bytes().count(b"\n")
        return 0

    def _stop(self) -> None:
        self._signal(signal.SIGSTOP)
        self._steps = self._recorded()

    def _signal(self, number: int) -> None:
        for pid in self._pids():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _pids(self) -> Iterator[int]:
        """Its processes, the launcher first."""
        mark = f"{_MARK}={self._mark}".encode()
        for entry in sorted(Path("/proc").glob("[0-9]*"), key=lambda path: int(path.name)):
            with suppress(OSError):  # it ended while we looked, or is none of ours
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    yield int(entry.name)

    def _cpu_ms(self) -> float:
        """What its living processes have used so far."""
        ticks = 0
        for pid in self._pids():
            with suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
        return ticks * 1e3 / _TICKS_PER_S


@contextmanager
def started(jobs: Mapping[str, Callable[[], TakingTurns]]) -> Iterator[Mapping[str, TakingTurns]]:
    """Start jobs, one after the other; all stand still then, and are ended at the end."""
    with ExitStack() as stack:
        found = {}
        for name, start in jobs.items():
            found[name] = job = start()
            stack.callback(job.end)
            job.warm_up()
        yield found
