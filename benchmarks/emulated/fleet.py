"""What is it worth that elastic jobs use what is idle? ``megatron-elastic bench fleet``.

Two elastic jobs, which emulate published models, and a stream of rigid ones share slots of this machine under
``megatron-elastic fleet run``: the same jobs, submitted at the same times, under each policy. Under ``fifo`` nothing
ever changes, so its elastic jobs are the undisturbed ones that those under ``elastic`` are compared with, bit for bit.
"""

from __future__ import annotations

import argparse
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from common import CHECKOUT, JobFailed, cli, emit, load_average, progress, run_root

from emulated.job import SCRIPT, flags_of_job
from megatron_elastic import usage
from megatron_elastic.config import UsageError
from megatron_elastic.emulation import command
from megatron_elastic.emulation.models import MODELS
from megatron_elastic.fleet.running import live
from megatron_elastic.fleet.running.daemon import POLICIES
from megatron_elastic.fleet.running.journal import Journal
from megatron_elastic.fleet.running.submission import cancel

SIZES, WEIGHTS = (1, 2, 4, 8), (4, 4, 3, 1)
"""Devices that rigid jobs ask for, and how often."""
_LIMIT = 4.0
"""Times as long as it should take at most."""


class Arrival(NamedTuple):
    """A rigid job of the stream. Times are in seconds."""

    at: float
    devices: int
    duration: float


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """Parse and check the flags."""
    parser = argparse.ArgumentParser(
        prog="megatron-elastic bench fleet",
        description="Elastic jobs and a stream of rigid ones on slots of this machine, by policy.")
    parser.add_argument("--models", default="flextrain-small,llama2-7b", metavar="NAMES",
                        help="of the elastic jobs (default: %(default)s)")
    command.add_flags(parser)
    parser.set_defaults(device="h200", layout=command.grid("tp1,pp2,dp1"), grains=16)
    parser.add_argument("--widest", type=usage.count, default=4, metavar="N",
                        help="times as many devices an elastic job can use (default: %(default)s)")
    parser.add_argument("--slots", type=usage.count, default=16, metavar="N", help="default: %(default)s")
    parser.add_argument("--minutes", type=float, default=5.0, metavar="M",
                        help="that elastic jobs take as submitted (default: %(default)s)")
    parser.add_argument("--pace", type=float, default=20.0, metavar="S",
                        help="seconds between two rigid jobs, in the mean (default: %(default)s)")
    parser.add_argument("--duration", type=float, default=20.0, metavar="S",
                        help="of rigid jobs, in the mean (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the stream (default: %(default)s)")
    parser.add_argument("--policy", default=",".join(POLICIES), metavar="NAMES", help="default: %(default)s")
    options = parser.parse_args(argv)
    options.models, options.policies = options.models.split(","), options.policy.split(",")
    if unknown := [name for name in options.models if name not in MODELS]:
        parser.error(f"--models: there is no {', '.join(unknown)}; of {', '.join(MODELS)}")
    if unknown := [name for name in options.policies if name not in POLICIES]:
        parser.error(f"--policy: there is no {', '.join(unknown)}; of {', '.join(POLICIES)}")
    if options.slots < options.layout.ranks * len(options.models) + max(SIZES):
        parser.error(f"--slots {options.slots}: elastic jobs have {options.layout.ranks} each, and a rigid one up to "
                     f"{max(SIZES)}")
    options.steps = round(60 * options.minutes / options.step_seconds)
    return options


def stream(options: argparse.Namespace) -> list[Arrival]:
    """Rigid jobs that come while elastic ones run, Poisson, with exponential durations."""
    draw, at, found = random.Random(options.seed), 0.0, []
    while (at := at + draw.expovariate(1 / options.pace)) < 48 * options.minutes:
        (devices,) = draw.choices(SIZES, WEIGHTS)
        found.append(Arrival(at, devices, round(draw.expovariate(1 / options.duration), 1)))
    return found


def elastic_flags(options: argparse.Namespace, model: str, profile: Path) -> list[str]:
    """Of one elastic job. Raises JobFailed if the model cannot be emulated so."""
    options.model = options.emulate = model
    try:
        profile.write_text(command.make(options).text)
    except UsageError as error:
        raise JobFailed(str(error)) from None
    slices = options.widest * options.layout.dp
    return [*flags_of_job(options, options.steps), "--elastic-emulate", str(profile), "--elastic-slices", str(slices),
            "--elastic-slow", "off"]  # fmt: skip


def run_policy(root: Path, options: argparse.Namespace, policy: str, arrivals: Sequence[Arrival]) -> dict[str, Any]:
    """Let all jobs run under a policy. Raises JobFailed unless all are done."""
    folder, given = root / policy, options.layout.ranks
    for model in options.models:
        flags = elastic_flags(options, model, root / f"{model}.json")
        _submit(folder, model, given, ["--max-devices", str(given * options.widest)], [SCRIPT, *flags])
    with (root / f"{policy}.out").open("w") as sink:
        fleet = subprocess.Popen(
            [*cli(), "fleet", "run", str(folder), "--slots", str(options.slots), "--policy", policy, "--every", "0.5"],
            cwd=CHECKOUT, stdout=sink, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            _feed(folder, options, arrivals, fleet)
        except BaseException:
            _end(folder)
            raise
        finally:
            fleet.send_signal(signal.SIGTERM)
            fleet.wait()
    return figures(folder, options)


def _feed(
    folder: Path, options: argparse.Namespace, arrivals: Sequence[Arrival], fleet: subprocess.Popen[bytes]
) -> None:
    """Submit rigid jobs as they come, from when the elastic ones train, until all have ended."""
    begun, limit = 0.0, time.monotonic() + _LIMIT * 60 * max(1.0, options.minutes)
    left, told = list(arrivals), 0
    while True:
        now, jobs = time.monotonic(), live.status(folder)["jobs"]
        if not begun and all(jobs.get(model, {}).get("step") for model in options.models):
            begun = now
        while begun and left and left[0].at <= now - begun:
            arrival = left.pop(0)
            name = f"rigid-{len(arrivals) - len(left)}"
            _submit(folder, name, arrival.devices, [], ["sleep", str(arrival.duration)])
        for event in Journal(folder).events()[told:]:
            told += 1
            if event["kind"] in ("grows", "shrinks", "disobeys", "failed", "lost"):
                progress(f"{folder.name}: {event['job']} {event['kind']} {event.get('before', '')} "
                         f"{event.get('devices', '')} {event.get('reason', '')}")  # fmt: skip
        over = [job["phase"] not in ("waiting", "running") and not job["devices"] for job in jobs.values()]
        if begun and not left and len(over) == len(arrivals) + len(options.models) and all(over):
            return
        if now > limit or fleet.poll() is not None:
            raise JobFailed(f"the fleet has not come to its end: {live.status(folder)}")
        time.sleep(0.2)


def _end(folder: Path) -> None:
    """Nothing goes on; gives up after some time."""
    limit = time.monotonic() + 60
    for name, job in live.status(folder)["jobs"].items():
        if job["phase"] in ("waiting", "running"):
            cancel(folder, name)
    while any(job["devices"] for job in live.status(folder)["jobs"].values()) and time.monotonic() < limit:
        time.sleep(0.5)


def _submit(folder: Path, name: str, devices: int, flags: Sequence[str], words: Sequence[str]) -> None:
    done = subprocess.run([*cli(), "fleet", "submit", str(folder), "--name", name, "--devices", str(devices), *flags,
                           "--", *words], cwd=CHECKOUT, capture_output=True, text=True, check=False)  # fmt: skip
    if done.returncode:
        raise JobFailed(done.stderr)


def figures(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Of a fleet that has ended. Raises JobFailed if a job was not done."""
    found = live.status(folder)
    jobs, events = found["jobs"], Journal(folder).events()
    if bad := {name: job["reason"] for name, job in jobs.items() if job["phase"] != "done"}:
        raise JobFailed(f"not done: {bad}")
    others = [job for name, job in jobs.items() if name not in options.models]
    waits = [job["started"] - job["submitted"] for job in others]
    leads = [event["time"] - began["time"] for event in events if event["kind"] == "joined"
             for began in [each for each in events if each["kind"] == "grows" and each["job"] == event["job"]
                           and each["time"] <= event["time"]][-1:]]  # fmt: skip
    return {
        "elastic_jct_s": {name: round(jobs[name]["ended"] - jobs[name]["submitted"], 1) for name in options.models},
        "mean_elastic_jct_s": round(mean(jobs[name]["ended"] - jobs[name]["submitted"] for name in options.models), 1),
        "mean_other_queue_s": round(mean(waits), 2) if waits else None,
        "longest_other_queue_s": round(max(waits), 2) if waits else None,
        "makespan_s": round(max(job["ended"] for job in jobs.values())
                            - min(job["submitted"] for job in jobs.values()), 1),
        "scale_operations": found["scale_operations"],
        "grows": sum(event["kind"] == "grows" for event in events),
        "shrinks": sum(event["kind"] == "shrinks" for event in events),
        "disobeys": sum(event["kind"] == "disobeys" for event in events),
        "most_devices": {name: max([options.layout.ranks] + [event["devices"] for event in events
                         if event["kind"] == "grows" and event["job"] == name]) for name in options.models},
        "mean_lead_s": round(mean(leads), 1) if leads else None,
        "tokens_per_s": {name: jobs[name]["tokens_per_s"] for name in options.models},
    }  # fmt: skip


def identical(root: Path, options: argparse.Namespace) -> bool | None:
    """Whether elastic jobs have the same results under all policies; None if there was one."""
    first, *rest = options.policies
    pairs = [(root / first / "jobs" / model / "run", root / other / "jobs" / model / "run")
             for other in rest for model in options.models]  # fmt: skip
    same = [subprocess.run([*cli(), "compare", *map(str, pair)], stdout=sys.stderr, check=False).returncode == 0
            for pair in pairs]  # fmt: skip
    return all(same) if same else None


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; 0 if all jobs were done, and results are the same."""
    options, load = parse_args(argv), load_average()
    arrivals = stream(options)
    found: dict[str, dict[str, Any]] = {}
    with run_root() as root:
        for policy in options.policies:
            progress(f"{policy}: {len(options.models)} jobs of {options.steps} steps, and {len(arrivals)} rigid ones")
            found[policy] = run_policy(root, options, policy, arrivals)
            progress(f"{policy}: {found[policy]}")
        same = identical(root, options)
    emit("fleet", argv, {
        "policies": found, "identical": same,
        "scale_operations": max(each["scale_operations"] for each in found.values()),
        "rigid_jobs": len(arrivals), "slots": options.slots, "steps": options.steps, "load_before": load,
    })  # fmt: skip
    return 1 if same is False else 0
