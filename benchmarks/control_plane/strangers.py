"""What do strangers cost a job that trains? ``megatron-elastic bench strangers``.

Two nodes of one job train on this machine. Every few steps somebody else attacks, or nobody does, in turns: connections
with a wrong token, connections that say nothing, and garbage to every port that a process of the job listens on. The
attacker is a process of the lowest priority, so that it does not just take the processor: one elsewhere would not.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import resource
import secrets
import socket
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from common import cli, emit, free_port, load_average, prepare_data, progress, run_root, watch
from undisturbed.overhead import ratio

from megatron_elastic.cluster import wire
from megatron_elastic.cluster.wire.token import TOKEN_VARIABLE, make_token
from megatron_elastic.observe.records import read_metrics

HOST = "127.0.0.1"
NODES = 2
_IDLE = 1500
"""Connections that say nothing, at most."""
_LIMIT = 1.0
"""Seconds that one attempt may take."""
_LISTENS = "0A"
"""State of a TCP socket, in ``/proc/net``."""


def attacks(port: int, ports: Sequence[int]) -> Mapping[str, Callable[[], None]]:
    """What strangers do, by name: to the coordinator's port, and to all that are open."""
    idle: deque[socket.socket] = deque()

    def guess() -> None:
        wire.connect(HOST, port, wire.Credentials(make_token()), _LIMIT, _LIMIT).close()

    def say_nothing() -> None:
        idle.append(socket.create_connection((HOST, port), timeout=_LIMIT))
        if len(idle) > _IDLE:
            idle.popleft().close()

    def garbage() -> None:
        for each in ports:
            with socket.create_connection((HOST, each), timeout=_LIMIT) as sock:
                sock.sendall(secrets.token_bytes(1000))

    return {"wrong token": guess, "idle": say_nothing, "garbage": garbage}


class Attacker:
    """A process that does what it is told until it is told something else; "nobody" is nothing."""

    def __init__(self, port: int, ports: Sequence[int]) -> None:
        here, there = multiprocessing.Pipe()
        self._pipe = here
        self._process = multiprocessing.get_context("fork").Process(target=_attack, args=(there, port, ports))
        self._process.start()

    def go_on(self, name: str) -> int:
        """Do this from now on; returns how often the last thing was done."""
        self._pipe.send(name)
        done = self._pipe.recv()
        assert isinstance(done, int)
        return done

    def close(self) -> None:
        """End the process."""
        self._pipe.send(None)
        self._process.join()


def _attack(pipe: Connection, port: int, ports: Sequence[int]) -> None:
    os.nice(19)
    known, name, done = attacks(port, ports), "nobody", 0
    while True:
        if pipe.poll(None if name == "nobody" else 0):
            name = pipe.recv()
            if name is None:
                return
            pipe.send(done)
            done = 0
        elif name in known:
            with contextlib.suppress(OSError, wire.WireError):
                done += 1
                known[name]()


def listening(pids: Sequence[int]) -> list[int]:
    """TCP ports that these processes and those they have started listen on."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.name))
    family = list(pids)
    for pid in family:
        family += children.get(pid, [])
    sockets = set()
    for pid in family:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                sockets.add(os.readlink(descriptor))
    tables = [Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    lines = [line.split() for table in tables for line in table]
    return sorted({int(line[1].rpartition(":")[2], 16) for line in lines
                   if line[3] == _LISTENS and f"socket:[{line[9]}]" in sockets})


def nodes(root: Path, options: argparse.Namespace, port: int) -> list[list[str]]:
    """The launchers' commands."""
    values = {
        "data-path": prepare_data(), "num-layers": 2, "hidden-size": options.hidden_size, "num-attention-heads": 4,
        "seq-length": 128, "micro-batch-size": 1, "global-batch-size": 4 * NODES, "train-iters": options.steps,
        "lr": 1e-3, "eval-iters": 0, "elastic-run-dir": root / "run",
    }
    flags = [text for name, value in values.items() for text in (f"--{name}", str(value))]
    return [[*cli(), "run", "--nnodes", str(NODES), "--node-rank", str(node), "--nproc-per-node", "1", "--master-addr",
             HOST, "--master-port", str(port), "examples/pretrain_gpt.py", "--elastic", *flags]
            for node in range(NODES)]


def train(root: Path, options: argparse.Namespace, port: int) -> Iterator[int]:
    """Train, and yield the number of each step as it is done."""
    env = {TOKEN_VARIABLE: make_token()}
    first, *others = nodes(root, options, port)
    threads = [threading.Thread(target=lambda command=command: deque(watch(command, root / "node1.out", env), 0))
               for command in others]
    lines = watch(first, root / "node0.out", env)
    for thread in threads:
        thread.start()
    for line in lines:
        if line.startswith("step"):
            yield int(line.split()[1].partition("/")[0])
    for thread in threads:
        thread.join()


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; 0 if the job finished."""
    parser = argparse.ArgumentParser(prog="megatron-elastic bench strangers",
                                     description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, metavar="N",
                        help="turns of each attack (default: %(default)s)")
    parser.add_argument("--window", type=int, default=12, metavar="N",
                        help="steps of a turn; the first two are left out (default: %(default)s)")
    parser.add_argument("--hidden-size", type=int, default=128, metavar="N", help="default: %(default)s")
    options = parser.parse_args(argv)
    if options.rounds < 1 or options.window < 3:
        parser.error("--rounds must be at least 1 and --window at least 3")
    names = ["nobody", "wrong token", "idle", "garbage"]
    options.steps = options.window * (1 + options.rounds * len(names))
    load = load_average()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with run_root() as root:
        port = free_port()
        tries, ports = attack(train(root, options, port), names, options.window, port)
        metrics = read_metrics(root / "run")
    times: dict[str, list[list[float]]] = {name: [] for name in names}
    for turn in range(1, 1 + options.rounds * len(names)):
        steps = range(turn * options.window + 3, (turn + 1) * options.window + 1)
        times[names[(turn - 1) % len(names)]].append([metrics[step]["step_ms"] for step in steps])
    emit("strangers", argv, {
        "ports": ports,
        "step_ms": {name: round(statistics.median(t for each in rounds for t in each), 1)
                    for name, rounds in times.items()},
        "ratio": {name: ratio(times, name, "nobody", "ratio") for name in names[1:]},
        "tries_a_second": {name: round(statistics.median(tries[name]), 1) for name in names[1:]},
        "load_before": load,
    })
    return 0


def attack(
    steps: Iterator[int], names: Sequence[str], window: int, port: int
) -> tuple[Mapping[str, list[float]], int]:
    """Follow the job, and let another of ``names`` begin after every ``window`` steps.

    Returns how often each was done a second, by turn, and the number of open ports.
    """
    attacker: Attacker | None = None
    ports: list[int] = []
    tries: dict[str, list[float]] = {name: [] for name in names}
    name, since = "", 0.0
    try:
        for step in steps:
            turn, rest = divmod(step, window)
            if rest or not turn:
                continue
            if attacker is None:
                ports = listening([os.getpid()])
                progress(f"the job trains; ports {ports} are open")
                attacker = Attacker(port, ports)
            before, name = name, names[(turn - 1) % len(names)]
            done = attacker.go_on(name)
            if before:
                tries[before].append(done / (time.monotonic() - since))
                progress(f"step {step}: {before} is over ({done} tries); {name}")
            since = time.monotonic()
    finally:
        if attacker is not None:
            attacker.close()
    return tries, len(ports)
