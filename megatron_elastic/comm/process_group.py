"""ProcessGroup: a ``Group`` in the shape that torch.distributed calls.

Megatron keeps references to its groups in dozens of modules, so the handle stays the same object when the group behind
it is edited.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_elastic.comm.group import Combine, Group
from megatron_elastic.comm.operation import Steps, Task
from megatron_elastic.comm.work import ElasticWork, ReceivedFrom

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
        work = ReceivedFrom(self.group.transport, tensors, self.group.recv_any(buffers[0], tag))
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
