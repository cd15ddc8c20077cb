"""Operation: something under way on a transport that can be waited for.

Sends and receives are single messages; a task is a collective that goes on by itself, step by step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch

Result = TypeVar("Result")


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's memory as bytes."""
    return tensor.detach().view(-1).view(torch.uint8)


@dataclass(frozen=True, slots=True)
class Shape:
    """What a borrowing receive expects: a flat tensor."""

    numel: int
    dtype: torch.dtype


class Request(Protocol):
    """A transfer that somebody else drives."""

    @property
    def done(self) -> bool:
        """Whether it is over. Raises Interrupted when it cannot be."""


class Send:
    """A message on its way to ``peer``. Once it is done its buffer may be reused, and it needs no more progress."""

    __slots__ = ("left", "peer", "request")

    def __init__(self, peer: int, request: Request | None = None) -> None:
        self.peer = peer
        self.request = request
        self.left = 0
        """Frames to be written yet."""

    @property
    def done(self) -> bool:
        """Whether the buffer is needed no more. Raises Interrupted when the link broke first."""
        return self.left == 0 if self.request is None else self.request.done


class Recv:
    """A message expected from ``peer``.

    ``buffer`` is where it goes. A borrowing receive has none before it is done, and then, if it can, one that lies in
    the sender's memory; it must be released as soon as it is read.
    """

    __slots__ = ("_error", "_finished", "_release", "_shape", "buffer", "peer", "request", "tag")

    def __init__(self, peer: int, tag: int, buffer: torch.Tensor | None, shape: Shape | None = None) -> None:
        self.peer = peer
        self.tag = tag
        self.buffer: torch.Tensor = buffer  # type: ignore[assignment]  # set when a borrowing receive begins
        self.request: Request | None = None
        """Set when the message comes over a link."""
        self._shape = shape
        self._finished = False
        self._error: Exception | None = None
        self._release: Callable[[], None] | None = None

    @property
    def nbytes(self) -> int:
        """Size of the message that is expected."""
        return self.buffer.nbytes if self._shape is None else self._shape.numel * self._shape.dtype.itemsize

    @property
    def shape(self) -> Shape | None:
        """What a borrowing receive can be lent; None for one with a buffer."""
        return self._shape

    def room(self) -> torch.Tensor:
        """A buffer for the message."""
        if self._shape is not None:
            self.buffer = torch.empty(self._shape.numel, dtype=self._shape.dtype)
        return self.buffer

    def lend(self, buffer: torch.Tensor, release: Callable[[], None]) -> None:
        """The message is here, in ``buffer`` until it is released."""
        self.buffer, self._release = buffer, release
        self._finished = True

    def finish(self) -> None:
        """The message is in the buffer."""
        self._finished = True

    def fail(self, error: Exception) -> None:
        """The message cannot be taken: who waits for it gets the error."""
        self._error = error

    @property
    def held(self) -> bool:
        """Whether a borrowed buffer is still to come, or to be released."""
        return self._release is not None or not (self._finished or self.request is not None)

    def release(self) -> None:
        """Give a borrowed buffer back, or let go of one that was copied. Idempotent."""
        if self._shape is None:
            return
        self.buffer = None  # type: ignore[assignment]  # the inbox remembers borrowing receives for a while
        release, self._release = self._release, None
        if release is not None:
            release()

    @property
    def done(self) -> bool:
        """Whether the whole message is in the buffer.

        Raises Interrupted when the link broke first, RuntimeError for a message of another size.
        """
        if self._error is not None:
            raise self._error
        return self._finished or (self.request is not None and self.request.done)


Steps = Generator["Sequence[Operation]", None, None]
"""A collective as a generator: it yields the operations it has to wait for before it goes on."""


class Task:
    """Steps under way. Itself an operation that can be waited for."""

    __slots__ = ("_error", "_finished", "_pending", "_steps", "peer")

    def __init__(self, steps: Steps, peer: int) -> None:
        self.peer = peer
        self._steps = steps
        self._pending: list[Operation] = []
        self._finished = False
        self._error: Exception | None = None

    @property
    def done(self) -> bool:
        """Whether all steps are done. Raises what a step raised."""
        if self._error is not None:
            raise self._error
        return self._finished

    def advance(self) -> bool:
        """Go as far as the operations that are done allow. Returns whether the task has ended."""
        try:
            while not self._finished and self._error is None:
                self._pending = [op for op in self._pending if not op.done]
                if self._pending:
                    return False
                self._pending = list(next(self._steps))
        except StopIteration:
            self._finished = True
        except Exception as error:
            self._error = error
        return True

    def abandon(self, error: Exception) -> None:
        """End without a result."""
        if not self._finished:
            self._error = error


class Arrival:
    """Done when a message of one of the tags is here, not yet received."""

    __slots__ = ("_arrived", "_tags", "peer")

    def __init__(self, arrived: Mapping[int, object], tags: Mapping[int, int]) -> None:
        self._arrived = arrived
        self._tags = tags
        self.peer = -1

    @property
    def done(self) -> bool:
        """Whether there is one; ``peer`` is its source then."""
        self.peer = next((peer for tag, peer in self._tags.items() if tag in self._arrived), -1)
        return self.peer >= 0


class Pause:
    """Done at a time, of ``time.monotonic()``. Tasks look at it now and then: some hundredths of a second may pass."""

    __slots__ = ("_until", "peer")

    def __init__(self, peer: int, until: float) -> None:
        self.peer = peer
        self._until = until

    @property
    def done(self) -> bool:
        """Whether the time has come."""
        return time.monotonic() >= self._until


class Aside(Generic[Result]):
    """Done when a function has run in another thread, which may take its time there."""

    __slots__ = ("_future", "peer")

    def __init__(self, peer: int, future: Future[Result]) -> None:
        self.peer = peer
        self._future = future

    @property
    def done(self) -> bool:
        """Whether it has. Raises what the function raised."""
        if self._future.done():
            self._future.result()
        return self._future.done()

    @property
    def result(self) -> Result:
        """What the function returned, once this is done."""
        return self._future.result()


Operation = Send | Recv | Task | Arrival | Pause | Aside[Any]
