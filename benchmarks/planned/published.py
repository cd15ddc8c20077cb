"""Do policies of a cluster decide as their authors' code? ``megatron-elastic bench published``.

``--elasticflow``, ``--pollux`` and ``--rubick`` each name a clone of their authors' repository; ``--python`` is an
interpreter that can import what these need (Pollux: numpy before 2.0, scipy, autograd, pymoo 0.4.2). The same cases go
to both, drawn by ``--seed``; ElasticFlow's simulator also runs the trace of its paper's figure 8a, and so does ours.
``--save`` keeps the cases and what was answered, which tests hold our policies against without anybody's code.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import exp, inf
from pathlib import Path
from typing import Any

from common import CHECKOUT, JobFailed, emit, load_average, progress

from megatron_elastic.fleet.admission import Member, fill
from megatron_elastic.fleet.job import Job
from megatron_elastic.fleet.observation import Observation, Overhead
from megatron_elastic.fleet.policies.elasticflow import satisfactory_share
from megatron_elastic.fleet.policies.elasticflow import share as elasticflow_share
from megatron_elastic.fleet.policies.pollux import efficiency, step_s
from megatron_elastic.fleet.policies.pollux import share as pollux_share
from megatron_elastic.fleet.policies.rule import Rule
from megatron_elastic.fleet.simulated.course import Course
from megatron_elastic.fleet.simulated.simulation import Simulation
from megatron_elastic.fleet.speed_table import SpeedTable

_TRACE, _GPUS = "elasticVpollux_e", 64
_MOST = {"bert": 16, "cifar10": 16, "yolov3": 4, "ncf": 1, "imagenet": 64}
"""GPUs of a job at most, as ElasticFlow's simulator limits them; deepspeech2 by its batch."""
_SLOT_S = 60
"""In which ElasticFlow's simulator counts time."""
_RESCALES_S = (0.0, 10.0)
"""ElasticFlow's has 2 s, and 2 s for each doubling of GPUs and one; its count of deadlines leaves them out."""
_DELAY_S = 30.0
"""Of Pollux's simulator: what it takes a reallocation to cost."""
_TINY = 1e-3
"""That Pollux adds to each speed-up, so that none may divide by nothing."""
_BUSY = Job(0, "", 0.0, inf, 1, inf, most=1)


def ask(python: str, name: str, checkout: Path, cases: Any) -> Any:
    """What the authors' code answers. Raises JobFailed."""
    command = [python, str(CHECKOUT / "benchmarks" / "planned" / "authors" / f"{name}.py"), str(checkout)]
    done = subprocess.run(command, input=json.dumps(cases), capture_output=True, text=True, check=False)
    if done.returncode:
        raise JobFailed(f"{name} in {checkout} ended with {done.returncode}: {done.stderr[-2000:]}")
    return json.loads(done.stdout)


def member(index: int, speeds: Sequence[float], floor: int, devices: int, started: float, changes: int) -> Member:
    """A job that is ``speeds[n - 1]`` fast on n devices."""
    table = SpeedTable(tuple(range(1, len(speeds) + 1)), tuple(speeds))
    return Member(replace(_BUSY, index=index), table, floor, devices, inf, started, changes)


# ---- ElasticFlow -----------------------------------------------------------------------------


def admissions(draw: random.Random, count: int) -> list[dict[str, Any]]:
    """Single jobs on a cluster that is partly taken for a while; curves are concave."""
    cases = []
    for _ in range(count):
        alpha = draw.uniform(0.2, 1.0)
        throughput = {2**k: draw.uniform(0.9, 1.0) * 2 ** (alpha * k) for k in range(7)}
        for k in range(1, 7):
            throughput[2**k] = max(throughput[2**k], 1.001 * throughput[2 ** (k - 1)])
        steps = sorted(draw.sample(range(1200, 50_000, _SLOT_S), 3))
        free = [(at, draw.choice((0, 1, 3, 8, 16, 33, 64))) for at in (0, *steps)]
        deadline = draw.randrange(2400, 60_000, _SLOT_S)
        work = draw.randrange(1000, 200_000)
        cases.append({"gpus": 64, "throughput": throughput, "free": free, "deadline": deadline, "iterations": work})
    return cases


def shares(cases: Sequence[Mapping[str, Any]]) -> list[int | None]:
    """Minimum satisfactory shares, as we find them."""
    found = []
    for case in cases:
        table = SpeedTable(tuple(map(int, case["throughput"])), tuple(case["throughput"].values()))
        share = satisfactory_share(table, case["iterations"], case["deadline"], case["free"])
        found.append(None if share is None else share[0])
    return found


class _Kept(Simulation):
    """A simulation that keeps when each job has ended."""

    ends: dict[str, float]

    def _end(self, course: Course) -> None:
        self.ends[course.job.name] = self.now
        super()._end(course)


def trace(checkout: Path) -> tuple[list[Job], dict[str, SpeedTable], float]:
    """Jobs of ElasticFlow's trace, with the throughputs that it was published with; and when it begins."""
    folder = checkout / "ElasticFlow"
    curves: dict[tuple[str, str], dict[int, float]] = {}
    for path in (folder / "scheduler" / "throughputs_T4").glob("*.csv"):
        for row in csv.DictReader(path.open()):
            batch = row.pop("global_batch_size")
            curves[path.stem, batch] = {int(gpus): float(speed) for gpus, speed in row.items()}
    rows = list(csv.DictReader((folder / "traces_for_ElasticFlow" / f"{_TRACE}.csv").open()))
    begin = min(float(row["submit_time"]) for row in rows)
    jobs, tables = [], {}
    for index, row in enumerate(sorted(rows, key=lambda row: float(row["submit_time"]))):
        curve, name = curves[row["model_name"], row["batch_size"]], row["model_name"]
        most = (32 if row["batch_size"] == "320" else 64) if name == "deepspeech2" else _MOST[name]
        given = min(int(row["num_gpu"]), most)
        seconds = {gpus: float(row["iteration"]) / speed for gpus, speed in curve.items() if gpus <= most}
        tables[row["job_id"]] = SpeedTable.of(given, seconds.__getitem__, seconds, seconds[given])
        submitted, deadline = float(row["submit_time"]) - begin, float(row["ddl"]) - begin
        jobs.append(Job(index, row["job_id"], submitted, seconds[given], given, deadline, most=most))
    return jobs, tables, begin


def ended(jobs: Sequence[Job], tables: Mapping[str, SpeedTable], rescale_s: float) -> dict[str, float]:
    """When each job has ended in our simulation under our policy, where a change takes so long."""
    numbered = [replace(job, index=index) for index, job in enumerate(jobs)]
    overhead = Overhead(rescale_s)
    policy = Rule("elasticflow", lambda job: tables[job.name], elasticflow_share, overhead, lowest=True, buddy=True)
    simulation = _Kept(numbered, _GPUS, policy)
    simulation.ends = {}
    simulation.run()
    return simulation.ends


def on_admissions(cases: Sequence[Mapping[str, Any]], theirs: Sequence[int | None]) -> dict[str, Any]:
    """Minimum satisfactory shares of single jobs, ours and theirs."""
    pairs = list(zip(shares(cases), theirs, strict=True))
    return {
        "cases": len(cases),
        "admitted": sum(share is not None for share in theirs),
        "same_verdict": sum((ours is None) == (share is None) for ours, share in pairs),
        "same_share": sum(ours == share for ours, share in pairs),
    }


def on_trace(checkout: Path, theirs: Mapping[str, Mapping[str, Any]], rescale_s: float) -> dict[str, Any]:
    """The whole trace, and that part of it which their simulator admits and whose deadlines it meets."""
    jobs, tables, begin = trace(checkout)
    met = [job for job in jobs if job.name in theirs and theirs[job.name]["met"]]
    every, own = ended(jobs, tables, rescale_s), ended(met, tables, rescale_s)
    jct = [theirs[job.name]["end"] - begin - job.submitted for job in met]
    return {
        "rescale_s": rescale_s,
        "jobs": len(jobs),
        "their_deadlines_met": len(met),
        "our_deadlines_met": sum(every[job.name] <= job.deadline for job in jobs),
        "of_theirs_we_meet": sum(own[job.name] <= job.deadline for job in met),
        "their_mean_jct_s": round(statistics.mean(jct)),
        "our_mean_jct_s": round(statistics.mean(own[job.name] - job.submitted for job in met)),
    }


# ---- Pollux ----------------------------------------------------------------------------------


def allocations(draw: random.Random, count: int) -> list[dict[str, Any]]:
    """Jobs on one node, some of which run, with constants about those that Pollux's own tests use."""
    cases = []
    for seed in range(count):
        gpus = draw.randrange(4, 17)
        jobs, left = [], gpus
        for index in range(draw.randrange(2, min(6, gpus) + 1)):
            had = draw.randrange(min(left, 5)) if index % 2 else 0
            left -= had
            perf = (
                draw.uniform(0.01, 0.2), 10 ** draw.uniform(-3, -2), 1.0, 1.0,
                10 ** draw.uniform(-2, 0), 10 ** draw.uniform(-3, -1.5), draw.uniform(1, 10),
            )  # fmt: skip
            noise, batch = 10 ** draw.uniform(-1, 1.5), draw.choice((64, 128, 256))
            jobs.append({
                "perf": perf, "grad": (1.0, noise), "batch": batch, "largest": batch * draw.choice((4, 8, 16)),
                "gpus": had, "age_s": draw.uniform(30, 3000), "restarts": draw.randrange(4),
            })  # fmt: skip
        cases.append({"seed": seed, "gpus": gpus, "jobs": jobs})
    return cases


def goodput(job: Mapping[str, Any], gpus: int, batch: float) -> float:
    """By our formulas, of a job of a case with a batch that is divided among so many GPUs of one node."""
    alpha_c, beta_c, _, _, alpha_r, beta_r, gamma = job["perf"]
    sync = alpha_r + beta_r * max(gpus - 2, 1e-8) if gpus > 1 else 1e-8 * (1 + 1e-8)
    seconds = step_s(alpha_c + beta_c * batch / gpus, sync, 0, gamma)
    squared, variance = job["grad"]
    return batch / seconds * efficiency(batch / job["batch"], variance / squared)


def fitness(case: Mapping[str, Any], goodputs: Sequence[Sequence[float]], given: Sequence[int]) -> float:
    """Pollux's objective: the power mean, p = -1, of speed-ups over a fair share, less for those that are changed."""
    fair = -(-case["gpus"] // len(given))
    total = 0.0
    for job, own, gpus in zip(case["jobs"], goodputs, given, strict=True):
        speedup = own[gpus - 1] / own[fair - 1] if gpus else 0.0
        if gpus != job["gpus"]:
            speedup *= max(job["age_s"] - job["restarts"] * _DELAY_S, 0.0) / (job["age_s"] + _DELAY_S)
        total += 1 / (speedup + _TINY)
    return len(given) / total


def best(case: Mapping[str, Any], goodputs: Sequence[Sequence[float]]) -> float:
    """The best value of that objective, found by going through all allocations, one job after the other."""
    fair, jobs = -(-case["gpus"] // len(goodputs)), case["jobs"]
    least = [0.0] * (case["gpus"] + 1)  # of the sum of 1 / speed-up, with so many GPUs given
    for job, own in zip(jobs, goodputs, strict=True):
        factor = max(job["age_s"] - job["restarts"] * _DELAY_S, 0.0) / (job["age_s"] + _DELAY_S)
        costs = [
            1 / ((own[n - 1] / own[fair - 1] if n else 0.0) * (1.0 if n == job["gpus"] else factor) + _TINY)
            for n in range(case["gpus"] + 1)
        ]
        least = [min(least[total - n] + costs[n] for n in range(total + 1)) for total in range(case["gpus"] + 1)]
    return len(jobs) / least[-1]


def on_allocations(cases: Sequence[Mapping[str, Any]], theirs: Sequence[Any]) -> dict[str, Any]:
    """Goodput on each number of GPUs, and who gets how many."""
    wrong, ours_to_theirs, ours_to_best, theirs_to_best, same = 0.0, [], [], [], 0
    now = 1e6
    for case, answer in zip(cases, theirs, strict=True):
        goodputs = [own["goodput"] for own in answer]
        for job, own in zip(case["jobs"], answer, strict=True):
            for gpus, (value, batch) in enumerate(zip(own["goodput"], own["batch"], strict=True), 1):
                wrong = max(wrong, abs(goodput(job, gpus, batch) / value - 1))
        members = [
            member(index, own, 1, job["gpus"], now - job["age_s"], job["restarts"])
            for index, (job, own) in enumerate(zip(case["jobs"], goodputs, strict=True))
        ]
        seen = Observation(now, case["gpus"], 0, {}, 0, {}, [])
        given = pollux_share(_DELAY_S)(seen, members, case["gpus"])
        mine = fitness(case, goodputs, [given[index] for index in range(len(members))])
        his = fitness(case, goodputs, [own["gpus"] for own in answer])
        top = best(case, goodputs)
        same += [given[index] for index in range(len(members))] == [own["gpus"] for own in answer]
        ours_to_theirs.append(mine / his)
        ours_to_best.append(mine / top)
        theirs_to_best.append(his / top)
    return {
        "cases": len(cases), "worst_goodput_difference": wrong, "same_allocation": same,
        "ours_to_theirs": spread(ours_to_theirs), "ours_to_best": spread(ours_to_best),
        "theirs_to_best": spread(theirs_to_best),
    }  # fmt: skip


def spread(values: Sequence[float]) -> dict[str, float]:
    """Mean, least and most."""
    figures = {"mean": statistics.mean(values), "least": min(values), "most": max(values)}
    return {name: round(value, 4) for name, value in figures.items()}


# ---- Rubick ----------------------------------------------------------------------------------


def slopes(draw: random.Random, count: int) -> list[dict[str, Any]]:
    """Jobs on one node of 8 GPUs; curves are concave, and differ in steepness."""
    cases: list[dict[str, Any]] = []
    for _ in range(count):
        jobs, floor = [], 0
        for _ in range(draw.randrange(2, 5)):
            gain, fall, speed = 10 ** draw.uniform(-1, 1), draw.uniform(0, 0.5), 0.0
            curve = [speed := speed + gain * exp(-fall * n) for n in range(8)]
            gpus = draw.randrange(1, 3)
            floor += gpus
            jobs.append({"throughput": curve, "as_submitted": curve[draw.randrange(8)], "gpus": gpus})
        cases.append({"gpus": min(max(floor, draw.randrange(4, 17)), 8 * len(jobs)), "jobs": jobs})
    return cases


def on_slopes(cases: Sequence[Mapping[str, Any]], theirs: Sequence[Any]) -> dict[str, Any]:
    """Slopes, and who gets how many by them."""
    wrong, same = 0.0, 0
    for case, answer in zip(cases, theirs, strict=True):
        members = [
            member(index, [own / job["as_submitted"] for own in job["throughput"]], job["gpus"], job["gpus"], 0.0, 0)
            for index, job in enumerate(case["jobs"])
        ]
        for own, slope in zip(members, answer["slopes"], strict=True):
            ours = own.table.speed(own.devices + 1) - own.table.speed(own.devices)
            wrong = max(wrong, abs(ours - slope) / slope)
        given = fill(members, case["gpus"], lambda own, devices: own.table.speed(devices))
        same += [given[index] for index in range(len(members))] == answer["gpus"]
    return {"cases": len(cases), "worst_slope_difference": wrong, "same_allocation": same}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and return the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="megatron-elastic bench published", description=__doc__)
    parser.add_argument("--elasticflow", type=Path, metavar="CHECKOUT", help="of pkusys/ElasticFlow")
    parser.add_argument("--pollux", type=Path, metavar="CHECKOUT", help="of petuum/adaptdl, branch osdi21-artifact")
    parser.add_argument("--rubick", type=Path, metavar="CHECKOUT", help="of AlibabaPAI/reconfigurable-dl-scheduler")
    parser.add_argument("--python", default=sys.executable, metavar="PYTHON", help="that runs them (default: this one)")
    parser.add_argument("--cases", type=int, default=1000, metavar="N", help="(default: %(default)s; Pollux: a tenth)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--save", type=Path, metavar="FILE", help="for cases and answers, as JSON")
    options = parser.parse_args(arguments)
    if not (options.elasticflow or options.pollux or options.rubick):
        parser.error("say whose code there is: --elasticflow, --pollux or --rubick")
    if options.cases < 10:
        parser.error("--cases must be at least 10")
    load = load_average()
    figures: dict[str, Any] = {}
    kept: dict[str, Any] = {}
    for name, drawn, compare, count in (
        ("elasticflow", admissions, on_admissions, options.cases),
        ("pollux", allocations, on_allocations, options.cases // 10),
        ("rubick", slopes, on_slopes, options.cases),
    ):
        checkout: Path | None = getattr(options, name)
        if checkout is None:
            continue
        cases = drawn(random.Random(f"{name} {options.seed}"), count)
        asked = {"trace": _TRACE, "gpus": _GPUS, "cases": cases} if name == "elasticflow" else cases
        answers = ask(options.python, name, checkout, asked)
        if name == "elasticflow":
            figures["elasticflow_trace"] = [on_trace(checkout, answers["jobs"], each) for each in _RESCALES_S]
            answers = answers["shares"]
        figures[name] = compare(cases, answers)
        kept[name] = {"cases": cases, "answers": answers}
        progress(f"{name}: {figures[name]}")
    if options.save:
        options.save.write_text(json.dumps(kept) + "\n")
    emit("published", arguments, {**figures, "load_before": load})
    return 0
