"""Transport: point-to-point messages between ranks, matched by tag, and waits that a fault can interrupt.

Between ranks of one host messages go through mailboxes and shared memory (``comm.outbox``, ``comm.mailbox``,
``comm.arena``); between hosts over UCX links (``comm.link``). Nothing is written into a caller's buffer before it is
here: arrivals are matched by tag and only then copied. So an interrupted receive leaves no buffer behind that a late
message could overwrite, and messages of an older epoch are dropped.

Work that was started and not yet waited for goes on while the rank computes: a background thread, which sleeps
unless there is such work, makes it progress. Everything else happens in the thread that calls.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch

from megatron_elastic.cluster.control import Interrupted
from megatron_elastic.comm.arena import Arena, address_of
from megatron_elastic.comm.inbox import Inbox
from megatron_elastic.comm.link import Links
from megatron_elastic.comm.mailbox import BLOCK, NUDGE, SQUEEZE, WHOLE, Frame, Mailbox, NearAddress, encode
from megatron_elastic.comm.message import Block, Whole
from megatron_elastic.comm.operation import (
    Arrival,
    Aside,
    Operation,
    Pending,
    Recv,
    Result,
    Send,
    Shape,
    Steps,
    Task,
)
from megatron_elastic.comm.outbox import Outbox
from megatron_elastic.comm.peers import PeerAddress, Peers
from megatron_elastic.comm.seal import Seal
from megatron_elastic.comm.sleep import Sleep
from megatron_elastic.comm.strangers import Strangers
from megatron_elastic.comm.tag import RANKS, Channel, make_tag, source_of

_ARENA_SIZE = 64 << 20
_NAP = 0.02
"""Seconds that a wait sleeps at most before it looks who is dying."""
_SHARE = 8
"""Messages that nobody expects may take one of so many parts of the machine's memory."""
_UNPROVED = 2
"""So do those that have not proved yet that they are of this job."""
_BACKGROUND = frozenset((Channel.STATE, Channel.CHECKPOINT))
"""Channels that must leave room for a step's messages."""


class Interruptible(Protocol):
    """What a wait looks at besides its messages (``cluster.control.InterruptFlag``)."""

    raised: bool
    fd: int
    lost: frozenset[int]

    @property
    def over(self) -> bool: ...

    def check(self) -> None: ...


class _Whole(NamedTuple):
    partners: frozenset[int]
    alone: Callable[[], bool]


class Transport:
    """Point-to-point messages between ranks, addressed by (epoch, channel, coordinate, peer).

    Args:
        rank: this rank's global id; ValueError if it does not fit message tags.
        interrupt: looked at in every wait; its ``check()`` raises to unwind the caller.
        wait_timeout: seconds after which one wait gives up with TimeoutError.
        crowded: ranks outnumber cores: sleep in the kernel almost at once.
        inbox_limit: bytes of memory that messages may take which nobody here expects yet; by default an eighth of the
            machine's. A peer that sends more is an error of whoever waits next; what still lies in the peer's own
            memory waits there.
        find: says where ranks are that are not known yet, without those that are dead; may be interrupted.
        refused: called when the first message over a link is refused, with the reason.
    """

    def __init__(
        self,
        rank: int,
        interrupt: Interruptible,
        wait_timeout: float,
        crowded: bool = True,
        inbox_limit: int | None = None,
        find: Callable[[Sequence[int]], Mapping[int, bytes]] | None = None,
        refused: Callable[[str], None] = lambda why: None,
    ) -> None:
        if not 0 <= rank < RANKS:
            raise ValueError(f"rank {rank}: messages can tell {RANKS} ranks apart, those that are lost among them")
        self.rank = rank
        self.epoch = 0
        self.bytes_sent = 0
        self.interrupt = interrupt
        self._wait_timeout = wait_timeout
        self._find = find
        self._refused = refused
        self._key = b""
        self._lock = threading.RLock()
        self._sleep = Sleep(interrupt.fd, crowded)
        self._events = events = self._sleep.events
        self._links: Links | None = None
        """None while nobody on another host matters."""
        self._arena = Arena(_ARENA_SIZE)
        self._mailbox = Mailbox()
        events.register(self._mailbox.fd, select.EPOLLIN)
        self._outbox = Outbox(rank, self._arena, events)
        self._peers = Peers(rank, events)
        self._frames: deque[Frame] = deque()
        """Taken from the mailbox and not yet looked at."""
        self._strangers = Strangers(rank)
        self._inbox = Inbox(rank, _memory() // _SHARE if inbox_limit is None else inbox_limit)
        self._tasks: dict[Task, None] = {}
        """Under way, in the order of their start."""
        self._ready: deque[Task] = deque()
        """Those that can go on."""
        self._looking: dict[Task, None] = {}
        """Those that wait for what does not tell."""
        self._background: threading.Thread | None = None
        self._aside: ThreadPoolExecutor | None = None
        self._work = threading.Event()
        """Set while there is work and nobody waits: then the background thread makes it progress."""
        self._waiting = 0
        self._whole: _Whole | None = None
        """What is computed, if it is to be finished."""
        self._failure: Exception | None = None
        """What went wrong in the background, until somebody waits."""
        self._closing = False

    # ---- peers ------------------------------------------------------------------------------

    @property
    def address(self) -> bytes:
        """What peers must be given to reach this rank; those of other hosts once it listens for them."""
        near = NearAddress(self._arena.address, self._mailbox.fd)
        return PeerAddress(b"" if self._links is None else self._links.address, near).encode()

    @property
    def listening(self) -> bool:
        """Whether peers of other hosts can reach this rank."""
        return self._links is not None

    def listen(self) -> None:
        """Let peers of other hosts reach this rank, and this rank them. Idempotent."""
        with self._lock:
            if self._links is None:
                self._links = Links(self.rank, self._peers.died, self._refused, _memory() // _UNPROVED)
                self._events.register(self._links.fd, select.EPOLLIN)
                if self._key:
                    self._links.seal = Seal(self.rank, self._key)

    def trust(self, key: bytes) -> None:
        """Exchange messages with ranks of other hosts that know this key. Once; later calls change nothing."""
        with self._lock:
            if not self._key:
                self._key = key
                if self._links is not None:
                    self._links.seal = Seal(self.rank, key)

    @property
    def refused(self) -> int:
        """Messages over links that were not of this job."""
        return 0 if self._links is None else self._links.refused

    def add_peers(self, addresses: Mapping[int, bytes]) -> None:
        """Learn where peers are. Links are made when first used. Raises msgspec.DecodeError for no address."""
        with self._lock:
            for peer, address in addresses.items():
                if peer in self._peers or peer == self.rank:
                    continue
                self._peers.add(peer, address)
                for frame in self._strangers.take(peer):
                    self._deliver(frame)

    def advance(self, epoch: int, lost: Iterable[int] = ()) -> None:
        """Enter an epoch: forget the waits of older ones, drop their messages, let go of the dead. Idempotent.

        Messages of ``lost`` ranks do not count from now on. Other dead peers are a fault again if the new epoch depends
        on them: if something is sent to them, expected from them, or run in a group that they are members of.
        """
        with self._lock:
            try:
                self._take_in()  # what is here is compared with the epoch before, which it is near to (``comm.tag``)
            except Exception as error:
                self._failure = error
            self.epoch = epoch
            for task in self._tasks:
                task.abandon(Interrupted(epoch))
            for tasks in (self._tasks, self._ready, self._looking):
                tasks.clear()
            self._inbox.advance(epoch, lost)
            self._outbox.advance(epoch)
            for peer, neighbour in self._peers.advance(lost).items():
                self._strangers.take(peer)
                if self._links is not None:
                    self._links.forget(peer)
                if neighbour is not None:
                    self._outbox.forget(neighbour)
                self._peers.forget(peer)
            if not self._outbox.busy:
                self._rest()

    # ---- messages ---------------------------------------------------------------------------

    def send(self, peer: int, channel: Channel, coordinate: int, buffer: torch.Tensor) -> Send:
        """Start sending a contiguous tensor; it must stay unchanged until the Send is done."""
        with self._lock:
            tag = make_tag(self.epoch, channel, coordinate, self.rank)
            send = self._send(peer, tag, buffer, channel in _BACKGROUND)
            if self._outbox.busy:
                self._work_goes_on()
            return send

    def send_all(self, peers: Sequence[int], channel: Channel, coordinate: int, buffer: torch.Tensor) -> list[Send]:
        """Start sending the same contiguous tensor to some peers; those of this host share one copy of it."""
        with self._lock:
            tag = make_tag(self.epoch, channel, coordinate, self.rank)
            neighbours = self._peers.near
            near = [neighbours[peer] for peer in peers if peer in neighbours]
            sends = [self._send(peer, tag, buffer, False) for peer in peers if peer not in neighbours]
            if near:
                self.bytes_sent += buffer.nbytes * len(near)
                self._peers.watch(peers)
                sends.append(self._outbox.send(near, tag, buffer, channel in _BACKGROUND))
                if self._outbox.busy:
                    self._work_goes_on()
            return sends

    def exchange(
        self, channel: Channel, coordinate: int,
        sends: Sequence[tuple[int, torch.Tensor]], recvs: Sequence[tuple[int, torch.Tensor]],
    ) -> list[Operation]:
        """Start sending a contiguous tensor to each of some peers and receiving one from each of some."""
        with self._lock:
            tag = make_tag(self.epoch, channel, coordinate, 0)
            started: list[Operation] = []
            for peer, buffer in recvs:
                address_of(buffer)
                started.append(self._expect(Recv(peer, tag | peer, buffer)))
            for peer, buffer in sends:
                started.append(self._send(peer, tag | self.rank, buffer, channel in _BACKGROUND))
            if self._outbox.busy:
                self._work_goes_on()
            return started

    def recv(self, peer: int, channel: Channel, coordinate: int, buffer: torch.Tensor) -> Recv:
        """Expect a message from ``peer`` into a contiguous tensor of exactly its size."""
        with self._lock:
            address_of(buffer)
            return self._expect(Recv(peer, make_tag(self.epoch, channel, coordinate, peer), buffer))

    def borrow(self, peer: int, channel: Channel, coordinate: int, numel: int, dtype: torch.dtype) -> Recv:
        """Expect a flat tensor, to be read where it lies and released (see ``Recv``)."""
        with self._lock:
            tag = make_tag(self.epoch, channel, coordinate, peer)
            return self._expect(Recv(peer, tag, None, Shape(numel, dtype)))

    def watch(self, members: Sequence[int]) -> None:
        """Members of a group depend on each other from now on: the death of one interrupts every wait of this epoch."""
        self._peers.watch(members)

    def first_of(self, peers: Sequence[int], channel: Channel, coordinate: int) -> int:
        """The peer whose message of this coordinate is here first; blocks until there is one."""
        self._peers.watch(peers)
        tags = {peer: make_tag(self.epoch, channel, coordinate, peer) for peer in peers}
        arrival = Arrival(self._inbox.has, tags)
        self.wait(arrival)
        return arrival.peer

    def _send(self, peer: int, tag: int, buffer: torch.Tensor, background: bool) -> Send:
        self.bytes_sent += buffer.nbytes
        self._need(peer)
        neighbour = self._peers.near.get(peer)
        if neighbour is not None:
            return self._outbox.send((neighbour,), tag, buffer, background)
        worker = self._peers.far.get(peer)
        if worker is not None:
            if self._links is None:
                raise RuntimeError(f"rank {self.rank} has no links, and rank {peer} is on another host: listen first")
            return Send(peer, self._links.send(peer, worker, tag, buffer))
        if peer not in self._peers:
            raise KeyError(f"rank {self.rank} knows no address of rank {peer}")
        return Send(peer)  # to the dead: who waits for anything in this epoch learns it

    def _expect(self, recv: Recv) -> Recv:
        self._need(recv.peer)
        return self._inbox.expect(recv)

    def _need(self, peer: int) -> None:
        """This epoch depends on a peer. It is looked up when it is first needed."""
        self._peers.watch((peer,))
        if self._find is None or peer in self._peers or peer == self.rank:
            return
        self.add_peers(self._find([peer]))
        if peer not in self._peers:
            self._peers.died(peer)

    # ---- waiting ----------------------------------------------------------------------------

    def start(self, steps: Steps) -> Task:
        """Start a collective that goes on while the caller computes; wait for it with ``wait``."""
        with self._lock:
            task = Task(steps, self.rank, self._ready)
            if not self._go_on(task):
                self._tasks[task] = None
                self._work_goes_on()
            return task

    def aside(self, peer: int, function: Callable[[], Result]) -> Aside[Result]:
        """Run ``function``, for ``peer``'s sake, in a thread of its own, so that nothing else waits for it."""
        if self._aside is None:
            self._aside = ThreadPoolExecutor(max_workers=1, thread_name_prefix="aside")
        future = self._aside.submit(function)
        future.add_done_callback(lambda _: self._mailbox.wake())
        return Aside(peer, future)

    def run(self, steps: Steps) -> None:
        """Run a collective to its end."""
        for operations in steps:
            self.wait(*operations)

    def wait(self, *operations: Operation, limit: float | None = None) -> None:
        """Block until all are done, at most ``limit`` seconds (default: the transport's).

        Raises what the interrupt raises, ``Interrupted`` naming the peer when a link breaks or a process ends,
        TimeoutError naming the peers waited for when the limit passes, and what went wrong in the background since the
        wait before. An interrupted wait leaves its operations to ``advance``.
        """
        with self._lock:
            pending = Pending(operations)
            if pending.done and self._failure is None:
                return
            self._waiting += 1
            self._rest()
        try:
            self._wait(operations, pending, self._wait_timeout if limit is None else limit)
        finally:
            with self._lock:
                self._waiting -= 1
                if self._tasks or self._outbox.busy:
                    self._work_goes_on()

    def _wait(self, operations: Sequence[Operation], pending: Pending, limit: float) -> None:
        deadline, looks = time.monotonic() + limit, self._sleep.looks
        while True:
            with self._lock:
                self._progress()
                self._raise_failure()
                if pending.done:
                    return
                self._check()
                idle = self._links is None or self._links.arm()
            if looks:
                looks -= 1
                self._sleep.give_way()
                continue
            if idle:
                deaf = self._whole is not None and self.interrupt.raised  # it would not sleep at all
                self._see(self._sleep.sleep(min(_NAP, limit), deaf))
                looks = self._sleep.looks
            if time.monotonic() > deadline:
                peers = sorted({op.peer for op in operations if not op.done})
                raise TimeoutError(
                    f"rank {self.rank} waited {limit:g} s for rank(s) {peers} in epoch {self.epoch}; "
                    "raise --elastic-wait-timeout if the step is that slow"
                )

    def look(self) -> None:
        """Raise what a wait would, if there is an interrupt: for long stretches of computing."""
        if self.interrupt.raised and self._whole is None:
            self.interrupt.check()

    @contextmanager
    def whole(self, partners: Sequence[int], alone: Callable[[], bool]) -> Iterator[None]:
        """Around what is to be finished if it can be: an interrupt has to wait.

        Only if one of the ``partners`` that it takes is lost, or if they have left this rank ``alone``, a wait ends.
        """
        self._whole = _Whole(frozenset(partners), alone)
        try:
            yield
        finally:
            self._whole = None

    def _check(self) -> None:
        suspects, interrupt, whole = self._peers.suspects, self.interrupt, self._whole
        if whole is not None:
            suspects = tuple(peer for peer in suspects if peer in whole.partners)
        if interrupt.raised and (whole is None or interrupt.over or whole.partners & interrupt.lost or whole.alone()):
            interrupt.check()
        if suspects:
            raise Interrupted(0, suspects=suspects)

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _see(self, events: Sequence[tuple[int, int]] | None) -> None:
        """See who has ended, or, if nothing happened, who is dying. What they had sent is taken before that counts."""
        with self._lock:
            if events is None:
                self._peers.look()
            else:
                self._peers.see(events)

    # ---- progress ---------------------------------------------------------------------------

    def progress(self) -> None:
        """Let everything under way progress, without waiting."""
        with self._lock:
            self._progress()

    def _progress(self) -> None:
        self._take_in()
        if self._outbox.busy:
            self._outbox.progress()
        if self._looking:
            self._ready.extend(self._looking)
            self._looking.clear()
        while self._ready:
            task = self._ready.popleft()
            if task in self._tasks and self._go_on(task):
                del self._tasks[task]
        if not self._tasks and self._work.is_set() and not self._outbox.busy:
            self._rest()

    def _take_in(self) -> None:
        """Give what has arrived to who expects it."""
        frames = self._frames
        frames.extend(self._mailbox.take())
        while frames:
            self._deliver(frames.popleft())
        if self._links is not None:
            for tag, message in self._links.progress():
                self._inbox.put(tag, message)

    def _go_on(self, task: Task) -> bool:
        """Returns whether the task has ended."""
        ended = task.advance()
        if not ended and task.looks:
            self._looking[task] = None
        return ended

    def _deliver(self, frame: Frame) -> None:
        """Make a message of a frame from this host."""
        tag, size, start, length, release, kind, data = frame
        source = source_of(tag)
        neighbour = self._peers.near.get(source)
        if kind == NUDGE:
            pass  # to wake is all it is for
        elif neighbour is None and source not in self._peers:
            self._strangers.put(source, frame)
        elif kind == WHOLE:
            self._inbox.put(tag, Whole(data))
        elif neighbour is None:
            self._peers.died(source)  # it had ended before its memory could be opened
        elif kind == SQUEEZE:
            self._inbox.squeeze(source)
            self._outbox.answer(neighbour, encode(self.rank, NUDGE))
        elif kind == BLOCK:
            if not (start + length <= neighbour.view.size and release < neighbour.view.size and length <= size):
                raise RuntimeError(
                    f"rank {self.rank} got a frame from rank {source} about {length} bytes at {start}: it has none"
                )
            block = Block(neighbour.view, start, length, release)
            if size == length:
                self._inbox.put(tag, block)
            else:
                self._inbox.put_piece(tag, size, block)
        else:
            raise RuntimeError(f"rank {self.rank} got a frame of unknown kind {kind} from rank {source}")

    def _work_goes_on(self) -> None:
        """Let the background thread work while nobody waits."""
        if self._waiting:
            return
        if self._background is None:
            self._background = threading.Thread(target=self._progress_in_background, daemon=True, name="links")
            self._background.start()
        self._work.set()

    def _rest(self) -> None:
        """Let the background thread sleep."""
        if self._work.is_set() and not self._closing:  # to ask costs less than to clear
            self._work.clear()

    def _progress_in_background(self) -> None:
        while True:
            self._work.wait()
            if self._closing:
                return
            try:
                self._progress_while_nobody_waits()
            except Exception as error:
                with self._lock:
                    if self._failure is not None:
                        self._rest()  # it fails again and again: leave it to who waits
                    self._failure = error

    def _progress_while_nobody_waits(self) -> None:
        with self._lock:
            if self._waiting:
                return  # who waits makes everything progress, and would miss events taken from under it
            self._progress()
            idle = self._links is None or self._links.arm()
        if idle and self._work.is_set():
            self._see(self._events.poll(0.1))

    def close(self) -> None:
        """Close every link and the mailbox. The transport cannot be used afterwards."""
        if self._aside is not None:
            self._aside.shutdown()
        if self._background is not None:
            with self._lock:
                self._closing = True
                self._work.set()
            self._background.join()
        self._sleep.close()
        if self._links is not None:
            self._links.close()
        self._peers.close()
        self._inbox.clear()
        self._mailbox.close()
        self._arena.close()


def _memory() -> int:
    """Bytes that this machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
