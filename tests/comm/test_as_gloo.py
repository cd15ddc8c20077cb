"""The elastic backend beside gloo: the same calls in the same processes give the same results, or the same errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh

from megatron_elastic.comm.distributed import backend
from tests import world
from tests.comm.single import all_gather_single, reduce_scatter_single
from tests.world import Peer

pytestmark = pytest.mark.job

_SIZE = 3
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32,
           torch.int64, torch.bool, torch.complex64, torch.complex128)  # fmt: skip
_OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")

Case = Callable[[int], Any]
"""Takes the rank, returns tensors and other values in lists or tuples, or raises."""


def _compare(folder: Path, *cases: Case) -> None:
    """Run the cases over gloo and over elastic, and compare what each rank got. ``folder``: where the ranks meet."""

    def body(peer: Peer) -> None:
        results = {name: [_outcome(case, peer) for case in cases] for name in _over_each(peer, folder)}
        for case, ours, gloos in zip(cases, results["elastic"], results["gloo"], strict=True):
            assert _alike(ours, gloos), f"{case.__name__}: elastic {ours}, gloo {gloos}"
        peer.leave()

    world.run(body, size=_SIZE)


def _over_each(peer: Peer, folder: Path, names: tuple[str, ...] = ("gloo", "elastic")) -> Iterator[str]:
    """The default group is of each kind in turn."""
    backend.register()
    for name in names:
        store = dist.FileStore(str(folder / name), peer.size)
        dist.init_process_group(
            name, store=store, rank=peer.rank, world_size=peer.size, timeout=timedelta(seconds=60)
        )
        yield name
        dist.destroy_process_group()


def _outcome(case: Case, peer: Peer) -> Any:
    try:
        return case(peer.rank)
    except Exception as error:
        return error
    finally:
        peer.meet()  # not over gloo, which may have closed its connections after an error


def _alike(ours: Any, gloos: Any) -> bool:
    if isinstance(gloos, Exception):
        return isinstance(ours, type(gloos))
    if isinstance(gloos, torch.Tensor):
        return isinstance(ours, torch.Tensor) and ours.dtype == gloos.dtype and torch.equal(ours, gloos)
    if isinstance(gloos, (list, tuple)):
        return len(ours) == len(gloos) and all(_alike(a, b) for a, b in zip(ours, gloos, strict=True))
    return bool(ours == gloos)


def _value(rank: int, dtype: torch.dtype = torch.float32, count: int = 6) -> torch.Tensor:
    numbers = torch.arange(count) % 3 + 1 + rank
    return numbers % 2 == 0 if dtype == torch.bool else numbers.to(dtype)


def test_every_operation_on_every_type(tmp_path: Path) -> None:
    def reduced(op: str, dtype: torch.dtype) -> Case:
        def case(rank: int) -> torch.Tensor:
            tensor = _value(rank, dtype)
            dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op))
            return tensor

        case.__name__ = f"all_reduce {op} {dtype}"
        return case

    def moved(dtype: torch.dtype) -> Case:
        def case(rank: int) -> list[torch.Tensor]:
            root, everywhere = _value(rank, dtype), _value(rank, dtype)
            dist.reduce(root, 0)
            dist.broadcast(everywhere, 1)
            listed = [torch.zeros(6, dtype=dtype) for _ in range(_SIZE)]
            dist.all_gather(listed, _value(rank, dtype))
            all_gather_single(whole := torch.zeros(18, dtype=dtype), _value(rank, dtype))
            reduce_scatter_single(part := torch.zeros(2, dtype=dtype), _value(rank, dtype))
            dist.all_to_all_single(swapped := torch.zeros(6, dtype=dtype), _value(rank, dtype))
            message = _value(rank, dtype)
            if rank < 2:
                dist.send(message, 1) if rank == 0 else dist.recv(message, 0)
            return [*([root] if rank == 0 else []), everywhere, *listed, whole, part, swapped, message]

        case.__name__ = f"moving {dtype}"
        return case

    _compare(tmp_path, *(reduced(op, dtype) for op in _OPS for dtype in _DTYPES), *(moved(dtype) for dtype in _DTYPES))


def test_wrong_arguments(tmp_path: Path) -> None:
    """Every call fails before anything is sent, with the type of gloo's error."""
    ones, six = torch.ones, torch.ones(6)
    premul = dist._make_nccl_premul_sum(2.0)
    calls: dict[str, Callable[[int], Any]] = {
        "premul": lambda rank: dist.all_reduce(six.clone(), op=premul),
        "gathered size": lambda rank: all_gather_single(ones(5), six),
        "gathered type": lambda rank: all_gather_single(ones(18, dtype=torch.int64), six),
        "gathered count": lambda rank: dist.all_gather([ones(6)] * 2, six),
        "gathered sizes": lambda rank: dist.all_gather([ones(5)] * 3, six),
        "gathered types": lambda rank: dist.all_gather([ones(6, dtype=torch.int64)] * 3, six),
        "scattered size": lambda rank: reduce_scatter_single(ones(4), ones(18)),
        "scattered type": lambda rank: reduce_scatter_single(ones(6, dtype=torch.int64), ones(18)),
        "scattered count": lambda rank: dist.reduce_scatter(ones(4), [ones(4)]),
        "splits": lambda rank: dist.all_to_all_single(ones(6), six, [1, 1], [3, 3]),
        "sum of splits": lambda rank: dist.all_to_all_single(ones(6), six, [2] * 3, [5] * 3),
        "uneven": lambda rank: dist.all_to_all_single(ones(7), ones(7)),
        "swapped type": lambda rank: dist.all_to_all_single(ones(6, dtype=torch.int64), six),
        "swapped count": lambda rank: dist.all_to_all([ones(3)], [ones(3)]),
        "root": lambda rank: dist.broadcast(ones(2), 6),
        "negative root": lambda rank: dist.broadcast(ones(2), -1),
        "root of a sum": lambda rank: dist.reduce(ones(2), 6),
        "no tensor": lambda rank: dist.broadcast([1, 2], 0),  # type: ignore[arg-type]
        "nowhere to gather": lambda rank: dist.gather(ones(3), None, dst=rank),
        "count to gather": lambda rank: dist.gather(ones(3), [ones(3)] * 4, dst=rank),
        "count to scatter": lambda rank: dist.scatter(ones(3), [ones(3)] * 4, src=rank),
        "size to scatter": lambda rank: dist.scatter(ones(3), [ones(2)] * 3, src=rank),
        "send to oneself": lambda rank: dist.send(ones(2), rank),
        "receive from oneself": lambda rank: dist.recv(ones(2), rank),
        "negative tag": lambda rank: dist.send(ones(2), (rank + 1) % 3, tag=-1),
        "sparse": lambda rank: dist.all_reduce(torch.eye(2).to_sparse(), op=premul),
        "rank of a group": lambda rank: dist.new_group([0, 4]),
        "rank twice": lambda rank: dist.new_group([0, 0]),
        "split_group": lambda rank: dist.split_group(None, [[0, 1], [2]]),
    }

    def named(name: str, call: Callable[[int], Any]) -> Case:
        def case(rank: int) -> Any:
            return call(rank)

        case.__name__ = name
        return case

    _compare(tmp_path, *(named(name, call) for name, call in calls.items()))


def test_coalesced(tmp_path: Path) -> None:
    def all_reduce(rank: int) -> Any:
        one, other = _value(rank), _value(rank, count=3)
        with dist._coalescing_manager(async_ops=True) as pending:
            dist.all_reduce(one)
            dist.all_reduce(other)
        pending.wait()
        dist.all_reduce_coalesced([one, other])
        return one, other

    def single(rank: int) -> Any:
        whole, whole_too, part, part_too = torch.zeros(18), torch.zeros(9), torch.zeros(3), torch.zeros(2)
        with dist._coalescing_manager():
            all_gather_single(whole, _value(rank))
            all_gather_single(whole_too, _value(rank, count=3))
        with dist._coalescing_manager():
            reduce_scatter_single(part, _value(rank, count=9))
            reduce_scatter_single(part_too, _value(rank, count=6))
        return whole, whole_too, part, part_too

    _compare(tmp_path, all_reduce, single)


def test_messages_and_objects(tmp_path: Path) -> None:
    def batch(rank: int) -> Any:
        got = torch.zeros(2)
        left, right = (rank - 1) % 3, (rank + 1) % 3
        ring = [dist.P2POp(dist.irecv, got, left), dist.P2POp(dist.isend, torch.full((2,), float(rank)), right)]
        for work in dist.batch_isend_irecv(ring):
            work.wait()
        return got

    def any_source(rank: int) -> Any:
        if rank == 0:
            got = torch.zeros(2)
            return dist.recv(got), got
        return dist.send(torch.ones(2), 0) if rank == 1 else None

    def source(rank: int) -> Any:
        if rank == 0:
            work = dist.irecv(torch.zeros(2), 1)
            assert work is not None
            return work.wait(), work.source_rank()
        return dist.send(torch.ones(2), 0) if rank == 1 else None

    def objects(rank: int) -> Any:
        every: list[Any] = [None] * 3
        dist.all_gather_object(every, {"rank": rank, "text": "x" * rank})
        gathered = [None] * 3 if rank == 0 else None
        dist.gather_object((rank,), gathered, dst=0)
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, [("for", i) for i in range(3)] if rank == 0 else None, src=0)
        sent: list[Any] = [1, "a"] if rank == 0 else [None, None]
        if rank < 2:
            dist.send_object_list(sent, 1) if rank == 0 else dist.recv_object_list(sent, 0)
        return every, gathered, mine, sent

    def asynchronous(rank: int) -> Any:
        tensor = _value(rank)
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        doubled = work.get_future().then(lambda future: future.value()[0] * 2)
        return work.wait(), work.wait(), work.is_completed(), work.is_success(), tensor, doubled.wait(), work.result()

    _compare(tmp_path, batch, any_source, source, objects, asynchronous)


def test_groups_and_meshes(tmp_path: Path) -> None:
    def groups(rank: int) -> Any:
        outer, everyone = dist.new_group([0, 2]), dist.new_group()
        turned = dist.new_group([2, 0], sort_ranks=False)
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=outer)
        result = [dist.get_process_group_ranks(None), dist.get_world_size(everyone), dist.get_rank(outer), tensor]
        if rank != 1:
            result += [dist.get_process_group_ranks(turned), dist.get_rank(turned), dist.get_group_rank(turned, 0)]
        dist.barrier()  # gloo: making a group fails where another member has already destroyed it
        dist.destroy_process_group(everyone)
        return result

    def subgroups(rank: int) -> Any:
        mine, _ = dist.new_subgroups_by_enumeration([[0, 2], [1]])
        tensor = torch.full((1,), float(rank))
        dist.all_reduce(tensor, group=mine)
        return tensor

    def mesh(rank: int) -> Any:
        grid = init_device_mesh("cpu", (1, 3), mesh_dim_names=("row", "column"))
        tensor = torch.full((2,), float(rank))
        dist.all_reduce(tensor, group=grid.get_group("column"))
        return tensor, grid.get_local_rank("column"), grid.get_coordinate()

    def sharded(rank: int) -> Any:
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        grid = init_device_mesh("cpu", (3,))
        rows: Any = distribute_tensor(torch.arange(12.0).view(6, 2), grid, [Shard(0)])
        return (rows @ torch.ones(2, 2)).redistribute(grid, [Replicate()]).to_local(), rows.sum().full_tensor()

    def functions(rank: int) -> Any:
        group, mine = dist.group.WORLD, torch.full((3,), float(rank))
        assert group is not None
        results = [
            functional.all_reduce(mine, "sum", group), functional.all_gather_tensor(mine, 0, group),
            functional.reduce_scatter_tensor(mine, "sum", 0, group), functional.broadcast(mine.clone(), 1, group),
            functional.all_to_all_single(mine, None, None, group),
            *functional.all_reduce_coalesced([mine, mine + 1], "sum", group),
            *functional.all_gather_into_tensor_coalesced([mine, mine + 1], group),
            *functional.reduce_scatter_tensor_coalesced([mine, mine + 1], "sum", [0, 0], group),
        ]  # fmt: skip
        return [result + 0 for result in results]  # using a result waits for it

    def wrapped(rank: int) -> Any:
        torch.manual_seed(0)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 3))
        model(torch.full((2, 4), rank + 1.0)).sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    _compare(tmp_path, groups, subgroups, mesh, sharded, functions, wrapped)


def test_an_elastic_group_of_a_default_group_that_is_not(tmp_path: Path) -> None:
    def body(peer: Peer) -> None:
        for _ in _over_each(peer, tmp_path, ("gloo",)):
            pair = dist.new_group([0, 2], backend="elastic")
            if peer.rank != 1:
                assert isinstance(pair, backend.ElasticProcessGroup)
                dist.all_reduce(tensor := torch.ones(3), group=pair)
                assert tensor.tolist() == [2, 2, 2]
            dist.barrier()
            if peer.rank != 1:
                dist.destroy_process_group(pair)
        peer.leave()

    world.run(body, size=_SIZE)


def test_groups_that_only_their_members_make(tmp_path: Path) -> None:
    """Gloo hangs when members have made different numbers of groups before; here that is allowed."""

    def body(peer: Peer) -> None:
        for _ in _over_each(peer, tmp_path, ("elastic",)):
            made = []
            for ranks in ([0, 1], [1, 2], [0, 1, 2], [0, 2]):
                if peer.rank in ranks:
                    made.append((len(ranks), dist.new_group(ranks, use_local_synchronization=True)))
            made.append((3, dist.new_group()))
            for size, group in made:
                tensor = torch.ones(1)
                dist.all_reduce(tensor, group=group)
                assert tensor.item() == size
        peer.leave()

    world.run(body, size=_SIZE)


def test_monitored_barrier() -> None:
    def body(peer: Peer) -> None:
        group = backend.initialize(peer.transport, range(peer.size), timedelta(seconds=60))
        group.monitored_barrier(timedelta(seconds=30))
        peer.meet()
        if peer.rank == 0:
            with pytest.raises(RuntimeError, match=r"member\(s\) \[1, 2\] did not come within 0.2 s"):
                group.monitored_barrier(timedelta(seconds=0.2), wait_all_ranks=True)
        peer.leave()

    world.run(body, size=_SIZE)
