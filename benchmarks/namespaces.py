"""Namespaces: hosts on this machine, each a network namespace of its own on one bridge.

What is started on a host has its own process ids, too: ranks of different hosts see nothing of each other but what goes
over the bridge, as on machines of their own; they share only the disk. Needs root, ``ip`` and ``tc`` (Debian:
``iproute2``), and ``nft`` (``nftables``).
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_NET = "10.77.{}.{}"
_ETC = Path("/etc/netns")


@dataclass(frozen=True, slots=True)
class Host:
    """One namespace."""

    name: str
    address: str
    clock: int = 0
    """Seconds that its monotonic clock is ahead of this machine's."""

    def command(self, command: Sequence[str]) -> list[str]:
        """``command``, to be run on this host; killing its process kills all that it started."""
        apart = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
        if self.clock:
            apart += ["--time", "--monotonic", str(self.clock), "--boottime", str(self.clock)]
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
        _run("ip", "netns", "add", self._all)
        # The bridge has a namespace of its own, so that nothing of this machine's own network changes.
        self._in(self._all, "link", "add", "br0", "type", "bridge")
        self._in(self._all, "link", "set", "br0", "up")

    def add(self, clock: int = 0) -> Host:
        """One more host, with an address that none had before, whose ``clock`` is so many seconds ahead."""
        number = len(self._hosts)
        host = Host(f"{self._name}{number}", _NET.format(self._net, number + 1), clock)
        self._hosts.append(host)
        port = f"p{number}"
        _run("ip", "netns", "add", host.name)
        self._in(self._all, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", host.name)
        self._in(self._all, "link", "set", port, "master", "br0", "up")
        self._in(host.name, "address", "add", f"{host.address}/24", "dev", "eth0")
        self._in(host.name, "link", "set", "eth0", "up")
        self._in(host.name, "link", "set", "lo", "up")
        return host

    def know(self, names: Mapping[str, str]) -> None:
        """What is started on a host from now on finds these names' addresses."""
        text = "127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for name, address in names.items())
        for host in self._hosts:
            # ``ip netns exec`` mounts what lies there over /etc.
            (folder := _ETC / host.name).mkdir(parents=True, exist_ok=True)
            (folder / "hosts").write_text(text)

    def cut(self, address: str, *, off: bool = True) -> None:
        """Take a host's cable out, or put it in again."""
        number = next(number for number, host in enumerate(self._hosts) if host.address == address)
        self._in(self._all, "link", "set", f"p{number}", "down" if off else "up")

    def deafen(self, address: str, source: str | None = None) -> None:
        """Nothing gets to a host, from another one or from any; what it sends still arrives."""
        self._filter(address, hears="drop" if source is None else f"ip saddr {source} drop")

    def mute(self, address: str) -> None:
        """Nothing that a host sends arrives; it still hears the others."""
        self._filter(address, says="drop")

    def part(self, one: str, other: str) -> None:
        """Two hosts hear nothing of each other; others hear both."""
        self._filter(one, hears=f"ip saddr {other} drop", says=f"ip daddr {other} drop")

    def lose_packets(self, address: str, percent: int) -> None:
        """So many of all packets do not get to a host, by chance."""
        self._filter(address, hears=f"numgen random mod 100 < {percent} drop")

    def slow_down(self, address: str, megabits: float) -> None:
        """What a host sends passes at so many megabits a second, and waits meanwhile, up to 400 ms."""
        limits = ("tbf", "rate", f"{megabits:g}mbit", "burst", "32kb", "latency", "400ms")
        _run("tc", "-n", self._name_of(address), "qdisc", "add", "dev", "eth0", "root", *limits)

    def mend(self, address: str) -> None:
        """A host's link is as it was."""
        name = self._name_of(address)
        self.cut(address, off=False)
        for command in (("ip", "netns", "exec", name, "nft", "flush", "ruleset"),
                        ("tc", "-n", name, "qdisc", "replace", "dev", "eth0", "root", "noqueue")):
            _run(*command)

    def remove(self) -> None:
        """Take all away again; what runs there must have ended."""
        for name in (*(host.name for host in self._hosts), self._all):
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)
            shutil.rmtree(_ETC / name, ignore_errors=True)

    def _filter(self, address: str, hears: str = "accept", says: str = "accept") -> None:
        chains = (("input", f'iifname "eth0" {hears}'), ("output", f'oifname "eth0" {says}'))
        rules = "\n".join(
            f"chain {hook} {{ type filter hook {hook} priority 0; {rule}; }}" for hook, rule in chains
        )
        _run("ip", "netns", "exec", self._name_of(address), "nft", f"table inet trouble {{\n{rules}\n}}")

    def _name_of(self, address: str) -> str:
        return next(host.name for host in self._hosts if host.address == address)

    def _in(self, namespace: str, *arguments: str) -> None:
        _run("ip", "-netns", namespace, *arguments)


def why_not() -> str:
    """Why there can be no namespaces here; empty if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc", "nft", "unshare") if shutil.which(tool) is None]
    if missing:
        return f"needs {' and '.join(missing)} (Debian: iproute2, nftables, util-linux)"
    name = f"mt{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], check=False, capture_output=True, text=True)
    if tried.returncode:
        return f"this machine allows no network namespaces: {tried.stderr.strip()}"
    _run("ip", "netns", "delete", name)
    return ""


@contextmanager
def hosts() -> Iterator[Hosts]:
    """Hosts that are gone in the end."""
    made = Hosts(f"me{os.getpid() % 100_000}")
    try:
        yield made
    finally:
        made.remove()


def _run(*command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
