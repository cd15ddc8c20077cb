"""Backend: groups as ``torch.distributed`` process groups, under the backend name ``elastic``.

A process group is a handle on a ``Group``. Megatron keeps references to its groups in dozens of modules, so the
handle stays the same object when the group behind it is edited.

In an elastic job the transport belongs to the trainer (``initialize``). Elsewhere, after ``register``,
``dist.init_process_group("elastic")`` works like any backend: addresses are exchanged through torch's store.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from megatron_elastic.cluster.control import InterruptFlag
from megatron_elastic.comm.group import Combine, Group
from megatron_elastic.comm.operation import Operation, Steps, Task
from megatron_elastic.comm.transport import Transport

NAME = "elastic"

_COMBINE: dict[Any, Combine] = {
    dist.ReduceOp.SUM: torch.Tensor.add_,
    dist.ReduceOp.AVG: torch.Tensor.add_,
    dist.ReduceOp.PRODUCT: torch.Tensor.mul_,
    dist.ReduceOp.MIN: lambda a, b: torch.minimum(a, b, out=a),
    dist.ReduceOp.MAX: lambda a, b: torch.maximum(a, b, out=a),
    dist.ReduceOp.BAND: torch.Tensor.bitwise_and_,
    dist.ReduceOp.BOR: torch.Tensor.bitwise_or_,
    dist.ReduceOp.BXOR: torch.Tensor.bitwise_xor_,
}


class ElasticWork(dist.Work):
    """An operation: over, or under way in the background until ``wait``."""

    def __init__(self, transport: Transport, result: list[torch.Tensor]) -> None:
        super().__init__()
        self._transport = transport
        self._result = result
        self._operation: Operation | None = None
        self._then: Callable[[], None] | None = None
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None

    def begin(self, operation: Operation, then: Callable[[], None] | None = None) -> ElasticWork:
        """``operation`` is under way; ``then`` runs in the thread that waits, once it is done."""
        self._operation, self._then = operation, then
        return self

    def finished(self) -> None:
        """The result is there: complete the future."""
        if self._future is not None and not self._future.done():
            self._future.set_result(self._result)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until the result is there. Raises TimeoutError after ``timeout``, Interrupted on a fault."""
        if self._operation is not None:
            self._transport.wait(self._operation, limit=timeout.total_seconds() or None)
            self._operation = None
            if self._then is not None:
                self._then()
            self.finished()
        return True

    def is_completed(self) -> bool:
        """Whether ``wait`` would return at once."""
        if self._operation is None:
            return True
        self._transport.poll()
        return self._operation.done

    def is_success(self) -> bool:
        """The same: failures raise."""
        return self.is_completed()

    def result(self) -> list[torch.Tensor]:
        """The tensors that the operation fills."""
        return self._result

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future of the result."""
        if self._future is None:
            self._future = torch.futures.Future()
            if self._operation is None:
                self.finished()
        return self._future


class ElasticProcessGroup(dist.ProcessGroup):
    """A ``Group`` in the shape that torch.distributed calls."""

    def __init__(self, group: Group, world: ElasticProcessGroup | None = None, owner: bool = False) -> None:
        super().__init__(group.index, group.size)  # type: ignore[call-arg]
        self.group = group
        self._world = world or self
        self._owner = owner
        self._idents = 1

    # ---- what torch.distributed asks of a group ---------------------------------------------

    def getBackendName(self) -> str:
        """Name of the backend."""
        return NAME

    @property
    def supports_splitting(self) -> bool:
        """Sub-groups are made by ``new_group``, not by splitting."""
        return False

    def rank(self) -> int:
        """This rank's index among the members, as of the last edit."""
        return self.group.index

    def size(self) -> int:
        """Number of members, as of the last edit."""
        return self.group.size

    def new_group(self, ranks: Sequence[int], **_: Any) -> ElasticProcessGroup | None:
        """Called by ``dist.new_group`` on the default group, by every rank in the same order."""
        ident = self._idents
        self._idents += 1
        members = [self.group.ranks[rank] for rank in ranks]
        if self.group.transport.rank not in members:
            return None
        return ElasticProcessGroup(Group(self.group.transport, ident, members), self._world)

    def shutdown(self) -> None:
        """Called by ``dist.destroy_process_group``; closes a transport that was made for the group."""
        if self._owner:
            self.group.transport.run(self.group.barrier())  # nobody may close while another still sends
            self.group.transport.close()

    def abort(self) -> None:
        """Nothing is left hanging by an interrupted operation."""

    # ---- reductions -------------------------------------------------------------------------

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> ElasticWork:
        """Reduce over all members, in place."""
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        buffers = [_contiguous(t) for t in tensors]
        steps = [self.group.all_reduce(b, _combine(op)) for b in buffers]
        return self._issue(steps, tensors, opts, lambda: self._deliver(tensors, buffers, op))

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> ElasticWork:
        """Reduce several tensors."""
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: list[torch.Tensor], opts: Any) -> ElasticWork:
        """Reduce into the root."""
        root = self._member(opts.rootRank, "reduce")
        buffers = [_contiguous(t) for t in tensors]
        steps = [self.group.reduce(b, _combine(opts.reduceOp), root) for b in buffers]
        done = (lambda: self._deliver(tensors, buffers, opts.reduceOp)) if self.group.index == root else None
        return self._issue(steps, tensors, opts, done)

    def reduce_scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any) -> ElasticWork:
        """Reduce inputs[i] over all members into member i's output; chunks may have different sizes."""
        buffers, steps = [_contiguous(t) for t in outputs], []
        for buffer, chunks in zip(buffers, inputs, strict=True):
            self._one_each(chunks, "reduce_scatter")
            _same_size(buffer, chunks[self.group.index], "reduce_scatter")
            steps.append(self.group.reduce_scatter(buffer, [_contiguous(c) for c in chunks], _combine(opts.reduceOp)))
        return self._issue(steps, outputs, opts, lambda: self._deliver(outputs, buffers, opts.reduceOp))

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any) -> ElasticWork:
        """Reduce the chunks of one tensor, member i's into its output."""
        return self.reduce_scatter([output], [self._chunks(tensor, output, "reduce_scatter_tensor")], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any
    ) -> ElasticWork:
        """Reduce and scatter several tensors."""
        pairs = zip(inputs, outputs, strict=True)
        return self.reduce_scatter(outputs, [self._chunks(t, o, "reduce_scatter_tensor") for t, o in pairs], opts)

    # ---- copies -----------------------------------------------------------------------------

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> ElasticWork:
        """Copy the root's tensors to all."""
        root = self._member(opts.rootRank, "broadcast")
        buffers = [_contiguous(t) for t in tensors]
        steps = [self.group.broadcast(b, root) for b in buffers]
        return self._issue(steps, tensors, opts, lambda: self._deliver(tensors, buffers))

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> ElasticWork:
        """Gather a tensor of each member; sizes may differ."""
        steps, buffers = [], [[_contiguous(t) for t in out] for out in outputs]
        for out, tensor in zip(buffers, inputs, strict=True):
            self._one_each(out, "all_gather")
            _same_size(out[self.group.index], tensor, "all_gather")
            steps.append(self.group.all_gather(out, _contiguous(tensor)))
        flat, sources = [t for out in outputs for t in out], [b for out in buffers for b in out]
        return self._issue(steps, flat, opts, lambda: self._deliver(flat, sources))

    def allgather_coalesced(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> ElasticWork:
        """Gather several tensors; torch passes a list of tensors for each member."""
        return self.allgather([list(each) for each in zip(*outputs, strict=True)], inputs, opts)

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> ElasticWork:
        """Gather a tensor of each member into one."""
        return self.all_gather_single_coalesced([output], [tensor], opts)

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> ElasticWork:
        """Gather several tensors, each into one."""
        buffers, steps = [_contiguous(t) for t in outputs], []
        for buffer, tensor in zip(buffers, inputs, strict=True):
            chunks = self._chunks(buffer, tensor, "all_gather_into_tensor")
            steps.append(self.group.all_gather(chunks, _contiguous(tensor)))
        return self._issue(steps, outputs, opts, lambda: self._deliver(outputs, buffers))

    def gather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any) -> ElasticWork:
        """Gather at the root."""
        root = self._member(opts.rootRank, "gather")
        targets = outputs[0] if self.group.index == root else []
        if self.group.index == root:
            self._one_each(targets, "gather")
        buffers = [_contiguous(t) for t in targets]
        steps = [self.group.gather(buffers, _contiguous(inputs[0]), root)]
        return self._issue(steps, targets, opts, lambda: self._deliver(targets, buffers))

    def scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any) -> ElasticWork:
        """Scatter from the root."""
        root = self._member(opts.rootRank, "scatter")
        chunks = inputs[0] if self.group.index == root else []
        if self.group.index == root:
            self._one_each(chunks, "scatter")
        buffers = [_contiguous(outputs[0])]
        steps = [self.group.scatter(buffers[0], [_contiguous(c) for c in chunks], root)]
        return self._issue(steps, outputs, opts, lambda: self._deliver(outputs, buffers))

    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> ElasticWork:
        """inputs[j] arrives at member j in its outputs[this member]."""
        self._one_each(outputs, "all_to_all")
        self._one_each(inputs, "all_to_all")
        buffers = [_contiguous(t) for t in outputs]
        steps = [self.group.all_to_all(buffers, [_contiguous(t) for t in inputs])]
        return self._issue(steps, outputs, opts, lambda: self._deliver(outputs, buffers))

    def all_to_all_single(
        self, output: torch.Tensor, tensor: torch.Tensor, out_splits: list[int], in_splits: list[int], opts: Any = None
    ) -> ElasticWork:
        """All to all on one tensor split along its first dimension (evenly if no splits are given)."""
        buffer = _contiguous(output)
        outs = self._split(buffer, out_splits, "output")
        steps = [self.group.all_to_all(outs, self._split(_contiguous(tensor), in_splits, "input"))]
        return self._issue(steps, [output], opts, lambda: self._deliver([output], [buffer]))

    # ---- barriers ---------------------------------------------------------------------------

    def barrier(self, opts: Any = None) -> ElasticWork:
        """Return when every member has entered."""
        return self._issue([self.group.barrier()], [], opts, None)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier that names who did not come. torch.distributed's function of this name knows gloo only."""
        limit = timeout.total_seconds() if timeout else None
        self.group.transport.wait(self.group.transport.start(self.group.barrier()), limit=limit)

    # ---- point to point ---------------------------------------------------------------------

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> ElasticWork:
        """Start sending to a member."""
        operation = self.group.send(_contiguous(tensors[0]), self._member(to, "send"), tag)
        return self._work(tensors).begin(operation)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> ElasticWork:
        """Start receiving from a member."""
        buffers = [_contiguous(tensors[0])]
        operation = self.group.recv(buffers[0], self._member(source, "recv"), tag)
        return self._work(tensors).begin(operation, lambda: self._deliver(tensors, buffers))

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> ElasticWork:
        """Receive from whichever member sends first."""
        buffers = [_contiguous(tensors[0])]
        work = _FromAnySource(self.group.transport, tensors, self.group.recv_any(buffers[0], tag))
        self._deliver(tensors, buffers)
        return work

    # ---- inside -----------------------------------------------------------------------------

    def _work(self, result: list[torch.Tensor]) -> ElasticWork:
        return ElasticWork(self.group.transport, result)

    def _issue(
        self, steps: Sequence[Steps], result: list[torch.Tensor], opts: Any, done: Callable[[], None] | None
    ) -> ElasticWork:
        """Run the collectives, or start them if the caller asked for asynchrony."""
        work, transport = self._work(result), self.group.transport
        if opts is not None and getattr(opts, "asyncOp", False):
            tasks: list[Task] = [transport.start(each) for each in steps]

            def whole() -> Steps:
                yield tasks
                if done is not None:
                    done()
                work.finished()

            return work.begin(transport.start(whole()))
        for each in steps:
            transport.run(each)
        if done is not None:
            done()
        return work

    def _deliver(self, targets: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor], op: Any = None) -> None:
        """Average if asked to, and copy what could not be received in place."""
        for target, buffer in zip(targets, buffers, strict=True):
            if op == dist.ReduceOp.AVG:
                buffer.div_(self.group.size)
            if target.numel() and buffer.data_ptr() != target.data_ptr():
                target.detach().copy_(buffer.view_as(target))

    def _member(self, index: int, what: str) -> int:
        if not 0 <= index < self.group.size:
            raise ValueError(f"{NAME}.{what}: member {index} does not exist in a group of {self.group.size}")
        return index

    def _one_each(self, tensors: Sequence[torch.Tensor], what: str) -> None:
        if len(tensors) != self.group.size:
            raise ValueError(f"{NAME}.{what}: {len(tensors)} tensors for {self.group.size} members; one each is needed")

    def _chunks(self, whole: torch.Tensor, part: torch.Tensor, what: str) -> list[torch.Tensor]:
        n = self.group.size
        if whole.numel() != part.numel() * n:
            raise ValueError(f"{NAME}.{what}: {whole.numel()} elements are not {n} times {part.numel()}")
        if not part.numel():
            return [part] * n
        return [chunk.view(part.shape) for chunk in _contiguous(whole).view(-1).split(part.numel())]

    def _split(self, tensor: torch.Tensor, splits: list[int], what: str) -> list[torch.Tensor]:
        n = self.group.size
        rows = tensor.shape[0] if tensor.dim() else 0
        if splits and (len(splits) != n or sum(splits) != rows):
            raise ValueError(f"{NAME}.all_to_all_single: {what} splits {splits} do not give {rows} rows to {n} members")
        if not splits and rows % n:
            raise ValueError(f"{NAME}.all_to_all_single: {rows} {what} rows cannot be split evenly over {n} members")
        return list(tensor.split(splits or [rows // n] * n))


class _FromAnySource(ElasticWork):
    """A finished receive that knows whom it was from."""

    def __init__(self, transport: Transport, result: list[torch.Tensor], source: int) -> None:
        super().__init__(transport, result)
        self._source = source

    def source_rank(self) -> int:
        """Index of the member that sent."""
        return self._source

    def _source_rank(self) -> int:
        return self._source


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous()


def _same_size(one: torch.Tensor, other: torch.Tensor, what: str) -> None:
    if one.numel() != other.numel() or one.dtype != other.dtype:
        raise ValueError(
            f"{NAME}.{what}: {one.numel()} elements of {one.dtype} and {other.numel()} of {other.dtype} must be alike"
        )


def _combine(op: Any) -> Combine:
    for known, combine in _COMBINE.items():
        if op == known:
            return combine
    raise ValueError(f"the {NAME} backend cannot reduce with {op}")


# ---- making and editing groups -------------------------------------------------------------


def register() -> None:
    """Make the name ``elastic`` known to torch.distributed. Idempotent."""
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


_given: list[tuple[Transport, Sequence[int]]] = []
"""The transport and the members of the next default group, when somebody else owns the transport."""


def _create(options: Any, _: Any) -> ElasticProcessGroup:
    rank, size = options.group_rank, options.group_size
    if _given:
        transport, ranks = _given.pop()
        return ElasticProcessGroup(Group(transport, 0, ranks))
    crowded = size > len(os.sched_getaffinity(0))
    transport = Transport(rank, InterruptFlag(), options.timeout.total_seconds(), crowded)
    options.store.set(f"address/{rank}", transport.address)
    transport.add_peers({peer: options.store.get(f"address/{peer}") for peer in range(size)})
    return ElasticProcessGroup(Group(transport, 0, range(size)), owner=True)


def initialize(transport: Transport, ranks: Sequence[int], timeout: timedelta) -> ElasticProcessGroup:
    """Make torch.distributed's default group over ``transport``, whose owner keeps and closes it. Talks to nobody.

    ``ranks``: the members' global ids, in order; the transport's own among them.
    """
    register()
    _given.append((transport, ranks))
    # Addresses come from the coordinator, so nothing needs a store that other processes can reach.
    dist.init_process_group(
        NAME, store=dist.HashStore(), rank=ranks.index(transport.rank), world_size=len(ranks), timeout=timeout
    )
    group = c10d._get_default_group()
    assert isinstance(group, ElasticProcessGroup)
    return group


def groups() -> list[ElasticProcessGroup]:
    """Every elastic group this process has, the default group first."""
    return [pg for pg in c10d._world.pg_map if isinstance(pg, ElasticProcessGroup)]


def edit(changes: Mapping[ElasticProcessGroup, Sequence[int]]) -> None:
    """Give groups new member lists (global ids, in order), all in one edit, in place. Idempotent.

    Every member calls it between the same two epochs of the transport. torch.distributed numbers the default group's
    members 0..n-1, so ranks as torch sees them are positions in its list; inside, groups keep the job's global ids.
    """
    for process_group, ranks in changes.items():
        process_group.group.edit(ranks)
    world = groups()[0]
    position = {rank: index for index, rank in enumerate(world.group.ranks)}
    for process_group in groups():
        c10d._world.pg_group_ranks[process_group] = {
            position[rank]: index for index, rank in enumerate(process_group.group.ranks)
        }


def keep(live: Sequence[int]) -> None:
    """Take every rank not in ``live`` out of every group of this process."""
    kept = set(live)
    edit({pg: [rank for rank in pg.group.ranks if rank in kept] for pg in groups()})
