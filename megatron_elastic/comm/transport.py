"""Transport: one UCX worker, a link to every peer it talks to, and waits that a fault can interrupt.

A link is one UCX endpoint, made on first use and kept for the life of both ranks. Nothing is ever received into
a caller's buffer before its message is known to be there: arrivals are probed off the worker, matched by tag in
Python, and only then received. So an interrupted receive leaves no buffer behind that a late message could
overwrite, and messages of an older epoch are drained into scratch and dropped. Between ranks of one host the bytes of
large messages go through shared memory (``comm.arena``), and the link carries their descriptors.

The worker is used by one thread only, the one that trains.
"""

from __future__ import annotations

import os
import select
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

# UCX reads this when it is loaded; ucxx sets variables that mean nothing to it on a machine without a GPU.
os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")

import msgspec
import torch
import ucxx._lib.libucxx as ucx
from ucxx._lib.arr import Array

from megatron_elastic.cluster.control import Interrupted
from megatron_elastic.comm.arena import Arena, ArenaAddress, ArenaView
from megatron_elastic.comm.tag import DESCRIPTOR, SOURCE_BITS, Channel, is_older, make_tag

_ANY_TAG = ucx.UCXXTag(0)
_ANY_MASK = ucx.UCXXTagMask(0)
_CONFIG = {
    # Whole messages are pushed eagerly: a rank that computes does not answer a rendezvous, and its peer would wait.
    # It also keeps messages between two ranks in order, so that a replica's copy is complete when its replay begins.
    "RNDV_THRESH": "inf",
}
_SOURCE_MASK = (1 << SOURCE_BITS) - 1


_ARENA_SIZE = 64 << 20
_ARENA_FROM = 8 << 10
"""Bytes from which two copies and a descriptor beat the link (TCP on one host)."""


class PeerAddress(msgspec.Struct, frozen=True):
    """What a rank must know to talk to another; opaque to everybody else."""

    worker: bytes
    arena: ArenaAddress


class Interruptible(Protocol):
    """What a wait looks at besides its messages (``cluster.control.InterruptFlag``)."""

    raised: bool
    fd: int

    def check(self) -> None: ...


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's memory as bytes."""
    return tensor.detach().view(-1).view(torch.uint8)


def _array(tensor: torch.Tensor) -> Any:
    """UCX's view of a contiguous tensor's memory."""
    return Array(_flat(tensor).numpy())


class Send:
    """A message on its way to ``peer``. Once it is done its buffer may be reused."""

    __slots__ = ("_request", "peer")

    def __init__(self, peer: int, request: Any) -> None:
        self.peer = peer
        self._request = request

    @property
    def done(self) -> bool:
        """Whether the buffer is needed no more. Raises Interrupted when the link broke first."""
        return self._request is None or _completed(self._request, self.peer)


class Recv:
    """A message expected from ``peer`` into ``buffer``."""

    __slots__ = ("_copied", "_request", "buffer", "peer", "tag")

    def __init__(self, peer: int, tag: int, buffer: torch.Tensor) -> None:
        self.peer = peer
        self.tag = tag
        self.buffer = buffer
        self._request: Any = None
        self._copied = False

    @property
    def done(self) -> bool:
        """Whether the whole message is in the buffer. Raises Interrupted when the link broke first."""
        return self._copied or (self._request is not None and _completed(self._request, self.peer))


def _completed(request: Any, peer: int) -> bool:
    if not request.completed:
        return False
    try:
        request.check_error()
    except ucx.UCXError:
        # A link that breaks completes its requests too: half of this message may be garbage.
        raise Interrupted(0, suspects=(peer,)) from None
    return True


@dataclass(frozen=True, slots=True)
class _InArena:
    """An arrived message whose bytes are in its sender's arena."""

    view: ArenaView
    start: int
    length: int


class Transport:
    """Point-to-point messages between ranks, addressed by (epoch, channel, coordinate, peer).

    Args:
        rank: this rank's global id.
        interrupt: looked at in every wait; its ``check()`` raises to unwind the caller.
        wait_timeout: seconds after which one wait gives up with TimeoutError.
        crowded: ranks outnumber cores: sleep in the kernel instead of spinning.
    """

    def __init__(self, rank: int, interrupt: Interruptible, wait_timeout: float, crowded: bool = True) -> None:
        self.rank = rank
        self.epoch = 0
        self.bytes_sent = 0
        self._interrupt = interrupt
        self._wait_timeout = wait_timeout
        self._spins = 1 if crowded else 200
        self._context = ucx.UCXContext(config_dict=_CONFIG, feature_flags=(ucx.Feature.TAG, ucx.Feature.WAKEUP))
        self._worker = ucx.UCXWorker(self._context)
        self._worker.init_blocking_progress_mode()
        self._arena = Arena(_ARENA_SIZE)
        self._peers: dict[int, PeerAddress] = {}
        self._views: dict[int, ArenaView | None] = {}
        """Arenas of peers; None for one on another host. Both sides find the same, so who sends looks here too."""
        self._links: dict[int, Any] = {}
        self._broken: set[int] = set()
        self._lost: set[int] = set()
        self._expected: dict[int, deque[Recv]] = defaultdict(deque)
        self._arrived: dict[int, deque[Any]] = defaultdict(deque)
        self._unfinished: list[tuple[Any, Any]] = []
        """Requests that were not complete at once, with their buffers; the completed ones are pruned now and then."""
        self._prune_at = 64
        self._epoll = select.epoll()
        self._epoll.register(self._worker.epoll_file_descriptor, select.EPOLLIN)
        if interrupt.fd >= 0:
            self._epoll.register(interrupt.fd, select.EPOLLIN)

    @property
    def address(self) -> bytes:
        """What peers must be given to reach this rank."""
        return msgspec.msgpack.encode(PeerAddress(bytes(self._worker.address.tobytes()), self._arena.address))

    def add_peers(self, addresses: Mapping[int, bytes]) -> None:
        """Learn where peers are. Links are made when first used. Raises msgspec.DecodeError for no address."""
        for peer, address in addresses.items():
            self._peers[peer] = msgspec.msgpack.decode(address, type=PeerAddress)
            # At once: what a peer sent before it died can only be read in memory that was open by then.
            self._views[peer] = ArenaView.open(self._peers[peer].arena)

    def advance(self, epoch: int, lost: Iterable[int] = ()) -> None:
        """Enter an epoch: forget the waits of older ones, drop their messages, close links to ``lost``. Idempotent."""
        self.epoch = epoch
        self._expected.clear()
        for tag in [t for t in self._arrived if is_older(t, epoch)]:
            for message in self._arrived.pop(tag):
                self._drop(message)
        for peer in set(lost) - self._lost:
            self._lost.add(peer)
            self._broken.discard(peer)
            # The close callback must not outlive the link it reports on.
            link = self._links.pop(peer, None)
            if link is not None:
                link.remove_close_callback()
            self._arena.forget(peer)

    def send(self, peer: int, channel: Channel, coordinate: int, buffer: torch.Tensor) -> Send:
        """Start sending a contiguous tensor; it must stay unchanged until the Send is done."""
        tag = make_tag(self.epoch, channel, coordinate, self.rank)
        self.bytes_sent += buffer.nbytes
        if buffer.nbytes >= _ARENA_FROM and self._views.get(peer) is not None:
            start = self._arena.put(_flat(buffer), peer)
            if start is not None:
                self._push(peer, tag | DESCRIPTOR, torch.tensor((start, buffer.nbytes)))
                return Send(peer, None)
        return Send(peer, self._push(peer, tag, buffer))

    def recv(self, peer: int, channel: Channel, coordinate: int, buffer: torch.Tensor) -> Recv:
        """Expect a message from ``peer`` into a contiguous tensor of exactly its size."""
        tag = make_tag(self.epoch, channel, coordinate, peer)
        recv = Recv(peer, tag, buffer)
        arrived = self._arrived.get(tag)
        if arrived:
            self._begin(recv, arrived.popleft())
            if not arrived:
                del self._arrived[tag]
        else:
            self._expected[tag].append(recv)
        return recv

    def wait(self, *operations: Send | Recv) -> None:
        """Block until all are done.

        Raises what the interrupt raises, ``Interrupted`` naming the peer when a link breaks, and TimeoutError
        naming the peers waited for when the limit passes. An interrupted wait leaves its operations to ``advance``.
        """
        pending = [op for op in operations if not op.done]
        deadline = 0.0
        while pending:
            for _ in range(self._spins):
                self.progress()
                pending = [op for op in pending if not op.done]
                if not pending:
                    return
            self._check()
            if not deadline:
                deadline = time.monotonic() + self._wait_timeout
            elif time.monotonic() > deadline:
                peers = sorted({op.peer for op in pending})
                raise TimeoutError(
                    f"rank {self.rank} waited {self._wait_timeout:g} s for rank(s) {peers} in epoch {self.epoch}; "
                    "raise --elastic-wait-timeout if the step is that slow"
                )
            if self._worker.arm():
                self._epoll.poll(1.0)

    def progress(self) -> None:
        """Let UCX work and hand arrived messages to those who expect them."""
        self._worker.progress()
        probe = self._worker.tag_probe(_ANY_TAG, _ANY_MASK, True)
        while probe.matched:
            tag = int(probe.sender_tag.value)
            message = probe
            if tag & DESCRIPTOR:
                tag ^= DESCRIPTOR
                message = self._described(tag & _SOURCE_MASK, probe)
            if is_older(tag, self.epoch) or (tag & _SOURCE_MASK) in self._lost:
                self._drop(message)
            elif expected := self._expected.get(tag):
                self._begin(expected.popleft(), message)
                if not expected:
                    del self._expected[tag]
            else:
                self._arrived[tag].append(message)
            probe = self._worker.tag_probe(_ANY_TAG, _ANY_MASK, True)

    def close(self) -> None:
        """Close every link and the worker. The transport cannot be used afterwards."""
        self._epoll.close()
        for link in self._links.values():
            link.remove_close_callback()
        self._worker.cancel_inflight_requests(period=10_000_000, max_attempts=10)
        self._links.clear()
        self._expected.clear()
        self._arrived.clear()
        self._unfinished.clear()
        for view in self._views.values():
            if view is not None:
                view.close()
        self._arena.close()
        self._worker = self._context = None

    def _check(self) -> None:
        if self._interrupt.raised:
            self._interrupt.check()
        if self._broken:
            raise Interrupted(0, suspects=tuple(sorted(self._broken)))

    def _link(self, peer: int) -> Any:
        link = self._links.get(peer)
        if link is None:
            if peer not in self._peers:
                raise KeyError(f"rank {self.rank} knows no address of rank {peer}")
            address = ucx.UCXAddress.create_from_buffer(bytearray(self._peers[peer].worker))
            link = self._worker.create_endpoint_from_worker_address(address, True)
            link.set_close_callback(self._broke, (peer,), {})
            self._links[peer] = link
        return link

    def _broke(self, *args: Any) -> None:
        # ucxx passes the status before our own argument.
        peer = args[-1]
        if peer not in self._lost:
            self._broken.add(peer)

    def _push(self, peer: int, tag: int, buffer: torch.Tensor) -> Any:
        request = self._link(peer).tag_send(_array(buffer), tag=ucx.UCXXTag(tag))
        if not request.completed:
            self._keep(request, buffer)
        return request

    def _described(self, peer: int, probe: Any) -> _InArena:
        descriptor = torch.empty(2, dtype=torch.int64)
        request = self._worker.tag_recv_with_handle(_array(descriptor), probe)
        while not request.completed:  # its 16 bytes are here; only the copy may be left to do
            self._worker.progress()
        view = self._views.get(peer)
        if view is None:
            raise RuntimeError(f"rank {self.rank} cannot open the shared memory of rank {peer}, which can open its own")
        start, length = descriptor.tolist()
        return _InArena(view, start, length)

    def _begin(self, recv: Recv, message: Any) -> None:
        if message.length != recv.buffer.nbytes:
            raise RuntimeError(
                f"rank {self.rank} got {message.length} bytes from rank {recv.peer} (tag {recv.tag:#018x}) where it "
                f"expected {recv.buffer.nbytes}: the two ranks disagree about the layout"
            )
        if isinstance(message, _InArena):
            message.view.take(message.start, _flat(recv.buffer))
            recv._copied = True
            return
        recv._request = self._worker.tag_recv_with_handle(_array(recv.buffer), message)
        if not recv._request.completed:
            self._keep(recv._request, recv.buffer)

    def _drop(self, message: Any) -> None:
        if isinstance(message, _InArena):
            message.view.release(message.start)
            return
        scratch = torch.empty(max(message.length, 1), dtype=torch.uint8)
        request = self._worker.tag_recv_with_handle(_array(scratch), message)
        if not request.completed:
            self._keep(request, scratch)

    def _keep(self, request: Any, buffer: torch.Tensor) -> None:
        """UCX holds no reference to a buffer, and its user may be interrupted: keep it until the request completes."""
        self._unfinished.append((request, buffer))
        if len(self._unfinished) > self._prune_at:
            self._unfinished = [item for item in self._unfinished if not item[0].completed]
            self._prune_at = max(64, 2 * len(self._unfinished))
