"""Rendezvous: where a job's nodes meet, and which of them this is, as torchrun's flags say."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
from dataclasses import dataclass

from megatron_elastic.config import UsageError

MOST = 1_000_000
"""Nodes of a job, or ranks of a node: more are a mistake."""
_PORT = re.compile(r"\d{1,5}")


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """As a node knows it.

    Attributes:
        nodes: with how many the job begins.
        node_rank: of this node; others than the first ``nodes`` join.
        host: of node 0, without brackets if it is IPv6.
        port: there; 0 means any free one.
        several: whether there are other nodes, or may be.
    """

    nodes: int
    node_rank: int
    host: str
    port: int
    several: bool = False

    @property
    def joins(self) -> bool:
        """Whether this node comes to a job that has begun, and whose number of ranks it does not know."""
        return self.node_rank >= self.nodes


def is_count(text: str) -> bool:
    """Whether there can be so many nodes, or ranks of a node."""
    return text.isdecimal() and len(text) <= len(str(MOST)) and 1 <= int(text) <= MOST


def nodes_of(text: str) -> tuple[int, int]:
    """The least and the most nodes of ``--nnodes``, which is N or MIN:MAX. Raises UsageError."""
    fewest, colon, most = text.partition(":")
    if not colon:
        most = fewest
    if not (is_count(fewest) and is_count(most) and int(fewest) <= int(most)):
        raise UsageError(f"--nnodes {text}: give a positive number, or MIN:MAX for a job that begins with MIN nodes "
                         f"and may have up to MAX; both up to {MOST}")
    return int(fewest), int(most)


def endpoint_of(text: str) -> tuple[str, int | None]:
    """Host and port of ``--rdzv-endpoint``; the port is None if there is none. Raises UsageError."""
    flag = "--rdzv-endpoint"
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        port = rest.removeprefix(":")
    elif text.count(":") > 1:
        host, port = text, ""
    else:
        host, _, port = text.partition(":")
    if (port and not (_PORT.fullmatch(port) and 0 < int(port) < 1 << 16)) or not host:
        raise UsageError(f"{flag} {text}: expected HOST:PORT, where HOST is a name, IPv4, or IPv6 in brackets")
    return host_of(flag, host), int(port) if port else None


def host_of(flag: str, text: str) -> str:
    """A host's name or address, without brackets. Raises UsageError."""
    host = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    if ":" not in host and not text.startswith("["):
        try:
            host.encode("idna")
        except UnicodeError:
            raise UsageError(f"{flag} {text} is no address of a host: each part of a name has 1 to 63 characters"
                             ) from None  # fmt: skip
        return host
    try:
        return str(ipaddress.IPv6Address(host))
    except ValueError:
        name, _, port = text.rpartition(":")
        fix = f"give the port as --master-port {port}" if _PORT.fullmatch(port) and ":" not in name else (
            "expected a name, IPv4, or IPv6, with brackets or without")
        raise UsageError(f"{flag} {text} is no address of a host: {fix}") from None


def is_here(host: str) -> bool:
    """Whether a host's name or address is one of this machine."""
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as sock:
                sock.bind(address)
                return True
    return False


def every_interface(host: str) -> str:
    """What to listen on so that others reach this machine by ``host``: IPv6 as well, if it has no other address."""
    with contextlib.suppress(OSError):
        if all(family == socket.AF_INET6 for family, *_ in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)):
            return "::"
    return "0.0.0.0"
