"""Mailboxes and shared memory between real processes: no room, full pipes, strangers, deaths, leaks."""

from __future__ import annotations

import gc
import os
import signal
import threading
import weakref
from collections import deque
from functools import partial
from itertools import repeat

import msgspec
import pytest
import torch

from megatron_elastic.cluster.rank.control import Interrupted, InterruptFlag
from megatron_elastic.comm import transport as transport_module
from megatron_elastic.comm.group import Group
from megatron_elastic.comm.host.arena import Arena, ArenaView
from megatron_elastic.comm.host.mailbox import BLOCK, INLINE, WHOLE, Mailbox, NearAddress, Neighbour, encode
from megatron_elastic.comm.links.strangers import Strangers
from megatron_elastic.comm.operation import Recv, Steps
from megatron_elastic.comm.tag import Channel
from megatron_elastic.comm.transport import Transport
from tests import world
from tests.world import Peer

pytestmark = pytest.mark.job

LARGE = 30_000_000
"""Elements of float32 that are more bytes than an arena has."""


def _open_files() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


# ---- a mailbox ------------------------------------------------------------------------------


def test_frames_come_whole_and_in_order() -> None:
    """More than one read can take, with frames that the end of a read cuts."""
    mailbox, arena = Mailbox(), Arena(1 << 20)
    address = NearAddress(arena.address, mailbox.fd)
    neighbour = Neighbour.open(7, address, 3)
    assert neighbour is not None
    sent = []
    for i in range(60):
        data = bytes([i]) * (i * 61 % INLINE)
        sent.append((i, len(data), 0, len(data), 0, WHOLE, data))
        sent.append((i, 1 << 40, 5, 6, 7, BLOCK, b""))
    for tag, size, start, length, release, kind, data in sent:
        assert neighbour.write(encode(tag, kind, size, start, length, release, data))
    assert mailbox.take() == sent
    assert mailbox.take() == []
    count = 0
    while neighbour.write(encode(count, BLOCK)):
        count += 1
    assert [frame[0] for frame in mailbox.take()] == list(range(count))
    neighbour.close()
    mailbox.close()
    neighbour.view.release(1000)  # a lent block may be released after its owner is forgotten
    arena.close()


def test_an_arena_serves_several_readers_and_uses_its_memory_again() -> None:
    arena = Arena(1 << 20)
    data = torch.arange(25_000, dtype=torch.int64)  # 200 kB: three fit what a step's messages have
    opened = _view(arena)
    blocks = [arena.put(data.data_ptr(), data.nbytes, (1, 2), False) for _ in range(4)]
    assert blocks[3] is None
    first = blocks[0]
    assert first is not None
    assert torch.equal(opened.tensor(first + arena.header(2), 25_000, torch.int64), data)
    assert arena.put(data.data_ptr(), data.nbytes, (1,), True) is not None  # background traffic has its own room
    assert arena.holders() == {1, 2}
    opened.release(first)
    assert arena.put(data.data_ptr(), data.nbytes, (1, 2), False) is None
    opened.release(first + 1)
    assert arena.put(data.data_ptr(), data.nbytes, (1, 2), False) == first
    arena.forget(1)
    assert arena.holders() == {2}
    arena.close()


def _view(arena: Arena) -> ArenaView:
    view = ArenaView.open(arena.address, lambda: None)
    assert view is not None
    return view


# ---- no room --------------------------------------------------------------------------------


def test_a_large_message_does_not_hold_up_a_small_one() -> None:
    """One that is expected late waits in its sender; a later one passes it, and both come whole."""

    def body(peer: Peer) -> None:
        transport = peer.transport
        if peer.rank == 0:
            large = transport.send(1, Channel.STATE, 1, torch.arange(LARGE, dtype=torch.float32))
            assert not large.done
            step = [transport.send(1, Channel.GRADIENT, i, torch.full((100_000,), float(i))) for i in range(20)]
            transport.wait(*step, limit=30)
            transport.wait(large)
        else:
            for i in range(20):
                got = torch.empty(100_000)
                transport.wait(transport.recv(0, Channel.GRADIENT, i, got), limit=30)
                assert (got == i).all()
            whole = torch.zeros(LARGE)
            transport.wait(transport.recv(0, Channel.STATE, 1, whole))
            assert torch.equal(whole, torch.arange(LARGE, dtype=torch.float32))
        peer.leave()

    world.run(body, size=2)


def test_sends_end_although_nobody_expects_them_yet() -> None:
    """Both send more than an arena has, and wait for that before they receive."""

    def body(peer: Peer) -> None:
        transport, other = peer.transport, 1 - peer.rank
        for channel in (Channel.STATE, Channel.GRADIENT):
            mine = torch.full((LARGE,), float(peer.rank))
            transport.wait(transport.send(other, channel, 1, mine))
            transport.wait(transport.send(other, channel, 1, torch.ones(3)))  # behind the large one of the same tag
            got, small = torch.empty(LARGE), torch.empty(3)
            transport.wait(transport.recv(other, channel, 1, got), transport.recv(other, channel, 1, small))
            assert (got == other).all() and (small == 1).all()
        assert not transport._outbox.busy
        peer.leave()

    world.run(body, size=2)


def test_a_send_goes_on_while_its_sender_computes() -> None:
    def body(peer: Peer) -> None:
        transport = peer.transport
        if peer.rank == 0:
            send = transport.send(1, Channel.STATE, 1, torch.ones(LARGE))
            peer.meet()  # which does not look at messages
            assert send.done
        else:
            got = torch.zeros(LARGE)
            transport.wait(transport.recv(0, Channel.STATE, 1, got))
            assert (got == 1).all()
            peer.meet()
        peer.leave()

    world.run(body, size=2)


def test_a_full_mailbox_delays_but_loses_nothing() -> None:
    count = 1000

    def body(peer: Peer) -> None:
        transport = peer.transport
        if peer.rank == 0:
            sends = [transport.send(1, Channel.VOTE, 1, torch.full((500,), float(i))) for i in range(count)]
            assert not sends[-1].done
            peer.meet()
            transport.wait(*sends)
        else:
            peer.meet()
            for i in range(count):
                got = torch.empty(500)
                transport.wait(transport.recv(0, Channel.VOTE, 1, got))
                assert (got == i).all()
        peer.leave()

    world.run(body, size=2)


def test_what_is_dropped_makes_room_again() -> None:
    """A new epoch forgets what was not written, and receivers drop what was: the arena is empty afterwards."""

    def body(peer: Peer) -> None:
        transport, other = peer.transport, 1 - peer.rank
        for epoch in range(1, 6):
            transport.send(other, Channel.GRADIENT, 1, torch.ones(LARGE))
            peer.meet()
            transport.advance(epoch)
            peer.meet()
            got = torch.empty(LARGE)
            send = transport.send(other, Channel.GRADIENT, 1, torch.full((LARGE,), float(epoch)))
            transport.wait(send, transport.recv(other, Channel.GRADIENT, 1, got))
            assert (got == epoch).all()
            peer.meet()
        transport.progress()
        assert not len(transport._inbox)
        peer.meet()
        assert transport._fabric._arena.holders() == set()
        peer.leave()

    world.run(body, size=2)


def test_who_stands_by_does_not_keep_the_room_of_others() -> None:
    """What was on its way to a rank that left comes when that has entered the epoch in which it waits for nothing."""
    ranks = one, left, other = [Transport(rank, InterruptFlag(), 60) for rank in range(3)]
    for transport in ranks:
        transport.add_peers({peer.rank: peer.address for peer in ranks})
    one.send(1, Channel.GRADIENT, 1, torch.ones(LARGE))
    left.advance(1)  # what it drops makes room for more
    one.progress()
    one.advance(1)
    other.advance(1)
    assert one._fabric._arena.holders() == {1}
    got = torch.zeros(LARGE)
    with left.attentive():
        one.send(2, Channel.GRADIENT, 1, torch.full((LARGE,), 2.0))
        other.wait(other.recv(0, Channel.GRADIENT, 1, got))
    assert (got == 2).all()
    for transport in ranks:
        transport.close()


# ---- what nobody expects --------------------------------------------------------------------


def _two(inbox_limit: int | None = None) -> tuple[Transport, Transport]:
    """Two ranks of this process that know each other."""
    one, other = (Transport(rank, InterruptFlag(), 60, inbox_limit=inbox_limit) for rank in range(2))
    for transport, peer in ((one, other), (other, one)):
        transport.add_peers({peer.rank: peer.address})
    return one, other


def test_a_peer_cannot_fill_the_memory() -> None:
    """What is too much is dropped, and whoever waits next learns from whom it came; the rest is as it was."""
    here, peer = _two(inbox_limit=10_000)
    for i in range(4):
        peer.send(0, Channel.VOTE, i, torch.full((800,), float(i)))  # 3200 bytes each
    with pytest.raises(RuntimeError, match=r"dropped a message from rank 1: .* 10000 bytes .* rank 1 sent 9600 bytes"):
        here.wait(here.recv(1, Channel.VOTE, 9, torch.empty(1)))
    for i in range(3):
        got = torch.empty(800)
        here.wait(here.recv(1, Channel.VOTE, i, got))
        assert (got == i).all()
    peer.send(0, Channel.VOTE, 5, torch.ones(800))  # there is room again
    here.wait(here.recv(1, Channel.VOTE, 5, torch.empty(800)))
    here.close()
    peer.close()


def test_too_much_waits_in_the_memory_of_its_sender() -> None:
    """Blocks that nobody expects are copied as long as they may; then their sender waits for room."""
    here, peer = _two(inbox_limit=10_000_000)
    send = peer.send(0, Channel.STATE, 1, torch.ones(LARGE))
    for _ in range(200):
        peer.progress()
        here.progress()
    assert not send.done
    assert here._inbox._budget.used < 10_000_000 + (16 << 20)  # what an arena has for background traffic comes on top
    got = torch.zeros(LARGE)
    here.wait(here.recv(1, Channel.STATE, 1, got))  # the other one's background sends the rest
    assert (got == 1).all()
    assert here._inbox._budget.used == 0
    here.close()
    peer.close()


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (encode(1, WHOLE, 9000, 0, 9000), "frame from rank 1 says that it has 9000 bytes"),
        (encode(1, BLOCK, 100, 1 << 31, 100, 5000), "frame from rank 1 about 100 bytes at 2147483648"),
        (encode(1, BLOCK, 100, 5000, 100, 1 << 31), "frame from rank 1 about 100 bytes at 5000"),
        (encode(1, 77), "frame of unknown kind 77 from rank 1"),
    ],
    ids=["too large", "outside", "released outside", "unknown"],
)
def test_a_frame_that_nobody_would_send_is_an_error(frame: bytes, message: str) -> None:
    here, peer = _two()
    assert peer._peers.near[0].write(frame)
    with pytest.raises(RuntimeError, match=message):
        here.wait(here.recv(1, Channel.VOTE, 1, torch.empty(3)))
    peer.send(0, Channel.VOTE, 2, torch.ones(3))
    here.wait(here.recv(1, Channel.VOTE, 2, torch.empty(3)))
    here.close()
    peer.close()


def test_strangers_cannot_fill_the_memory() -> None:
    strangers, frame = Strangers(0), (1 << 20, 4000, 0, 4000, 0, WHOLE, bytes(4000))
    for _ in range(15_000):
        strangers.put(7, frame)
    with pytest.raises(RuntimeError, match="dropped a frame from rank 7, whose address it does not know"):
        deque(map(strangers.put, repeat(7), repeat(frame)))
    assert 15_000 < len(list(strangers.take(7))) < 20_000
    strangers.put(7, frame)


# ---- what an event costs --------------------------------------------------------------------


class Counted(Recv):
    """Counts how often anybody looks whether it is done."""

    looks = 0

    @property
    def done(self) -> bool:
        Counted.looks += 1
        return super().done


@pytest.mark.parametrize("count", [100, 1000])
def test_an_arrival_costs_the_same_however_much_is_awaited(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations are looked at when the wait begins and never again, in waits and in tasks."""
    monkeypatch.setattr(transport_module, "Recv", Counted)
    here, peer = _two()
    monkeypatch.setattr(here._pump, "wake", lambda: None)
    recvs = [here.recv(1, Channel.VOTE, i, torch.empty(1)) for i in range(count)]

    def one(i: int) -> Steps:
        yield [here.recv(1, Channel.GRADIENT, i, torch.empty(1))]

    tasks = [here.start(one(i)) for i in range(count)]
    Counted.looks = 0
    for i in range(count):
        peer.send(0, Channel.GRADIENT, i, torch.ones(1))
        peer.send(0, Channel.VOTE, count - 1 - i, torch.ones(1))
        here.progress()
    assert all(task.done for task in tasks)
    assert Counted.looks == 0
    here.wait(*recvs)
    assert Counted.looks == count
    here.close()
    peer.close()


# ---- peers come and go ----------------------------------------------------------------------


def test_a_stranger_is_heard_once_it_is_known() -> None:
    """A joiner may send before its address has come to everybody."""
    here, stranger = (Transport(rank, InterruptFlag(), 60) for rank in range(2))
    stranger.add_peers({0: here.address})
    sends = [stranger.send(0, Channel.VOTE, size, torch.ones(size)) for size in (5, 50_000)]
    assert all(send.done for send in sends)
    recvs = [here.recv(1, Channel.VOTE, size, torch.zeros(size)) for size in (5, 50_000)]
    here.progress()
    assert not any(recv.done for recv in recvs)
    here.add_peers({1: stranger.address})
    here.wait(*recvs)
    assert all((recv.buffer == 1).all() for recv in recvs)
    stranger.close()
    here.close()


def test_a_death_is_known_at_once() -> None:
    """Without links and without an agent: by the process itself, and not by the limit of a wait."""

    def body(peer: Peer) -> None:
        transport = peer.transport
        peer.meet()
        if peer.rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(Interrupted) as caught:
            transport.wait(transport.recv(3, Channel.VOTE, 1, torch.empty(1)))
        assert caught.value.suspects == (3,)
        transport.advance(1, [3])
        group = Group(transport, 0, [0, 1, 2])
        total = torch.ones(5000)
        transport.run(group.all_reduce(total, torch.Tensor.add_))
        assert (total == 3).all()
        peer.leave()

    world.run(body, killed=[3])


def test_a_death_interrupts_those_who_wait_for_others_that_wait() -> None:
    """In a star the members talk to the first one only."""

    def body(peer: Peer) -> None:
        group = Group(peer.transport, 0, range(peer.size))
        total = torch.ones(5)
        peer.transport.run(group.all_reduce(total, torch.Tensor.add_))
        assert (total == peer.size).all()
        peer.meet()
        if peer.rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(Interrupted) as caught:
            peer.transport.run(group.all_reduce(total, torch.Tensor.add_))
        assert caught.value.suspects == (3,)
        peer.leave()

    world.run(body, killed=[3])


def test_the_end_of_a_rank_that_nothing_was_exchanged_with_interrupts_nobody() -> None:
    def body(peer: Peer) -> None:
        peer.meet()
        if peer.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        peer.await_death(2)
        group = Group(peer.transport, 0, [0, 1])
        for _ in range(3):
            total = torch.ones(5000)
            peer.transport.run(group.all_reduce(total, torch.Tensor.add_))
            assert (total == 2).all()
        peer.leave()

    world.run(body, size=3, killed=[2])


def test_the_memory_of_a_lost_rank_is_let_go_of_at_once() -> None:
    """The collector may come late, or never again, where little is made that stays."""
    here, peer = _two()
    small, large = torch.zeros(3), torch.zeros(50_000)
    for got in (small, large):
        peer.send(0, Channel.VOTE, len(got), torch.ones(len(got)))
        here.wait(here.recv(1, Channel.VOTE, len(got), got))
    here.send(1, Channel.VOTE, 1, torch.ones(50_000))
    gc.disable()
    try:
        view = weakref.ref(here._peers.near[1].view)
        here.advance(1, [1])
        assert view() is None
    finally:
        gc.enable()
    here.close()
    peer.close()


def test_what_was_done_aside_is_let_go_of_at_once() -> None:
    """The thread that has made a copy of a state may have nothing else to do for hours."""
    here, state, left = Transport(0, InterruptFlag(), 60), torch.ones(5), [threading.Event() for _ in range(2)]
    copying = here.aside(0, partial(torch.clone, state))
    here.wait(copying)
    for gone, held in zip(left, (state, copying.result), strict=True):
        weakref.finalize(held, gone.set)
    del state, copying, held
    assert all(gone.wait(60) for gone in left)
    here.close()


def test_what_a_task_was_at_is_let_go_of_at_once() -> None:
    """When it is over, and when it is given up, although who has started it still has it."""
    here, peer = _two()
    got, left = torch.zeros(3), list[weakref.ref[torch.Tensor]]()

    def steps(number: int) -> Steps:
        copy = torch.ones(5)
        left.append(weakref.ref(copy))
        received = torch.empty(3)
        left.append(weakref.ref(received))
        yield [here.recv(1, Channel.STATE, number, received)]
        got.copy_(received)

    gc.disable()
    try:
        ended, given_up = here.start(steps(1)), here.start(steps(2))
        peer.send(0, Channel.STATE, 1, torch.ones(3))
        here.wait(ended)
        here.advance(1)
        assert got.tolist() == [1.0, 1.0, 1.0]
        with pytest.raises(Interrupted):
            given_up.done  # noqa: B018
        assert [each() for each in left] == [None] * 4
    finally:
        gc.enable()
    here.close()
    peer.close()


def test_close_leaves_nothing_open() -> None:
    before, threads = _open_files(), len(os.listdir("/proc/self/task"))
    transports = [Transport(rank, InterruptFlag(), 60) for rank in range(2)]
    addresses = {rank: transport.address for rank, transport in enumerate(transports)}
    flags = [transport.interrupt for transport in transports]
    for transport in transports:
        transport.add_peers(addresses)
    got = torch.empty(LARGE)
    send = transports[0].send(1, Channel.STATE, 1, torch.ones(LARGE))
    transports[1].wait(transports[1].recv(0, Channel.STATE, 1, got))
    transports[0].wait(send)
    for transport in transports:
        transport.close()
    for flag in flags:
        assert isinstance(flag, InterruptFlag)
        flag.close()
    del transport, transports, send
    assert _open_files() == before
    assert len(os.listdir("/proc/self/task")) <= threads + 1  # UCX keeps one for all its contexts


def test_who_is_at_work_aside_when_all_is_closed_wakes_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """The descriptor that woke this rank may be another file's by then."""
    transport, others, go_on = Transport(0, InterruptFlag(), 60), set(threading.enumerate()), threading.Event()
    transport.aside(0, go_on.wait)
    (thread,) = set(threading.enumerate()) - others
    transport.close()
    go_on.set()
    thread.join(60)
    assert not caplog.records


def test_an_address_is_opaque_and_checked() -> None:
    transport = Transport(0, InterruptFlag(), 60)
    with pytest.raises(msgspec.DecodeError):
        transport.add_peers({1: b"nonsense"})
    transport.close()
