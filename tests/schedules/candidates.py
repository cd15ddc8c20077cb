"""Stand-ins for agents that campaign for leadership, and the stores that they do it in."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from namespaces import Host, Hosts

from tests.launches import free_port

PATIENCE = 60.0
"""Seconds after which something that must happen counts as not happening, on a busy machine too."""
TOKEN = "a token of the tests that is long enough"


class Candidate:
    """One process that runs ``cluster_programs/candidate.py``, on this machine or on a host of its own."""

    def __init__(self, store: str, nodes: int, address: str, limit: float, token: str = TOKEN,
                 host: Host | None = None) -> None:
        self.address = address
        self.host = host
        self.told: list[dict[str, Any]] = []
        where = "127.0.0.1" if host is None else host.address
        given = {"store": store, "nodes": nodes, "job": "test", "limit": limit, "address": address, "token": token,
                 "host": where}
        command = [sys.executable, "-m", "tests.cluster_programs.candidate", json.dumps(given)]
        self._process = subprocess.Popen(command if host is None else host.command(command),
                                         stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        self._rest = b""
        self.raft = ""
        if store == "embedded":
            self.raft = f"{where}:{self.hear(lambda told: 'port' in told)['port']}"

    def order(self, what: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what).encode() + b"\n")

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Order something, and return what it tells when that is done."""
        before = len(self.told)
        self.order({"do": do, **arguments})
        return self.hear(lambda told: told.get("did") == do, since=before)

    def hear(self, wanted: Callable[[dict[str, Any]], bool], since: int = 0) -> dict[str, Any]:
        """The first of the things told from number ``since`` on that is ``wanted``; waits for it."""
        deadline = time.monotonic() + PATIENCE
        seen = since
        while True:
            for told in self.told[seen:]:
                seen += 1
                if wanted(told):
                    return told
            assert self._read(max(0.0, deadline - time.monotonic())), f"{self.address} told only {self.told}"

    def drain(self) -> list[dict[str, Any]]:
        """All that it has told by now."""
        while self._read(0):
            pass
        return self.told

    def _read(self, timeout: float) -> bool:
        out = self._process.stdout
        assert out is not None
        if not select.select([out], [], [], timeout)[0]:
            return False
        data = os.read(out.fileno(), 1 << 20)
        *lines, self._rest = (self._rest + data).split(b"\n")
        self.told += [json.loads(line) for line in lines]
        return bool(data)

    def stop(self) -> None:
        os.kill(self._process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)

    def go_on(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def end(self) -> int:
        """Let it end by itself; return its exit code."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        code = self._process.wait(PATIENCE)
        self._process.stdout.close()
        return code

    def close(self) -> None:
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


class Group:
    """Candidates for the leadership of one job."""

    def __init__(self, store: str, nodes: int, limit: float, hosts: Hosts | None) -> None:
        self._store, self._nodes, self._limit, self._hosts = store, nodes, limit, hosts
        self.all: list[Candidate] = []
        self.members: list[str] = []

    def start(self, members: int) -> None:
        """Start all nodes; with an embedded store the first ``members`` are members."""
        self.all = [self.candidate() for _ in range(self._nodes)]
        if self._store == "embedded":
            self.members = [candidate.raft for candidate in self.all[:members]]
            for candidate in self.all:
                candidate.order(self.members)
        for candidate in self.all:
            candidate.hear(lambda told: "opened" in told)

    def candidate(self, token: str = TOKEN) -> Candidate:
        candidate = Candidate(self._store, self._nodes, f"node{len(self.all)}:1", self._limit, token,
                              None if self._hosts is None else self._hosts.add())
        self.all.append(candidate)
        return candidate

    def followed(self, by: Candidate, after: int = 0) -> tuple[int, Candidate]:
        """(term, leader) once ``by`` knows of a term above ``after`` and its leader is sure of it, too."""
        told = by.hear(lambda told: told.get("follows", 0) > after)
        leader = next(candidate for candidate in self.all if candidate.address == told["address"])
        leader.hear(lambda said: said.get("led") == told["follows"])
        return told["follows"], leader

    def terms(self) -> list[int]:
        """All terms in which somebody has led, in the order of time."""
        led = [told for candidate in self.all for told in candidate.drain() if "led" in told]
        return [told["led"] for told in sorted(led, key=lambda told: float(told["at"]))]

    def close(self) -> None:
        for candidate in self.all:
            candidate.close()


@contextlib.contextmanager
def group(store: str, nodes: int, limit: float, members: int = 3, hosts: Hosts | None = None) -> Iterator[Group]:
    """Start candidates, each on one of ``hosts`` if there are some, and kill those that are left."""
    group = Group(store, nodes, limit, hosts)
    try:
        group.start(members)
        yield group
    finally:
        group.close()


class EtcdServer:
    """A real etcd of one member on loopback. ``certificate``, ``key``: files with which it is asked over TLS."""

    def __init__(self, folder: Path, certificate: Path | None = None, key: Path | None = None) -> None:
        if shutil.which("etcd") is None:
            pytest.skip("no etcd on this machine; install it: apt-get install etcd-server")
        self._folder = folder
        self._client, self._peer = free_port(), free_port()
        self._scheme = "http" if certificate is None else "https"
        self._files = [] if certificate is None else ["--cert-file", str(certificate), "--key-file", str(key)]
        self.url = f"etcd{self._scheme[4:]}://127.0.0.1:{self._client}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start, with what was stored before. Clients wait for it."""
        client, peer = f"{self._scheme}://127.0.0.1:{self._client}", f"http://127.0.0.1:{self._peer}"
        with (self._folder / "etcd.log").open("ab") as log:
            self._process = subprocess.Popen(
                ["etcd", "--name", "one", "--data-dir", str(self._folder / "etcd"),
                 "--listen-client-urls", client, "--advertise-client-urls", client,
                 "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
                 "--initial-cluster", f"one={peer}", *self._files], stdout=log, stderr=log)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
