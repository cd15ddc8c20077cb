"""Hosts that are network namespaces: what is wrong with a link is wrong in the direction that it should be."""

from __future__ import annotations

import subprocess
import sys
import time

import namespaces
import pytest
from namespaces import Host, Hosts

pytestmark = [pytest.mark.job, pytest.mark.skipif(bool(namespaces.why_not()), reason=namespaces.why_not())]

_LISTEN = """
import socket, sys
receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
receiver.bind(("0.0.0.0", 999))
receiver.settimeout(1.0)
print("ready", flush=True)
arrived = 0
try:
    while receiver.recv(2048) != b"last":
        arrived += 1
except TimeoutError:
    pass
print(arrived)
"""
_SEND = """
import socket, sys
sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for each in [b"some"] * int(sys.argv[2]) + [b"last"] * 9:
    sender.sendto(each, (sys.argv[1], 999))
"""


def arrive(one: Host, other: Host, count: int = 3) -> int:
    """How many of so many datagrams get from one host to another."""
    inside = ["ip", "netns", "exec", other.name, sys.executable, "-c", _LISTEN]
    with subprocess.Popen(inside, stdout=subprocess.PIPE, text=True) as receiver:
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == "ready\n"
        # What may not be sent is an error here.
        sender = ["ip", "netns", "exec", one.name, sys.executable, "-c", _SEND, other.address, str(count)]
        subprocess.run(sender, check=False, stderr=subprocess.DEVNULL)
        return int(receiver.stdout.readline())


def test_links_are_troubled_as_asked_and_mended() -> None:
    with namespaces.hosts() as hosts:
        a, b, c = (hosts.add() for _ in range(3))
        assert (arrive(a, b), arrive(b, a)) == (3, 3)
        hosts.deafen(a.address)
        assert (arrive(a, c), arrive(c, a)) == (3, 0)
        _mended(hosts, a, b)
        hosts.mute(a.address)
        assert (arrive(a, b), arrive(b, a)) == (0, 3)
        _mended(hosts, a, b)
        hosts.part(a.address, b.address)
        assert (arrive(a, b), arrive(b, a), arrive(a, c), arrive(c, a)) == (0, 0, 3, 3)
        _mended(hosts, a, b)
        hosts.cut(a.address)
        assert arrive(b, a) == 0
        _mended(hosts, a, b)
        hosts.lose_packets(b.address, 50)
        assert 0 < arrive(a, b, 400) < 400
        _mended(hosts, a, b)
        hosts.slow_down(a.address, 0.1)
        began = time.monotonic()
        passed = 46 * arrive(a, b, 2000)  # bytes: four, and headers
        allowed = 32 * 1024 + 0.1e6 / 8 * (time.monotonic() - began)  # the first burst, and the rate
        assert passed < allowed
        _mended(hosts, a, b)


def _mended(hosts: Hosts, one: Host, other: Host) -> None:
    hosts.mend(one.address)
    hosts.mend(other.address)
    assert (arrive(one, other), arrive(other, one)) == (3, 3)
