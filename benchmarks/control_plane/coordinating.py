"""Coordinating: the real coordinator, with its door and its records, in a process of its own."""

from __future__ import annotations

import gc
import os
import sys
import time
from pathlib import Path
from typing import Any

from control_plane.pure import SETTINGS, settled, took_over
from megatron_elastic.cluster.coordination.coordinator import Coordinator
from megatron_elastic.cluster.coordination.server import Server
from megatron_elastic.cluster.protocol import Job
from megatron_elastic.cluster.protocol.events import Begun, Event
from megatron_elastic.cluster.recording.recorder import Recorder
from megatron_elastic.cluster.recording.screen import Screen
from megatron_elastic.cluster.wire import Credentials
from megatron_elastic.config import ElasticConfig
from megatron_elastic.observe.records import newest_step

HOST = "127.0.0.1"
_CONFIG = ElasticConfig(
    elastic=True, start_timeout=SETTINGS.start_timeout, suspect_timeout=SETTINGS.suspect_timeout,
    heartbeat_timeout=SETTINGS.heartbeat_timeout, report_timeout=SETTINGS.report_timeout,
    wait_timeout=SETTINGS.wait_timeout,
)  # fmt: skip


async def begin(run_dir: Path, ranks: int, nodes: int, credentials: Credentials) -> Coordinating:
    """A coordinator of so many ranks, which listens. What it prints goes nowhere."""
    return Coordinating(run_dir, ranks, nodes, credentials, Begun(now=time.time(), torch_port=1, key=bytes(32)))


async def succeed(run_dir: Path, ranks: int, nodes: int, credentials: Credentials) -> Coordinating:
    """One that takes over from that."""
    return Coordinating(run_dir, ranks, nodes, credentials, took_over(newest_step(run_dir)))


class Coordinating:
    """What the coordinator's process obeys."""

    def __init__(self, run_dir: Path, ranks: int, nodes: int, credentials: Credentials, first: Event) -> None:
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 - until this process ends
        self._screen = Screen()
        self._records = Recorder(run_dir, self._screen.say)
        self.coordinator = Coordinator(Job.new(SETTINGS, ranks), self._records, self._screen.say)
        self._server = Server(_CONFIG, credentials, Path("none"), self._screen.say)
        self._server.coordinator = self.coordinator
        self._port = self._server.listen(HOST, 0, nodes)
        self.coordinator.post(first)

    def port(self) -> int:
        """Where it listens."""
        return self._port

    def state(self) -> dict[str, Any]:
        """How far the job is."""
        job = self.coordinator.job
        if job.outcome is not None:
            raise RuntimeError(f"the job has ended: {job.outcome.reason}")
        change = job.change
        return {
            "epoch": None if job.layout is None else job.layout.epoch,
            "recovering": job.recovery is not None,
            "settled": job.layout is not None and settled(job),
            "unsettled": len(job.unsettled),
            "announced": change.layout.epoch if change is not None and change.announced else None,
            "members": 0 if job.layout is None else len(job.layout.ranks),
            "written": 0 if job.ledger is None else job.ledger.written,
        }

    def quiet(self) -> None:
        """Collect the garbage of what was before."""
        gc.collect()

    async def end(self) -> None:
        """The job is over."""
        self.coordinator.end(True, "the benchmark is over")
        await self._server.close(1.0)
        self._records.close(60.0)
        self._screen.close(1.0)
