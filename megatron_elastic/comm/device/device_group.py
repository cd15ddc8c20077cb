"""DeviceGroup: the collectives of one group on a device, by NCCL, HCCL or another backend of torch.

A communicator of such a backend is fixed to its members and counts operations in order. So one that a fault interrupted
is of no use even if its members stay, and one whose members change has to be shrunk or made anew. The members find out
which it is at the first operation after an edit or a new epoch, by comparing what each has; communicators that no edit
and no fault touched are kept as they are.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _DistributedBackendOptions
from torch.distributed import distributed_c10d as c10d

from megatron_elastic.cluster.rank.control import Interrupted, JobStopped
from megatron_elastic.comm.device.link_store import LinkStore
from megatron_elastic.comm.group import Group
from megatron_elastic.comm.operation import Operation
from megatron_elastic.comm.tag import Channel, at_group
from megatron_elastic.observe.dials import DEVICE

_LOOK = 1e-3
"""Seconds between looks at work that nothing announces the end of."""
_PATIENCE = 5.0
"""Seconds in which a fault must show that made the backend fail; then its error counts as an error of the program."""
FORMER = {
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
}
"""Operations of ``dist.ProcessGroup`` -> what they were called before torch 2.13, and some callers still call them."""


class DeviceGroup:
    """The communicator of a group on one type of device; made when it is first needed.

    Args:
        group: says who the members are, as of its last edit.
        device: type of device, e.g. ``cuda``.
        backend: name of torch's backend for it, e.g. ``nccl``.
        timeout: after which the backend gives an operation up.
    """

    def __init__(self, group: Group, device: str, backend: str, timeout: timedelta) -> None:
        self.made = 0
        """How many communicators there have been, shrunk ones included."""
        self.device = device
        self._group, self._backend, self._timeout = group, backend, timeout
        self._communicator: dist.ProcessGroup | None = None
        self._ranks: tuple[int, ...] = ()
        self._born = -1
        """Epoch in which the communicator was made; with the operations since, what must be equal on all members."""
        self._issued = 0
        self._agreed: tuple[int, tuple[int, ...]] | None = None
        """Epoch and members of the last agreement that the communicator can be used."""
        self._calling = False
        self._pending: list[DeviceWork] = []

    def issue(self, operation: str, *args: Any) -> DeviceWork:
        """Start an operation of ``dist.ProcessGroup`` by its name. Raises Interrupted on a fault."""
        communicator = self._usable()
        self._count(operation, args)
        self._issued += 1
        self._calling = True
        try:
            work = getattr(communicator, _name_in(communicator, operation))(*args)
        except dist.DistBackendError as error:
            self._fail(error, _PATIENCE)
        except RuntimeError as error:
            self._fail(error, 0.0)
        finally:
            self._calling = False
        issued = DeviceWork(self, work)
        self._pending = [each for each in self._pending if not each.is_completed()]
        self._pending.append(issued)
        return issued

    def _count(self, operation: str, args: Sequence[Any]) -> None:
        """Bytes of what this rank gives and gets; what the backend makes of that on its way is its own matter."""
        dials = self._group.transport.dials
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor | list)][:2]
        if not tensors:
            return
        # What is got comes first; most operations have it in the place of what is given.
        if operation != "recv":
            dials.sent[DEVICE] += _bytes_of(tensors[-1])
        if operation != "send":
            dials.received[DEVICE] += _bytes_of(tensors[0])

    def connect(self) -> None:
        """Have a communicator that all members agree on, in which each has met the others: from now on operations of
        this epoch begin without a wait. Every member must come here. Raises as ``issue`` does.
        """
        made = self.made
        self._usable()
        if self.made != made:  # backends look for the peers when they are first asked for something
            self.issue("allreduce", [torch.zeros(1, device=self.device)], dist.AllreduceOptions()).wait()

    def wait(self, work: dist.Work, limit: float | None) -> None:
        """Block until ``work`` is done or, on a device with streams, until the current stream waits for it.

        Raises Interrupted on a fault, TimeoutError after ``limit`` seconds, the backend's RuntimeError otherwise.
        """
        try:
            if self.device == "cpu":
                self._finish(work, limit)
            else:
                work.wait()
        except RuntimeError as error:
            self._fail(error, _PATIENCE)

    def abort(self) -> None:
        """Give the communicator up, so that what blocks in it ends. The next operation makes another. Any thread."""
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            # Some backends cannot abort: gloo's abort ends nothing, others raise.
            with contextlib.suppress(RuntimeError):
                communicator.abort()
        # To destroy a communicator means to wait for its work, so it is kept for as long as there is some.
        with _abandoning:
            if communicator is not None:
                _abandoned.append((communicator, self._pending))
                self._pending = []
            _abandoned[:] = [(c, works) for c, works in _abandoned if _unfinished(works)]

    def abort_blocked(self) -> None:
        """Abort if something is under way. Any thread."""
        if self._calling or _unfinished(self._pending):
            self._give_up()

    def _give_up(self) -> None:
        """Abort in a fault: what is under way leaves garbage behind, and the device goes on with it."""
        if self.device != "cpu":
            self._group.transport.doubt()
        self.abort()

    def shutdown(self) -> None:
        """Let the communicator go, when all members do. Work under way is finished first."""
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            for each in self._pending:
                each.wait()
            communicator.shutdown()

    # ---- making it fit ----------------------------------------------------------------------

    def _usable(self) -> dist.ProcessGroup:
        """The communicator, once all members agree on it. Every member must come here."""
        now = self._group.transport.epoch, self._group.ranks
        if (communicator := self._communicator) is None or self._agreed != now:
            self._agreed = None
            self._settle()
            in_step = self._in_step()
            communicator = self._communicator
            if communicator is None or not in_step or self._ranks != self._group.ranks:
                communicator = (self._shrunk(communicator) if communicator and in_step else None) or self._new()
                self.made += 1
                self._communicator, self._ranks, self._born, self._issued = communicator, now[1], now[0], 0
            self._agreed = now
        return communicator

    def _settle(self) -> None:
        """Let what is under way end; it does, unless a fault kept another member from taking part."""
        try:
            for each in self._pending:
                self._finish(each.work, _PATIENCE)
        except (RuntimeError, TimeoutError):
            self.abort()

    def _in_step(self) -> bool:
        """Whether every member has the same communicator and did the same number of operations on it."""
        group, transport = self._group, self._group.transport
        coordinate = at_group(group.ident, 0)
        mine = torch.tensor([self._born, self._issued] if self._communicator is not None else [-1, 0])
        others = [rank for rank in group.ranks if rank != transport.rank]
        theirs = [torch.zeros_like(mine) for _ in others]
        transport.wait(
            *[transport.recv(rank, Channel.RENDEZVOUS, coordinate, t) for rank, t in zip(others, theirs, strict=True)],
            *[transport.send(rank, Channel.RENDEZVOUS, coordinate, mine) for rank in others],
        )
        return self._communicator is not None and all(torch.equal(mine, each) for each in theirs)

    def _shrunk(self, communicator: dist.ProcessGroup) -> dist.ProcessGroup | None:
        """Without the members that left, if that is all that changed and the backend can do it in place."""
        backend: Any = communicator._get_backend(torch.device(self.device))
        ranks = self._group.ranks
        gone = [index for index, rank in enumerate(self._ranks) if rank not in ranks]
        if not getattr(backend, "supports_shrinking", False) or [r for r in self._ranks if r in ranks] != list(ranks):
            return None
        # The old one is not used again, and those who left may have died in it.
        return self._wrapped(backend.shrink(gone, c10d.SHRINK_ABORT, None), communicator.get_group_store())

    def _new(self) -> dist.ProcessGroup:
        self.abort()
        group = self._group
        store = LinkStore(group.transport, group.ident, group.ranks)
        try:
            backend = _create(self._backend, store, group.index, group.size, self._timeout)
        except RuntimeError as error:
            self._fail(error, _PATIENCE)
        return self._wrapped(backend, store)

    def _wrapped(self, backend: Any, store: dist.Store) -> dist.ProcessGroup:
        """Torch's own group around a backend: it knows every operation under every name."""
        if isinstance(backend, dist.ProcessGroup):  # as backends in Python are
            return backend
        kind = c10d.Backend.backend_type_map[self._backend]
        communicator = dist.ProcessGroup(store, self._group.index, self._group.size)
        communicator._register_backend(torch.device(self.device), kind, backend)
        communicator._set_default_backend(kind)
        return communicator

    # ---- waiting ----------------------------------------------------------------------------

    def _finish(self, work: dist.Work, limit: float | None) -> None:
        """Block until work is done, on the device too."""
        if self.device != "cpu":
            self._await(work.is_completed, limit)
            return
        # Not all of gloo's work says when it is done, and waiting for it cannot be interrupted.
        waiting = _Waiting(work)
        self._await(lambda: not waiting.is_alive(), limit)
        if waiting.error is not None:
            raise waiting.error

    def _await(self, done: Callable[[], bool], limit: float | None) -> None:
        """Look again and again, at the links and the interrupt too."""
        condition = cast(Operation, _Condition(done, self._group.transport.rank))
        deadline = time.monotonic() + (self._timeout.total_seconds() if limit is None else limit)
        while not done():
            try:
                self._group.transport.wait(condition, limit=_LOOK)
            except (Interrupted, JobStopped):
                self._give_up()
                raise
            except TimeoutError:
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"rank {self._group.transport.rank} waited for an operation of {self._backend} with ranks "
                        f"{list(self._ranks)}: one of them did not take part, or needs more time than the limit"
                    ) from None

    def _fail(self, error: RuntimeError, patience: float) -> NoReturn:
        """Raise the interruption that made the backend fail, or its own error if there is none."""
        # Where a device has given something up, nothing is left that could be finished before.
        self._group.transport.check_devices()
        try:
            self._group.transport.wait(cast(Operation, _Condition(lambda: False, -1)), limit=patience)
        except (Interrupted, JobStopped):
            self._give_up()
            raise
        except TimeoutError:
            pass
        raise error


class DeviceWork(dist.Work):
    """An operation of a device group."""

    def __init__(self, group: DeviceGroup, work: dist.Work) -> None:
        super().__init__()
        self._group, self.work = group, work
        self._waited = False

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """See ``DeviceGroup.wait``."""
        if not self._waited:
            self._group.wait(self.work, timeout.total_seconds() or None)
            # On a device with streams only the stream has waited.
            self._waited = self._group.device == "cpu"
        return True

    def is_completed(self) -> bool:
        """Whether the operation is over, on the device too."""
        return self._waited or self.work.is_completed()

    def is_success(self) -> bool:
        """Whether it is over, without an error."""
        return self.work.is_success()

    def exception(self) -> Any:
        """The backend's error, if there is one."""
        return self.work.exception()

    def result(self) -> list[torch.Tensor]:
        """The tensors that the operation fills."""
        return self.work.result()

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """The backend's future of the result. It knows nothing of faults: ``wait`` does."""
        return self.work.get_future()


class _Waiting(threading.Thread):
    """Waits for work where nothing can interrupt it."""

    def __init__(self, work: dist.Work) -> None:
        super().__init__(daemon=True, name="device work")
        self._work = work
        self.error: RuntimeError | None = None
        self.start()

    def run(self) -> None:
        """Keep the error for who waits for the thread."""
        try:
            self._work.wait()
        except RuntimeError as error:
            self.error = error


class _Condition:
    """Anything that comes true, in the shape of an operation."""

    __slots__ = ("_done", "peer")
    tells = False

    def __init__(self, done: Callable[[], bool], peer: int) -> None:
        self._done, self.peer = done, peer

    @property
    def done(self) -> bool:
        return self._done()


_abandoned: list[tuple[dist.ProcessGroup, list[DeviceWork]]] = []
"""Aborted communicators in which work may still be blocked."""
_abandoning = threading.Lock()
"""Held while they change."""


def _bytes_of(tensors: Any) -> int:
    """Of a tensor, or of all in lists, of lists."""
    if isinstance(tensors, torch.Tensor):
        return tensors.nbytes
    return sum(map(_bytes_of, tensors)) if isinstance(tensors, list) else 0


def _unfinished(works: list[DeviceWork]) -> bool:
    return any(not work.is_completed() for work in works)


def _create(name: str, store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    """A backend object of torch. Raises RuntimeError if this torch has no such backend."""
    if name == "gloo":
        return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
    if name == "nccl" and dist.is_nccl_available():
        # Otherwise NCCL's own watchdog ends the process when a peer is lost, which is ours to handle.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, size, options)
    plugin = dist.Backend._plugins.get(name.upper())
    if plugin is None:
        raise RuntimeError(f"this torch has no backend {name}: install one that has (for hccl: torch_npu)")
    if not plugin.extended_api:
        return plugin.creator_fn(store, rank, size, timeout)
    given = _DistributedBackendOptions()
    given.store, given.group_rank, given.group_size, given.timeout = store, rank, size, timeout
    return plugin.creator_fn(given, None)


def _name_in(communicator: dist.ProcessGroup, operation: str) -> str:
    return operation if hasattr(communicator, operation) else FORMER.get(operation, operation)
