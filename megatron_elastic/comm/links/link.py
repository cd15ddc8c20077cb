"""Links: the UCX endpoints to ranks of other hosts.

A link is made on first use and kept for the life of both ranks. Anybody who reaches the worker can send to it: what
does not prove that it comes from a rank of this job (``comm.links.seal``) is dropped before anybody else sees it.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

# UCX reads this when it is loaded; ucxx sets variables that mean nothing to it on a machine without a GPU.
os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
import ucxx._lib.libucxx as ucx
from ucxx._lib.arr import Array

from megatron_elastic.cluster.rank.control import Interrupted
from megatron_elastic.comm.links.seal import HEAD, Seal
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
        refused: called when the first message is refused, with the reason.
        limit: bytes that messages may take of which nobody knows yet who sent them.
    """

    def __init__(
        self, rank: int, broke: Callable[[int], None], refused: Callable[[str], None], limit: int
    ) -> None:
        self._rank = rank
        self._broke = broke
        self._tell = refused
        self._limit = limit
        self.seal: Seal | None = None
        """None until the job's key is known: what comes earlier waits in UCX."""
        self.refused = 0
        """Messages that were dropped."""
        self._coming: list[tuple[int, Any, torch.Tensor]] = []
        """Tags, requests and buffers of messages that are not whole yet."""
        self._unproved = 0
        """Bytes that they take."""
        self._context = ucx.UCXContext(config_dict=_CONFIG, feature_flags=(ucx.Feature.TAG, ucx.Feature.WAKEUP))
        self._worker = ucx.UCXWorker(self._context)
        self._worker.init_blocking_progress_mode()
        self._links: dict[int, Any] = {}
        self._unfinished: deque[tuple[Any, torch.Tensor]] = deque()
        """Requests that were not complete at once, with their buffers, in order. The completed ones go; behind one that
        is not, only now and then."""
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
        assert self.seal is not None, f"rank {self._rank} sends before it knows the job's key"
        sealed = self.seal.close(peer, tag, flat_bytes(buffer))
        request = link.tag_send(_array(sealed), tag=ucx.UCXXTag(tag))
        self._keep(request, sealed)
        return LinkRequest(request, peer)

    def progress(self) -> Iterator[tuple[int, LinkMessage]]:
        """Let UCX work; the messages that are here and have proved where they come from, with their tags."""
        self._worker.progress()
        while self._unfinished and self._unfinished[0][0].completed:
            self._unfinished.popleft()
        if self.seal is None:
            return
        probe = self._worker.tag_probe(_ANY_TAG, _ANY_MASK, True)
        while probe.matched:
            self._receive(probe)
            probe = self._worker.tag_probe(_ANY_TAG, _ANY_MASK, True)
        if not self._coming:
            return
        coming, self._coming = self._coming, []
        for tag, request, sealed in coming:
            if not request.completed:
                self._coming.append((tag, request, sealed))
                continue
            self._unproved -= sealed.numel()
            if _failed(request):
                continue  # its link broke, half-way
            if self.seal.opens(tag, sealed):
                yield tag, LinkMessage(sealed)
            else:
                self._refuse("it is not what a rank of this job has sealed for this one, or has come before")

    def _receive(self, probe: Any) -> None:
        """Start receiving a probed message."""
        length = int(probe.length)
        room = self._unproved + length <= self._limit
        # UCX drops what does not fit into the buffer, so a message without a place takes none.
        sealed = torch.empty(max(length, 1) if room else 1, dtype=torch.uint8)
        request = self._worker.tag_recv_with_handle(_array(sealed), probe)
        if room and length >= HEAD:
            self._coming.append((int(probe.sender_tag.value), request, sealed))
            self._unproved += length
        else:
            self._keep(request, sealed)
            self._refuse("it is too short" if room else f"what is not proved yet may take {self._limit} bytes")

    def _refuse(self, why: str) -> None:
        self.refused += 1
        if self.refused == 1:
            self._tell(why)

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
        if self._links or self._unfinished or self._coming:
            self._worker.cancel_inflight_requests(period=10_000_000, max_attempts=10)
        self._links.clear()
        self._unfinished.clear()
        self._coming.clear()
        self._worker = self._context = None

    def _closed(self, *args: Any) -> None:
        self._broke(args[-1])  # ucxx passes the status before our own argument

    def _keep(self, request: Any, buffer: torch.Tensor) -> None:
        """UCX holds no reference to a buffer, and its user may be interrupted: keep it until the request completes."""
        if request.completed:
            return
        self._unfinished.append((request, buffer))
        if len(self._unfinished) > self._prune_at:
            self._unfinished = deque(item for item in self._unfinished if not item[0].completed)
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
    """A message that has proved where it comes from."""

    __slots__ = ("_sealed", "kept", "length")
    lent = False

    def __init__(self, sealed: torch.Tensor) -> None:
        self._sealed = sealed
        self.length = self.kept = sealed.numel() - HEAD

    def give(self, recv: Recv) -> None:
        """Copy it."""
        flat_bytes(recv.room()).copy_(self._sealed[HEAD:])
        recv.finish()

    def drop(self) -> None:
        """Nothing is held."""

    def detach(self) -> LinkMessage:
        """No memory of the sender's is held."""
        return self


def _failed(request: Any) -> bool:
    try:
        request.check_error()
    except ucx.UCXError:
        return True
    return False


def _array(tensor: torch.Tensor) -> Any:
    """UCX's view of a contiguous tensor's memory."""
    return Array(flat_bytes(tensor).numpy())
