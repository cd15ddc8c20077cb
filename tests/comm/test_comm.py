"""Links, groups and the torch backend, between real processes that also die."""

from __future__ import annotations

import math
import os
import signal
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from megatron_elastic.cluster.rank.control import Interrupted, InterruptFlag
from megatron_elastic.comm import transport
from megatron_elastic.comm.distributed import backend
from megatron_elastic.comm.group import Group
from megatron_elastic.comm.host.mailbox import encode
from megatron_elastic.comm.host.sleep import YIELDS
from megatron_elastic.comm.operation import Operation, Steps
from megatron_elastic.comm.tag import (
    GRAINS,
    GROUPS,
    NUMBERS,
    PARTS,
    POSITIONS,
    RANKS,
    SLICES,
    UNITS,
    Channel,
    at_grain,
    at_group,
    at_slice,
    check_sizes,
    is_older,
    make_tag,
    source_of,
)
from tests import world
from tests.comm.single import all_gather_single, reduce_scatter_single
from tests.world import Peer

pytestmark = pytest.mark.job

SIZES = [(0,), (1,), (3, 5), (4099,), (70_001,)]
"""From nothing, over a star, to chunks that are uneven and go through shared memory."""
APART = pytest.mark.parametrize("apart", [False, True], ids=["one host", "links"])
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8]


def _value(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """What ``rank`` contributes; known to all."""
    generator = torch.Generator().manual_seed(rank)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, 50, shape, generator=generator).to(dtype)


def _world(body: Callable[[Peer], None], apart: bool = False) -> None:
    """Run ``body`` in four processes whose default group is the elastic backend."""

    def with_backend(peer: Peer) -> None:
        backend.initialize(peer.transport, range(peer.size), timedelta(seconds=60))
        body(peer)
        peer.leave()

    world.run(with_backend, apart=apart)


def _equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected), (found, expected)


# ---- collectives --------------------------------------------------------------------------


@APART
def test_all_reduce(apart: bool) -> None:
    def body(peer: Peer) -> None:
        combine: dict[Any, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
            dist.ReduceOp.SUM: torch.add, dist.ReduceOp.PRODUCT: torch.mul,
            dist.ReduceOp.MIN: torch.minimum, dist.ReduceOp.MAX: torch.maximum,
        }  # fmt: skip
        for shape in SIZES:
            for dtype in DTYPES:
                for op, function in combine.items():
                    values = [_value(rank, shape, dtype) for rank in range(peer.size)]
                    expected = values[0]
                    for value in values[1:]:
                        expected = function(expected, value)  # in member order: floats are equal bit for bit
                    mine = values[peer.rank].clone()
                    dist.all_reduce(mine, op=op)
                    _equal(mine, expected)
        mine = torch.full((5,), float(peer.rank))
        dist.all_reduce(mine, op=dist.ReduceOp.AVG)
        _equal(mine, torch.full((5,), 1.5))

    _world(body, apart)


def test_not_contiguous() -> None:
    def body(peer: Peer) -> None:
        mine = torch.arange(12.0).view(3, 4).t() + peer.rank
        assert not mine.is_contiguous()
        dist.all_reduce(mine)
        _equal(mine, 4 * torch.arange(12.0).view(3, 4).t() + 6)
        column = torch.full((4, 3), float(peer.rank))
        dist.broadcast(column[:, 1], src=2)
        _equal(column, torch.tensor([float(peer.rank), 2.0, float(peer.rank)]).expand(4, 3))
        gathered = [torch.empty(4, 2).t() for _ in range(peer.size)]
        dist.all_gather(gathered, torch.full((2, 4), float(peer.rank)))
        for rank, tensor in enumerate(gathered):
            _equal(tensor, torch.full((2, 4), float(rank)))

    _world(body)


@pytest.mark.parametrize("shape", [(0, 3), (2, 3), (5003, 7)], ids=str)
def test_moving_collectives(shape: tuple[int, int]) -> None:
    """broadcast, gather, scatter, all_gather, all_to_all, reduce, reduce_scatter and their one-tensor forms."""

    def body(peer: Peer) -> None:
        me, everybody = peer.rank, range(peer.size)
        for dtype in DTYPES:
            values = [_value(rank, shape, dtype) for rank in everybody]
            total = values[0] + values[1] + values[2] + values[3]

            mine = values[me].clone()
            dist.broadcast(mine, src=3)
            _equal(mine, values[3])
            mine = values[me].clone()
            dist.reduce(mine, dst=2)
            _equal(mine, total if me == 2 else values[me])
            gathered = [torch.empty(shape, dtype=dtype) for _ in everybody]
            dist.all_gather(gathered, values[me])
            for rank in everybody:
                _equal(gathered[rank], values[rank])
            flat = torch.empty(peer.size * shape[0], shape[1], dtype=dtype)
            all_gather_single(flat, values[me])
            _equal(flat, torch.cat(values))
            at_root = [torch.empty(shape, dtype=dtype) for _ in everybody]
            dist.gather(values[me], at_root if me == 1 else None, dst=1)
            if me == 1:
                _equal(torch.cat(at_root), torch.cat(values))
            out = torch.empty(shape, dtype=dtype)
            dist.scatter(out, values if me == 0 else None, src=0)
            _equal(out, values[me])
            dist.reduce_scatter(out, [value + me for value in values])
            expected = values[me] + 0
            for rank in everybody[1:]:
                expected = expected + (values[me] + rank)
            _equal(out, expected)
            reduce_scatter_single(out, torch.cat([value + me for value in values]))
            _equal(out, expected)
            with dist._coalescing_manager():
                all_gather_single(flat, values[me])
            _equal(flat, torch.cat(values))
            dist.all_to_all(gathered, [value + me for value in values])
            for rank in everybody:
                _equal(gathered[rank], values[me] + rank)

    _world(body)


@APART
def test_uneven_collectives(apart: bool) -> None:
    def body(peer: Peer) -> None:
        me, everybody = peer.rank, range(peer.size)
        # Rank i sends i + j elements to rank j.
        send = [torch.full((me + j,), float(10 * me + j)) for j in everybody]
        recv = [torch.empty(i + me) for i in everybody]
        dist.all_to_all(recv, send)
        for i in everybody:
            _equal(recv[i], torch.full((i + me,), float(10 * i + me)))
        whole = torch.empty(sum(i + me for i in everybody))
        splits: Any = torch.tensor([i + me for i in everybody])  # as Megatron's token dispatchers have them
        dist.all_to_all_single(whole, torch.cat(send), splits, [me + j for j in everybody])
        _equal(whole, torch.cat(recv))
        gathered = [torch.empty(3000 * i) for i in everybody]
        dist.all_gather(gathered, torch.full((3000 * me,), float(me)))
        for i in everybody:
            _equal(gathered[i], torch.full((3000 * i,), float(i)))

    _world(body, apart)


def test_objects() -> None:
    def body(peer: Peer) -> None:
        objects: list[Any] = [None] * peer.size
        dist.all_gather_object(objects, {"rank": peer.rank, "text": "x" * 1000 * peer.rank})
        assert [entry["rank"] for entry in objects] == [0, 1, 2, 3]
        assert [len(entry["text"]) for entry in objects] == [0, 1000, 2000, 3000]
        told: list[Any] = [("word", peer.rank), None]
        dist.broadcast_object_list(told, src=1)
        assert told == [("word", 1), None]

    _world(body)


@pytest.mark.parametrize("asked", ["default group", "backend"])
def test_groups(asked: str) -> None:
    """Sub-groups that overlap, do not contain everybody, and have another order of their own."""

    def body(peer: Peer) -> None:
        if asked == "backend":  # torch makes them so where the default group does not know how to, as before 2.13
            del backend.ElasticProcessGroup.new_group
            backend.adopt_sub_groups()
        me = peer.rank
        pairs = [dist.new_group([0, 1], backend="gloo"), dist.new_group([2, 3])]
        assert isinstance(pairs[me // 2], backend.ElasticProcessGroup)
        outer = dist.new_group([0, 3])
        mine = torch.tensor([float(me)])
        dist.all_reduce(mine, group=pairs[me // 2])
        assert mine.item() == (1 if me < 2 else 5)
        if me in (0, 3):
            assert dist.get_rank(outer) == (0 if me == 0 else 1)
            mine = torch.tensor([float(me)])
            dist.broadcast(mine, src=3, group=outer)
            assert mine.item() == 3
        else:
            assert dist.get_rank(outer) == -1
        dist.barrier()

    _world(body)


@APART
def test_point_to_point(apart: bool) -> None:
    """Messages are matched by tag, not by order, and may be large, strided or empty."""

    def body(peer: Peer) -> None:
        if peer.rank == 0:
            works = [dist.isend(torch.full((n,), float(n)), 1, tag=n) for n in (3, 7_000, 5)]
            works.append(dist.isend(torch.arange(6.0).view(2, 3).t(), 1, tag=9))
            for work in works:
                assert work is not None
                work.wait()
        if peer.rank == 1:
            for n in (5, 3, 7_000):
                got = torch.empty(n)
                work = dist.irecv(got, 0, tag=n)
                assert work is not None
                work.wait()
                _equal(got, torch.full((n,), float(n)))
            wide = torch.zeros(2, 3).t()
            dist.recv(wide, 0, tag=9)
            _equal(wide, torch.arange(6.0).view(2, 3).t())
        left, right = (peer.rank - 1) % peer.size, (peer.rank + 1) % peer.size
        got = torch.empty(2)
        ring = [dist.P2POp(dist.isend, torch.full((2,), float(peer.rank)), right), dist.P2POp(dist.irecv, got, left)]
        for work in dist.batch_isend_irecv(ring):
            work.wait()
        _equal(got, torch.full((2,), float(left)))

    _world(body, apart)


# ---- faults -------------------------------------------------------------------------------


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _reduce_in(group: Group, tensor: torch.Tensor) -> None:
    while True:
        group.transport.run(group.all_reduce(tensor, torch.Tensor.add_))


def _reduce_for_ever(tensor: torch.Tensor) -> None:
    while True:
        dist.all_reduce(tensor)


@APART
def test_edit_after_a_death(apart: bool) -> None:
    """Those blocked in a collective unwind; the same group objects then work without the dead rank."""

    def body(peer: Peer) -> None:
        default = backend.initialize(peer.transport, range(peer.size), timedelta(seconds=60))
        upper = dist.new_group([2, 3])
        reversed_ = dist.new_group([1, 3, 2])
        big = torch.ones(100_000)
        dist.all_reduce(big)
        if peer.rank == 3:
            _die()
        with pytest.raises(Interrupted) as caught:
            _reduce_for_ever(big)
        assert caught.value.suspects == (3,)
        peer.transport.advance(1, [3])
        backend.keep([0, 1, 2])
        assert (default.size(), dist.get_world_size(), dist.get_rank()) == (3, 3, peer.rank)
        for shape in SIZES:
            mine = torch.full(shape, float(peer.rank))
            dist.all_reduce(mine)
            _equal(mine, torch.full(shape, 3.0))
        if peer.rank == 2:
            mine = torch.ones(3)
            dist.all_reduce(mine, group=upper)
            _equal(mine, torch.ones(3))
        if peer.rank != 0:
            mine = torch.ones(3)
            dist.all_reduce(mine, group=reversed_)
            _equal(mine, torch.full((3,), 2.0))
        peer.leave()

    world.run(body, killed=[3], apart=apart)


@APART
def test_a_newcomer_that_dies_is_a_fault_only_where_it_is_needed(apart: bool) -> None:
    """It dies under the layout that lets it in, and no later one ever lists it among the lost."""

    def body(peer: Peer) -> None:
        # Large enough that everybody exchanges parts with everybody: a link tells only its own end.
        transport, tensor = peer.transport, torch.zeros(100_000)
        group = Group(transport, 0, [0, 1, 2])
        if peer.rank != 3:
            transport.run(group.all_reduce(tensor, torch.Tensor.add_))
        peer.meet()
        transport.advance(1)
        group.edit([0, 1, 2, 3])
        transport.run(group.all_reduce(tensor, torch.Tensor.add_))
        if peer.rank == 3:
            _die()
        for _ in range(2):  # as often as anybody waits under this layout
            with pytest.raises(Interrupted) as caught:
                _reduce_in(group, tensor)
            assert caught.value.suspects == (3,)
        transport.advance(2)
        group.edit([0, 1, 2])
        for _ in range(50):
            tensor.fill_(1)
            transport.run(group.all_reduce(tensor, torch.Tensor.add_))
            _equal(tensor, torch.full((100_000,), 3.0))
        assert 3 not in transport._peers.near  # nothing of it stays open
        transport.advance(3)
        group.edit([0, 1, 2, 3])
        with pytest.raises(Interrupted) as caught:
            _reduce_in(group, tensor)
        assert caught.value.suspects == (3,)
        transport.advance(4, [3])
        group.edit([0, 1, 2])
        transport.run(group.all_reduce(tensor, torch.Tensor.add_))
        peer.leave()

    world.run(body, killed=[3], apart=apart)


@APART
def test_older_epochs_are_dropped(apart: bool) -> None:
    """A message of an epoch that is over is never taken for one of the present; an early one is kept."""

    def body(peer: Peer) -> None:
        transport, sizes = peer.transport, (10, 50_000)
        if peer.rank == 0:
            for size in sizes:
                transport.wait(transport.send(1, Channel.ACTIVATION, size, torch.full((size,), 1.0)))
            transport.advance(1)
            for size in sizes:
                transport.wait(transport.send(1, Channel.ACTIVATION, size, torch.full((size,), 2.0)))
            transport.wait(transport.send(1, Channel.ACTIVATION, 3, torch.zeros(1)))
        if peer.rank == 1:
            stale = torch.zeros(50_000)
            transport.recv(0, Channel.ACTIVATION, 77, stale)  # what waits for an older epoch's message is forgotten
            arrived = torch.zeros(10)
            transport.wait(transport.recv(0, Channel.ACTIVATION, 10, arrived))
            assert arrived[0] == 1  # the other one may be here or still under way
            transport.advance(1)
            for size in sizes:
                got = torch.zeros(size)
                transport.wait(transport.recv(0, Channel.ACTIVATION, size, got))
                _equal(got, torch.full((size,), 2.0))
            transport.wait(transport.recv(0, Channel.ACTIVATION, 3, torch.zeros(1)))
            assert not len(transport._inbox)
            assert not stale.any()
        peer.leave()

    world.run(body, size=2, apart=apart)


LAST_LOOK = YIELDS + 1
"""How often a wait looks before it sleeps."""


class RaisedWhileWaiting:
    """An interrupt that comes right after the wait has looked and before it sleeps: only ``fd`` can wake it."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK)
        self.lost: frozenset[int] = frozenset()
        self.over = False
        self.since = 0.0
        self.looks = 0

    @property
    def raised(self) -> bool:
        self.looks += 1
        if self.looks == LAST_LOOK:
            os.eventfd_write(self.fd, 1)
        return self.looks > LAST_LOOK

    @raised.setter
    def raised(self, value: bool) -> None:
        raise AssertionError("a wait does not write the flag")

    def check(self) -> None:
        raise Interrupted(1)


def test_an_interrupt_wakes_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "_NAP", math.inf)  # without the descriptor it would sleep until the limit

    def body(peer: Peer) -> None:
        with pytest.raises(Interrupted) as caught:
            peer.transport.wait(peer.transport.recv(1 - peer.rank, Channel.ACTIVATION, 1, torch.empty(4)))
        assert caught.value.epoch == 1
        assert isinstance(peer.flag, RaisedWhileWaiting)
        assert peer.flag.looks == LAST_LOOK + 1
        peer.leave()

    world.run(body, size=2, make_flag=RaisedWhileWaiting)


def test_the_flag_of_a_rank_interrupts() -> None:
    def body(peer: Peer) -> None:
        assert isinstance(peer.flag, InterruptFlag)
        peer.flag.raise_for(2, frozenset({1}))
        with pytest.raises(Interrupted) as caught:
            peer.transport.wait(peer.transport.recv(1 - peer.rank, Channel.ACTIVATION, 1, torch.empty(4)))
        assert caught.value.epoch == 2
        peer.leave()

    world.run(body, size=2)


@APART
def test_half_a_message_never_counts(apart: bool) -> None:
    """The sender dies while a message that neither shared memory nor sockets can hold is on its way."""
    size = 40_000_000

    def body(peer: Peer) -> None:
        transport = peer.transport
        _greet(peer)
        if peer.rank == 0:
            transport.send(1, Channel.STATE, 1, torch.ones(size))
            _die()
        peer.await_death(0)  # without looking at what arrives, so that it cannot arrive whole
        got = torch.zeros(size)
        recv = transport.recv(0, Channel.STATE, 1, got)
        with pytest.raises(Interrupted) as caught:
            transport.wait(recv)
        assert caught.value.suspects == (0,)
        assert got[-1] == 0
        transport.advance(1, [0])
        peer.leave()

    world.run(body, size=2, killed=[0], apart=apart)


@APART
def test_the_last_message_of_the_dead(apart: bool) -> None:
    """It is read, although its bytes were in the memory of a process that is gone."""

    def body(peer: Peer) -> None:
        transport = peer.transport
        _greet(peer)
        if peer.rank == 0:
            transport.wait(transport.send(1, Channel.STATE, 1, torch.ones(10_000)))
            transport.progress()
            _die()
        peer.await_death(0)
        got = torch.zeros(10_000)
        transport.wait(transport.recv(0, Channel.STATE, 1, got))
        _equal(got, torch.ones(10_000))
        transport.advance(1, [0])
        transport.progress()
        peer.leave()

    world.run(body, size=2, killed=[0], apart=apart)


def _greet(peer: Peer) -> None:
    """Exchange something small, so that the link is made."""
    got = torch.zeros(1)
    send = peer.transport.send(1 - peer.rank, Channel.ACTIVATION, 99, torch.ones(1))
    peer.transport.wait(send, peer.transport.recv(1 - peer.rank, Channel.ACTIVATION, 99, got))
    assert got.item() == 1
    peer.meet()


@APART
def test_sizes_that_disagree_are_an_error(apart: bool) -> None:
    def body(peer: Peer) -> None:
        if peer.rank == 0:
            peer.transport.wait(peer.transport.send(1, Channel.VOTE, 1, torch.ones(4)))
        else:
            with pytest.raises(RuntimeError, match=r"got 16 bytes from rank 0 .* where it expected 12"):
                peer.transport.wait(peer.transport.recv(0, Channel.VOTE, 1, torch.ones(3)))
        peer.leave()

    world.run(body, size=2, apart=apart)


@APART
def test_an_error_in_the_background_reaches_who_waits_and_ends_nothing_else(apart: bool) -> None:
    """What arrives wrong while nobody waits is the error of who expects it; the others' messages go on."""

    def body(peer: Peer) -> None:
        transport = peer.transport

        def expect(numel: int) -> Steps:
            yield [transport.recv(0, Channel.VOTE, 1, torch.zeros(numel))]

        def echo(numel: int) -> Steps:
            got = torch.zeros(numel)
            yield [transport.recv(0, Channel.STATE, 2, got)]
            yield [transport.send(0, Channel.STATE, 3, got)]

        if peer.rank == 0:
            peer.meet()
            transport.wait(transport.send(1, Channel.VOTE, 1, torch.ones(4)))
            transport.wait(transport.send(1, Channel.STATE, 2, torch.ones(3)))
            # Comes only if the other one's background has survived the first message.
            transport.wait(transport.recv(1, Channel.STATE, 3, torch.zeros(3)), limit=20)
            peer.meet()
        else:
            wrong, right = transport.start(expect(3)), transport.start(echo(3))
            peer.meet()
            peer.meet()  # which does not look at messages
            with pytest.raises(RuntimeError, match=r"got 16 bytes from rank 0 .* where it expected 12"):
                transport.wait(transport.recv(0, Channel.ACTIVATION, 98, torch.zeros(1)), wrong)
            transport.wait(right, limit=20)
        _greet(peer)
        peer.leave()

    world.run(body, size=2, apart=apart)


@pytest.mark.parametrize("waits", [True, False], ids=["waiting already", "waiting later"])
def test_what_cannot_leave_a_device_ends_any_wait(monkeypatch: pytest.MonkeyPatch, waits: bool) -> None:
    """The other waits for it, and what this one waits for would be made of it: neither would ever come."""
    copying, failing = threading.Event(), threading.Event()

    class Faulty:
        def __init__(self, _: torch.Tensor) -> None:
            copying.set()

        def wait(self) -> torch.Tensor:
            failing.wait()
            raise ValueError("the device is out of order")

    monkeypatch.setattr(transport, "HostCopy", Faulty)

    def body(peer: Peer) -> None:
        if peer.rank == 0:
            peer.meet()
        else:
            there = peer.transport.recv(0, Channel.ACTIVATION_GRAD, 1, torch.zeros(3))
            sent = peer.transport.send(0, Channel.ACTIVATION, 1, torch.empty(3, device="meta"))
            assert copying.wait(20)
            if waits:
                threading.Timer(0.1, failing.set).start()
            else:
                failing.set()
                while not _has_failed(sent):
                    pass
            with pytest.raises(ValueError, match="out of order"):
                peer.transport.wait(there, limit=20)
            peer.meet()
        _greet(peer)
        peer.leave()

    world.run(body, size=2)


def _has_failed(operation: Operation) -> bool:
    try:
        return operation.done
    except ValueError:
        return True


def test_the_background_itself_survives_an_error() -> None:
    """What no operation is to blame for is raised to whoever waits next, once."""

    def body(peer: Peer) -> None:
        transport = peer.transport
        if peer.rank == 0:
            peer.meet()
            neighbour = transport._peers.near[1]
            assert neighbour.write(encode(make_tag(0, Channel.VOTE, 1, 0), 99))  # no such kind of frame
            transport.wait(transport.send(1, Channel.VOTE, 2, torch.ones(3)))
            transport.wait(transport.recv(1, Channel.VOTE, 3, torch.zeros(3)), limit=20)
            peer.meet()
        else:

            def echo() -> Steps:
                got = torch.zeros(3)
                yield [transport.recv(0, Channel.VOTE, 2, got)]
                yield [transport.send(0, Channel.VOTE, 3, got)]

            task = transport.start(echo())
            peer.meet()
            peer.meet()
            with pytest.raises(RuntimeError, match="frame of unknown kind 99 from rank 0"):
                transport.wait(task)
            transport.wait(task)
        _greet(peer)
        peer.leave()

    world.run(body, size=2)


# ---- tags ---------------------------------------------------------------------------------


COORDINATES: dict[Callable[..., int], tuple[int, ...]] = {
    at_group: (GROUPS, NUMBERS),
    at_slice: (UNITS, SLICES, PARTS),
    at_grain: (GRAINS, POSITIONS),
}
"""What makes coordinates, and what its arguments are below."""


@given(st.data())
def test_tags_tell_messages_apart(data: st.DataObject) -> None:
    """Two tags are equal only if all that they are made of is."""
    make = data.draw(st.sampled_from(list(COORDINATES)))
    fields = st.tuples(
        st.integers(0, 4095), st.sampled_from(Channel), st.tuples(*(st.integers(0, n - 1) for n in COORDINATES[make])),
        st.integers(0, RANKS - 1),
    )  # fmt: skip
    first, second = data.draw(fields), data.draw(fields)
    if data.draw(st.booleans()):  # so that they differ in one field only
        same = data.draw(st.integers(0, 3))
        second = (*first[:same], second[same], *first[same + 1 :])
    tags = [make_tag(epoch, channel, make(*numbers), source) for epoch, channel, numbers, source in (first, second)]
    assert (tags[0] == tags[1]) == (first == second)
    assert all(0 <= tag < 1 << 64 for tag in tags)
    assert source_of(tags[0]) == first[3]


@given(st.integers(0, 10**7), st.integers(0, 2047))
def test_older_epochs_are_told_from_newer_ones(epoch: int, ahead: int) -> None:
    """Also after millions of them."""
    tag = make_tag(epoch, Channel.VOTE, 0, 0)
    assert is_older(tag, epoch + ahead) == (ahead > 0)
    assert not is_older(make_tag(epoch + ahead, Channel.VOTE, 0, 0), epoch)


def test_what_does_not_fit_is_refused() -> None:
    for make, limits in COORDINATES.items():
        for i, limit in enumerate(limits):
            for wrong in (limit, -1):
                with pytest.raises(ValueError, match="there can be"):
                    make(*(wrong if i == j else 0 for j in range(len(limits))))
    with pytest.raises(ValueError, match="does not fit"):
        make_tag(0, Channel.VOTE, 1 << 28, 0)
    with pytest.raises(ValueError, match=f"rank {RANKS}: messages can tell"):
        transport.Transport(RANKS, InterruptFlag(), 60)
    check_sizes(units=UNITS, slices=SLICES, grains=GRAINS, positions=POSITIONS)
    with pytest.raises(ValueError, match=r"65537 slices .* lower --elastic-slices"):
        check_sizes(units=1, slices=SLICES + 1, grains=1, positions=1)


@APART
@pytest.mark.parametrize("epoch", [2049, 4095, 1_000_000])
def test_a_rank_joins_at_any_epoch(apart: bool, epoch: int) -> None:
    """It hears what is sent to it before it has entered its first one."""

    def body(peer: Peer) -> None:
        transport = peer.transport
        if peer.rank == 0:
            transport.advance(epoch)
            transport.wait(*(transport.send(1, Channel.PARAMETER, size, torch.ones(size)) for size in (10, 50_000)))
        else:
            while len(transport._inbox) < 2:
                transport.progress()
            transport.advance(epoch)
            for size in (10, 50_000):
                got = torch.zeros(size)
                transport.wait(transport.recv(0, Channel.PARAMETER, size, got), limit=20)
                _equal(got, torch.ones(size))
        peer.leave()

    world.run(body, size=2, apart=apart)
