"""Backend: groups as ``torch.distributed`` process groups, under the backend name ``elastic``.

A process group is a handle on a ``Group``. Megatron keeps references to its groups in dozens of modules, so the
handle stays the same object when the group behind it is edited. Operations complete before they return, except
isend and irecv.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from megatron_elastic.comm.group import Combine, Group
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
    """A started operation; ``wait`` completes it."""

    def __init__(self, result: list[torch.Tensor], finish: Callable[[], None] | None = None) -> None:
        super().__init__()
        self._result = result
        self._finish = finish

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Complete the operation. The transport's own limit applies."""
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        return True

    def is_completed(self) -> bool:
        """Whether the result is there."""
        return self._finish is None

    def is_success(self) -> bool:
        """Whether the result is there; failures raise in ``wait``."""
        return self._finish is None

    def result(self) -> list[torch.Tensor]:
        """The tensors the operation filled."""
        return self._result

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future of the result; completes the operation first."""
        self.wait()
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result(self._result)
        return future


class ElasticProcessGroup(dist.ProcessGroup):
    """A ``Group`` in the shape that torch.distributed calls."""

    def __init__(self, group: Group, timeout: timedelta) -> None:
        super().__init__(group.index, group.size)  # type: ignore[call-arg]
        self.group = group
        self._next_ident = 1
        self._timeout = timeout

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
        ident = self._next_ident
        self._next_ident += 1
        members = [self.group.ranks[rank] for rank in ranks]
        if self.group.transport.rank not in members:
            return None
        return ElasticProcessGroup(Group(self.group.transport, ident, members), self._timeout)

    # ---- collectives ------------------------------------------------------------------------

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> ElasticWork:
        """Reduce over all members, in place."""
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        for tensor in tensors:
            self._on_contiguous(tensor, lambda t: self.group.all_reduce(t, _combine(op)))
            self._average(tensor, op)
        return ElasticWork(tensors)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> ElasticWork:
        """Reduce several tensors."""
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: list[torch.Tensor], opts: Any) -> ElasticWork:
        """Reduce into the root."""
        for tensor in tensors:
            self._on_contiguous(tensor, lambda t: self.group.reduce(t, _combine(opts.reduceOp), opts.rootRank))
            if self.group.index == opts.rootRank:
                self._average(tensor, opts.reduceOp)
        return ElasticWork(tensors)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> ElasticWork:
        """Copy the root's tensors to all."""
        for tensor in tensors:
            self._on_contiguous(tensor, lambda t: self.group.broadcast(t, opts.rootRank))
        return ElasticWork(tensors)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> ElasticWork:
        """Gather a tensor of each member."""
        for out, tensor in zip(outputs, inputs, strict=True):
            buffers = [t if t.is_contiguous() else t.contiguous() for t in out]
            self.group.all_gather(buffers, tensor.contiguous())
            for target, buffer in zip(out, buffers, strict=True):
                if target is not buffer:
                    target.copy_(buffer)
        return ElasticWork([t for out in outputs for t in out])

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> ElasticWork:
        """Gather a tensor of each member into one (``dist.all_gather_into_tensor``)."""

        def gather(flat: torch.Tensor) -> None:
            self.group.all_gather(list(flat.view(-1).chunk(self.group.size)), tensor.contiguous().view(-1))

        self._on_contiguous(output, gather)
        return ElasticWork([output])

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> ElasticWork:
        """Gather several tensors, each into one."""
        for output, tensor in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, tensor)
        return ElasticWork(outputs)

    def reduce_scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any) -> ElasticWork:
        """Reduce inputs[i] over all members into member i's output."""
        combine = _combine(opts.reduceOp)
        for output, chunks in zip(outputs, inputs, strict=True):
            reduce = partial(self.group.reduce_scatter, chunks=[c.contiguous() for c in chunks], combine=combine)
            self._on_contiguous(output, reduce)
            self._average(output, opts.reduceOp)
        return ElasticWork(outputs)

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any) -> ElasticWork:
        """Reduce a tensor over all members; each gets its part (``dist.reduce_scatter_tensor``)."""
        chunks = [c.view_as(output) for c in tensor.contiguous().view(-1).chunk(self.group.size)]
        return self.reduce_scatter([output], [chunks], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any
    ) -> ElasticWork:
        """Reduce and scatter several tensors."""
        for output, tensor in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, tensor, opts)
        return ElasticWork(outputs)

    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> ElasticWork:
        """inputs[j] arrives at member j in its outputs[this member]."""
        buffers = [t.contiguous() for t in outputs]
        self.group.all_to_all(buffers, [t.contiguous() for t in inputs])
        for target, buffer in zip(outputs, buffers, strict=True):
            if target is not buffer:
                target.copy_(buffer)
        return ElasticWork(outputs)

    def alltoall_base(
        self, output: torch.Tensor, tensor: torch.Tensor, out_splits: list[int], in_splits: list[int], opts: Any = None
    ) -> ElasticWork:
        """All to all on one tensor split along its first dimension (evenly if no splits are given)."""
        n = self.group.size
        outs = out_splits or [output.shape[0] // n] * n
        ins = in_splits or [tensor.shape[0] // n] * n
        source = tensor.contiguous()
        self._on_contiguous(output, lambda t: self.group.all_to_all(list(t.split(outs)), list(source.split(ins))))
        return ElasticWork([output])

    def gather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any) -> ElasticWork:
        """Gather at the root."""
        out = [t.contiguous() for t in outputs[0]] if self.group.index == opts.rootRank else []
        self.group.gather(out, inputs[0].contiguous(), opts.rootRank)
        for target, buffer in zip(outputs[0] if out else [], out, strict=True):
            if target is not buffer:
                target.copy_(buffer)
        return ElasticWork(inputs)

    def scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any) -> ElasticWork:
        """Scatter from the root."""
        chunks = [t.contiguous() for t in inputs[0]] if self.group.index == opts.rootRank else []
        self._on_contiguous(outputs[0], lambda t: self.group.scatter(t, chunks, opts.rootRank))
        return ElasticWork(outputs)

    def barrier(self, opts: Any = None) -> ElasticWork:
        """Return when every member has entered."""
        self.group.barrier()
        return ElasticWork([])

    # ---- point to point ---------------------------------------------------------------------

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> ElasticWork:
        """Start sending to member ``to``."""
        return ElasticWork(tensors, self.group.send(tensors[0], to, tag))

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> ElasticWork:
        """Start receiving from member ``source``."""
        return ElasticWork(tensors, self.group.recv(tensors[0], source, tag))

    # ---- inside -----------------------------------------------------------------------------

    def _on_contiguous(self, tensor: torch.Tensor, run: Callable[[torch.Tensor], object]) -> None:
        data = tensor.detach()
        buffer = data.contiguous()
        run(buffer)
        if buffer.data_ptr() != data.data_ptr():
            data.copy_(buffer)

    def _average(self, tensor: torch.Tensor, op: Any) -> None:
        if op == dist.ReduceOp.AVG:
            tensor.detach().div_(self.group.size)


def _combine(op: Any) -> Combine:
    for known, combine in _COMBINE.items():
        if op == known:
            return combine
    raise ValueError(f"the {NAME} backend cannot reduce with {op}")


def initialize(transport: Transport, world_size: int, timeout: timedelta) -> ElasticProcessGroup:
    """Make ``transport`` torch.distributed's default group, in place of ``init_process_group`` over a network store."""

    def create(options: Any, _: Any) -> ElasticProcessGroup:
        return ElasticProcessGroup(Group(transport, 0, options.global_ranks_in_group or range(world_size)), timeout)

    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu"])
    else:
        dist.Backend._plugins[NAME.upper()] = dist.Backend._plugins[NAME.upper()]._replace(creator_fn=create)
    # Addresses come from the coordinator, so nothing needs a store that other processes can reach.
    dist.init_process_group(NAME, store=dist.HashStore(), rank=transport.rank, world_size=world_size, timeout=timeout)
    group = c10d._get_default_group()
    assert isinstance(group, ElasticProcessGroup)
    return group


def edit(live: Sequence[int]) -> None:
    """Take every rank not in ``live`` out of every elastic group of this process, in place.

    torch.distributed numbers the members of the default group 0..n-1, so ranks as torch sees them are positions in
    ``live`` from now on; groups keep the job's global ids inside.
    """
    position = {rank: index for index, rank in enumerate(live)}
    for process_group in c10d._world.pg_map:
        if isinstance(process_group, ElasticProcessGroup):
            members = [rank for rank in process_group.group.ranks if rank in position]
            process_group.group.edit(members)
            c10d._world.pg_group_ranks[process_group] = {position[rank]: i for i, rank in enumerate(members)}
