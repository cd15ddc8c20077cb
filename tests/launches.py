"""Launches: real launchers of programs without a model, and what becomes of them."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_elastic.cluster import wire
from megatron_elastic.observe.records import read_events, read_metrics
from tests.jobs import PATIENT
from tests.nursery import await_exits, output_until, rest_of

PROGRAMS = Path(__file__).parent / "cluster_programs"
MARK = "MEGATRON_ELASTIC_TEST_MARK"
_LIMIT = 100.0
"""Seconds for which a launcher may print nothing, and its processes take to end; some fifty times what they need."""
_LOOK = 1.0
"""Seconds between two looks whether launchers are there."""
TOKEN = "a token for tests that nobody would guess"


class Run:
    """One launcher process and what it left behind."""

    def __init__(self, process: subprocess.Popen[str], run_dir: Path) -> None:
        self.process = process
        self.run_dir = run_dir
        self.output = ""

    def read_until(self, text: str) -> str:
        """Read the launcher's output up to the line with ``text``, and return that line."""
        output, line = output_until(self.process, text, _LIMIT)
        self.output += output
        return line

    def finish(self, code: int = 0) -> str:
        """Wait for the launcher and check its exit code; returns everything it printed."""
        self.output += rest_of(self.process, _LIMIT)
        assert self.process.returncode == code, self.output
        return self.output

    def pid(self, rank: int) -> int:
        """Process of a rank, as it printed it."""
        return int((self.run_dir / "logs" / f"rank{rank}.log").read_text().split()[1])

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in read_events(self.run_dir) if event["kind"] == kind]

    def steps(self) -> list[int]:
        return list(read_metrics(self.run_dir))


class Launch:
    """Starts launchers; ``start`` takes the launcher's own flags in ``flags`` and the program's in ``arguments``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.mark = uuid.uuid4().hex
        self.env = {**os.environ, MARK: self.mark, "PYTHONPATH": str(PROGRAMS.parents[1])}
        self.env["MEGATRON_ELASTIC_PRELOAD"] = ""  # these programs need no torch
        self.runs: list[Run] = []
        (path / "meet").mkdir()
        os.mkfifo(path / "meet" / "go")
        os.mkfifo(path / "meet" / "told")
        self.told = os.open(path / "meet" / "told", os.O_RDWR)

    def start(self, program: str, *arguments: str, flags: tuple[str, ...] = (), name: str = "run") -> Run:
        run_dir = self.path / name
        command = [sys.executable, "-m", "megatron_elastic.cli", "run", *flags, str(PROGRAMS / program), *arguments,
                   "--elastic-run-dir", str(run_dir)]
        process = subprocess.Popen(command, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                   stdin=subprocess.DEVNULL, start_new_session=True)
        self.runs.append(Run(process, run_dir))
        return self.runs[-1]

    def members(self, *acts: str, ranks: int = 4, steps: int = 4, extra: tuple[str, ...] = ()) -> Run:
        return self.start("member.py", "--elastic", *self.member_flags(*acts, steps=steps), *extra,
                          flags=("--nproc-per-node", str(ranks)))

    def member_flags(self, *acts: str, steps: int = 4) -> list[str]:
        at = [flag for act in acts for flag in ("--at", act)]
        return [*PATIENT, "--meet", str(self.path / "meet"), "--steps", str(steps), *at]

    def go(self) -> None:
        """Let the rank with the act ``wait`` go on."""
        (self.path / "meet" / "go").write_text("go")

    def hear(self, count: int) -> None:
        """Wait until ``count`` ranks have done the act ``tell``. Nobody does any more when all launchers have ended."""
        while count:
            if select.select([self.told], [], [], _LOOK)[0]:
                count -= len(os.read(self.told, count))
            elif all(run.process.poll() is not None for run in self.runs):
                raise AssertionError("\n".join(run.output + rest_of(run.process, _LIMIT) for run in self.runs))

    def processes(self) -> list[int]:
        """Processes of these launchers that are alive, found by their environment."""
        found = []
        for path in Path("/proc").iterdir():
            if path.name.isdecimal():
                try:
                    if self.mark.encode() in (path / "environ").read_bytes():
                        found.append(int(path.name))
                except OSError:
                    continue
        return found


@contextlib.contextmanager
def launches(path: Path) -> Iterator[Launch]:
    """A ``Launch`` in ``path``; in the end its launchers are killed, and nothing of them may be left."""
    launch = Launch(path)
    yield launch
    for run in launch.runs:
        if run.process.poll() is None:
            run.process.kill()
        run.process.wait()
        assert run.process.stdout is not None
        run.process.stdout.close()
    os.close(launch.told)
    await_exits(launch.processes(), _LIMIT)  # what killed launchers have started ends by itself
    assert launch.processes() == []


def family(pid: int) -> list[int]:
    """A process and all below it, parents first."""
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [pid, *(member for child in children for member in family(child))]


_ports = itertools.cycle(range(10_000, 32_000))
for _ in range(os.getpid() * 97 % 22_000):  # elsewhere in each process, as tests may run in several
    next(_ports)


def free_port() -> int:
    """A port that nobody listens on, and that the kernel gives to nobody who asks for any one."""
    while True:
        port = next(_ports)
        with contextlib.suppress(OSError), socket.socket() as sock:
            sock.bind(("127.0.0.1", port))
            return port


def start_nodes(launch: Launch, *acts: str, ranks: int, extra: tuple[str, ...] = ()) -> tuple[Run, Run]:
    """Start a job of two nodes with ``ranks`` ranks each; returns the first and the second one's launcher."""
    launch.env[wire.TOKEN_VARIABLE] = TOKEN
    port = str(free_port())
    first, second = (
        launch.start("member.py", "--elastic", *launch.member_flags(*acts), *extra, name=f"node{node}",
                     flags=("--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", str(ranks),
                            "--master-addr", "127.0.0.1", "--master-port", port))
        for node in (0, 1)
    )
    return first, second
