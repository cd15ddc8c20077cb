"""Fleets of real jobs on slots of this machine, for tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from megatron_elastic import cli
from megatron_elastic.fleet.managers.local import Local
from megatron_elastic.fleet.managers.manager import Launch, Manager
from megatron_elastic.fleet.running import live
from megatron_elastic.fleet.running.daemon import Daemon
from megatron_elastic.fleet.running.journal import Journal
from tests.jobs import environment

LIMIT = 120.0
"""Seconds that anything may take; many times what it needs."""
_LOOK = 0.05
"""Seconds between two looks: a fleet looks at its jobs now and then, too."""


def until(what: str, holds: Callable[[], bool]) -> None:
    """Wait until that holds."""
    limit = time.monotonic() + LIMIT
    while not holds():
        assert time.monotonic() < limit, f"not within {LIMIT:g} s: {what}"
        time.sleep(_LOOK)


class Fleet:
    """A fleet's folder, and, if somebody looks after it, who does: in this process, turn by turn, or another one."""

    def __init__(self, folder: Path, slots: int) -> None:
        self.folder = folder
        self.slots = slots
        self.journal = Journal(folder)
        self.manager: Manager = Local(slots)
        self.said: list[str] = []
        self._daemon: Daemon | None = None
        self._process: subprocess.Popen[str] | None = None

    def submit(self, name: str, *command: str, devices: int = 1, most: int | None = None) -> None:
        """Give it a job."""
        flags = ["--name", name, "--devices", str(devices), *([] if most is None else ["--max-devices", str(most)])]
        assert cli.main(["fleet", "submit", str(self.folder), *flags, "--", *command]) == 0

    def holder(self, name: str) -> Path:
        """Give it a rigid job that goes on until ``let_end``, and then has that exit code."""
        pipe, noted = self.folder / f"{name}.pipe", self.folder / f"{name}.noted"
        self.folder.mkdir(exist_ok=True)
        os.mkfifo(pipe)
        self.submit(name, "bash", "-c", f"echo $$ >> {noted}; exit $(cat {pipe})")
        return noted

    def let_end(self, name: str, code: int = 0) -> None:
        """As soon as it runs."""
        (self.folder / f"{name}.pipe").write_text(f"{code}\n")

    def begin(self, limit: float = 60.0) -> Daemon:
        """Look after it in this process, from now on."""
        self.close()
        self.folder.mkdir(exist_ok=True)
        self._daemon = Daemon(self.journal, self.manager, "elastic", limit, self.said.append)
        return self._daemon

    def until(self, what: str, holds: Callable[[], bool]) -> None:
        """Turn until that holds."""
        assert self._daemon is not None
        turn = self._daemon.turn

        def look() -> bool:
            turn()
            return holds()

        until(f"{what}: {self.said[-10:]}", look)

    def run(self, *flags: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Look after it in a process of its own."""
        where = () if "--kubernetes" in flags else ("--slots", str(self.slots))
        command = [sys.executable, "-m", "megatron_elastic.cli", "fleet", "run", str(self.folder), *where,
                   "--every", "0.05", *flags]  # fmt: skip
        self._process = subprocess.Popen(command, env={**environment(), **(env or {})}, text=True,
                                         stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        return self._process

    def status(self) -> dict[str, Any]:
        """As ``fleet status --json`` has it."""
        return live.status(self.folder)

    def job(self, name: str) -> dict[str, Any]:
        """Of a job; empty until it is taken in."""
        found: dict[str, Any] = self.status()["jobs"].get(name, {})
        return found

    def phase(self, name: str) -> str:
        """What a job does."""
        return str(self.job(name).get("phase"))

    def told(self, kind: str, job: str | None = None) -> list[dict[str, Any]]:
        """What has happened."""
        return [event for event in self.journal.events() if event["kind"] == kind and job in (None, event.get("job"))]

    def run_dir(self, name: str) -> Path:
        """Records of an elastic job."""
        return self.journal.job(name) / "run"

    def process(self, name: str, node: int) -> int:
        """Process that looks after a launch; its child is the command."""
        path = self.journal.job(name) / "nodes" / str(node) / "process.json"
        return int(json.loads(path.read_text())["pid"])

    def close(self) -> None:
        """Nobody looks after it any more; jobs go on."""
        if self._daemon is not None:
            self._daemon.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()
        self._daemon, self._process = None, None

    def end(self) -> None:
        """Nothing of it is left."""
        self.close()
        launches = [
            Launch(f"{name}/{node.rank}", self.journal.job(name) / "nodes" / str(node.rank), [], 1, [], self.folder)
            for name in self.journal.names() if (entry := self.journal.read_entry(name)) is not None
            for node in entry.nodes
        ]  # fmt: skip
        local = Local(self.slots)
        for launch in launches:
            with suppress(OSError):
                local.stop(launch, at_once=True)
        until("all launches have ended",
              lambda: all(each.state in ("ended", "absent") for each in local.look(launches).standings.values()))
        if isinstance(self.manager, Local):
            self.manager.look([])  # reaps those that it has started


@contextmanager
def fleet(folder: Path, slots: int) -> Iterator[Fleet]:
    """A fleet in ``folder``, of which nothing is left at the end."""
    made = Fleet(folder, slots)
    try:
        yield made
    finally:
        made.end()
