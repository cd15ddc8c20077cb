"""Work: what torch.distributed's callers wait for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_elastic.comm.operation import Operation
from megatron_elastic.comm.transport import Transport


class ElasticWork(dist.Work):
    """An operation: over, or under way in the background until ``wait``."""

    def __init__(self, transport: Transport, result: list[torch.Tensor]) -> None:
        super().__init__()
        self._transport = transport
        self._result = result
        self._operation: Operation | None = None
        self._then: Callable[[], None] | None = None
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None
        self._lock = threading.Lock()  # the background thread may finish while the future is being asked for

    def begin(self, operation: Operation, then: Callable[[], None] | None = None) -> ElasticWork:
        """``operation`` is under way; ``then`` runs in the thread that waits, once it is done."""
        self._operation, self._then = operation, then
        return self

    def finished(self) -> None:
        """The result is there: complete the future."""
        with self._lock:
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
        self._transport.progress()
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
            if self._operation is None or (self._then is None and self._operation.done):
                self.finished()
        return self._future


class ReceivedFrom(ElasticWork):
    """A receive that knows whom it is from."""

    def __init__(self, transport: Transport, result: list[torch.Tensor], source: int) -> None:
        super().__init__(transport, result)
        self._source = source

    def source_rank(self) -> int:
        """Index of the member that sent."""
        return self._source

    def _source_rank(self) -> int:
        return self._source
