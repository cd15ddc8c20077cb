"""Choice: which store a job uses, from ``--elastic-store``."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from typing import Literal

import msgspec

from megatron_elastic.cluster.leadership.alone import Alone
from megatron_elastic.cluster.leadership.embedded import Member, Observer
from megatron_elastic.cluster.leadership.leased import Leased
from megatron_elastic.cluster.leadership.store import Store
from megatron_elastic.config import UsageError

FLAG = "--elastic-store"
_FEWEST = 3
"""Nodes among which a majority survives a loss."""
_ENDPOINT = re.compile(r"([-.\w]+|\[[0-9a-fA-F:.]+\]):[0-9]{1,5}")
_NAME = re.compile(r"[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?")


class Choice(msgspec.Struct, frozen=True):
    """What the flag says."""

    kind: Literal["alone", "embedded", "etcd", "kubernetes"]
    endpoints: tuple[str, ...] = ()
    """``host:port`` of etcd's members."""
    encrypted: bool = False
    """Whether etcd is asked over TLS."""
    namespace: str = ""
    name: str = ""
    """Of the Lease."""


class Place(msgspec.Struct, frozen=True):
    """A node's place among the members of an embedded store, known when all nodes are."""

    members: tuple[str, ...]
    """Raft addresses, ``host:port``; of the first ``seats(nodes)`` nodes at the start."""
    token: str
    """The job's."""
    me: str = ""
    """This node's address, if it is a member."""
    listening: socket.socket | None = None
    """This member's socket, from ``reserve``."""


def parse(flag: str, nodes: int) -> Choice:
    """What ``--elastic-store`` asks for in a job of ``nodes`` nodes. Raises UsageError."""
    scheme, separator, rest = flag.partition("://")
    if not separator and flag in ("auto", "alone", "embedded"):
        if flag == "embedded" and nodes < _FEWEST:
            raise UsageError(f"{FLAG} embedded needs at least {_FEWEST} nodes, so that a majority survives the loss of "
                             f"one; this job has {nodes}. Use etcd or kubernetes, or alone")
        return Choice("embedded" if flag == "embedded" or (flag == "auto" and nodes >= _FEWEST) else "alone")
    if separator and scheme in ("etcd", "etcds"):
        endpoints = tuple(rest.rstrip("/").split(","))
        for endpoint in endpoints:
            if not _ENDPOINT.fullmatch(endpoint) or not 0 < int(endpoint.rpartition(":")[2]) < 1 << 16:
                raise UsageError(f"{FLAG} {flag}: {endpoint!r} is no HOST:PORT; write {scheme}://HOST:PORT[,HOST:PORT...]")
        return Choice("etcd", endpoints=endpoints, encrypted=scheme == "etcds")
    if separator and scheme == "kubernetes":
        namespace, slash, name = rest.partition("/")
        if not slash or not _NAME.fullmatch(namespace) or not _NAME.fullmatch(name):
            raise UsageError(f"{FLAG} {flag}: write kubernetes://NAMESPACE/NAME, as Kubernetes spells names; the "
                             "Lease NAME is made if it is not there")
        return Choice("kubernetes", namespace=namespace, name=name)
    raise UsageError(f"{FLAG} {flag}: choose auto, alone, embedded, etcd://HOST:PORT[,HOST:PORT...], etcds://... "
                     "or kubernetes://NAMESPACE/NAME")


def make(choice: Choice, job: str, limit: float, leads_at: str | None = None, place: Place | None = None,
         note: Callable[[str], None] = lambda line: None) -> Store:
    """The store, to be opened.

    Args:
        choice: from ``parse``.
        job: names this run; other runs have other names.
        limit: seconds without the leader after which another may lead.
        leads_at: for ``alone``, on nodes that do not lead: the coordinator's address.
        place: for ``embedded``.
        note: told, in a line for people, when the store refuses what it should take.

    Raises StoreError if the store's client is not installed or not set up.
    """
    match choice.kind:
        case "alone":
            return Alone(leads_at)
        case "embedded":
            assert place is not None, "an embedded store needs its members"
            if place.listening is None:
                return Observer(place.members, place.token, limit)
            return Member(place.listening, place.me, place.members, place.token, limit)
        case "etcd":
            from megatron_elastic.cluster.leadership.etcd import Etcd

            return Leased(Etcd(choice.endpoints, job, limit, choice.encrypted), note)
        case "kubernetes":
            from megatron_elastic.cluster.leadership.kubernetes import Kubernetes

            return Leased(Kubernetes(choice.namespace, choice.name, limit), note)
