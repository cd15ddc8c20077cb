"""Jobs whose hosts are network namespaces of this machine, and are lost."""

from __future__ import annotations

import itertools
import queue
import subprocess
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from launcher import Heard, Launcher
from namespaces import Host, Hosts
from programs.waiting_gpt import VARIABLE

from megatron_elastic import cli
from megatron_elastic.cluster import wire
from megatron_elastic.cluster.wire.address import read_address
from megatron_elastic.observe.records import read_events, read_metrics
from tests.jobs import ROOT, Grid, Job, Jobs
from tests.launches import TOKEN

NODES = 3
GRID = Grid(tp=1, pp=2, steps=220, ranks=2 * NODES)
FLAGS = (*GRID.flags, "--num-layers", "2", "--micro-batch-size", "2", "--global-batch-size", "12",
         "--elastic-slices", "3", "--elastic-heartbeat-timeout", "2.5")  # fmt: skip
EVEN = "slices and grains are even over {} ranks, and all copies are there"
FOLLOW = "follow from step"
SEATED = "this node has a lost member's seat"
LOST = "lost ranks"
LED = "another node takes over if this one is lost"
SCRIPT = ROOT / "benchmarks" / "programs" / "waiting_gpt.py"
_DEVICE_MS = "30"
"""What a grain's forward takes besides: what the tests do to hosts takes seconds, and a quick machine is not to have
trained all steps meanwhile."""
_LIMIT = 240.0
"""Seconds that anything may take; many times what it needs where the processors are this test's own."""
COORDINATES = "this node coordinates from now on"


@dataclass(frozen=True, slots=True)
class Loss:
    """Seconds from the kill until another node coordinated, and until the next step was committed."""

    election: float
    commit: float

    def __str__(self) -> str:
        return f"election {self.election:.2f} s, next committed step after {self.commit:.2f} s"


class LostHosts:
    """One job on hosts that can be killed.

    Args:
        jobs: says how a job is started.
        hosts: where; the first ones are the job's.
        extra: further flags.
        nodes: how many it begins with.
        clocks: how many seconds the clocks of the first of them are ahead.
    """

    def __init__(
        self, jobs: Jobs, hosts: Hosts, *extra: str, nodes: int = NODES, clocks: Sequence[int] = ()
    ) -> None:
        self.run_dir = jobs.folder / uuid.uuid4().hex[:8]
        self.nodes: list[Launcher] = []
        self._heard: Heard = queue.Queue()
        self._jobs = jobs
        self._hosts = hosts
        self._flags = (*FLAGS, *extra)
        self._begins_with = nodes
        places = [hosts.add(clock) for clock, _ in itertools.zip_longest(clocks, range(nodes), fillvalue=0)]
        for place in places:
            self._start(place, places[0].address, 29500)

    def come(self) -> Launcher:
        """A node comes to the running job, on a host that is new."""
        where = read_address(self.run_dir)
        return self._start(self._hosts.add(), where.host, where.port)

    def until(self, *texts: str) -> Launcher:
        """Wait until nodes have printed lines with all ``texts``, in any order; return who printed the last."""
        limit, missing = time.monotonic() + _LIMIT, set(texts)
        while True:
            try:
                node, line = self._heard.get(timeout=limit - time.monotonic())
            except (queue.Empty, ValueError):
                raise AssertionError(f"no node printed {sorted(missing)} within {_LIMIT:g} s") from None
            missing -= {text for text in missing if text in line}
            if not missing:
                return node

    def finish(self, node: Launcher) -> None:
        """It ends well."""
        assert node.process.wait(_LIMIT) == 0, node.output

    def cut_off(self, node: Launcher, *texts: str) -> float:
        """Nothing gets to a node's host or from it until nodes have printed ``texts``. Returns the time since when it
        does again.
        """
        self._hosts.cut(node.address)
        self.until(*texts)
        self._hosts.cut(node.address, off=False)
        return time.time()

    def back_after(self, since: float) -> float:
        """Seconds from then until ranks that had come took part."""
        entered = (event["time"] for event in read_events(self.run_dir)
                   if event["kind"] == "switched" and event["entered"] and event["time"] > since)
        return next(entered) - since

    def losses(self, *killed: float) -> list[Loss]:
        """What each kill of a coordinator cost."""
        events = read_events(self.run_dir)
        found = []
        for when, until in zip(killed, (*killed[1:], float("inf")), strict=True):
            after = [event for event in events if when < event["time"] < until]
            took = next(event for event in after if event["kind"] == "took_over")
            fault = next(event for event in after if event["kind"] == "fault")
            back = next(event for event in after if event["kind"] == "recovered")
            commit = fault["exited_at"] + back["mttr_ms"] / 1000
            found.append(Loss(took["time"] - when, commit - when))
        return found

    def assert_same(self, reference: Job) -> None:
        """It trained bit for bit like ``reference``, each step once."""
        output = "".join(node.output for node in self.nodes)
        assert cli.main(["compare", str(self.run_dir), str(reference.run_dir)]) == 0, output
        assert list(read_metrics(self.run_dir)) == list(read_metrics(reference.run_dir))

    def end(self) -> str:
        """Whatever is left ends; returns what all have printed."""
        for node in self.nodes:
            node.end()
        return "\n".join(f"---- node {number}\n{node.output}" for number, node in enumerate(self.nodes))

    def _start(self, host: Host, address: str, port: int) -> Launcher:
        rank = str(len(self.nodes))
        launcher = ("--nnodes", str(self._begins_with), "--node-rank", rank, "--master-addr", address,
                    "--master-port", str(port))
        command = self._jobs.command(*self._flags, run_dir=self.run_dir, ranks=2, launcher=launcher, script=SCRIPT)
        env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), wire.TOKEN_VARIABLE: TOKEN, VARIABLE: _DEVICE_MS}
        self.nodes.append(Launcher(command, self._heard, env, host))
        return self.nodes[-1]


@contextmanager
def lost_hosts(
    jobs: Jobs, hosts: Hosts, *extra: str, nodes: int = NODES, clocks: Sequence[int] = ()
) -> Iterator[LostHosts]:
    """A job on so many of ``hosts``, with ``clocks``; what it printed is printed in the end, and nothing of it left."""
    job = LostHosts(jobs, hosts, *extra, nodes=nodes, clocks=clocks)
    try:
        yield job
    finally:
        print(job.end())


@contextmanager
def etcd(host: Host, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """An etcd server on a host; keeps what it has in ``folder``, so that it can be started there again."""
    client, peer = f"http://{host.address}:2379", f"http://{host.address}:2380"
    process = subprocess.Popen(
        host.command(["etcd", "--data-dir", str(folder),
                      "--listen-client-urls", client, "--advertise-client-urls", client,
                      "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
                      "--initial-cluster", f"default={peer}", "--logger", "zap", "--log-level", "error"]),
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()
