"""ProcessGroup: a ``Group`` in the shape that torch.distributed calls.

Tensors of the CPU go over the links. Collectives on those of a device go to the group's communicator there
(``comm.device.device_group``), messages between two ranks through host memory. Megatron keeps references to its groups
in dozens of modules, so the handle stays the same object when the group behind it is edited.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from megatron_elastic.comm.device.device_group import FORMER, DeviceGroup
from megatron_elastic.comm.device.devices import Devices
from megatron_elastic.comm.distributed.work import ElasticWork, ReceivedFrom
from megatron_elastic.comm.group import Combine, Group
from megatron_elastic.comm.operation import Steps, Task
from megatron_elastic.comm.registration import NAME
from megatron_elastic.comm.tag import GROUPS, Channel, at_group

_LOCAL_IDENTS, _NO_IDENT = GROUPS // 2, GROUPS - 1
"""Groups have numbers below the first when all ranks make them together, from it on when only their members do."""

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


Method = TypeVar("Method", bound=Callable[..., Any])


def _by_device(collective: Method) -> Method:
    """Hand a collective on a device's tensors to the group's communicator there."""
    name = collective.__name__

    @functools.wraps(collective)
    def by_device(self: ElasticProcessGroup, *args: Any) -> Any:
        device = _device_of(args) or "cpu"
        if device != "cpu" or device in self._devices:
            return self.device_group(device).issue(name, *args)
        return collective(self, *args)

    return cast(Method, by_device)


class ElasticProcessGroup(dist.ProcessGroup):
    """A ``Group`` in the shape that torch.distributed calls.

    Args:
        group: the members and the links between them.
        devices: the strategies for tensors that are not on the CPU; shared by all groups of a process.
        at_end: called when the group is destroyed.
    """

    def __init__(self, group: Group, devices: Devices, at_end: Callable[[], None] | None = None) -> None:
        super().__init__(group.index, group.size)  # type: ignore[call-arg]
        self.group = group
        self._devices = devices
        self._on_device: dict[str, DeviceGroup] = {}
        self._at_end = at_end
        self._made_locally = 0
        self._name = self._description = ""

    # ---- what torch.distributed asks of a group ---------------------------------------------

    def getBackendName(self) -> str:
        """Name of the backend."""
        return NAME

    def name(self) -> str:
        """Name of the backend."""
        return NAME

    @property
    def group_name(self) -> str:
        """The name under which torch finds the group again."""
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_desc(self) -> str:
        """What the group is for, in its maker's words."""
        return self._description

    def _set_group_desc(self, desc: str) -> None:
        self._description = desc

    def _get_backend(self, device: torch.device) -> ElasticProcessGroup:
        """What carries a device's tensors: this. torch 2.14 asks it whether it would batch messages."""
        return self

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

    def new_group(
        self, ranks: Sequence[int], group_name: str = "", group_desc: str | None = None, **_: Any
    ) -> ElasticProcessGroup | None:
        """Called by ``dist.new_group`` on the default group, since torch 2.13; ``create`` is asked by torch before."""
        made = self.sub_group(ranks, group_name)
        if made is not None:
            made._set_group_name(group_name)
            made._set_group_desc(group_desc or "undefined")
        return made

    def sub_group(self, ranks: Sequence[int], name: str) -> ElasticProcessGroup | None:
        """A group of some members, which are positions in this one; None if this rank is none of them.

        ``name``: torch's number of it, if every rank makes all groups in the same order. Else
        (``use_local_synchronization``) a hash, and only members call it; two groups that share two ranks must still be
        made in the same order by both.
        """
        members = [self.group.ranks[rank] for rank in ranks]
        if name.isdecimal():
            ident = int(name)
            if ident >= _LOCAL_IDENTS:
                raise RuntimeError(f"{NAME}: this process has made {ident - 1} groups, there can be no more")
        else:
            ident = self._agree_on_ident(members)
        if self.group.transport.rank not in members:
            return None
        return ElasticProcessGroup(Group(self.group.transport, ident, members), self._devices)

    def _agree_on_ident(self, members: Sequence[int]) -> int:
        """A number that no member has for another group, although they have made different groups so far."""
        transport, coordinate = self.group.transport, at_group(_NO_IDENT, 0)
        mine = torch.tensor([self._made_locally])
        others = [rank for rank in members if rank != transport.rank]
        theirs = [torch.zeros_like(mine) for _ in others]
        transport.wait(
            *[transport.recv(rank, Channel.RENDEZVOUS, coordinate, t) for rank, t in zip(others, theirs, strict=True)],
            *[transport.send(rank, Channel.RENDEZVOUS, coordinate, mine) for rank in others],
        )
        self._made_locally = 1 + max(int(t.item()) for t in (mine, *theirs))
        return _LOCAL_IDENTS + self._made_locally - 1

    def get_group_store(self) -> dist.Store:
        """The store that the group was made with; in an elastic job it reaches nobody else."""
        store: dist.Store = c10d._world.pg_map[self][1]
        return store

    def device_group(self, device: str) -> DeviceGroup:
        """The communicator of this group's members on a type of device, as ``cuda``.

        Raises RuntimeError if there is no strategy for such devices.
        """
        if device not in self._on_device:
            if device not in self._devices:
                raise RuntimeError(f"{NAME}: there is no backend for tensors on {device}; move them to the CPU")
            self._on_device[device] = self._devices.make(self.group, device)
        return self._on_device[device]

    def shutdown(self) -> None:
        """Called by ``dist.destroy_process_group``, by every member."""
        for each in self._on_device.values():
            each.shutdown()
        if self._at_end is not None:
            self._at_end()

    def abort(self) -> None:
        """Give up what is under way on devices; on the CPU an interruption leaves nothing hanging."""
        for each in self._on_device.values():
            each.abort()

    # ---- reductions -------------------------------------------------------------------------

    @_by_device
    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> ElasticWork:
        """Reduce over all members, in place."""
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        buffers = [_contiguous(t) for t in tensors]
        steps = [self.group.all_reduce(b, _combine(op)) for b in buffers]
        return self._issue(steps, tensors, opts, lambda: self._deliver(tensors, buffers, op))

    @_by_device
    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> ElasticWork:
        """Reduce several tensors."""
        return self.allreduce(tensors, opts)

    @_by_device
    def reduce(self, tensors: list[torch.Tensor], opts: Any) -> ElasticWork:
        """Reduce into the root."""
        root = self._member(opts.rootRank, "reduce")
        buffers = [_contiguous(t) for t in tensors]
        steps = [self.group.reduce(b, _combine(opts.reduceOp), root) for b in buffers]
        done = (lambda: self._deliver(tensors, buffers, opts.reduceOp)) if self.group.index == root else None
        return self._issue(steps, tensors, opts, done)

    @_by_device
    def reduce_scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any) -> ElasticWork:
        """Reduce inputs[i] over all members into member i's output; chunks may have different sizes."""
        buffers, steps = [_contiguous(t) for t in outputs], []
        for buffer, chunks in zip(buffers, inputs, strict=True):
            self._one_each(chunks, "reduce_scatter")
            _same_size(buffer, chunks[self.group.index], "reduce_scatter")
            steps.append(self.group.reduce_scatter(buffer, [_contiguous(c) for c in chunks], _combine(opts.reduceOp)))
        return self._issue(steps, outputs, opts, lambda: self._deliver(outputs, buffers, opts.reduceOp))

    @_by_device
    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any) -> ElasticWork:
        """Reduce the chunks of one tensor, member i's into its output."""
        return self.reduce_scatter([output], [self._chunks(tensor, output, "reduce_scatter_tensor")], opts)

    @_by_device
    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any
    ) -> ElasticWork:
        """Reduce and scatter several tensors."""
        pairs = zip(inputs, outputs, strict=True)
        return self.reduce_scatter(outputs, [self._chunks(t, o, "reduce_scatter_tensor") for t, o in pairs], opts)

    # ---- copies -----------------------------------------------------------------------------

    @_by_device
    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> ElasticWork:
        """Copy the root's tensors to all."""
        root = self._member(opts.rootRank, "broadcast")
        buffers = [_contiguous(t) for t in tensors]
        steps = [self.group.broadcast(b, root) for b in buffers]
        return self._issue(steps, tensors, opts, lambda: self._deliver(tensors, buffers))

    @_by_device
    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> ElasticWork:
        """Gather a tensor of each member; sizes may differ."""
        steps, buffers = [], [[_contiguous(t) for t in out] for out in outputs]
        for out, tensor in zip(buffers, inputs, strict=True):
            self._one_each(out, "all_gather")
            _same_size(out[self.group.index], tensor, "all_gather")
            steps.append(self.group.all_gather(out, _contiguous(tensor)))
        flat, sources = [t for out in outputs for t in out], [b for out in buffers for b in out]
        return self._issue(steps, flat, opts, lambda: self._deliver(flat, sources))

    @_by_device
    def allgather_coalesced(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> ElasticWork:
        """Gather several tensors; torch passes a list of tensors for each member."""
        return self.allgather([list(each) for each in zip(*outputs, strict=True)], inputs, opts)

    @_by_device
    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> ElasticWork:
        """Gather a tensor of each member into one."""
        return self.all_gather_single_coalesced([output], [tensor], opts)

    @_by_device
    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> ElasticWork:
        """Gather several tensors, each into one."""
        buffers, steps = [_contiguous(t) for t in outputs], []
        for buffer, tensor in zip(buffers, inputs, strict=True):
            chunks = self._chunks(buffer, tensor, "all_gather_into_tensor")
            steps.append(self.group.all_gather(chunks, _contiguous(tensor)))
        return self._issue(steps, outputs, opts, lambda: self._deliver(outputs, buffers))

    @_by_device
    def gather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any) -> ElasticWork:
        """Gather at the root."""
        root = self._member(opts.rootRank, "gather")
        targets = outputs[0] if self.group.index == root else []
        if self.group.index == root:
            self._one_each(targets, "gather")
        buffers = [_contiguous(t) for t in targets]
        steps = [self.group.gather(buffers, _contiguous(inputs[0]), root)]
        return self._issue(steps, targets, opts, lambda: self._deliver(targets, buffers))

    @_by_device
    def scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any) -> ElasticWork:
        """Scatter from the root."""
        root = self._member(opts.rootRank, "scatter")
        chunks = inputs[0] if self.group.index == root else []
        if self.group.index == root:
            self._one_each(chunks, "scatter")
        buffers = [_contiguous(outputs[0])]
        steps = [self.group.scatter(buffers[0], [_contiguous(c) for c in chunks], root)]
        return self._issue(steps, outputs, opts, lambda: self._deliver(outputs, buffers))

    @_by_device
    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> ElasticWork:
        """inputs[j] arrives at member j in its outputs[this member]."""
        self._one_each(outputs, "all_to_all")
        self._one_each(inputs, "all_to_all")
        buffers = [_contiguous(t) for t in outputs]
        steps = [self.group.all_to_all(buffers, [_contiguous(t) for t in inputs])]
        return self._issue(steps, outputs, opts, lambda: self._deliver(outputs, buffers))

    @_by_device
    def all_to_all_single(
        self, output: torch.Tensor, tensor: torch.Tensor, out_splits: Iterable[int], in_splits: Iterable[int],
        opts: Any = None,
    ) -> ElasticWork:  # fmt: skip
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
        """A barrier in which the first member says who did not come within ``timeout`` (all, or the first of them).

        Raises RuntimeError there and, a while later, at the others that came. ``dist.monitored_barrier`` refuses every
        backend but gloo, so it is called on the group.
        """
        group, transport = self.group, self.group.transport
        came = torch.zeros(1, dtype=torch.uint8)
        seconds = timeout.total_seconds() if timeout else None
        if group.index != 0:
            transport.run(group.gather([], came, 0))
            transport.wait(transport.start(group.broadcast(came, 0)), limit=seconds and 2 * seconds)
            return
        arrivals = next(group.gather([torch.zeros_like(came) for _ in group.ranks], came, 0))
        missing, deadline = [], time.monotonic() + (seconds or 0)
        for arrival in arrivals:
            try:
                transport.wait(arrival, limit=seconds and max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                missing.append(group.ranks.index(arrival.peer))
                if not wait_all_ranks:
                    break
        if missing:
            raise RuntimeError(f"{NAME}.monitored_barrier: member(s) {missing} did not come within {seconds} s")
        transport.run(group.broadcast(came, 0))

    # ---- point to point ---------------------------------------------------------------------

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> ElasticWork:
        """Start sending to a member."""
        self._check_message(to, tag, "send")
        operation = self.group.send(_contiguous(tensors[0]), to, tag)
        return self._work(tensors).begin(operation)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> ElasticWork:
        """Start receiving from a member."""
        self._check_message(source, tag, "recv")
        buffers = [_contiguous(tensors[0])]
        work = ReceivedFrom(self.group.transport, tensors, source)
        return work.begin(self.group.recv(buffers[0], source, tag), lambda: self._deliver(tensors, buffers))

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
            raise RuntimeError(f"{NAME}.{what}: member {index} does not exist in a group of {self.group.size}")
        return index

    def _check_message(self, peer: int, tag: int, what: str) -> None:
        if self._member(peer, what) == self.group.index:
            raise RuntimeError(f"{NAME}.{what}: member {peer} is this process itself, which needs no message")
        if tag < 0:
            raise RuntimeError(f"{NAME}.{what}: tag {tag} is negative")

    def _one_each(self, tensors: Sequence[torch.Tensor], what: str) -> None:
        if len(tensors) != self.group.size:
            raise RuntimeError(f"{NAME}.{what}: {len(tensors)} tensors for {self.group.size} members; give one each")

    def _chunks(self, whole: torch.Tensor, part: torch.Tensor, what: str) -> list[torch.Tensor]:
        n = self.group.size
        if whole.numel() != part.numel() * n:
            raise RuntimeError(f"{NAME}.{what}: {whole.numel()} elements are not {n} times {part.numel()}")
        if whole.dtype != part.dtype:
            raise RuntimeError(f"{NAME}.{what}: {whole.dtype} and {part.dtype} must be alike")
        if not part.numel():
            return [part] * n
        return [chunk.view(part.shape) for chunk in _contiguous(whole).view(-1).split(part.numel())]

    def _split(self, tensor: torch.Tensor, splits: Iterable[int], what: str) -> list[torch.Tensor]:
        n, splits = self.group.size, [int(rows) for rows in splits]  # of tensors and arrays, too
        rows = tensor.shape[0] if tensor.dim() else 0
        if splits and (len(splits) != n or sum(splits) != rows):
            raise RuntimeError(f"{NAME}.all_to_all_single: {what} splits {splits} do not fit {rows} rows, {n} members")
        if not splits and rows % n:
            raise RuntimeError(f"{NAME}.all_to_all_single: {rows} {what} rows cannot be split evenly over {n} members")
        return list(tensor.split(splits or [rows // n] * n))


for _name, _former in FORMER.items():
    setattr(ElasticProcessGroup, _former, getattr(ElasticProcessGroup, _name))


def _device_of(args: Iterable[Any]) -> str:
    """Type of the device of the first tensor in (lists in) ``args``."""
    for arg in args:
        if isinstance(arg, torch.Tensor):
            return arg.device.type
        if isinstance(arg, (list, tuple)) and arg and (device := _device_of(arg)):
            return device
    return ""


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in a contiguous tensor of the CPU: the same memory if it can be."""
    return tensor.detach().cpu().contiguous()


def _same_size(one: torch.Tensor, other: torch.Tensor, what: str) -> None:
    if one.numel() != other.numel() or one.dtype != other.dtype:
        raise RuntimeError(
            f"{NAME}.{what}: {one.numel()} elements of {one.dtype} and {other.numel()} of {other.dtype} must be alike"
        )


def _combine(op: Any) -> Combine:
    for known, combine in _COMBINE.items():
        if op == known:
            return combine
    raise RuntimeError(f"the {NAME} backend cannot reduce with {op}")
