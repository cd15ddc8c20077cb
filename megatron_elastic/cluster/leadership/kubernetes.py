"""Kubernetes: leadership by a ``coordination.k8s.io/v1`` Lease.

All is in the one object, so its resource version guards all: who holds it, the term (``leaseTransitions``), and, in
annotations, the address and what is durable.
"""

from __future__ import annotations

import base64
import datetime
import math
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

from megatron_elastic.cluster.kubernetes import NoAccess, connect
from megatron_elastic.cluster.leadership.leased import Unreachable
from megatron_elastic.cluster.leadership.store import Durable, Leader, StoreError, pack, unpack

try:
    import urllib3
    from kubernetes import client
    from kubernetes.client.exceptions import ApiException
except ImportError as error:
    raise StoreError(
        f"--elastic-store kubernetes://... needs its client: pip install 'megatron-elastic[kubernetes]' ({error})"
    ) from None

_ADDRESS = "megatron-elastic/address"
_DURABLE = "megatron-elastic/durable"
_CONFLICT = 409
_NOT_FOUND = 404
_TOO_MANY = 429


class Kubernetes:
    """The operations of ``leased.Backend`` on a Lease, which is made if it is not there.

    The API server and the right to get, create and update Leases come from the pod's service account, or else from
    ``KUBECONFIG`` or ``~/.kube/config``.

    Args:
        namespace: where the Lease is.
        name: of the Lease; no two runs may share it.
        limit: seconds after which a silent leader is replaced, rounded up to whole ones.
    """

    def __init__(self, namespace: str, name: str, limit: float) -> None:
        self.limit: float = math.ceil(limit)
        self._namespace = namespace
        self._name = name
        self._me = uuid.uuid4().hex
        self._seen: tuple[str, float] = ("", 0.0)
        """A resource version, and when it was first seen here: clocks of others are not believed."""
        self._lock = threading.Lock()
        try:
            self._api_client = connect()
        except NoAccess as error:
            raise StoreError(f"--elastic-store kubernetes://...: {error}") from None
        self._api = client.CoordinationV1Api(self._api_client)

    def claim(self, address: str) -> int | None:
        lease = self._read()
        if lease is None:
            return self._make(address)
        if lease.spec.holder_identity and not self._silent(lease):
            return None
        term = int(lease.spec.lease_transitions or 0) + 1
        lease.spec.lease_transitions = term
        lease.spec.holder_identity = self._me
        lease.spec.lease_duration_seconds = int(self.limit)
        lease.spec.acquire_time = lease.spec.renew_time = _now()
        lease.metadata.annotations = {**(lease.metadata.annotations or {}), _ADDRESS: address}
        return term if self._replace(lease) else None

    def renew(self, term: int) -> bool:
        def stamp(lease: Any) -> None:
            lease.spec.renew_time = _now()

        return self._change(term, stamp)

    def resign(self, term: int) -> None:
        def leave(lease: Any) -> None:
            lease.spec.holder_identity = None

        self._change(term, leave)

    def write(self, durable: Durable) -> bool:
        def note(lease: Any) -> None:
            lease.metadata.annotations[_DURABLE] = base64.b64encode(pack(durable)).decode()

        return self._change(durable.term, note)

    def read(self) -> Durable | None:
        lease = self._read()
        text = (lease.metadata.annotations or {}).get(_DURABLE) if lease is not None else None
        return unpack(base64.b64decode(text)) if text else None

    def holder(self) -> Leader | None:
        lease = self._read()
        if lease is None or not lease.spec.holder_identity:
            return None
        return Leader(int(lease.spec.lease_transitions), lease.metadata.annotations[_ADDRESS])

    def close(self) -> None:
        self._api_client.close()

    def _silent(self, lease: Any) -> bool:
        """Whether the lease's time has passed here since anything in it changed."""
        version, now = lease.metadata.resource_version, time.monotonic()
        with self._lock:
            if version != self._seen[0]:
                self._seen = (version, now)
            return now - self._seen[1] > (lease.spec.lease_duration_seconds or self.limit)

    def _make(self, address: str) -> int | None:
        first = 1
        metadata = client.V1ObjectMeta(name=self._name, namespace=self._namespace, annotations={_ADDRESS: address})
        spec = client.V1LeaseSpec(holder_identity=self._me, lease_duration_seconds=int(self.limit),
                                  lease_transitions=first, acquire_time=_now(), renew_time=_now())
        made = self._ask(lambda: self._api.create_namespaced_lease(
            self._namespace, client.V1Lease(metadata=metadata, spec=spec), _request_timeout=self.limit / 2), _CONFLICT)
        return first if made is not None else None

    def _change(self, term: int, change: Callable[[Any], None]) -> bool:
        """Change the lease if ``term`` has it; False if it has not."""
        while True:
            lease = self._read()
            if lease is None or lease.spec.lease_transitions != term or lease.spec.holder_identity != self._me:
                return False
            change(lease)
            if self._replace(lease):
                return True

    def _read(self) -> Any:
        """The Lease, from the API server's newest state; None if there is none. Raises StoreError if others have it."""
        lease = self._ask(lambda: self._api.read_namespaced_lease(
            self._name, self._namespace, _request_timeout=self.limit / 2), _NOT_FOUND)
        if lease is not None:
            lease.spec = lease.spec or client.V1LeaseSpec()
            if (holder := lease.spec.holder_identity) and _ADDRESS not in (lease.metadata.annotations or {}):
                raise StoreError(f"the Lease {self._namespace}/{self._name} is held by {holder}, which is no job of "
                                 "megatron_elastic; choose another name")
        return lease

    def _replace(self, lease: Any) -> bool:
        """Write ``lease`` over the version that it was read as; False if that is not the newest any more."""
        return self._ask(lambda: self._api.replace_namespaced_lease(
            self._name, self._namespace, lease, _request_timeout=self.limit / 2), _CONFLICT, _NOT_FOUND) is not None

    def _ask(self, request: Callable[[], Any], *expected: int) -> Any:
        """The answer; None if it is one of the ``expected`` errors."""
        try:
            return request()
        except ApiException as error:
            if error.status in expected:
                return None
            text = f"the Kubernetes API answered {error.status} ({error.reason})"
            if error.status == _TOO_MANY or error.status >= 500:
                raise Unreachable(text) from None
            raise StoreError(f"{text} for the Lease {self._namespace}/{self._name}: {error.body}; is the namespace "
                             "there, and may this pod's service account get, create and update Leases in it?") from None
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise Unreachable(f"the Kubernetes API at {self._api_client.configuration.host} does not answer: "
                              f"{error}") from None


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
