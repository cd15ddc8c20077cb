"""Ward: a job in the fleet's care: what was asked for, what is known of it, and the launches that it is made of."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path

from megatron_elastic.cluster.wire.token import TOKEN_VARIABLE, make_token
from megatron_elastic.fleet.job import Job
from megatron_elastic.fleet.managers.launch import OUTPUT
from megatron_elastic.fleet.managers.manager import HERE, Launch
from megatron_elastic.fleet.observation import Running
from megatron_elastic.fleet.running.journal import Entry, Node
from megatron_elastic.fleet.running.progress import Progress, table_of
from megatron_elastic.fleet.running.submission import CANCEL, Submission
from megatron_elastic.fleet.speed_table import SpeedTable

_TOKEN = "token"
_UNKNOWN_S = 3600.0
"""That a job is taken to run where nobody has said."""
_MOST_FAILURES = 3
"""Nodes in a row that did not come to join a job, after which it is not grown any more."""
_LAST_BYTES = 4096


class Ward:
    """``entry`` is what the journal has; all else is known from ``folder``, the job's own."""

    def __init__(self, entry: Entry, folder: Path) -> None:
        self.entry = entry
        self.folder = folder
        self.run_dir = folder / "run"
        self.progress = Progress(self.run_dir)
        self.known = False
        """Whether its records could be read when it was last looked at."""
        self.unreadable = ""
        """Why they could not."""

    @property
    def name(self) -> str:
        """Of the job."""
        return self.entry.name

    @property
    def submission(self) -> Submission:
        """What was asked for; only of a job that could be read."""
        assert self.entry.submission is not None, f"{self.name} was refused"
        return self.entry.submission

    @property
    def cancelled(self) -> bool:
        """Whether somebody wants it to end."""
        return (self.folder / CANCEL).exists()

    @property
    def job(self) -> Job:
        """As policies see it."""
        asked = self.submission
        duration = _UNKNOWN_S if asked.seconds is None else asked.seconds
        return Job(self.entry.index, self.name, asked.submitted, duration, asked.devices, float("inf"),
                   most=asked.max_devices)  # fmt: skip

    @property
    def running(self) -> Running | None:
        """As policies see it, if it can be told to have another number of devices."""
        entry = self.entry
        if entry.phase != "running" or not self.submission.elastic or entry.trouble or not self.known:
            return None
        remaining = self.progress.remaining(self.submission.devices)
        if remaining is None or entry.started is None:
            return None
        return Running(self.job, entry.target, remaining, entry.started, entry.changes)

    @property
    def ends(self) -> float:
        """When it ends, as far as that is known, in seconds since 1970."""
        return (self.entry.started or self.submission.submitted) + self.job.duration

    def table(self) -> SpeedTable:
        """How fast it is on which numbers of devices, by what was measured."""
        given, most = self.submission.devices, self.submission.max_devices
        speeds = self.progress.speeds()
        if most is None or given not in speeds:
            return SpeedTable.rigid(given)
        if self.entry.failures >= _MOST_FAILURES:
            most = max(given, min(most, self.entry.target))
        return table_of(speeds, given, most, self.progress.column, self.progress.predicted)

    # ---- launches ------------------------------------------------------------------------------

    def launch(self, node: Node, host: str | None = None) -> Launch:
        """The launch of a node. ``host``: where the first one runs, which those that join must reach."""
        asked = self.submission
        command, env = list(asked.command), {}
        if asked.elastic:
            env = {TOKEN_VARIABLE: self._token()}
            # As many nodes of this one's size as the job began with, so that it is told as large as it was; the first
            # one had all of them. No store, as only the first one can coordinate.
            command = [
                sys.executable, "-m", "megatron_elastic.cli", "run", "--nnodes", str(asked.devices // node.devices),
                "--node-rank", str(node.rank), "--nproc-per-node", str(node.devices),
                "--master-addr", host or HERE, "--master-port", str(self.entry.port),
                *command, "--elastic-store", "alone", "--elastic-run-dir", str(self.run_dir),
            ]  # fmt: skip
        return Launch(f"{self.name}/{node.rank}", self.folder / "nodes" / str(node.rank), command, node.devices,
                      node.slots, Path(asked.cwd), asked.elastic, env)  # fmt: skip

    def add(self, devices: int, slots: list[int], now: float) -> Node:
        """A node more, which is to be launched as soon as that is in the journal."""
        node = Node(self.entry.next_node, devices, slots, now)
        # Nodes that come later are numbered beyond all that the job could have begun with.
        self.entry.next_node = max(self.submission.devices, self.entry.next_node + 1)
        self.entry.nodes.append(node)
        return node

    def last_line(self, node: Node) -> str:
        """The last line that a launch has printed."""
        try:
            with (self.folder / "nodes" / str(node.rank) / OUTPUT).open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - _LAST_BYTES))
                lines = [line.strip() for line in file.read().decode(errors="replace").splitlines()]
        except OSError:
            return ""
        told = [line for line in lines if line and not line.startswith("records and logs are in ")]
        return told[-1][:500] if told else ""

    def _token(self) -> str:
        """The job's secret, made when it is first needed, for its owner alone to read. Raises OSError."""
        path = self.folder / _TOKEN
        try:
            return path.read_text()
        except FileNotFoundError:
            token = make_token()
            fresh = path.with_name(f".{_TOKEN}.{secrets.token_hex(4)}")
            with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(token)
            os.replace(fresh, path)
            return token

    def figures(self) -> Mapping[str, object]:
        """How far it is, for people and programs."""
        if self.entry.submission is None or not self.submission.elastic:
            return {}
        return {
            "run_dir": str(self.run_dir),
            "step": self.progress.steps,
            "total_steps": self.progress.total,
            "tokens_per_s": {str(ranks): round(speed, 1) for ranks, speed in self.progress.speeds().items()},
        }
