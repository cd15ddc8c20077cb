"""Operation: something under way on a transport that can be waited for.

Sends and receives are single messages; a task is a collective that goes on by itself, step by step.
"""

from __future__ import annotations

import time
from collections import deque
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


class Pending:
    """Operations that are waited for together.

    Those that tell when they are done count down; only the others are looked at, one of them at a time. So a wake-up
    costs what has happened, not what is still to come.

    Args:
        operations: raises what those raise that have failed already.
        ready: called when all that tell are done, or one has failed.
    """

    __slots__ = ("_error", "_left", "_ready", "looked_at")

    def __init__(self, operations: Sequence[Operation], ready: Callable[[], None] | None = None) -> None:
        self._left = 0
        self._error: Exception | None = None
        self._ready = ready
        self.looked_at: list[Operation] = []
        """Operations that do not tell and are not seen to be done."""
        for operation in operations:
            if operation.done:
                continue
            if operation.tells:
                operation.pending = self  # type: ignore[union-attr]
                self._left += 1
            else:
                self.looked_at.append(operation)

    @property
    def done(self) -> bool:
        """Whether all operations are. Raises what one that failed raises."""
        if self._error is not None:
            raise self._error
        looked_at = self.looked_at
        while looked_at and looked_at[-1].done:
            looked_at.pop()
        return not (self._left or looked_at)

    def told(self) -> None:
        """One more is done."""
        self._left -= 1
        if not self._left and self._ready is not None:
            self._ready()

    def failed(self, error: Exception) -> None:
        """One will never be done."""
        self._error = error
        if self._ready is not None:
            self._ready()


class Send:
    """A message on its way to ``peer``. Once it is done its buffer may be reused, and it needs no more progress."""

    __slots__ = ("left", "peer", "pending", "request")

    def __init__(self, peer: int, request: Request | None = None) -> None:
        self.peer = peer
        self.request = request
        self.left = 0
        """Frames to be written yet."""
        self.pending: Pending | None = None
        """Who waits for it."""

    @property
    def tells(self) -> bool:
        """Whether it tells who waits for it when it is done."""
        return self.request is None

    def written(self) -> None:
        """One more frame is."""
        self.left -= 1
        if not self.left and self.pending is not None:
            self.pending.told()

    @property
    def done(self) -> bool:
        """Whether the buffer is needed no more. Raises Interrupted when the link broke first."""
        return self.left == 0 if self.request is None else self.request.done


class Recv:
    """A message expected from ``peer``.

    ``buffer`` is where it goes. A borrowing receive has none before it is done, and then, if it can, one that lies in
    the sender's memory; it must be released as soon as it is read.
    """

    __slots__ = ("_error", "_finished", "_release", "_shape", "buffer", "peer", "pending", "tag")
    tells = True

    def __init__(self, peer: int, tag: int, buffer: torch.Tensor | None, shape: Shape | None = None) -> None:
        self.peer = peer
        self.tag = tag
        self.buffer: torch.Tensor = buffer  # type: ignore[assignment]  # set when a borrowing receive begins
        self.pending: Pending | None = None
        """Who waits for it."""
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
        self.finish()

    def finish(self) -> None:
        """The message is in the buffer."""
        self._finished = True
        if self.pending is not None:
            self.pending.told()

    def fail(self, error: Exception) -> None:
        """The message cannot be taken: who waits for it gets the error."""
        self._error = error
        if self.pending is not None:
            self.pending.failed(error)

    @property
    def held(self) -> bool:
        """Whether a borrowed buffer is still to come, or to be released."""
        return self._release is not None or not self._finished

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
        """Whether the whole message is in the buffer. Raises RuntimeError for a message of another size."""
        if self._error is not None:
            raise self._error
        return self._finished


_NOTHING = Pending(())

Steps = Generator["Sequence[Operation]", None, None]
"""A collective as a generator: it yields the operations it has to wait for before it goes on."""


class Task:
    """Steps under way. Itself an operation that can be waited for.

    Args:
        steps: what it does.
        rank: whose task it is.
        ready: where it puts itself when it can go on.
    """

    __slots__ = ("_error", "_finished", "_operations", "_rank", "_ready", "_steps", "_under_way", "lane", "pending")
    tells = True

    def __init__(self, steps: Steps, rank: int, ready: deque[Task]) -> None:
        self._rank = rank
        self.lane = 0
        """Its number in a trace, if it is traced."""
        self._operations: Sequence[Operation] = ()
        """Those that it waits for."""
        self.pending: Pending | None = None
        """Who waits for it."""
        self._steps = steps
        self._ready = ready
        self._under_way = _NOTHING
        self._finished = False
        self._error: Exception | None = None

    @property
    def done(self) -> bool:
        """Whether all steps are done. Raises what a step raised."""
        if self._error is not None:
            raise self._error
        return self._finished

    @property
    def peer(self) -> int:
        """Whom a wait for it blames: the first one that it waits for itself."""
        return next((op.peer for op in self._operations if not op.done), self._rank)

    @property
    def looks(self) -> bool:
        """Whether it can go on only when somebody lets it look."""
        return bool(self._under_way.looked_at)

    def advance(self) -> bool:
        """Go as far as the operations that are done allow. Returns whether the task has ended."""
        try:
            while not self._finished and self._error is None:
                if not self._under_way.done:
                    return False
                self._operations = next(self._steps)
                self._under_way = Pending(self._operations, self._can_go_on)
        except StopIteration:
            self._finished = True
            self._let_go()
            if self.pending is not None:
                self.pending.told()
        except Exception as error:
            self.abandon(error)
        return True

    def abandon(self, error: Exception) -> None:
        """End without a result."""
        if not self._finished and self._error is None:
            self._error = error
            self._let_go()
            if self.pending is not None:
                self.pending.failed(error)

    def _let_go(self) -> None:
        # Operations lead back here: who has the task would keep their buffers, and else they would keep one another.
        del self._steps
        self._operations, self._under_way = (), _NOTHING

    def _can_go_on(self) -> None:
        self._ready.append(self)


class Arrival:
    """Done when a message of one of the tags, which are given by peer, is here and not yet received."""

    __slots__ = ("_has", "_tags", "peer")
    tells = False

    def __init__(self, has: Callable[[int, int], bool], tags: Mapping[int, int]) -> None:
        self._has = has
        self._tags = tags
        self.peer = -1

    @property
    def done(self) -> bool:
        """Whether there is one; ``peer`` is its source then."""
        self.peer = next((peer for peer, tag in self._tags.items() if self._has(peer, tag)), -1)
        return self.peer >= 0


class Pause:
    """Done at a time, of ``time.monotonic()``. Tasks look at it now and then: some hundredths of a second may pass."""

    __slots__ = ("_until", "peer")
    tells = False

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
    tells = False

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


Sending = Send | Task
"""A message on its way; one of a device's memory is a task."""
Operation = Send | Recv | Task | Arrival | Pause | Aside[Any]
