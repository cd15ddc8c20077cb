"""Slurm: the devices of a partition. A launch is a batch job of its own, on one node; others submit theirs beside it.

Slurm decides who starts; the fleet sees who waits (``squeue --json``) and what there is (``sinfo --json``), lets
elastic jobs grow by submitting further batch jobs, whose task is the launcher that joins, and lets them give back by
draining these, which then end. All nodes must share the fleet's folder. The form of the JSON is that of Slurm 22.05.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_elastic.fleet.managers.launch import OUTPUT, exit_code, keeper, write
from megatron_elastic.fleet.managers.manager import HERE, Launch, ManagerError, Other, Pool, Scheduler, Standing

COUNTED = ("gpu", "cpu")
"""What a device can be."""
JOB = "slurm.json"
"""In a launch's folder: the number of its batch job."""
_LIMIT_S = 20.0
"""That one of Slurm's commands may take."""
_WAITING = ("PENDING", "REQUEUED", "SUSPENDED")
_RUNNING = ("RUNNING", "CONFIGURING", "COMPLETING", "STAGE_OUT", "SIGNALING", "STOPPED")
_AWAY = ("down", "error", "unknown", "future")
_AWAY_FLAGS = ("DRAIN", "NOT_RESPONDING", "MAINTENANCE", "POWERED_DOWN")


class Slurm(Scheduler):
    """The partition ``partition``, whose devices are what is ``counted`` (see ``Manager``)."""

    def __init__(self, partition: str, counted: str) -> None:
        self._partition, self._counted = partition, counted
        self.kind = f"Slurm's partition {partition}"

    def look(self, launches: Sequence[Launch]) -> Pool:
        """What there is, by what Slurm says of nodes and jobs."""
        nodes, jobs = self._told("sinfo", "nodes"), self._told("squeue", "jobs")
        try:
            here = [job for job in jobs if self._partition in job["partition"].split(",")]
            ours = {launch.name: self._standing(launch, jobs) for launch in launches}
            numbers = {_number(launch) for launch in launches}
            own = [node for node in nodes if self._partition in node["partitions"]]
            there = [node for node in own
                     if node["state"] not in _AWAY and not set(_AWAY_FLAGS) & set(node["state_flags"])]  # fmt: skip
            return Pool(self._total(there), self._total(own), ours,
                        [self._other(job) for job in here
                         if job["job_id"] not in numbers and job["job_state"] in _WAITING + _RUNNING])  # fmt: skip
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ManagerError(f"it says what is not understood: {type(error).__name__} {error}") from None

    def start(self, launch: Launch) -> None:
        """Submit it. Its first process starts nothing that was started before, so that submitting twice is harmless."""
        launch.folder.mkdir(parents=True, exist_ok=True)
        words = " ".join(shlex.quote(word).replace(HERE, "'\"$SLURMD_NODENAME\"'") for word in launch.command)
        devices = "--gpus-per-node" if self._counted == "gpu" else "--cpus-per-task"
        number = _ask(
            "sbatch", "--parsable", f"--partition={self._partition}", f"--job-name={_job_name(launch)}", "--nodes=1",
            "--ntasks=1", f"{devices}={launch.devices}", f"--chdir={launch.cwd}", "--no-requeue", "--export=ALL",
            f"--output={launch.folder / OUTPUT}", "--open-mode=append",
            env=launch.env,
            text=f"#!/bin/sh\nexec {shlex.join(keeper(launch.folder, launch.ends_its_own))} {words}\n",
        )  # fmt: skip
        try:
            write(launch.folder / JOB, {"job": int(number.partition(";")[0])})
        except (OSError, ValueError) as error:
            raise ManagerError(f"{launch.name} was submitted as {number!r}, which cannot be kept: {error}") from None

    def stop(self, launch: Launch, at_once: bool) -> None:
        """SIGTERM to what looks after the command, which passes it on; or SIGTERM and SIGKILL to all of it."""
        number = _number(launch)
        if number is None:
            raise ManagerError(f"{launch.name} is only just being submitted")
        _ask("scancel", "--state=PENDING", str(number))
        _ask("scancel", *([] if at_once else ["--batch", "--signal=TERM"]), str(number))

    def _told(self, command: str, key: str) -> list[dict[str, Any]]:
        try:
            told = json.loads(_ask(command, "--json"))
            found: list[dict[str, Any]] = told[key]
        except (ValueError, KeyError, TypeError):
            raise ManagerError(f"{command} --json says nothing of {key}") from None
        return found

    def _total(self, nodes: Sequence[Mapping[str, Any]]) -> int:
        return sum(gpus_in(node["gres"]) if self._counted == "gpu" else int(node["cpus"]) for node in nodes)

    def _other(self, job: Mapping[str, Any]) -> Other:
        waits = job["job_state"] in _WAITING
        return Other(str(job["job_id"]), self._devices(job), float(job["submit_time"]),
                     None if waits else float(job["start_time"]), float(job["end_time"]))  # fmt: skip

    def _devices(self, job: Mapping[str, Any]) -> int:
        if self._counted == "cpu":
            return int(job["cpus"])
        if job["gres_detail"]:
            return sum(map(gpus_in, job["gres_detail"]))
        return gpus_in(job["tres_per_job"]) or gpus_in(job["tres_per_node"]) * int(job["node_count"])

    def _standing(self, launch: Launch, jobs: Sequence[Mapping[str, Any]]) -> Standing:
        if (code := exit_code(launch.folder)) is not None:
            return Standing("ended", code)
        number = _number(launch)
        if number is None:  # submitted by one that was killed before it had written that down?
            found = [job for job in jobs if job["name"] == _job_name(launch)]
            if not found:
                return Standing("absent")
            number = int(found[0]["job_id"])
            write(launch.folder / JOB, {"job": number})
        job = next((job for job in jobs if job["job_id"] == number), None)
        if job is None or job["job_state"] not in _WAITING + _RUNNING:
            return Standing("ended")
        if job["job_state"] in _WAITING:
            return Standing("waiting")
        return Standing("running", host=job["batch_host"])


def gpus_in(gres: str) -> int:
    """GPUs of what Slurm calls generic resources: ``gpu:8``, ``gres:gpu:a100:4``, ``gpu:a100:8(S:0-1),nic:2``."""
    return sum(int(count) for part in re.sub(r"\([^)]*\)", "", gres).split(",") if "gpu" in part.split(":")
               for count in part.split(":")[-1:] if count.isdecimal())  # fmt: skip


def _job_name(launch: Launch) -> str:
    """Of its batch job; another fleet's has another folder."""
    return f"megatron-elastic {launch.folder}"


def _number(launch: Launch) -> int | None:
    try:
        return int(json.loads((launch.folder / JOB).read_text())["job"])
    except (OSError, ValueError, KeyError):
        return None


def _ask(*command: str, env: Mapping[str, str] | None = None, text: str = "") -> str:
    """What one of Slurm's commands prints. Raises ManagerError."""
    try:
        done = subprocess.run(command, input=text, env={**os.environ, **(env or {})}, capture_output=True, text=True,
                              timeout=_LIMIT_S, check=False)  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ManagerError(f"{command[0]} does not answer: {error}") from None
    if done.returncode:
        raise ManagerError(f"{command[0]}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout.strip()
