"""Does a job stay as it was, whatever goes wrong? ``megatron-elastic chaos``.

Job after job with a tiny GPT and ``--elastic-respawn``, each with random faults of all kinds, drawn from the seed: at
hook points of the step and of recoveries (``--elastic-inject``) and from outside at any moment, some of them at once.
Each job is compared bit for bit with one that nothing disturbed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import shlex
import signal
import subprocess
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from common import (
    CHECKOUT,
    SCRIPT,
    JobFailed,
    cli,
    emit,
    pid_of,
    prepare_data,
    progress,
    run,
    run_job,
    run_root,
    summary,
)
from endurance import newest_layout

from megatron_elastic.faults.injection import Injection
from megatron_elastic.observe.compare import compare
from megatron_elastic.observe.records import read_events, read_metrics

IN_STEP = ("data", "forward", "backward", "grad_sync", "replay", "vote", "apply", "param_sync", "commit")
IN_RECOVERY = ("interrupt", "report", "edit", "promote", "replicate", "resume")
KINDS = {
    "kill": 6, "raise": 2, "hang": 1, "pause": 2, "slow": 1, "disconnect": 1, "disk": 1, "flip": 2,
    "kill outside": 4, "stop outside": 2, "scale": 1,
}  # fmt: skip
"""How often each kind is drawn. ``pause``: a hang that ends in time."""
DEADLY = frozenset({"kill", "raise", "hang", "kill outside"})
VARIANTS: dict[str, list[str]] = {
    "fp32": [],
    "bf16": ["--bf16"],
    "recompute": ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"],
    "virtual": ["--num-layers-per-virtual-pipeline-stage", "1"],
    "verify": ["--elastic-verify-every", "1"],
}
BATCH, LAYERS = 8, 4
HANG = 2.0
"""``--elastic-hang-timeout``, in seconds: less than a user's, as steps take so little here."""
STALL = 90.0
"""Seconds without a line after which a job hangs."""
_FIRST, _LAST, _SAVE_EVERY = 14, 25, 6
"""Steps without faults at the beginning, when there is no checkpoint yet, and at the end; and between checkpoints."""
_STEP = re.compile(r"step +(\d+)/")


@dataclass(frozen=True, slots=True)
class Fault:
    """``kind`` happens in ``step``: on ``rank`` at hook point ``at``, or from outside."""

    kind: str
    step: int
    rank: int
    at: str
    number: float
    """Between 0 and 1: chooses what else there is to choose."""

    def spec(self, peers: Sequence[int]) -> str | None:
        """As ``--elastic-inject``; None for what comes from outside. ``peers``: all ranks that there may be."""
        action, more = {
            "kill": ("kill", ""), "raise": ("raise", ""), "hang": ("hang", ""),
            "pause": ("hang", f",for={0.2 + 0.5 * HANG * self.number:.2f}"),
            "slow": ("slow", f",factor={1.5 + 3 * self.number:.1f},for=3"),
            "disconnect": ("disconnect", f",for=0.5,peers={'+'.join(str(p) for p in peers if p != self.rank)}"),
            "disk": ("disk", f",what={'full' if self.number < 0.5 else 'slow'},for={0.1 + 0.4 * self.number:.2f}"),
            "flip": ("flip", f",what={('weights', 'moments', 'replica')[int(3 * self.number)]}"),
        }.get(self.kind, ("", ""))  # fmt: skip
        return f"{action}:rank={self.rank},step={self.step},at={self.at}{more}" if action else None


@dataclass(slots=True)
class Round:
    """One job and what happens to it, drawn from ``seed``."""

    seed: int
    layout: tuple[int, int, int]
    variant: str
    faults: list[Fault] = field(default_factory=list)

    @property
    def ranks(self) -> int:
        tp, pp, dp = self.layout
        return tp * pp * dp

    @property
    def name(self) -> str:
        tp, pp, dp = self.layout
        return f"TP{tp} PP{pp} DP{dp} {self.variant}"

    def draw(self, kinds: Mapping[str, int], count: int) -> None:
        """Draw about so many faults. Ids of ranks that come are foretold; a fault whose rank is not there fails."""
        choose = random.Random(self.seed)
        since: dict[int, int] = dict.fromkeys(range(self.ranks), 0)
        step, last_error, last_change = _FIRST, -99, -99
        allowed = {kind: often for kind, often in kinds.items() if self._may(kind)}
        while len(self.faults) < count:
            again = bool(self.faults) and choose.random() < 0.2
            step += 0 if again else choose.choice((1, 2, 4, 6, 9, 14))
            kind = choose.choices(list(allowed), list(allowed.values()))[0]
            if (kind == "raise" and step - last_error < 8) or (kind == "scale" and step - last_change < 40):
                kind = "pause"  # what is raised again and again would be the program's error
            there = [rank for rank, joined in since.items() if joined <= step]
            if kind in DEADLY and len(there) <= max(self.ranks // 2, self.ranks - 2 * self.layout[0]):
                kind = "pause"
                step += 12
            rank = choose.choice(there)
            at = choose.choice(IN_RECOVERY if again and kind in ("kill", "pause") else IN_STEP)
            self.faults.append(Fault(kind, step, rank, at, choose.random()))
            last_error = step if kind == "raise" else last_error
            last_change = step if kind == "scale" else last_change
            if kind in DEADLY:
                del since[rank]
                since[max((*since, self.ranks - 1, rank)) + 1] = step + 15

    def _may(self, kind: str) -> bool:
        if kind == "flip":
            return self.variant == "verify"
        if kind == "scale":
            return self.variant != "virtual"
        return True

    @property
    def steps(self) -> int:
        return self.faults[-1].step + _LAST

    def flags(self, data: Path, save: Path) -> list[str]:
        """Of the job without faults."""
        tp, pp, _ = self.layout
        values = {
            "data-path": data, "tensor-model-parallel-size": tp, "pipeline-model-parallel-size": pp,
            "num-layers": LAYERS if self.variant != "virtual" else 2 * pp, "hidden-size": 32,
            "num-attention-heads": 4, "seq-length": 32, "micro-batch-size": 1, "global-batch-size": BATCH,
            "train-iters": self.steps, "lr": 1e-3, "attention-dropout": 0.1, "hidden-dropout": 0.1, "eval-iters": 0,
            "save": save, "save-interval": _SAVE_EVERY,
        }  # fmt: skip
        return ["--elastic", *(text for name, value in values.items() for text in (f"--{name}", str(value))),
                *VARIANTS[self.variant]]

    @property
    def injected(self) -> dict[str, Fault]:
        """Those that ranks do themselves, by how they are written."""
        specs = {fault: fault.spec(range(self.ranks + len(self.faults))) for fault in self.faults}
        return {str(Injection.parse(spec)): fault for fault, spec in specs.items() if spec is not None}


class Job:
    """One job under fire."""

    def __init__(self, round_: Round, run_dir: Path, flags: Sequence[str]) -> None:
        self.stalled = False
        self.done: Counter[tuple[str, str]] = Counter()
        """Faults from outside, by kind and moment."""
        self._round, self._run_dir = round_, run_dir
        self._choose = random.Random(round_.seed + 1)
        self._timers: list[threading.Timer] = []
        inject = [text for spec in round_.injected for text in ("--elastic-inject", spec)]
        self._command = [
            *cli(), "run", "--nproc-per-node", str(round_.ranks), SCRIPT, "--elastic-run-dir", str(run_dir), *flags,
            "--elastic-respawn", "--elastic-hang-timeout", str(HANG), *inject,
        ]  # fmt: skip

    def run(self) -> int:
        """To its end; returns the exit code."""
        with self._run_dir.with_suffix(".out").open("w") as sink:
            process = subprocess.Popen(
                self._command, cwd=CHECKOUT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            assert process.stdout is not None
            outside = [fault for fault in self._round.faults if fault.spec(()) is None]
            try:
                for line in self._watched(process):
                    sink.write(line)
                    match = _STEP.match(line)
                    while match and outside and outside[0].step <= int(match[1]):
                        self._outside(outside.pop(0))
                return process.wait()
            except BaseException:
                process.send_signal(signal.SIGINT)
                process.communicate()
                raise
            finally:
                for timer in self._timers:
                    timer.cancel()

    def _watched(self, process: subprocess.Popen[str]) -> Iterator[str]:
        """Lines, as long as they come."""

        def stall() -> None:
            self.stalled = True
            process.kill()

        assert process.stdout is not None
        while True:
            watchdog = threading.Timer(STALL, stall)
            watchdog.start()
            line = process.stdout.readline()
            watchdog.cancel()
            if not line:
                return
            yield line

    def _outside(self, fault: Fault) -> None:
        """Do something from outside, at any moment of the step or two that follow."""
        if fault.kind == "scale":
            _, pp, dp = self._round.layout
            stages = [n for n in (1, 2, 4) if n <= 2 * pp and n <= pp * dp // 2]
            command = [*cli(), "scale", str(self._run_dir), "--pp", str(stages[int(fault.number * len(stages))])]
            answer = subprocess.run(command, capture_output=True, text=True, check=False)
            self.done[fault.kind, "any moment" if answer.returncode == 0 else "refused"] += 1
            return
        timer = threading.Timer(0.3 * self._choose.random(), self._strike, (fault,))
        self._timers.append(timer)
        timer.start()

    def _strike(self, fault: Fault) -> None:
        ranks = newest_layout(self._run_dir).ranks
        with contextlib.suppress(JobFailed, ProcessLookupError):  # it has ended meanwhile
            pid = pid_of(self._run_dir, ranks[int(fault.number * len(ranks))])
            os.kill(pid, signal.SIGKILL if fault.kind == "kill outside" else signal.SIGSTOP)
            self.done[fault.kind, "any moment"] += 1
            if fault.kind == "kill outside":
                return
            timer = threading.Timer(2.5 * self._choose.random(), self._go_on, (pid,))
            self._timers.append(timer)
            timer.start()

    @staticmethod
    def _go_on(pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def left_behind(run_dir: Path) -> int:
    """Processes that still write logs of a job that is over."""
    logs, found = str(run_dir.resolve() / "logs"), 0
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            found += entry.name.isdecimal() and os.readlink(entry / "fd" / "1").startswith(logs)
    return found


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
        return self._compare(read_metrics(reference), run_dir, reference)

    def _compare(self, expected: Mapping[int, Mapping[str, Any]], run_dir: Path, reference: Path) -> str | None:
        lines = read_metrics(run_dir)
        samples = [line["consumed_samples"] for _, line in sorted(lines.items())]
        self.lost_samples += BATCH * len(expected.keys() - lines.keys())
        self.repeated_samples += BATCH * (len(samples) - len(set(samples)))
        exact = ("loss_hex", "grad_norm_hex", "consumed_samples")
        common = lines.keys() & expected.keys()
        self.differing_steps += sum(any(lines[step][name] != expected[step][name] for name in exact) for step in common)
        difference = compare(reference, run_dir)
        return None if difference is None else str(difference)


def _cause(event: Mapping[str, Any]) -> str:
    return re.sub(r"\d+", "N", str(event["cause"]))


def _layout(text: str) -> list[tuple[int, int, int]]:
    found = []
    for each in text.split(","):
        match = re.fullmatch(r"(\d)x(\d)x(\d)", each)
        if match is None or int(match[3]) < 2:
            raise argparse.ArgumentTypeError(f"{each!r}: expected TPxPPxDP, DP at least 2")
        found.append((int(match[1]), int(match[2]), int(match[3])))
    return found


def _names(known: Sequence[str], text: str) -> list[str]:
    names = text.split(",")
    if wrong := [name for name in names if name not in known]:
        raise argparse.ArgumentTypeError(f"unknown {', '.join(wrong)}; known: {', '.join(known)}")
    return names


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """Parse and check the flags."""
    parser = argparse.ArgumentParser(
        prog="megatron-elastic chaos", formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Let random faults happen to jobs, and compare each with one that nothing disturbed.",
        epilog="example:\n  megatron-elastic chaos --seed 1 --minutes 10 --layout 1x2x4,2x2x2\n\n"
        "Progress goes to stderr; the last line of stdout is one JSON object. Exit code 1 if anything is wrong; the\n"
        "job and its undisturbed twin are kept then, and the command is printed that does it again.")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="what faults are drawn from (default: 0)")
    parser.add_argument("--minutes", type=float, default=5.0, metavar="M",
                        help="begin no job after so long (default: %(default)g)")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="begin with the N-th job of the seed")
    parser.add_argument("--jobs", type=int, metavar="N", help="so many jobs at most")
    parser.add_argument("--faults", type=int, default=12, metavar="N", help="faults of a job (default: %(default)s)")
    parser.add_argument("--layout", type=_layout, default=_layout("1x2x4,2x2x2,1x4x2"), metavar="TPxPPxDP,...",
                        help="layouts, taken in turns (default: 1x2x4,2x2x2,1x4x2)")
    parser.add_argument("--variants", type=partial(_names, list(VARIANTS)), default=list(VARIANTS), metavar="NAMES",
                        help=f"models and flags, taken in turns (default: {','.join(VARIANTS)})")
    parser.add_argument("--kinds", type=partial(_names, list(KINDS)), default=list(KINDS), metavar="NAMES",
                        help=f"kinds of faults (default: {','.join(KINDS)})")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Run job after job; 0 if nothing was wrong."""
    options = parse_args(argv)
    data, tally, number = prepare_data(), Tally(), options.first
    kinds = {kind: often for kind, often in KINDS.items() if kind in options.kinds}
    until = time.monotonic() + 60 * options.minutes
    with run_root() as root:
        while time.monotonic() < until and (options.jobs is None or tally.jobs < options.jobs):
            round_ = Round(options.seed * 100_003 + number, options.layout[number % len(options.layout)],
                           options.variants[number // len(options.layout) % len(options.variants)])
            round_.draw(kinds, options.faults)
            folder = root / str(number)
            folder.mkdir()
            problem = _one(round_, folder, data, tally)
            if problem is not None:
                again = ["megatron-elastic", "chaos", *argv, "--first", str(number), "--jobs", "1"]
                tally.problems.append(f"job {number} ({round_.name}): {problem}; {folder}; again: {shlex.join(again)}")
                progress(tally.problems[-1])
            else:
                subprocess.run(["rm", "-r", str(folder)], check=True)
            progress(f"job {number} ({round_.name}): {tally.faults} faults so far, {len(tally.problems)} problems")
            number += 1
        _emit(argv, tally)
        if tally.problems:
            raise JobFailed("; ".join(tally.problems))
    return 0


def _one(round_: Round, folder: Path, data: Path, tally: Tally) -> str | None:
    reference, run_dir = folder / "undisturbed", folder / "disturbed"
    run_job(reference, round_.ranks, round_.flags(data, folder / "checkpoints-0"))
    job = Job(round_, run_dir, round_.flags(data, folder / "checkpoints-1"))
    code = job.run()
    return tally.add(round_, job, run_dir, reference, code)


def _emit(argv: Sequence[str], tally: Tally) -> None:
    emit("chaos", argv, {
        "jobs": tally.jobs, "faults": tally.faults,
        "by_kind": {kind: dict(each) for kind, each in tally.by_kind.items()},
        "lost_samples": tally.lost_samples, "repeated_samples": tally.repeated_samples,
        "differing_steps": tally.differing_steps, "identical": not tally.problems, "hangs": tally.hangs,
        "false_alarms": tally.false_alarms, "processes_left": tally.processes_left, "decisions": dict(tally.decisions),
        "recovery_ms": {cause: {"count": len(times), **summary(times)} for cause, times in tally.recovery_ms.items()},
        "detect_ms": {cause: summary(times) for cause, times in tally.detect_ms.items()},
        "problems": tally.problems,
    })  # fmt: skip


if __name__ == "__main__":
    run("chaos", main)
