"""Transport: point-to-point messages between ranks, matched by tag, and waits that a fault can interrupt.

Nothing is written into a caller's buffer before it is here: arrivals are matched by tag and only then copied. So an
interrupted receive leaves no buffer behind that a late message could overwrite, and messages of an older epoch are
dropped.

A device's memory is nothing that messages know: what lies there is copied to host memory first, in a stream of its own,
and the message begins when the copy is there.

What carries messages is ``comm.fabric``. Work that was started and not yet waited for goes on while the rank computes
(``comm.pump``); everything else happens in the thread that calls.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch

from megatron_elastic.cluster.rank.control import Interrupted
from megatron_elastic.comm.fabric import Fabric
from megatron_elastic.comm.helper import Helper
from megatron_elastic.comm.host.arena import address_of
from megatron_elastic.comm.host.sleep import Sleep
from megatron_elastic.comm.inbox import Inbox
from megatron_elastic.comm.interrupts import Interruptible, Interrupts
from megatron_elastic.comm.operation import (
    Arrival,
    Aside,
    Operation,
    Pending,
    Recv,
    Result,
    Sending,
    Shape,
    Steps,
    Task,
)
from megatron_elastic.comm.pump import Pump
from megatron_elastic.comm.tag import RANKS, Channel, make_tag
from megatron_elastic.device import allowance
from megatron_elastic.device.copies import HostCopy
from megatron_elastic.faults.odometer import Odometer
from megatron_elastic.observe.dials import SHARED_MEMORY, UCX
from megatron_elastic.observe.tracing.tracer import Tracer, Waiting

_NAP = 0.02
"""Seconds that a wait sleeps at most before it looks who is dying."""
_LONG = 0.25
"""Seconds after which a wait is worth noting."""
_SHARE = 8
"""Messages that nobody expects may take one of so many parts of the machine's memory."""
_UNPROVED = 2
"""So do those that have not proved yet that they are of this job."""
_BACKGROUND = Channel.STATE
"""It must leave room for a step's messages."""


class Transport:
    """Point-to-point messages between ranks, addressed by (epoch, channel, coordinate, peer).

    Args:
        rank: this rank's global id; ValueError if it does not fit message tags.
        interrupt: looked at in every wait; its ``check()`` raises to unwind the caller.
        wait_timeout: seconds after which one wait gives up with TimeoutError, or ``lasts``.
        crowded: ranks outnumber cores: sleep in the kernel almost at once.
        inbox_limit: bytes of memory that messages may take which nobody here expects yet; by default an eighth of the
            machine's. A peer that sends more is an error of whoever waits next; what still lies in the peer's own
            memory waits there.
        find: says where ranks are that are not known yet, without those that are dead; may be interrupted.
        refused: called when the first message over a link is refused, with the reason.
        lasts: told whom a wait waits for each time that it has lasted ``wait_timeout``; it goes on then.
        odometer: notes which wait lasts, and who has come out of one.
        patience: seconds that an interrupt may have to wait for what is to be finished if it can be.
        tracer: notes messages and waits while it is on.
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
        lasts: Callable[[list[int]], None] | None = None,
        odometer: Odometer | None = None,
        patience: float = 5.0,
        tracer: Tracer | None = None,
    ) -> None:
        if not 0 <= rank < RANKS:
            raise ValueError(f"rank {rank}: messages can tell {RANKS} ranks apart, those that are lost among them")
        self.rank = rank
        self.epoch = 0
        self.interrupt = interrupt
        self._wait_timeout = wait_timeout
        self._lasts = lasts
        self._odometer = odometer or Odometer.alone()
        self.dials = self._odometer.dials
        """Count what is sent and received."""
        self.tracer = tracer or Tracer.of_nothing()
        self._lock = threading.RLock()
        self._sleep = Sleep(interrupt.fd, crowded)
        memory, events = allowance.memory(), self._sleep.events
        self._inbox = Inbox(rank, memory // _SHARE if inbox_limit is None else inbox_limit)
        self._fabric = Fabric(rank, self._inbox, events, memory // _UNPROVED, find, refused, self.dials)
        self._peers, self._outbox = self._fabric.peers, self._fabric.outbox
        self._pump = Pump(rank, self._fabric, events, self._lock)
        self._interrupts = Interrupts(interrupt, self._peers, patience)
        self._helpers: dict[str, Helper] = {}
        self._doubted = -1
        """The epoch in which what comes from devices means nothing, if there was one."""

    # ---- peers ------------------------------------------------------------------------------

    @property
    def address(self) -> bytes:
        """What peers must be given to reach this rank; those of other hosts once it listens for them."""
        return self._fabric.address

    @property
    def listening(self) -> bool:
        """Whether peers of other hosts can reach this rank."""
        return self._fabric.listening

    def listen(self) -> None:
        """Let peers of other hosts reach this rank, and this rank them. Idempotent."""
        with self._lock:
            self._fabric.listen()

    def trust(self, key: bytes) -> None:
        """Exchange messages with ranks of other hosts that know this key. Once; later calls change nothing."""
        with self._lock:
            self._fabric.trust(key)

    @property
    def refused(self) -> int:
        """Messages over links that were not of this job."""
        return self._fabric.refused

    @property
    def bytes_sent(self) -> int:
        """Bytes of all messages so far, once for each peer that they went to."""
        return self.dials.sent[SHARED_MEMORY] + self.dials.sent[UCX]

    def cut(self, peers: Sequence[int], seconds: float) -> None:
        """Fault: for so long nothing that is sent to these peers arrives, and nobody learns that."""
        with self._lock:
            self._fabric.cut(peers, seconds)

    def add_peers(self, addresses: Mapping[int, bytes]) -> None:
        """Learn where peers are. Links are made when first used. Raises msgspec.DecodeError for no address."""
        with self._lock:
            self._fabric.add_peers(addresses)

    def advance(self, epoch: int, lost: Iterable[int] = ()) -> None:
        """Enter an epoch: forget the waits of older ones, drop their messages, let go of the dead. Idempotent.

        Messages of ``lost`` ranks do not count from now on. Other dead peers are a fault again if the new epoch depends
        on them: if something is sent to them, expected from them, or run in a group that they are members of.
        """
        with self._lock:
            try:
                # What is here is compared with the epoch before, which it is near to (``comm.tag``).
                self._fabric.take_in()
            except Exception as error:
                self._pump.failure = error
            self.epoch = epoch
            self._pump.abandon(Interrupted(epoch))
            self._inbox.advance(epoch, lost)
            self._fabric.advance(epoch, lost)
            self._pump.rest()

    # ---- messages ---------------------------------------------------------------------------

    def send(self, peer: int, channel: Channel, coordinate: int, buffer: torch.Tensor) -> Sending:
        """Start sending a contiguous tensor; it must stay unchanged until that is done."""
        if not buffer.is_cpu:
            return self.start(self._depart([peer], channel, coordinate, buffer))
        with self._lock:
            tag = make_tag(self.epoch, channel, coordinate, self.rank)
            if self.tracer.on:
                self.tracer.sent(peer, tag)
            send = self._fabric.send(peer, tag, buffer, channel == _BACKGROUND)
            if self._outbox.busy:
                self._pump.wake()
            return send

    def send_all(
        self, peers: Sequence[int], channel: Channel, coordinate: int, buffer: torch.Tensor
    ) -> Sequence[Sending]:
        """Start sending the same contiguous tensor to some peers; those of this host share one copy of it."""
        if not buffer.is_cpu:
            return [self.start(self._depart(peers, channel, coordinate, buffer))] if peers else []
        with self._lock:
            tag = make_tag(self.epoch, channel, coordinate, self.rank)
            if self.tracer.on:
                for peer in peers:
                    self.tracer.sent(peer, tag)
            sends = self._fabric.send_all(peers, tag, buffer, channel == _BACKGROUND)
            if self._outbox.busy:
                self._pump.wake()
            return sends

    def exchange(
        self, channel: Channel, coordinate: int,
        sends: Sequence[tuple[int, torch.Tensor]], recvs: Sequence[tuple[int, torch.Tensor]],
    ) -> list[Operation]:
        """Start sending a contiguous tensor to each of some peers and receiving one from each of some."""
        with self._lock:
            self._fabric.need(*(peer for peer, _ in (*recvs, *sends)))
            tag = make_tag(self.epoch, channel, coordinate, 0)
            started: list[Operation] = []
            for peer, buffer in recvs:
                address_of(buffer)
                started.append(self._expect(Recv(peer, tag | peer, buffer)))
            for peer, buffer in sends:
                if self.tracer.on:
                    self.tracer.sent(peer, tag | self.rank)
                started.append(self._fabric.send(peer, tag | self.rank, buffer, channel == _BACKGROUND))
            if self._outbox.busy:
                self._pump.wake()
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

    def meet(self, peers: Iterable[int]) -> None:
        """There will be messages to or from these: learn where they are, in one question instead of one for each."""
        with self._lock:
            self._fabric.need(*peers)

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

    def _depart(self, peers: Sequence[int], channel: Channel, coordinate: int, buffer: torch.Tensor) -> Steps:
        """Send what lies in a device's memory."""
        host = yield from self._landed(partial(self._or_end_waits, HostCopy(buffer).wait))
        yield self.send_all(peers, channel, coordinate, host)

    def _or_end_waits(self, wait: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Wait for what is to be sent. If it cannot be had, what is waited for here may be what others would make of
        it: any wait ends, not only one for this message.
        """
        try:
            return wait()
        except Exception as error:
            with self._lock:
                self._pump.failure = error
            raise

    def to_host(self, tensor: torch.Tensor) -> Generator[Sequence[Operation], None, torch.Tensor]:
        """Steps that have a tensor in host memory; it must not change meanwhile. Not copied if it is there.

        Raises Interrupted if the device has given up what the tensor may have come from.
        """
        if tensor.is_cpu:
            return tensor
        return (yield from self._landed(HostCopy(tensor).wait))

    def _landed(self, wait: Callable[[], torch.Tensor]) -> Generator[Sequence[Operation], None, torch.Tensor]:
        """Steps that have what a copy brings, for which another thread waits."""
        copying = self.aside(self.rank, wait, "copies")
        yield [copying]
        self.check_devices()
        return copying.result

    def doubt(self) -> None:
        """A collective of a device has been given up: what comes from devices means nothing for the rest of the epoch.

        In any thread, before the device can go on.
        """
        self._doubted = self.epoch

    @property
    def doubted(self) -> bool:
        """Whether that has happened in this epoch."""
        return self._doubted == self.epoch

    def check_devices(self) -> None:
        """Raise Interrupted if what has come from a device means nothing."""
        if self.doubted:
            self._interrupts.look()
            raise Interrupted(self.epoch)

    def _expect(self, recv: Recv) -> Recv:
        self._fabric.need(recv.peer)
        return self._inbox.expect(recv)

    # ---- waiting ----------------------------------------------------------------------------

    def start(self, steps: Steps, name: str = "collective", unit: int | None = None) -> Task:
        """Start a collective that goes on while the caller computes; wait for it with ``wait``.

        ``name``, ``unit``: what it is in a trace.
        """
        with self._lock:
            if not self.tracer.on:
                return self._pump.start(steps)
            lane = self.tracer.begin(name, unit)
            task = self._pump.start(self.tracer.follow(lane, steps))
            task.lane = lane
            return task

    def aside(self, peer: int, function: Callable[[], Result], thread: str = "aside") -> Aside[Result]:
        """Run ``function``, for ``peer``'s sake, in a thread of its own, after others there: nothing else waits."""
        helper = self._helpers.get(thread)
        if helper is None:
            helper = self._helpers[thread] = Helper(thread)
        future = helper.ask(function)
        future.add_done_callback(lambda _: self._fabric.wake())
        return Aside(peer, future)

    def run(self, steps: Steps) -> None:
        """Run a collective to its end."""
        for operations in steps:
            self.wait(*operations)

    def wait(self, *operations: Operation, limit: float | None = None) -> None:
        """Block until all are done, at most ``limit`` seconds (default: the transport's).

        Raises what the interrupt raises, ``Interrupted`` naming the peer when a link breaks or a process ends,
        TimeoutError naming the peers waited for when the limit passes (unless it is the transport's, and somebody is
        told of waits that last), and what went wrong in the background since the wait before. An interrupted wait
        leaves its operations to ``advance``.
        """
        with self._lock:
            pending = Pending(operations)
            if pending.done and self._pump.failure is None:
                if self.tracer.on:
                    self.tracer.had(operations)
                return
            self._pump.attend()
        traced = self.tracer.waits(operations) if self.tracer.on else None
        arrived = False
        try:
            self._wait(operations, pending, limit, traced)
            arrived = True
        finally:
            if traced is not None:
                traced.over(arrived)
            self._odometer.moved()
            with self._lock:
                self._pump.leave()

    def _wait(
        self, operations: Sequence[Operation], pending: Pending, own: float | None, traced: Waiting | None
    ) -> None:
        limit = self._wait_timeout if own is None else own
        begun, looks, pump = time.monotonic(), self._sleep.looks, self._pump
        deadline, noted = begun + limit, False
        while True:
            with self._lock:
                if traced is not None:
                    traced.look()
                pump.turn()
                if pump.failure is not None:
                    failure, pump.failure = pump.failure, None
                    raise failure
                if pending.done:
                    return
                self._interrupts.check()
                idle = not looks and self._fabric.arm()
            if looks:
                looks -= 1
                self._sleep.give_way()
                continue
            if idle:
                deaf = self._interrupts.put_off  # it would not sleep at all
                self._see(self._sleep.sleep(min(_NAP, limit), deaf))
                looks = self._sleep.looks
            now = time.monotonic()
            if not noted and now > begun + _LONG:
                noted = True
                self._odometer.wait(self._missing(operations)[0])
            if now > deadline:
                peers = self._missing(operations)
                if own is not None or self._lasts is None:
                    raise TimeoutError(
                        f"rank {self.rank} waited {limit:g} s for rank(s) {peers} in epoch {self.epoch}; "
                        "raise --elastic-wait-timeout if the step is that slow"
                    )
                self._lasts(peers)
                deadline = now + limit

    def _missing(self, operations: Sequence[Operation]) -> list[int]:
        """Whom these operations wait for; this rank itself if they have ended meanwhile."""
        with self._lock:
            return sorted({op.peer for op in operations if not op.done}) or [self.rank]

    def look(self) -> None:
        """Raise what a wait would, if there is an interrupt: for long stretches of computing."""
        self._interrupts.look()

    def whole(self, partners: Sequence[int], alone: Callable[[], bool]) -> AbstractContextManager[None]:
        """Around what is to be finished if it can be: an interrupt has to wait.

        Only if one of the ``partners`` that it takes is lost, if they have left this rank ``alone``, or if the
        interrupt has waited for too long, a wait ends.
        """
        return self._interrupts.whole(partners, alone)

    def _see(self, events: Sequence[tuple[int, int]] | None) -> None:
        """See who has ended, or, if nothing happened, who is dying. What they had sent is taken before that counts."""
        with self._lock:
            if events is None:
                self._peers.look()
            else:
                self._peers.see(events)

    def progress(self) -> None:
        """Let everything under way progress, without waiting."""
        with self._lock:
            self._pump.turn()

    @contextmanager
    def attentive(self) -> Iterator[None]:
        """Around a wait for something else than messages, for however long: what comes meanwhile is taken in.

        What nobody takes in lies in the memory of who sent it, and of that others have need.
        """
        with self._lock:
            self._pump.take_in(True)
        try:
            yield
        finally:
            with self._lock:
                self._pump.take_in(False)

    def close(self) -> None:
        """Close every link and the mailbox. The transport cannot be used afterwards."""
        for helper in self._helpers.values():
            helper.close()
        self._pump.close()
        self._sleep.close()
        self._inbox.clear()
        self._fabric.close()
