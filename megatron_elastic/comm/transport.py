"""Transport: one UCX worker, a link to every peer it talks to, and waits that a fault can interrupt.

A link is one UCX endpoint, made on first use and kept for the life of both ranks. Nothing is ever received into
a caller's buffer before its message is known to be there: arrivals are probed off the worker, matched by tag in
Python, and only then received. So an interrupted receive leaves no buffer behind that a late message could
overwrite, and messages of an older epoch are drained into scratch and dropped. Between ranks of one host the bytes of
large messages go through shared memory (``comm.arena``), and the link carries their descriptors.

Work that was started and not yet waited for goes on while the rank computes: a background thread, which sleeps
unless there is such work, makes it progress. Everything else happens in the thread that calls.
"""

from __future__ import annotations

import select
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import msgspec
import torch
import ucxx._lib.libucxx as ucx

from megatron_elastic.cluster.control import Interrupted
from megatron_elastic.comm.arena import Arena, ArenaAddress, ArenaView
from megatron_elastic.comm.operation import (
    Arrival,
    InArena,
    Operation,
    Recv,
    Send,
    Shape,
    Steps,
    Task,
    flat_bytes,
    ucx_array,
)
from megatron_elastic.comm.tag import DESCRIPTOR, SOURCE_BITS, Channel, is_older, make_tag

_ANY_TAG = ucx.UCXXTag(0)
_ANY_MASK = ucx.UCXXTagMask(0)
_CONFIG = {
    # Whole messages are pushed eagerly: a rank that computes does not answer a rendezvous, and its peer would wait.
    # It also keeps messages between two ranks in order, so that a replica's copy is complete when its replay begins.
    "RNDV_THRESH": "inf",
}
_SOURCE_MASK = (1 << SOURCE_BITS) - 1
_MANY = 256
"""Borrowing receives that are remembered before those that are over are pruned."""
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
        self.interrupt = interrupt
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
        self._tasks: list[Task] = []
        self._borrowed: list[Recv] = []
        """Borrowing receives, those that are over too until they are pruned: an interrupted reader releases nothing."""
        self._lock = threading.RLock()
        self._background: threading.Thread | None = None
        self._work = threading.Event()
        """Set while there are tasks and nobody waits: then the background thread makes them progress."""
        self._waiting = 0
        self._closing = False
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
            if peer in self._peers or peer == self.rank:
                continue
            self._peers[peer] = msgspec.msgpack.decode(address, type=PeerAddress)
            # At once: what a peer sent before it died can only be read in memory that was open by then.
            self._views[peer] = ArenaView.open(self._peers[peer].arena)

    def advance(self, epoch: int, lost: Iterable[int] = ()) -> None:
        """Enter an epoch: forget the waits of older ones, drop their messages, close links to ``lost``. Idempotent."""
        with self._lock:
            self._advance(epoch, lost)

    def _advance(self, epoch: int, lost: Iterable[int]) -> None:
        self.epoch = epoch
        for task in self._tasks:
            task.abandon(Interrupted(epoch))
        self._tasks.clear()
        self._work.clear()
        for recv in self._borrowed:
            recv.release()
        self._borrowed.clear()
        self._expected.clear()
        gone = set(lost)
        for tag in [t for t in self._arrived if is_older(t, epoch) or (t & _SOURCE_MASK) in gone]:
            for message in self._arrived.pop(tag):
                self._drop(message)
        for peer in gone - self._lost:
            self._lost.add(peer)
            self._broken.discard(peer)
            # The close callback must not outlive the link it reports on.
            link = self._links.pop(peer, None)
            if link is not None:
                link.remove_close_callback()
            self._arena.forget(peer)
            self._views.pop(peer, None)

    def send(self, peer: int, channel: Channel, coordinate: int, buffer: torch.Tensor) -> Send:
        """Start sending a contiguous tensor; it must stay unchanged until the Send is done."""
        with self._lock:
            return self._send(peer, make_tag(self.epoch, channel, coordinate, self.rank), buffer)

    def borrow(self, peer: int, channel: Channel, coordinate: int, numel: int, dtype: torch.dtype) -> Recv:
        """Expect a flat tensor, to be read where it lies and released (see ``Recv``)."""
        with self._lock:
            tag = make_tag(self.epoch, channel, coordinate, peer)
            recv = Recv(peer, tag, None, Shape(numel, dtype))
            if len(self._borrowed) > _MANY:
                self._borrowed = [each for each in self._borrowed if each.held]
            self._borrowed.append(recv)
            return self._expect(recv)

    def _send(self, peer: int, tag: int, buffer: torch.Tensor) -> Send:
        self.bytes_sent += buffer.nbytes
        if buffer.nbytes >= _ARENA_FROM and self._views.get(peer) is not None:
            start = self._arena.put(flat_bytes(buffer), peer)
            if start is not None:
                # The buffer is free already; but who leaves before the descriptor is out leaves it behind for ever.
                return Send(peer, self._push(peer, tag | DESCRIPTOR, torch.tensor((start, buffer.nbytes))))
        return Send(peer, self._push(peer, tag, buffer))

    def recv(self, peer: int, channel: Channel, coordinate: int, buffer: torch.Tensor) -> Recv:
        """Expect a message from ``peer`` into a contiguous tensor of exactly its size."""
        with self._lock:
            return self._expect(Recv(peer, make_tag(self.epoch, channel, coordinate, peer), buffer))

    def _expect(self, recv: Recv) -> Recv:
        tag = recv.tag
        arrived = self._arrived.get(tag)
        if arrived:
            self._begin(recv, arrived.popleft())
            if not arrived:
                del self._arrived[tag]
        else:
            self._expected[tag].append(recv)
        return recv

    def first_of(self, peers: Sequence[int], channel: Channel, coordinate: int) -> int:
        """The peer whose message of this coordinate is here first; blocks until there is one."""
        tags = {make_tag(self.epoch, channel, coordinate, peer): peer for peer in peers}
        arrival = Arrival(self._arrived, tags)
        self.wait(arrival)
        return arrival.peer

    def start(self, steps: Steps) -> Task:
        """Start a collective that goes on while the caller computes; wait for it with ``wait``."""
        with self._lock:
            task = Task(steps, self.rank)
            if not task.advance():
                self._tasks.append(task)
                self._work.set()
                if self._background is None:
                    self._background = threading.Thread(target=self._progress_in_background, daemon=True, name="links")
                    self._background.start()
            return task

    def run(self, steps: Steps) -> None:
        """Run a collective to its end."""
        for operations in steps:
            self.wait(*operations)

    def wait(self, *operations: Operation, limit: float | None = None) -> None:
        """Block until all are done, at most ``limit`` seconds (default: the transport's).

        Raises what the interrupt raises, ``Interrupted`` naming the peer when a link breaks, and TimeoutError
        naming the peers waited for when the limit passes. An interrupted wait leaves its operations to ``advance``.
        """
        pending = [op for op in operations if not op.done]
        if not pending:
            return
        with self._lock:
            self._waiting += 1
            self._work.clear()
        try:
            self._wait(pending, self._wait_timeout if limit is None else limit)
        finally:
            with self._lock:
                self._waiting -= 1
                if self._tasks and not self._waiting:
                    self._work.set()

    def _wait(self, pending: list[Operation], limit: float) -> None:
        deadline = time.monotonic() + limit
        while True:
            with self._lock:
                for _ in range(self._spins):
                    self.progress()
                    pending = [op for op in pending if not op.done]
                    if not pending:
                        return
                self._check()
                idle = self._worker.arm()
            if idle:
                self._epoll.poll(min(1.0, limit))
            if time.monotonic() > deadline:
                peers = sorted({op.peer for op in pending})
                raise TimeoutError(
                    f"rank {self.rank} waited {limit:g} s for rank(s) {peers} in epoch {self.epoch}; "
                    "raise --elastic-wait-timeout if the step is that slow"
                )

    def progress(self) -> None:
        """Let UCX work and hand arrived messages to those who expect them."""
        self._worker.progress()
        probe = self._worker.tag_probe(_ANY_TAG, _ANY_MASK, True)
        while probe.matched:
            self._sort(int(probe.sender_tag.value), probe)
            probe = self._worker.tag_probe(_ANY_TAG, _ANY_MASK, True)
        if self._tasks:
            self._tasks = [task for task in self._tasks if not task.advance()]
            if not self._tasks:
                self._work.clear()

    def _sort(self, tag: int, message: Any) -> None:
        """Give an arrived message to who expects it, keep it, or drop it."""
        source = tag & _SOURCE_MASK
        if source in self._lost:
            self._drop(message)
            return
        if tag & DESCRIPTOR:
            tag ^= DESCRIPTOR
            message = self._described(source, message)
        if is_older(tag, self.epoch):
            self._drop(message)
        elif expected := self._expected.get(tag):
            self._begin(expected.popleft(), message)
            if not expected:
                del self._expected[tag]
        else:
            self._arrived[tag].append(message)

    def _progress_in_background(self) -> None:
        poller = select.epoll()
        poller.register(self._worker.epoll_file_descriptor, select.EPOLLIN)
        while True:
            self._work.wait()
            with self._lock:
                if self._closing:
                    poller.close()
                    return
                if self._waiting:
                    continue  # who waits makes everything progress, and would miss events taken from under it
                self.progress()
                idle = self._worker.arm()
            if idle:
                poller.poll(0.1)

    def poll(self) -> None:
        """Let everything under way progress, without waiting."""
        with self._lock:
            self.progress()

    def close(self) -> None:
        """Close every link and the worker. The transport cannot be used afterwards."""
        if self._background is not None:
            self._closing = True
            self._work.set()
            self._background.join()
        self._epoll.close()
        for link in self._links.values():
            link.remove_close_callback()
        self._worker.cancel_inflight_requests(period=10_000_000, max_attempts=10)
        self._links.clear()
        self._expected.clear()
        self._arrived.clear()
        self._unfinished.clear()
        self._views.clear()
        self._arena.close()
        self._worker = self._context = None

    def _check(self) -> None:
        if self.interrupt.raised:
            self.interrupt.check()
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
        request = self._link(peer).tag_send(ucx_array(buffer), tag=ucx.UCXXTag(tag))
        if not request.completed:
            self._keep(request, buffer)
        return request

    def _described(self, peer: int, probe: Any) -> InArena:
        descriptor = torch.empty(2, dtype=torch.int64)
        request = self._worker.tag_recv_with_handle(ucx_array(descriptor), probe)
        while not request.completed:  # its 16 bytes are here; only the copy may be left to do
            self._worker.progress()
        view = self._views.get(peer)
        if view is None:
            raise RuntimeError(f"rank {self.rank} cannot open the shared memory of rank {peer}, which can open its own")
        start, length = descriptor.tolist()
        return InArena(view, start, length)

    def _begin(self, recv: Recv, message: Any) -> None:
        if message.length != recv.nbytes:
            raise RuntimeError(
                f"rank {self.rank} got {message.length} bytes from rank {recv.peer} (tag {recv.tag:#018x}) where it "
                f"expected {recv.nbytes}: the two ranks disagree about the layout"
            )
        if isinstance(message, InArena):
            recv.place(message)
            return
        recv.place(None)
        recv._request = self._worker.tag_recv_with_handle(ucx_array(recv.buffer), message)
        if not recv._request.completed:
            self._keep(recv._request, recv.buffer)

    def _drop(self, message: Any) -> None:
        if isinstance(message, InArena):
            message.view.release(message.start)
            return
        scratch = torch.empty(max(message.length, 1), dtype=torch.uint8)
        request = self._worker.tag_recv_with_handle(ucx_array(scratch), message)
        if not request.completed:
            self._keep(request, scratch)

    def _keep(self, request: Any, buffer: torch.Tensor) -> None:
        """UCX holds no reference to a buffer, and its user may be interrupted: keep it until the request completes."""
        self._unfinished.append((request, buffer))
        if len(self._unfinished) > self._prune_at:
            self._unfinished = [item for item in self._unfinished if not item[0].completed]
            self._prune_at = max(64, 2 * len(self._unfinished))
