"""Does a job that loses rank after rank stay as it was? ``megatron-elastic bench endurance``.

One job with a tiny GPT and ``--elastic-respawn``. Ranks are killed (kill -9, at any moment) one after the other: the
next one as soon as the job is as wide as it began and its slices and grains are even again. The job is compared bit for
bit with one that nothing disturbed.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from common import (
    JobFailed,
    emit,
    even_over,
    load_average,
    newest_layout,
    pid_of,
    prepare_data,
    progress,
    run_job,
    run_root,
    summary,
    watch_job,
)

from disturbed.recovery import add_model_flags, flags_of_job
from megatron_elastic.observe.compare import compare
from megatron_elastic.observe.records import read_digest, read_events

_STEP = re.compile(r"step +(\d+)/")
_BEGIN = 3
"""Step after which the first rank is killed."""
_STEPS_PER_KILL, _REST = 35, 20


def kill_in_turn(lines: Iterator[str], run_dir: Path, ranks: int, kills: int, choose: random.Random) -> list[int]:
    """Read a job's output to its end and kill ranks meanwhile; returns them. Raises JobFailed if it ends too soon."""
    victims: list[int] = []
    wait = _BEGIN
    even = True
    begun, step_s = time.monotonic(), 0.0
    for line in lines:
        if even_over(line) == ranks and victims:
            even, wait = True, choose.randrange(3)
            progress(f"{len(victims)}/{kills}: rank {victims[-1]} is replaced")
        elif _STEP.match(line):
            wait -= 1
            step_s, begun = time.monotonic() - begun, time.monotonic()
        if even and wait <= 0 and len(victims) < kills:
            time.sleep(choose.random() * step_s)  # anywhere in the step
            victims.append(choose.choice(newest_layout(run_dir).ranks))
            os.kill(pid_of(run_dir, victims[-1]), signal.SIGKILL)
            even = False
    if len(victims) < kills or not even:
        raise JobFailed(f"the job ended before all of {kills} killed ranks had been replaced; give it more --steps")
    return victims


def times_to_width(run_dir: Path, ranks: int) -> list[float]:
    """Seconds from each fault until the job was as wide and even as before."""
    times, since = [], None
    for event in read_events(run_dir):
        if event["kind"] == "fault":
            since = event["exited_at"]
        elif (event["kind"] == "switched" and event["world_size"] == ranks and not event["shadows"]
                and not event["entered"] and since is not None):
            times.append(event["time"] - since)
            since = None
    return times


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """Parse and check the flags."""
    parser = argparse.ArgumentParser(
        prog="megatron-elastic bench endurance",
        description="Kill rank after rank of one job that replaces them, and compare it with an undisturbed one.")
    parser.add_argument("--kills", type=int, default=20, metavar="N", help="default: %(default)s")
    parser.add_argument("--nproc-per-node", type=int, default=8, metavar="N", help="ranks (default: %(default)s)")
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="default: %(default)s")
    parser.add_argument("--pp", type=int, default=2, metavar="N", help="default: %(default)s")
    parser.add_argument("--steps", type=int, metavar="N",
                        help=f"steps of the job (default: {_STEPS_PER_KILL} for each kill and {_REST})")
    parser.add_argument("--seed", type=int, default=0, metavar="N",
                        help="of the choice of victims and moments (default: %(default)s)")
    add_model_flags(parser)
    options = parser.parse_args(argv)
    column = options.tp * options.pp
    if options.nproc_per_node % column or options.nproc_per_node < 2 * column:
        parser.error(f"--nproc-per-node must be a multiple of --tp times --pp, at least {2 * column}")
    if options.kills < 1:
        parser.error("--kills must be at least 1")
    return options


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; 0 if the job finished and was identical to the undisturbed one."""
    options = parse_args(argv)
    ranks, steps = options.nproc_per_node, options.steps or _STEPS_PER_KILL * options.kills + _REST
    load = load_average()
    flags = flags_of_job(options, prepare_data(), steps, options.tp, options.pp)
    with run_root() as root:
        run_dir, reference = root / "disturbed", root / "undisturbed"
        progress(f"a job of {steps} steps that loses {options.kills} ranks")
        with closing(watch_job(run_dir, ranks, [*flags, "--elastic-respawn"])) as lines:
            victims = kill_in_turn(lines, run_dir, ranks, options.kills, random.Random(options.seed))
        progress(f"the same without losses, {steps} steps")
        run_job(reference, ranks, flags)
        difference = compare(reference, run_dir)
        events: list[dict[str, Any]] = [e for e in read_events(run_dir) if e["kind"] == "recovered"]
        emit("endurance", argv, {
            "kills": len(victims),
            "identical": difference is None,
            "mttr_ms": summary(e["mttr_ms"] for e in events),
            "pause_ms": summary(e["mttr_ms"] - e["redo_ms"] for e in events),
            "back_to_full_width_s": summary(times_to_width(run_dir, ranks)),
            "width": len(newest_layout(run_dir).ranks),
            "victims": victims,
            "newcomers_killed": sum(rank >= ranks for rank in victims),
            "steps": steps,
            "digest": read_digest(run_dir)["sha256"],
            "decisions": dict(Counter(e["decision"] for e in events)),
            "kept_ops": sum(e.get("kept_ops", 0) for e in events),
            "redone_ops": sum(e.get("redone_ops", 0) for e in events),
            "layout": {"tp": options.tp, "pp": options.pp, "dp": ranks // options.tp // options.pp},
            "load_before": load,
        })
        if difference is not None:
            raise JobFailed(f"the job differs from the undisturbed one: {difference}")
    return 0
