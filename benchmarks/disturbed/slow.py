"""What slow ranks cost, and what is left of it: ``megatron-elastic bench slow``.

A data-parallel job in which some ranks get less of a processor for a while, with each ``--elastic-slow``. Every rank
has a quota of processor time from the beginning (a cgroup of its own), so that each has a processor of its own, if a
slow one, also where there are fewer of them than ranks.

With ``--clocks`` quotas are clocks, too (``--elastic-actuator quota``): what sharing by speed, and clocks of half as
much again as the base clock, give alone and together. Slow ranks stay slow at either clock.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import JobFailed, emit, prepare_data, progress, run_root, watch_job

from disturbed.recovery import add_model_flags, flags_of_job
from megatron_elastic.layout import Layout
from megatron_elastic.observe.records import read_digest, read_events
from megatron_elastic.plan.costs.cost import Costs
from megatron_elastic.plan.costs.power import PowerModel
from megatron_elastic.power.quota import Quotas

WAYS = {way: ["--elastic-slow", way] for way in ("off", "share", "evict")}
CLOCKS = ["--elastic-dvfs", "performance", "--elastic-actuator", "quota"]
WITH_CLOCKS = {
    "off": WAYS["off"],
    "share": WAYS["share"],
    "clocks": [*WAYS["off"], *CLOCKS],
    "share + clocks": [*WAYS["share"], *CLOCKS],
}
"""Name -> flags of a job."""
_STEPS = (1.0, 1.5)
_POWER = PowerModel(idle_w=0.0, static_w=0.0, dynamic_w=1.0)
"""Must be there; makes no difference where there is no limit."""
SCRIPT = "benchmarks/programs/quota_gpt.py"


@dataclass
class Course:
    """How a job went: when each step was committed, by this process's clock."""

    steps: dict[int, float] = field(default_factory=dict)
    slowed: float = 0.0
    restored: float = 0.0
    """When it was over; 0.0: not yet."""

    def rate(self, begin: float, end: float) -> float:
        """Steps a second between two times."""
        within = [when for when in self.steps.values() if begin <= when <= end]
        return (len(within) - 1) / (within[-1] - within[0]) if len(within) > 1 else 0.0

    def step_at(self, when: float) -> int:
        """The step that was in progress then."""
        return 1 + max((step for step, done in self.steps.items() if done < when), default=0)


def train(run_dir: Path, way: str, options: argparse.Namespace, flags: Sequence[str]) -> Course:
    """Run a job, and slow some of its ranks down for a while."""
    flags = [*flags_of_job(options, prepare_data(), options.steps, pp=1), *flags]
    try:
        course, quotas = Course(), Quotas(f"megatron-elastic-{os.getpid()}")
    except OSError as error:
        raise JobFailed(f"needs a cgroup that it can write, to slow ranks down: {error}") from None
    try:
        quotas.make(options.nproc_per_node, options.quota)
        os.environ["QUOTAS"] = str(quotas.folder)
        for line in watch_job(run_dir, options.nproc_per_node, flags, SCRIPT):
            words = line.split()
            if not words or words[0] != "step":
                if "have become" in line or "taken out" in line:
                    progress(line.rstrip())
                continue
            now = time.monotonic()
            course.steps[int(words[1].partition("/")[0])] = now
            if not course.slowed and len(course.steps) == options.first:
                quotas.scale(range(options.ranks), 1 / options.factor)
                course.slowed = now
                progress(f"{way}: ranks {list(range(options.ranks))} are {options.factor:g} times as slow")
            elif course.slowed and not course.restored and now > course.slowed + options.seconds:
                quotas.scale(range(options.ranks), options.factor)
                course.restored = now
                progress(f"{way}: they are as fast as before")
    finally:
        quotas.remove()
    if not course.restored:
        raise JobFailed(f"{run_dir}: the job ended within the {options.seconds:g} s; give more --steps")
    return course


def profile(run_dir: Path) -> str:
    """Of the units of a job; what they cost is assumed, of which only proportions matter to clocks."""
    units = Layout.from_json((run_dir / "layouts" / "0.json").read_text()).units
    return dataclasses.replace(Costs.assumed(units), power=_POWER, clock_steps=_STEPS).to_json(units)


def figures(course: Course, run_dir: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Tokens a second before, while ranks are slow, and after; and how many steps work took to move, and to be back."""
    tokens = options.global_batch_size * options.seq_length
    # What comes first includes warming up, and what comes after has to be even again.
    settled = course.restored + 0.5 * (max(course.steps.values()) - course.restored)
    rates = {"before": course.rate(course.steps[2], course.slowed), "slow": course.rate(course.slowed, course.restored),
             "after": course.rate(settled, max(course.steps.values()))}
    switched = [event["step"] for event in read_events(run_dir) if event["kind"] == "switched"]
    slow, well = course.step_at(course.slowed + 1e-3), course.step_at(course.restored + 1e-3)
    moved = next((step - slow for step in switched if slow <= step < well), None)
    back = next((step - well for step in switched if step >= well), None)
    return {"tokens_per_s": {name: round(rate * tokens, 1) for name, rate in rates.items()},
            "of_before": round(rates["slow"] / rates["before"], 3), "moved_after_steps": moved,
            "back_after_steps": back}


def table(found: dict[str, dict[str, Any]]) -> str:
    """In Markdown."""
    lines = ["| way | tokens/s before | while ranks are slow | after | of before | of `off` before | steps "
             "until work moves | back |", "|---|---|---|---|---|---|---|---|"]
    for way, each in found.items():
        rates = each["tokens_per_s"]
        lines.append(f"| {way} | {rates['before']} | {rates['slow']} | {rates['after']} | {each['of_before']:.2f} | "
                     f"{each['of_undisturbed']:.2f} | "
                     f"{each['moved_after_steps'] or '-'} | {each['back_after_steps'] or '-'} |")
    return "\n".join(lines)


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """Parse and check the flags."""
    parser = argparse.ArgumentParser(
        prog="megatron-elastic bench slow",
        description="Take processor time from some ranks for a while, and measure tokens a second with each "
        "--elastic-slow; a run stays the same bit for bit. Needs a cgroup that it can write.")
    parser.add_argument("--nproc-per-node", type=int, default=4, metavar="N", help="ranks (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="slow ones (default: %(default)s)")
    parser.add_argument("--quota", type=float, default=0.25, metavar="X",
                        help="part of a processor that a rank has (default: %(default)s)")
    parser.add_argument("--factor", type=float, default=2.0, metavar="X",
                        help="by how much that becomes less (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=60.0, metavar="S", help="for so long (default: %(default)s)")
    parser.add_argument("--first", type=int, default=15, metavar="N",
                        help="steps before that (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=80, metavar="N", help="default: %(default)s")
    parser.add_argument("--clocks", action="store_true",
                        help="instead of each --elastic-slow: sharing by speed and clocks, alone and together")
    add_model_flags(parser)
    parser.set_defaults(seq_length=128, global_batch_size=24)
    options = parser.parse_args(argv)
    if not 0 < options.ranks < options.nproc_per_node:
        parser.error(f"--ranks must be at least 1 and less than --nproc-per-node, got {options.ranks}")
    if not options.factor > 1 or not 0 < options.quota <= 1:
        parser.error("--factor must be more than 1, and --quota more than 0 and at most 1")
    return options


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; 0 if all jobs finished and are the same."""
    options = parse_args(argv)
    found: dict[str, dict[str, Any]] = {}
    digests = set()
    with run_root() as root:
        for number, (way, flags) in enumerate((WITH_CLOCKS if options.clocks else WAYS).items()):
            run_dir = root / str(number)
            if CLOCKS[0] in flags:
                (root / "profile.json").write_text(profile(root / "0"))
                flags = [*flags, "--elastic-profile", str(root / "profile.json")]
            found[way] = figures(train(run_dir, way, options, flags), run_dir, options)
            found[way]["of_undisturbed"] = round(found[way]["tokens_per_s"]["slow"]
                                                 / found["off"]["tokens_per_s"]["before"], 3)
            digests.add(json.dumps(read_digest(run_dir)["units"], sort_keys=True))
            progress(f"{way}: {found[way]}")
        print(table(found), file=sys.stderr)
        if len(digests) != 1:
            raise JobFailed("the runs differ")
    emit("slow", argv, {"ways": found, "identical": True, "options": vars(options)})
    return 0
