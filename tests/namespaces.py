"""Namespaces: hosts on this machine, each a network namespace of its own on one bridge.

What is started on a host has its own process ids, too: ranks of different hosts see nothing of each other but what goes
over the bridge, as on machines of their own; they share only the disk. Needs root and ``ip`` (Debian: ``iproute2``).
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

_NET = "10.77.{}.{}"


@dataclass(frozen=True, slots=True)
class Host:
    """One namespace."""

    name: str
    address: str

    def command(self, command: Sequence[str]) -> list[str]:
        """``command``, to be run on this host; killing its process kills all that it started."""
        apart = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
        return ["ip", "netns", "exec", self.name, *apart, *command]


class Hosts:
    """Hosts that see each other.

    Args:
        name: what the names of all begin with; at most 8 characters, others on this machine must not use it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._net = os.getpid() % 200 + 1
        """Tests that run at the same time must not mix up their addresses when they read each other's output."""
        self._hosts: list[Host] = []
        self._all = f"{name}sw"
        _ip("netns", "add", self._all)
        # The bridge has a namespace of its own, so that nothing of this machine's own network changes.
        self._in(self._all, "link", "add", "br0", "type", "bridge")
        self._in(self._all, "link", "set", "br0", "up")

    def add(self) -> Host:
        """One more host, with an address that none had before."""
        number = len(self._hosts)
        host = Host(f"{self._name}{number}", _NET.format(self._net, number + 1))
        self._hosts.append(host)
        port = f"p{number}"
        _ip("netns", "add", host.name)
        self._in(self._all, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", host.name)
        self._in(self._all, "link", "set", port, "master", "br0", "up")
        self._in(host.name, "address", "add", f"{host.address}/24", "dev", "eth0")
        self._in(host.name, "link", "set", "eth0", "up")
        self._in(host.name, "link", "set", "lo", "up")
        return host

    def cut(self, address: str, *, off: bool = True) -> None:
        """Take a host's cable out, or put it in again."""
        number = next(number for number, host in enumerate(self._hosts) if host.address == address)
        self._in(self._all, "link", "set", f"p{number}", "down" if off else "up")

    def remove(self) -> None:
        """Take all away again; what runs there must have ended."""
        for name in (*(host.name for host in self._hosts), self._all):
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)

    def _in(self, namespace: str, *arguments: str) -> None:
        _ip("-netns", namespace, *arguments)


def why_not() -> str:
    """Why there can be no namespaces here; empty if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "unshare") if shutil.which(tool) is None]
    if missing:
        return f"needs {' and '.join(missing)} (Debian: iproute2, util-linux)"
    name = f"mt{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], check=False, capture_output=True, text=True)
    if tried.returncode:
        return f"this machine allows no network namespaces: {tried.stderr.strip()}"
    _ip("netns", "delete", name)
    return ""


@contextmanager
def hosts() -> Iterator[Hosts]:
    """Hosts that are gone in the end."""
    made = Hosts(f"me{os.getpid() % 100_000}")
    try:
        yield made
    finally:
        made.remove()


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
