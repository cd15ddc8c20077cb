"""ElasticFlow's simulator (``pkusys/ElasticFlow``): who meets deadlines, on a trace of its own and in single cases.

``python elasticflow.py CHECKOUT < TASK``. A task has ``trace``, ``gpus`` and ``cases``, each with ``gpus``, what is
``free`` (pairs of second and GPUs) and a job: ``throughput`` by GPUs, ``iterations``, ``deadline``. The answer has
``shares``, for each case the most GPUs that the job is given until its deadline, or null where it is declined, and
``jobs`` of the trace by their ids, each with ``end`` and ``met``. What the scheduler imports for real clusters only
(cvxpy, gRPC) need not be installed.
"""

from __future__ import annotations

import contextlib
import csv
import importlib
import json
import os
import sys
import tempfile
from collections import OrderedDict
from pathlib import Path
from types import ModuleType
from typing import Any

_UNUSED = ("cvxpy", "runtime", "runtime.rpc", "runtime.rpc.scheduler_client", "runtime.rpc.scheduler_server")
_SPECS = {64: "n16g4", 128: "n16g8", 32: "n4g8"}


class _Nothing(ModuleType):
    """Stands for a module that a simulation does not use."""

    def __getattr__(self, name: str) -> Any:
        if name == "__path__":
            return []
        raise AttributeError(name)


def share(scheduler: Any, case: Any) -> int | None:
    """The most GPUs that their admission gives the job of a case until its deadline."""
    scheduler.CLUSTER.num_gpu = case["gpus"]
    scheduler.THROUGHPUTS["case"] = {"1": {str(count): str(speed) for count, speed in case["throughput"].items()}}
    job = {
        "job_idx": 0, "model": {"name": "case"}, "batch_size": 1, "iteration": case["iterations"],
        "ddl": case["deadline"], "max_gpu": max(map(int, case["throughput"])), "num_gpu": 0,
    }  # fmt: skip
    if not scheduler.ef_sim_allocation(job, 0, future_free_gpus=OrderedDict((at, free) for at, free in case["free"])):
        return None
    allocations: dict[int, int] = job["allocations"]
    return max(allocations.values())


def simulate(scheduler: Any, logs: Path) -> Any:
    """Let the trace run. Ends are those that its own count of deadlines goes by; it sees them in whole slots."""
    scheduler.main()
    with (logs / "job.csv").open() as file:
        ended = {row["job_id"] for row in csv.DictReader(file)}
    done = [job for job in scheduler.JOBS.job_list if str(job["job_id"]) in ended]
    jobs = {
        str(job["job_id"]): {"end": float(job["real_end_time"]), "met": job["real_end_time"] <= job["ddl"]}
        for job in done
    }
    return {"jobs": jobs}


def main() -> None:
    """Answer the task."""
    task = json.load(sys.stdin)
    here = Path(sys.argv[1]).resolve() / "ElasticFlow" / "scheduler"
    for name in _UNUSED:
        sys.modules[name] = _Nothing(name)
    for name in ("scheduler_client", "scheduler_server"):
        setattr(sys.modules["runtime.rpc"], name, sys.modules[f"runtime.rpc.{name}"])
    os.chdir(here)  # where it looks for its tables
    sys.path.insert(0, str(here))
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        sys.argv = [
            "scheduler.py", f"--cluster_spec=cluster_specs/{_SPECS[task['gpus']]}.csv", "--scheme=elastic",
            f"--trace_file=../traces_for_ElasticFlow/{task['trace']}.csv", "--schedule=ef-accessctrl",
            f"--log_path={folder}", "--simulation=True", "--scheduling_slot=60", "--gpu_type=T4",
        ]  # fmt: skip
        scheduler = importlib.import_module("scheduler")
        answer = simulate(scheduler, Path(folder))
        answer["shares"] = [share(scheduler, case) for case in task["cases"]]
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
