"""Does a job stay as it was, whatever goes wrong? ``megatron-elastic chaos``.

Job after job with a tiny GPT and ``--elastic-respawn``, each with random faults of all kinds, drawn from the seed: at
hook points of the step and of recoveries (``--elastic-inject``) and from outside at any moment, some of them at once.
Each job is compared bit for bit with one that nothing disturbed. With ``--nodes`` jobs are on several hosts, which are
network namespaces of this machine, and hosts and their links have faults, too. With ``--device soft`` jobs are on a
device made of software, which has faults of its own, and are compared with one on the CPU.
"""

from __future__ import annotations

import argparse
import math
import re
import shlex
import subprocess
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import namespaces
from common import JobFailed, emit, prepare_data, progress, run_job, run_root, summary

from disturbed.under_fire.draw import KINDS, KINDS_OF_DEVICES, KINDS_OF_HOSTS, VARIANTS, Round
from disturbed.under_fire.hosted import HostedJob
from disturbed.under_fire.job import Job
from disturbed.under_fire.tally import Tally
from megatron_elastic import usage
from megatron_elastic.device.soft import build

_KINDS = KINDS | KINDS_OF_HOSTS | KINDS_OF_DEVICES


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


def make_parser() -> argparse.ArgumentParser:
    """The flags of ``megatron-elastic chaos``."""
    parser = argparse.ArgumentParser(
        prog="megatron-elastic chaos", formatter_class=usage.Formatter,
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
    parser.add_argument("--nodes", type=int, default=1, metavar="K",
                        help="hosts of a job, network namespaces that are lost and cut off as well; needs root, ip, tc "
                             "and nft (default: 1, this machine itself)")
    parser.add_argument("--device", choices=("cpu", "soft"), default="cpu",
                        help="what ranks compute on; the undisturbed job is on the CPU (default: %(default)s)")
    parser.add_argument("--layout", type=_layout, metavar="TPxPPxDP,...",
                        help="layouts, taken in turns (default: 1x2x4,2x2x2,1x4x2; on K hosts 1x2xK,2x1xK)")
    parser.add_argument("--variants", type=partial(_names, list(VARIANTS)), default=list(VARIANTS), metavar="NAMES",
                        help=f"models and flags, taken in turns (default: {','.join(VARIANTS)})")
    kinds = list(_KINDS)
    parser.add_argument("--kinds", type=partial(_names, kinds), default=kinds, metavar="NAMES",
                        help=f"kinds of faults (default: {','.join(KINDS)}; on hosts also {','.join(KINDS_OF_HOSTS)}; "
                             f"on soft also {','.join(KINDS_OF_DEVICES)})")
    return parser


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """Parse and check the flags."""
    parser = make_parser()
    options = parser.parse_args(argv)
    nodes = options.nodes
    if options.layout is None:
        options.layout = _layout("1x2x4,2x2x2,1x4x2" if nodes == 1 else f"1x2x{nodes},2x1x{nodes}")
    if not 1 <= nodes <= 3:  # of more, some are no members of the store, and others may be lost at once
        parser.error(f"--nodes {nodes}: expected 1, 2 or 3")
    if wrong := [size for size in options.layout if math.prod(size) % nodes]:
        parser.error(f"--nodes {nodes}: its hosts cannot have equal parts of the ranks of {wrong}")
    if nodes > 1 and (reason := namespaces.why_not()):
        parser.error(f"--nodes {nodes}: {reason}")
    if options.device == "soft" and build.compiler() is None:
        parser.error("--device soft: no C++ compiler (g++, or what CXX names)")
    return options


def main(argv: Sequence[str]) -> int:
    """Run job after job; 0 if nothing was wrong."""
    options = parse_args(argv)
    data, tally, number = prepare_data(), Tally(), options.first
    kinds = {kind: often for kind, often in _KINDS.items() if kind in options.kinds}
    if options.device == "soft":
        build.library()  # or all ranks would wait for the first one
    until = time.monotonic() + 60 * options.minutes
    with run_root() as root:
        while time.monotonic() < until and (options.jobs is None or tally.jobs < options.jobs):
            round_ = Round(options.seed * 100_003 + number, options.layout[number % len(options.layout)],
                           options.variants[number // len(options.layout) % len(options.variants)],
                           options.nodes, options.device)
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
    flags = round_.flags(data, folder / "checkpoints-1", round_.device)
    if round_.nodes == 1:
        job = Job(round_, run_dir, flags)
        code = job.run()
    else:
        with namespaces.hosts() as hosts:
            job = HostedJob(round_, run_dir, flags, hosts)
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
