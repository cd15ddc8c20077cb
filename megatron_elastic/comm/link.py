"""Links: the UCX endpoints to ranks of other hosts.

A link is made on first use and kept for the life of both ranks. Messages are probed off the worker, and received only
when somebody is there to take them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import ucxx._lib.libucxx as ucx
from ucxx._lib.arr import Array

from megatron_elastic.cluster.control import Interrupted
from megatron_elastic.comm.operation import Recv, flat_bytes

_ANY_TAG = ucx.UCXXTag(0)
_ANY_MASK = ucx.UCXXTagMask(0)
_CONFIG = {
    # Whole messages are pushed eagerly: a rank that computes does not answer a rendezvous, and its peer would wait.
    "RNDV_THRESH": "inf",
}


class Links:
    """One UCX worker, and a link to every peer it talks to.

    Args:
        rank: this rank's global id.
        broke: called with the peer's rank when a link breaks.
    """

    def __init__(self, rank: int, broke: Callable[[int], None]) -> None:
        self._rank = rank
        self._broke = broke
        self._context = ucx.UCXContext(config_dict=_CONFIG, feature_flags=(ucx.Feature.TAG, ucx.Feature.WAKEUP))
        self._worker = ucx.UCXWorker(self._context)
        self._worker.init_blocking_progress_mode()
        self._links: dict[int, Any] = {}
        self._unfinished: list[tuple[Any, torch.Tensor]] = []
        """Requests that were not complete at once, with their buffers; the completed ones are pruned now and then."""
        self._prune_at = 64

    @property
    def address(self) -> bytes:
        """What peers must be given to reach this worker."""
        return bytes(self._worker.address.tobytes())

    @property
    def fd(self) -> int:
        """Readable when there is something to do, once ``arm`` has said that there is nothing."""
        return int(self._worker.epoll_file_descriptor)

    def arm(self) -> bool:
        """Make ``fd`` tell of what comes next. False if something has come already."""
        return bool(self._worker.arm())

    def send(self, peer: int, address: bytes, tag: int, buffer: torch.Tensor) -> LinkRequest:
        """Start sending a contiguous tensor to a peer whose worker has this address.

        Raises Interrupted, naming the peer, if there is nobody.
        """
        link = self._links.get(peer)
        if link is None:
            try:
                link = self._worker.create_endpoint_from_worker_address(
                    ucx.UCXAddress.create_from_buffer(bytearray(address)), True
                )
            except ucx.UCXUnreachableError:
                self._broke(peer)  # nobody listens there any more
                raise Interrupted(suspects=(peer,)) from None
            link.set_close_callback(self._closed, (peer,), {})
            self._links[peer] = link
        request = link.tag_send(_array(buffer), tag=ucx.UCXXTag(tag))
        self._keep(request, buffer)
        return LinkRequest(request, peer)

    def progress(self) -> Iterator[tuple[int, LinkMessage]]:
        """Let UCX work; the messages that are here, with their tags."""
        self._worker.progress()
        probe = self._worker.tag_probe(_ANY_TAG, _ANY_MASK, True)
        while probe.matched:
            yield int(probe.sender_tag.value), LinkMessage(self, probe)
            probe = self._worker.tag_probe(_ANY_TAG, _ANY_MASK, True)

    def receive(self, probe: Any, buffer: torch.Tensor) -> Any:
        """Start receiving a probed message."""
        request = self._worker.tag_recv_with_handle(_array(buffer), probe)
        self._keep(request, buffer)
        return request

    def forget(self, peer: int) -> None:
        """Close the link to a dead peer."""
        # The close callback must not outlive the link it reports on.
        link = self._links.pop(peer, None)
        if link is not None:
            link.remove_close_callback()

    def close(self) -> None:
        """Close every link and the worker."""
        for link in self._links.values():
            link.remove_close_callback()
        if self._links or self._unfinished:
            self._worker.cancel_inflight_requests(period=10_000_000, max_attempts=10)
        self._links.clear()
        self._unfinished.clear()
        self._worker = self._context = None

    def _closed(self, *args: Any) -> None:
        self._broke(args[-1])  # ucxx passes the status before our own argument

    def _keep(self, request: Any, buffer: torch.Tensor) -> None:
        """UCX holds no reference to a buffer, and its user may be interrupted: keep it until the request completes."""
        if request.completed:
            return
        self._unfinished.append((request, buffer))
        if len(self._unfinished) > self._prune_at:
            self._unfinished = [item for item in self._unfinished if not item[0].completed]
            self._prune_at = max(64, 2 * len(self._unfinished))


class LinkRequest:
    """A transfer over the link to ``peer``."""

    __slots__ = ("_peer", "_request")

    def __init__(self, request: Any, peer: int) -> None:
        self._request = request
        self._peer = peer

    @property
    def done(self) -> bool:
        """Whether UCX is done with it. Raises Interrupted when the link broke first."""
        if not self._request.completed:
            return False
        try:
            self._request.check_error()
        except ucx.UCXError:
            # A link that breaks completes its requests too: half of this message may be garbage.
            raise Interrupted(0, suspects=(self._peer,)) from None
        return True


class LinkMessage:
    """A message that has been probed off the worker."""

    __slots__ = ("_links", "_probe", "kept", "length")
    lent = False

    def __init__(self, links: Links, probe: Any) -> None:
        self._links = links
        self._probe = probe
        self.length = self.kept = int(probe.length)

    def give(self, recv: Recv) -> None:
        """Start receiving it."""
        recv.begin(LinkRequest(self._links.receive(self._probe, recv.room()), recv.peer))

    def drop(self) -> None:
        """Drain it."""
        self._links.receive(self._probe, torch.empty(max(self.length, 1), dtype=torch.uint8))

    def detach(self) -> LinkMessage:
        """No memory of the sender's is held."""
        return self


def _array(tensor: torch.Tensor) -> Any:
    """UCX's view of a contiguous tensor's memory."""
    return Array(flat_bytes(tensor).numpy())
