"""softccl: collectives of soft devices. They are enqueued, and block their stream until all members have come.

As with NCCL, a member that never comes blocks the others until somebody aborts them or the limit is over. What was
under way then leaves garbage in its outputs, streams go on, and the communicator is of no use any more.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist

NAME = "softccl"

_soft = torch.ops.soft


class _Kind(IntEnum):
    """Operations, numbered as in ``exchange.cpp``."""

    ALL_REDUCE = 0
    REDUCE_SCATTER = 1
    ALL_GATHER = 2
    ALL_TO_ALL = 3
    BROADCAST = 4
    BARRIER = 5
    REDUCE = 6


_REDUCE: dict[Any, int] = {
    dist.ReduceOp.SUM: 0,
    dist.ReduceOp.AVG: 0,
    dist.ReduceOp.PRODUCT: 1,
    dist.ReduceOp.MIN: 2,
    dist.ReduceOp.MAX: 3,
}


def register() -> None:
    """Make the name ``softccl`` known to torch.distributed. Idempotent."""
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["soft"])


def _create(options: Any, _: Any) -> SoftGroup:
    return SoftGroup(options.store, options.group_rank, options.group_size, options.timeout)


class SoftGroup(dist.ProcessGroup):
    """A communicator.

    Args:
        store: where the members find each other.
        rank: index of this member.
        size: number of members.
        timeout: after which an operation that waits for a member is given up.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._store, self._rank, self._size, self._timeout = store, rank, size, timeout
        self._exchanges: dict[str, int] = {}
        self._files: list[int] = []
        self._streams: dict[int, torch.Stream] = {}
        self._aborted = False

    def getBackendName(self) -> str:
        """Name of the backend."""
        return NAME

    def name(self) -> str:
        """Name of the backend."""
        return NAME

    def rank(self) -> int:
        """Index of this member."""
        return self._rank

    def size(self) -> int:
        """Number of members."""
        return self._size

    # ---- operations -------------------------------------------------------------------------

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> SoftWork:
        """Reduce over all members, in place."""
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        return self._run(_Kind.ALL_REDUCE, [(t, t) for t in tensors], op=op)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> SoftWork:
        """Reduce several tensors."""
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: list[torch.Tensor], opts: Any) -> SoftWork:
        """Reduce into the root's tensor; those of the others stay as they are."""
        # What is no output is left alone by an abort, too.
        pairs = [(t, t if opts.rootRank == self._rank else t.new_empty(0)) for t in tensors]
        return self._run(_Kind.REDUCE, pairs, op=opts.reduceOp, root=opts.rootRank)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> SoftWork:
        """Send the root's tensor to all members."""
        return self._run(_Kind.BROADCAST, [(t, t) for t in tensors], root=opts.rootRank)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> SoftWork:
        """Put the members' tensors one after another."""
        return self._run(_Kind.ALL_GATHER, [(input, output)])

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> SoftWork:
        """Gather several tensors."""
        return self._run(_Kind.ALL_GATHER, list(zip(inputs, outputs, strict=True)))

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> SoftWork:
        """Gather the members' tensors into a list."""
        pairs = [(i, i.new_empty((self._size, *i.shape))) for i in inputs]
        return self._run(_Kind.ALL_GATHER, pairs, spread=outputs)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> SoftWork:
        """Reduce, each member its part."""
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        return self._run(_Kind.REDUCE_SCATTER, [(input, output)], op=op)

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> SoftWork:
        """Reduce several tensors, each member its parts."""
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        return self._run(_Kind.REDUCE_SCATTER, list(zip(inputs, outputs, strict=True)), op=op)

    def reduce_scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any) -> SoftWork:
        """Reduce the members' lists, each member its own element."""
        return self._run(_Kind.REDUCE_SCATTER, [(torch.cat([t.reshape(-1) for t in parts]), o)
                                                for parts, o in zip(inputs, outputs, strict=True)], op=opts.reduceOp)

    def all_to_all_single(
        self, output: torch.Tensor, input: torch.Tensor, out_splits: Sequence[int], in_splits: Sequence[int],
        opts: Any = None,
    ) -> SoftWork:
        """Exchange parts, equal ones unless sizes are given: then two members at a time, in an order that all have."""
        if self._size == 1 or not (len(out_splits) or len(in_splits)):
            return self._run(_Kind.ALL_TO_ALL, [(input, output)])
        me, even = self._rank, [len(output) // self._size] * self._size
        given, got = input.split([*map(int, in_splits)] or even), output.split([*map(int, out_splits)] or even)
        got[me].copy_(given[me])
        for peer in sorted({*range(self._size)} - {me}, key=lambda peer: sorted((me, peer))):
            if me < peer:
                self.send([given[peer]], peer)
                last = self.recv([got[peer]], peer)
            else:
                self.recv([got[peer]], peer)
                last = self.send([given[peer]], peer)
        return last.of([output])

    def barrier(self, opts: Any = None) -> SoftWork:
        """Until all members have come. Only the stream waits, until ``wait``, which lets the host wait, too."""
        nothing = torch.empty(0, device="soft")
        return self._run(_Kind.BARRIER, [(nothing, nothing)], on_host=True)

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int = 0) -> SoftWork:
        """Send to a member. Messages of a pair arrive in order, whatever their tag."""
        return self._run(_Kind.BROADCAST, [(t, t) for t in tensors], peer=dst, root=int(self._rank > dst))

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int = 0) -> SoftWork:
        """Receive from a member."""
        return self._run(_Kind.BROADCAST, [(t, t) for t in tensors], peer=src, root=int(src > self._rank))

    # ---- the end ----------------------------------------------------------------------------

    def abort(self) -> None:
        """End what is under way, with garbage in its outputs. Any thread. The communicator is of no use afterwards."""
        self._aborted = True
        for exchange in list(self._exchanges.values()):
            _soft.exchange_abort(exchange, "it was aborted")

    def shutdown(self) -> None:
        """Finish what is under way, and let go of the memory."""
        for stream in self._streams.values():
            stream.synchronize()
        for exchange in self._exchanges.values():
            _soft.exchange_close(exchange)
        for file in self._files:
            os.close(file)
        self._exchanges, self._files, self._aborted = {}, [], True

    def error(self) -> str:
        """What has become of the communicator; empty if it is well."""
        if not self._exchanges and self._aborted:
            return "it was aborted"
        return next((e for e in map(_soft.exchange_error, self._exchanges.values()) if e), "")

    def check(self) -> None:
        """Raise DistBackendError if the communicator is of no use any more."""
        if error := self.error():
            raise dist.DistBackendError(f"{NAME}: member {self._rank} of {self._size}: {error}; outputs are garbage. "
                                        "Make another communicator")

    # ---- running ----------------------------------------------------------------------------

    def _run(self, kind: _Kind, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], *, op: Any = dist.ReduceOp.SUM,
             root: int = 0, peer: int | None = None, spread: list[list[torch.Tensor]] | None = None,
             on_host: bool = False) -> SoftWork:
        """Enqueue on the communicator's own stream, behind what the current one has been given."""
        self.check()
        # torch hands on objects that equal these names, and hash otherwise.
        how = next((number for each, number in _REDUCE.items() if op == each), None)
        if how is None:
            raise NotImplementedError(f"{NAME}: {op}; reduce with one of {', '.join(map(str, _REDUCE))}")
        exchange = self._exchange(peer)
        index = torch.accelerator.current_device_index()
        current = torch.accelerator.current_stream()
        stream = self._streams.setdefault(index, torch.Stream(torch.device("soft", index)))
        stream.wait_stream(current)
        with stream:
            for source, target in pairs:
                whole_in, whole_out = source.contiguous(), target if target.is_contiguous() else target.contiguous()
                _soft.exchange_run(exchange, int(kind), how, root, whole_in, whole_out)
                if op == dist.ReduceOp.AVG:
                    whole_out.div_(self._size)
                if whole_out is not target:
                    target.copy_(whole_out)
            for lists, (_, gathered) in zip(spread or [], pairs, strict=False):
                for each, part in zip(lists, gathered.unbind(), strict=True):
                    each.copy_(part)
            end = stream.record_event()
        for tensor in {id(t): t for pair in pairs for t in pair}.values():
            tensor.record_stream(stream)
        outputs = [t for each in spread for t in each] if spread else [target for _, target in pairs]
        return SoftWork(self, end, outputs, on_host)

    def _exchange(self, peer: int | None) -> int:
        """The memory shared with all members, or with one other; made when it is first needed."""
        name, rank, size = "all", self._rank, self._size
        if peer is not None:
            low, high = sorted((self._rank, peer))
            name, rank, size = f"{low}-{high}", int(self._rank > peer), 2
        if name not in self._exchanges:
            if rank == 0:
                file = os.memfd_create(f"{NAME}-{name}")
                self._store.set(f"{NAME}/{name}", f"/proc/{os.getpid()}/fd/{file}")
            else:
                file = os.open(self._store.get(f"{NAME}/{name}").decode(), os.O_RDWR)
            self._files.append(file)
            self._exchanges[name] = _soft.exchange_open(file, rank, size, self._timeout.total_seconds())
            if self._aborted:  # meanwhile
                self.abort()
        return self._exchanges[name]


class SoftWork(dist.Work):
    """An operation that has been enqueued."""

    def __init__(self, group: SoftGroup, end: torch.Event, outputs: list[torch.Tensor], on_host: bool) -> None:
        super().__init__()
        self._group, self._end, self._outputs, self._on_host = group, end, outputs, on_host

    def of(self, outputs: list[torch.Tensor]) -> SoftWork:
        """An operation of several parts, whose last one this is."""
        return SoftWork(self._group, self._end, outputs, self._on_host)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Let the current stream wait, for a barrier the host, too.

        Raises DistBackendError if the communicator is known to have failed; a later failure shows in ``exception`` and
        in the outputs.
        """
        self._end.wait(torch.accelerator.current_stream())
        if self._on_host:
            self._end.synchronize()
        self._group.check()
        return True

    def is_completed(self) -> bool:
        """Whether it is over on the device, done or aborted."""
        return self._end.query()

    def is_success(self) -> bool:
        """Whether it is over, without an error."""
        return self.is_completed() and not self._group.error()

    def exception(self) -> Any:
        """The error, once there is one."""
        error = self._group.error()
        return dist.DistBackendError(f"{NAME}: {error}") if error else None

    def result(self) -> list[torch.Tensor]:
        """The tensors that the operation fills."""
        return self._outputs

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future of the outputs, for use in the stream that has waited."""
        self.wait()
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result(self._outputs)
        return future
