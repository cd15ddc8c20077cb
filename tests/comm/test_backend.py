"""The torch backend: devices' communicators behind the same group, with gloo standing in for NCCL."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron_elastic.cluster.rank.control import Interrupted, InterruptFlag
from megatron_elastic.comm.device.device_group import DeviceGroup
from megatron_elastic.comm.device.link_store import LinkStore
from megatron_elastic.comm.distributed import backend
from megatron_elastic.observe.dials import DEVICE
from tests import world
from tests.comm.single import all_gather_single, reduce_scatter_single
from tests.world import Peer

pytestmark = pytest.mark.job

_LIMIT = timedelta(seconds=60)


def _world(body: Callable[[Peer], None], size: int = 4, killed: tuple[int, ...] = ()) -> None:
    """Run ``body`` in processes whose default group takes tensors of the CPU to gloo, as others to NCCL."""

    def with_device(peer: Peer) -> None:
        backend.initialize(peer.transport, range(peer.size), _LIMIT, {"cpu": "gloo"})
        body(peer)
        peer.leave()

    world.run(with_device, size=size, killed=killed)


def _on_device(group: dist.ProcessGroup | None) -> DeviceGroup:
    assert isinstance(group, backend.ElasticProcessGroup)
    return group.device_group("cpu")


def _sum(group: dist.ProcessGroup | None) -> float:
    """What an all-reduce of ones gives: the number of those who took part."""
    tensor = torch.ones(1000)
    dist.all_reduce(tensor, group=group)
    assert bool((tensor == tensor[0]).all())
    return float(tensor[0])


def _await(condition: Callable[[], bool]) -> None:
    """Look until ``condition`` holds."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline


# ---- devices --------------------------------------------------------------------------------


def test_collectives_of_a_device() -> None:
    def body(peer: Peer) -> None:
        me, size = peer.rank, peer.size
        sent = peer.transport.bytes_sent
        large = torch.full((100_000,), float(me))
        dist.all_reduce(large)
        assert large[-1] == 6
        assert peer.transport.bytes_sent - sent < 10_000  # that was not ours: the links only carried addresses
        given, taken = peer.transport.dials.sent[DEVICE], peer.transport.dials.received[DEVICE]
        assert (given, taken) == (large.nbytes, large.nbytes)
        gathered = torch.empty(size, 2)
        all_gather_single(gathered.view(-1), torch.full((2,), float(me)))
        assert gathered[:, 0].tolist() == [0, 1, 2, 3]
        assert (peer.transport.dials.sent[DEVICE] - given, peer.transport.dials.received[DEVICE] - taken) == (8, 32)
        listed = [torch.empty(2) for _ in range(size)]
        dist.all_gather(listed, torch.full((2,), float(me)))
        assert torch.equal(torch.stack(listed), gathered)
        part = torch.empty(2)
        reduce_scatter_single(part, torch.arange(8.0))
        assert part.tolist() == [8.0 * me, 8.0 * me + 4]
        dist.all_to_all_single(swapped := torch.empty(size), torch.arange(4.0) + 10 * me)
        assert swapped.tolist() == [10.0 * i + me for i in range(size)]
        word = torch.full((2,), float(me))
        dist.broadcast(word, src=2)
        assert word.tolist() == [2, 2]
        at_root = [torch.empty(1) for _ in range(size)] if me == 1 else None
        dist.gather(torch.tensor([float(me)]), at_root, dst=1)
        if at_root is not None:
            assert torch.cat(at_root).tolist() == [0, 1, 2, 3]
        work = dist.all_reduce(lazy := torch.ones(3), async_op=True)
        assert work is not None
        work.wait()
        _await(work.is_completed)
        assert lazy.tolist() == [4, 4, 4]
        with dist._coalescing_manager():
            dist.all_reduce(lazy)
            dist.all_reduce(word)
        assert [lazy[0].item(), word[0].item()] == [16, 8]
        # Messages and barriers are not the device's.
        got, right, left = torch.empty(3), (me + 1) % size, (me - 1) % size
        ring = [dist.P2POp(dist.irecv, got, left), dist.P2POp(dist.isend, torch.full((3,), float(me)), right)]
        for each in dist.batch_isend_irecv(ring):
            each.wait()
        assert got.tolist() == [left] * 3
        whole = backend.groups()[0]
        assert whole._get_backend(got.device) is whole  # torch 2.14 asks before it batches them
        dist.barrier()
        assert _on_device(dist.group.WORLD).made == 1
        dist.destroy_process_group()

    _world(body)


def test_an_edit_makes_only_the_edited_communicators_anew() -> None:
    """Shrink and grow again between two steps; the groups stay the same objects."""

    def body(peer: Peer) -> None:
        pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][peer.rank // 2]
        assert isinstance(pair, backend.ElasticProcessGroup)
        whole = backend.groups()[0]
        pair = next(group for group in backend.groups()[1:] if peer.rank in group.group.ranks)
        assert (_sum(whole), _sum(pair)) == (4, 2)
        peer.transport.advance(1)
        if peer.rank != 3:
            backend.keep([0, 1, 2])
            assert _sum(whole) == 3
            assert _sum(pair) == (2 if peer.rank < 2 else 1)
        peer.meet()
        peer.transport.advance(2)
        backend.edit({whole: [0, 1, 2, 3]} if peer.rank < 2 else {whole: [0, 1, 2, 3], pair: [2, 3]})
        assert (_sum(whole), _sum(pair)) == (4, 2)
        # Rank 3 was away while the others had a communicator of three.
        assert _on_device(whole).made == (2 if peer.rank == 3 else 3)
        assert _on_device(pair).made == {0: 1, 1: 1, 2: 3, 3: 2}[peer.rank]

    _world(body)


def test_a_new_epoch_keeps_communicators() -> None:
    def body(peer: Peer) -> None:
        for epoch in range(1, 4):
            assert _sum(None) == 4
            peer.meet()
            peer.transport.advance(epoch)
        assert _on_device(dist.group.WORLD).made == 1

    _world(body)


def test_a_kill_in_the_middle_of_a_collective() -> None:
    """Everybody that is blocked in the device's collective unwinds; the same group works without the dead rank."""

    def body(peer: Peer) -> None:
        whole = dist.group.WORLD
        pair = dist.new_group([0, 1])
        assert _sum(whole) == 4
        if peer.rank < 2:
            assert _sum(pair) == 2
        peer.meet()
        if peer.rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(Interrupted) as caught:
            _sum(whole)
        assert caught.value.suspects == (3,)
        peer.transport.advance(1, [3])
        backend.keep([0, 1, 2])
        assert _sum(whole) == 3
        assert dist.group.WORLD is whole
        if peer.rank < 2:
            assert _sum(pair) == 2
            assert _on_device(pair).made == 1

    _world(body, killed=(3,))


def test_an_interrupt_ends_what_blocks_on_a_device() -> None:
    """Nobody died; one rank never comes. What the others have in common is out of step and made anew."""

    def body(peer: Peer) -> None:
        assert isinstance(peer.flag, InterruptFlag)
        assert _sum(None) == 4
        peer.meet()
        if peer.rank != 0:
            tensor = torch.ones(10)
            work = dist.all_reduce(tensor, async_op=True)
            assert work is not None
            peer.meet()
            peer.flag.raise_for(1, frozenset())
            with pytest.raises(Interrupted) as caught:
                work.wait()
            assert caught.value.epoch == 1
        else:
            peer.meet()
        peer.transport.advance(1)
        peer.flag.acknowledge(1)
        assert _sum(None) == 4
        assert _on_device(dist.group.WORLD).made == 2

    _world(body)


def test_the_watch_aborts_while_nobody_waits() -> None:
    """As when the training thread is blocked in a driver: here it does nothing but look."""

    def body(peer: Peer) -> None:
        assert isinstance(peer.flag, InterruptFlag)
        assert _sum(None) == 2
        group = _on_device(dist.group.WORLD)
        peer.meet()
        if peer.rank == 0:
            dist.all_reduce(torch.ones(10), async_op=True)
            peer.flag.raise_for(1, frozenset())
            _await(lambda: group._communicator is None)
        peer.meet()
        peer.transport.advance(1)
        peer.flag.acknowledge(1)
        assert _sum(None) == 2
        assert group.made == 2

    _world(body, size=2)


def test_a_kill_while_a_communicator_is_made() -> None:
    def body(peer: Peer) -> None:
        dist.barrier()  # so that there are links
        peer.meet()
        if peer.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(Interrupted):
            _sum(None)
        peer.transport.advance(1, [2])
        backend.keep([0, 1])
        assert _sum(None) == 2

    _world(body, size=3, killed=(2,))


def test_a_device_without_a_backend() -> None:
    def body(peer: Peer) -> None:
        backend.initialize(peer.transport, range(peer.size), _LIMIT)
        with pytest.raises(RuntimeError, match="no backend for tensors on meta; move them to the CPU"):
            dist.all_reduce(torch.empty(2, device="meta"))
        with pytest.raises(RuntimeError, match="this torch has no backend hccl: install one that has"):
            backend.groups()[0].device_group("npu").issue("allreduce", [torch.empty(2)])
        peer.leave()

    world.run(body, size=1)


def test_link_store() -> None:
    def body(peer: Peer) -> None:
        store = LinkStore(peer.transport, 7, range(peer.size))
        assert not store.check([f"key {peer.rank}"])
        store.set(f"key {peer.rank}", bytes([peer.rank]) * 20_000 * peer.rank)
        for rank in range(peer.size):
            assert store.get(f"key {rank}") == bytes([rank]) * 20_000 * rank
        store.wait(["key 0", "key 3"])
        assert store.check(["key 0", "key 3"])
        peer.leave()

    world.run(body)
