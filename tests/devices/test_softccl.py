"""softccl, the collectives of soft devices: results, what an abort leaves, and elastic groups above it."""

from __future__ import annotations

import gc
import os
import signal
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_elastic.cluster.rank.control import Interrupted, InterruptFlag
from megatron_elastic.comm.device.device_group import DeviceGroup
from megatron_elastic.comm.device.devices import end_blocked
from megatron_elastic.comm.distributed import backend
from megatron_elastic.comm.group import Group
from megatron_elastic.device import soft
from megatron_elastic.device.soft import build
from tests import world
from tests.world import Peer

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler (g++, or what CXX names)")

_LIMIT = timedelta(seconds=60)


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    build.library()  # only built here: this process forks others


def _group(
    body: Callable[[Peer], None], tmp_path: Path, size: int, killed: tuple[int, ...] = (), limit: timedelta = _LIMIT
) -> None:
    """Run ``body`` in processes whose default group is softccl's."""

    def with_group(peer: Peer) -> None:
        soft.load()
        store = dist.FileStore(str(tmp_path / "store"), size)
        dist.init_process_group("softccl", store=store, rank=peer.rank, world_size=size, timeout=limit)
        body(peer)
        peer.leave()

    world.run(with_group, size=size, killed=killed)


def _made(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    if dtype == torch.int64:
        return torch.randint(-(2**60), 2**60, (count,), generator=generator)
    return torch.randn(count, generator=generator).to(dtype)


def _communicator() -> Any:
    return dist.distributed_c10d._get_default_group()


@pytest.mark.job
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bfloat16], ids=str)
def test_collectives(dtype: torch.dtype, tmp_path: Path) -> None:
    size, count = 3, 3 * 100_003  # several rounds, the last one not full

    def body(peer: Peer) -> None:
        all_of_them = [_made(rank, count, dtype) for rank in range(size)]
        total = all_of_them[0].clone()
        for each in all_of_them[1:]:
            total += each
        mine = all_of_them[peer.rank].to("soft")

        reduced = mine.clone()
        dist.all_reduce(reduced)
        assert torch.equal(reduced.cpu(), total)

        largest = mine.clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        assert torch.equal(largest.cpu(), torch.stack(all_of_them).amax(0))

        kept = mine.clone()
        dist.reduce(kept, 1)
        assert torch.equal(kept.cpu(), total if peer.rank == 1 else all_of_them[peer.rank])

        part = torch.empty(count // size, dtype=dtype, device="soft")
        dist.reduce_scatter_tensor(part, mine)
        assert torch.equal(part.cpu(), total.chunk(size)[peer.rank])

        gathered = torch.empty(size * count, dtype=dtype, device="soft")
        work = dist.all_gather_into_tensor(gathered, mine, async_op=True)
        assert work is not None
        work.wait()
        assert torch.equal(gathered.cpu(), torch.cat(all_of_them))

        apart = [torch.empty_like(mine) for _ in range(size)]
        dist.all_gather(apart, mine)
        assert all(torch.equal(a.cpu(), b) for a, b in zip(apart, all_of_them, strict=True))

        swapped = torch.empty_like(mine)
        dist.all_to_all_single(swapped, mine)
        assert torch.equal(swapped.cpu(), torch.cat([each.chunk(size)[peer.rank] for each in all_of_them]))

        # From r to s go r * s rows, and so nothing to and from the first.
        sizes = [[r * s for s in range(size)] for r in range(size)]
        rows = mine[: 100 * sum(sizes[peer.rank])].view(-1, 100)
        uneven = torch.empty(sum(sizes[peer.rank]), 100, dtype=dtype, device="soft")
        dist.all_to_all_single(uneven, rows, sizes[peer.rank], sizes[peer.rank])
        there = [each[: 100 * sum(sizes[r])].view(-1, 100).split(sizes[r])[peer.rank]
                 for r, each in enumerate(all_of_them)]
        assert torch.equal(uneven.cpu(), torch.cat(there))

        told = mine.clone()
        dist.broadcast(told, 1)
        assert torch.equal(told.cpu(), all_of_them[1])

        if peer.rank == 0:
            dist.send(mine, 2)
        elif peer.rank == 2:
            dist.recv(told, 0)
            assert torch.equal(told.cpu(), all_of_them[0])
        dist.barrier()

    _group(body, tmp_path, size)


@pytest.mark.job
def test_operations_block_the_stream_and_not_the_host(tmp_path: Path) -> None:
    def body(peer: Peer) -> None:
        tensor = torch.ones(10, device="soft")
        torch.soft.synchronize()  # type: ignore[attr-defined]
        if peer.rank == 0:
            # The other comes only after this one has gone on, so it was not blocked.
            work = dist.all_reduce(tensor, async_op=True)
            assert work is not None
            work.wait()
            after = tensor + 1
            assert not work.is_completed() and not torch.soft.current_stream().query()  # type: ignore[attr-defined]
            peer.meet()
            assert torch.equal(after.cpu(), torch.full((10,), 3.0))
        else:
            communicator = _communicator()
            communicator._exchange(None)  # what a peer shares must be there before it can be told from a late one
            peer.meet()
            dist.all_reduce(tensor)
            torch.soft.synchronize()  # type: ignore[attr-defined]

    _group(body, tmp_path, 2)


@pytest.mark.job
def test_an_abort_leaves_garbage_and_whoever_goes_on_undisturbed_has_it(tmp_path: Path) -> None:
    def body(peer: Peer) -> None:
        if peer.rank == 1:
            _communicator()._exchange(None)
            peer.meet()
            peer.meet()
            return
        tensor = torch.ones(1000, device="soft")
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        work.wait()
        undisturbed = tensor * 0 + 5  # what a program does that does not look
        peer.meet()
        timer = threading.Timer(0.2, _communicator().abort)
        timer.start()
        torch.soft.synchronize()  # type: ignore[attr-defined]
        timer.join()
        assert bool(tensor.isnan().all()) and bool(undisturbed.isnan().all())
        assert work.is_completed() and not work.is_success() and "aborted" in str(work.exception())
        with pytest.raises(dist.DistBackendError, match="aborted"):
            work.wait()
        with pytest.raises(dist.DistBackendError, match="Make another communicator"):
            dist.all_reduce(tensor)
        assert torch.equal((torch.ones(3, device="soft") + 1).cpu(), torch.full((3,), 2.0))  # the device goes on
        peer.meet()

    _group(body, tmp_path, 2)


@pytest.mark.job
def test_a_member_that_does_not_come_is_waited_for_until_the_limit(tmp_path: Path) -> None:
    def body(peer: Peer) -> None:
        if peer.rank == 0:
            _communicator()._exchange(None)
        else:
            tensor = torch.ones(10, device="soft")
            dist.all_reduce(tensor, async_op=True)
            torch.soft.synchronize()  # type: ignore[attr-defined]
            assert bool(tensor.isnan().all())
            assert "longer than the limit" in _communicator().error()
        peer.meet()

    _group(body, tmp_path, 2, limit=timedelta(seconds=0.5))


@pytest.mark.job
def test_members_in_different_operations_are_told(tmp_path: Path) -> None:
    def body(peer: Peer) -> None:
        tensor = torch.ones(10 + peer.rank, device="soft")
        dist.all_reduce(tensor, async_op=True)  # to wait for it could raise before the other looks
        torch.soft.synchronize()  # type: ignore[attr-defined]
        assert bool(tensor.isnan().all())
        assert "is in operation 0 of" in _communicator().error()

    _group(body, tmp_path, 2)


@pytest.mark.job
def test_what_blocks_is_ended_before_an_interrupt_is_acknowledged() -> None:
    """Also where the thread that aborts has not seen it."""

    def body(peer: Peer) -> None:
        soft.load()
        backend.initialize(peer.transport, range(peer.size), _LIMIT)
        tensor = torch.ones(1000, dtype=torch.int64, device="soft")
        dist.all_reduce(tensor)
        if peer.rank == 0:
            blocked = torch.ones(1000, device="soft")
            work = dist.all_reduce(blocked, async_op=True)
            assert work is not None and not work.is_completed()
            doubted = []
            end_blocked(lambda: doubted.append(peer.transport.doubted))
            torch.soft.synchronize()  # type: ignore[attr-defined]
            assert doubted == [True] and bool(blocked.isnan().all())
        peer.meet()
        peer.leave()

    world.run(body, size=2)


@pytest.mark.job
def test_an_elastic_group_loses_a_member_in_a_collective() -> None:
    def body(peer: Peer) -> None:
        soft.load()
        assert isinstance(peer.flag, InterruptFlag)
        backend.initialize(peer.transport, range(peer.size), _LIMIT)
        tensor = torch.ones(1000, dtype=torch.int64, device="soft")
        dist.all_reduce(tensor)
        assert int(tensor.sum()) == 3000
        if peer.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        blocked = torch.ones(1000, device="soft")
        work = dist.all_reduce(blocked, async_op=True)
        assert work is not None
        work.wait()
        peer.await_death(2)
        peer.flag.raise_for(1, frozenset())
        torch.soft.synchronize()  # type: ignore[attr-defined]  # what blocks is ended by the thread that aborts
        with pytest.raises(Interrupted):
            dist.all_reduce(blocked)
        assert bool(blocked.isnan().all())
        peer.transport.advance(1, [2])
        peer.flag.acknowledge(1)
        backend.keep([0, 1])
        again = torch.ones(1000, dtype=torch.int64, device="soft")
        dist.all_reduce(again)
        assert int(again.sum()) == 2000
        peer.leave()

    world.run(body, size=3, killed=[2])


@pytest.mark.job
def test_what_a_communicator_that_was_given_up_worked_on_is_let_go_of() -> None:
    """At once if its work was over, else when the next one is made: another fault may never come."""

    def body(peer: Peer) -> None:
        soft.load()
        gc.disable()  # as long as it does not come
        group = DeviceGroup(Group(peer.transport, 0, range(peer.size)), "soft", "softccl", _LIMIT)
        left = []
        for blocks in (False, True):
            tensor = torch.ones(1000, device="soft")
            left.append(weakref.ref(tensor))
            if peer.rank == 0 or not blocks:
                group.issue("allreduce", [tensor], dist.AllreduceOptions())
            peer.meet()
            if not blocks:
                torch.soft.synchronize()  # type: ignore[attr-defined]
            del tensor
            group.abort()
            torch.soft.synchronize()  # type: ignore[attr-defined]
            group.connect()
            assert left.pop()() is None, f"rank {peer.rank}, {blocks=}"
        peer.leave()

    world.run(body, size=2)
