"""Etcd: leadership by a key that lives with a lease, in etcd version 3.

Two keys: ``PREFIX/leader`` exists while somebody leads, and its create revision is the term; ``PREFIX/durable`` is
written only in a transaction that compares that revision.
"""

from __future__ import annotations

import base64
import json
import math
import os
import threading
from collections.abc import Sequence
from typing import Any

from megatron_elastic.cluster.leadership.leased import Unreachable
from megatron_elastic.cluster.leadership.store import Durable, Leader, StoreError, pack, unpack

try:
    import requests
    from etcd3gw.client import Etcd3Client
    from etcd3gw.exceptions import (
        ConnectionFailedError,
        ConnectionTimeoutError,
        Etcd3Exception,
        InternalServerError,
    )
except ImportError as error:
    raise StoreError(
        f"--elastic-store etcd://... needs a client: pip install 'megatron-elastic[etcd]' ({error})"
    ) from None

_SHORTEST_LEASE = 2
"""Seconds; etcd makes shorter ones this long, with the timing that it comes with."""
_AWAY = (ConnectionFailedError, ConnectionTimeoutError, InternalServerError, requests.RequestException)


class Etcd:
    """The operations of ``leased.Backend`` on an etcd cluster.

    Args:
        endpoints: ``host:port`` of its members; another is asked when one does not answer.
        job: names this run's keys; no two runs may share it.
        limit: seconds after which a silent leader is replaced, rounded up to whole ones, at least 2.
        encrypted: whether it is asked over TLS, with the files that etcdctl's variables name (``ETCDCTL_CACERT``, else
            the certificates that requests brings; ``ETCDCTL_CERT`` and ``ETCDCTL_KEY``, if it wants to see one).
    """

    def __init__(self, endpoints: Sequence[str], job: str, limit: float, encrypted: bool = False) -> None:
        self.limit: float = max(_SHORTEST_LEASE, math.ceil(limit))
        self._endpoints = endpoints
        self._encrypted = encrypted
        self._current = 0
        self._leader_key = _encoded(f"megatron-elastic/{job}/leader".encode())
        self._durable_key = _encoded(f"megatron-elastic/{job}/durable".encode())
        self._leases: dict[int, int] = {}
        """Term -> the lease behind it, of terms of this process."""
        self._here = threading.local()
        self._sessions: list[requests.Session] = []

    def claim(self, address: str) -> int | None:
        # Asked first, so that waiting candidates make no leases.
        if self.holder() is not None:
            return None
        lease = int(self._post("lease/grant", {"TTL": int(self.limit)})["ID"])
        taken = self._post("kv/txn", {
            "compare": [{"key": self._leader_key, "target": "CREATE", "result": "EQUAL", "create_revision": 0}],
            "success": [{"request_put": {"key": self._leader_key, "value": _encoded(address.encode()),
                                         "lease": lease}}],
        })
        if not taken.get("succeeded"):
            self._post("lease/revoke", {"ID": lease})
            return None
        term = int(taken["header"]["revision"])
        self._leases[term] = lease
        return term

    def renew(self, term: int) -> bool:
        answer = self._post("lease/keepalive", {"ID": self._leases[term]})
        # A lease that has expired is answered without its time.
        return int(answer.get("result", {}).get("TTL", 0)) > 0

    def resign(self, term: int) -> None:
        self._post("lease/revoke", {"ID": self._leases[term]})

    def write(self, durable: Durable) -> bool:
        """Write over exactly what is there, so that a request that was given up cannot overwrite a later one."""
        while True:
            newest = self._get(self._durable_key)
            answer = self._post("kv/txn", {
                "compare": [
                    {"key": self._leader_key, "target": "CREATE", "result": "EQUAL", "create_revision": durable.term},
                    {"key": self._durable_key, "target": "MOD", "result": "EQUAL",
                     "mod_revision": int(newest["mod_revision"]) if newest else 0},
                ],
                "success": [{"request_put": {"key": self._durable_key, "value": _encoded(pack(durable))}}],
                "failure": [{"request_range": {"key": self._leader_key}}],
            })
            if answer.get("succeeded"):
                return True
            leader = next(iter(answer["responses"][0]["response_range"].get("kvs", ())), None)
            if leader is None or int(leader["create_revision"]) != durable.term:
                return False

    def read(self) -> Durable | None:
        found = self._get(self._durable_key)
        return unpack(base64.b64decode(found["value"])) if found else None

    def holder(self) -> Leader | None:
        found = self._get(self._leader_key)
        return Leader(int(found["create_revision"]), base64.b64decode(found["value"]).decode()) if found else None

    def close(self) -> None:
        for session in self._sessions:
            session.close()

    def _get(self, key: str) -> dict[str, Any] | None:
        return next(iter(self._post("kv/range", {"key": key}).get("kvs", ())), None)

    def _post(self, operation: str, request: dict[str, Any]) -> dict[str, Any]:
        current = self._current
        client = self._client(current)
        try:
            answer: dict[str, Any] = client.post(client.get_url(operation), json=request)
        except (*_AWAY, json.JSONDecodeError) as error:
            # Other threads may have noticed it, too; one step on is enough.
            self._current = (current + 1) % len(self._endpoints)
            raise Unreachable(f"etcd at {self._endpoints[current]} does not answer: {error}") from None
        except Etcd3Exception as error:
            text = f"{error.detail_text}"
            if "too many requests" in text:
                raise Unreachable(f"etcd at {self._endpoints[current]} is overloaded") from None
            if "lease not found" in text:
                return {}
            raise StoreError(f"etcd at {self._endpoints[current]} refused {operation}: {text}") from None
        return answer

    def _client(self, endpoint: int) -> Etcd3Client:
        """This thread's connection to a member: sessions are not made for several threads."""
        clients: dict[int, Etcd3Client] = self._here.__dict__.setdefault("clients", {})
        if endpoint not in clients:
            session = requests.Session()
            session.trust_env = False  # proxies are for the world outside
            session.verify = os.environ.get("ETCDCTL_CACERT") or True
            if (shown := os.environ.get("ETCDCTL_CERT")) and (key := os.environ.get("ETCDCTL_KEY")):
                session.cert = (shown, key)
            self._sessions.append(session)
            host, _, port = self._endpoints[endpoint].rpartition(":")
            clients[endpoint] = Etcd3Client(host.strip("[]"), int(port), timeout=self.limit / 2, api_path="/v3/",
                                            protocol="https" if self._encrypted else "http", session=session)
        return clients[endpoint]


def _encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()
