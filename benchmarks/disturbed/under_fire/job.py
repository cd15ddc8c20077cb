"""Job: one that faults happen to, on this machine or on hosts of its own."""

from __future__ import annotations

import contextlib
import os
import queue
import random
import re
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from common import SCRIPT, JobFailed, cli, newest_layout, pid_of
from launcher import Heard, Launcher
from namespaces import Host

from disturbed.under_fire.draw import BEARABLE, HANG, Fault, Round

STALL = 90.0
"""Seconds without a line after which a job hangs."""
_STEP = re.compile(r"step +(\d+)/")


class Job:
    """One job under fire.

    Args:
        round_: what happens to it.
        run_dir: where its records go.
        flags: of the same job without faults.
    """

    def __init__(self, round_: Round, run_dir: Path, flags: Sequence[str]) -> None:
        self.stalled = False
        self.done: Counter[tuple[str, str]] = Counter()
        """Faults from outside, by kind and moment."""
        self.launchers: list[Launcher] = []
        self.round, self.run_dir = round_, run_dir
        self.choose = random.Random(round_.seed + 1)
        inject = [text for spec in round_.injected for text in ("--elastic-inject", spec)]
        self._flags = ["--elastic-run-dir", str(run_dir), *flags, "--elastic-respawn",
                       "--elastic-hang-timeout", str(HANG), *inject]  # fmt: skip
        self._outside = [fault for fault in round_.faults if fault.spec(()) is None]
        self._heard: Heard = queue.Queue()
        self._timers: list[threading.Timer] = []

    def run(self) -> int:
        """To its end; returns the worst exit code of those that are to end well."""
        with self.run_dir.with_suffix(".out").open("w") as sink:
            try:
                self.begin()
                for launcher, line in self._lines():
                    sink.write(line if len(self.launchers) == 1 else f"{self.launchers.index(launcher)}: {line}")
                    self.hear(launcher, line)
            except BaseException:
                for launcher in self.launchers:
                    launcher.interrupt()
                raise
            finally:
                for timer in self._timers:
                    timer.cancel()
                for launcher in self.launchers:
                    launcher.end()
        codes: list[int] = [abs(launcher.process.returncode) for launcher in self.well()]
        return max(codes)

    def begin(self) -> None:
        """Start it."""
        self.launch(("--nproc-per-node", str(self.round.ranks)))

    def well(self) -> Sequence[Launcher]:
        """Who is to end well."""
        return self.launchers

    def launch(self, flags: Sequence[str], host: Host | None = None, **env: str) -> None:
        """One more launcher, with ``flags`` of ``megatron-elastic run``."""
        command = [*cli(), "run", *flags, SCRIPT, *self._flags]
        self.launchers.append(Launcher(command, self._heard, env, host))

    def hear(self, launcher: Launcher, line: str) -> None:
        """A launcher has printed a line, or has ended (an empty one). What is due after a step happens."""
        if match := _STEP.match(line):
            for fault in [fault for fault in self._outside if fault.step <= int(match[1])]:
                if self.may_happen(fault):
                    self._outside.remove(fault)
                    self.happen(fault)
                    break  # what is left after this one is known after the next step

    def may_happen(self, fault: Fault) -> bool:
        """Whether it can be survived now."""
        if fault.kind not in ("kill outside", "stop outside"):
            return True
        missing = self.round.ranks - len(newest_layout(self.run_dir).ranks)
        return missing < BEARABLE * self.round.layout[0]

    def happen(self, fault: Fault) -> None:
        """Do something from outside, at any moment of the step or two that follow."""
        if fault.kind == "scale":
            _, pp, dp = self.round.layout
            stages = [n for n in (1, 2, 4) if n <= 2 * pp and n <= pp * dp // 2]
            self.ask(fault, "scale", str(self.run_dir), "--pp", str(stages[int(fault.number * len(stages))]))
        else:
            self.later(0.3 * self.choose.random(), self._strike, fault)

    def ask(self, fault: Fault, *command: str, host: Host | None = None) -> bool:
        """Give the job a command; it may refuse. Returns whether it does it."""
        words = [*cli(), *command]
        answer = subprocess.run(words if host is None else host.command(words), capture_output=True, check=False)
        self.done[fault.kind, "any moment" if answer.returncode == 0 else "refused"] += 1
        return answer.returncode == 0

    def later(self, seconds: float, do: Callable[..., object], *arguments: object) -> None:
        """Do something after so long, if the job still runs."""
        timer = threading.Timer(seconds, do, arguments)
        self._timers.append(timer)
        timer.start()

    def _lines(self) -> Iterator[tuple[Launcher, str]]:
        """What launchers print, as long as they do and one of them is there."""
        ended = 0
        while ended < len(self.launchers):
            try:
                launcher, line = self._heard.get(timeout=STALL)
            except queue.Empty:
                self.stalled = True
                return
            ended += not line
            yield launcher, line

    def _strike(self, fault: Fault) -> None:
        ranks = newest_layout(self.run_dir).ranks
        with contextlib.suppress(JobFailed, ProcessLookupError):  # it has ended meanwhile
            pid = pid_of(self.run_dir, ranks[int(fault.number * len(ranks))])
            os.kill(pid, signal.SIGKILL if fault.kind == "kill outside" else signal.SIGSTOP)
            self.done[fault.kind, "any moment"] += 1
            if fault.kind == "stop outside":
                self.later(2.5 * self.choose.random(), _go_on, pid)


def _go_on(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
