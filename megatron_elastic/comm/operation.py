"""Operation: something under way on a transport that can be waited for.

Sends and receives are single messages; a task is a collective that goes on by itself, step by step.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import ucxx._lib.libucxx as ucx
from ucxx._lib.arr import Array

from megatron_elastic.cluster.control import Interrupted
from megatron_elastic.comm.arena import ArenaView


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's memory as bytes."""
    return tensor.detach().view(-1).view(torch.uint8)


def ucx_array(tensor: torch.Tensor) -> Any:
    """UCX's view of a contiguous tensor's memory."""
    return Array(flat_bytes(tensor).numpy())


@dataclass(frozen=True, slots=True)
class InArena:
    """An arrived message whose bytes are in its sender's arena."""

    view: ArenaView
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Shape:
    """What a borrowing receive expects: a flat tensor."""

    numel: int
    dtype: torch.dtype


class Send:
    """A message on its way to ``peer``. Once it is done its buffer may be reused, and it needs no more progress."""

    __slots__ = ("_request", "peer")

    def __init__(self, peer: int, request: Any) -> None:
        self.peer = peer
        self._request = request

    @property
    def done(self) -> bool:
        """Whether the buffer is needed no more. Raises Interrupted when the link broke first."""
        return completed(self._request, self.peer)


class Recv:
    """A message expected from ``peer``.

    ``buffer`` is where it goes. A borrowing receive has none before it is done, and then, if it can, one that lies in
    the sender's memory; it must be released as soon as it is read.
    """

    __slots__ = ("_block", "_copied", "_request", "_shape", "buffer", "peer", "tag")

    def __init__(self, peer: int, tag: int, buffer: torch.Tensor | None, shape: Shape | None = None) -> None:
        self.peer = peer
        self.tag = tag
        self.buffer: torch.Tensor = buffer  # type: ignore[assignment]  # set when a borrowing receive begins
        self._shape = shape
        self._request: Any = None
        self._copied = False
        self._block: InArena | None = None

    @property
    def nbytes(self) -> int:
        """Size of the message that is expected."""
        return self.buffer.nbytes if self._shape is None else self._shape.numel * self._shape.dtype.itemsize

    def place(self, block: InArena | None) -> None:
        """The message is here, in ``block`` of its sender's arena or not: find room for it, or take it as it lies."""
        if self._shape is not None:
            if block is not None:
                self._block = block
                self.buffer = block.view.bytes(block.start, block.length).view(self._shape.dtype)
                self._copied = True
                return
            self.buffer = torch.empty(self._shape.numel, dtype=self._shape.dtype)
        if block is not None:
            block.view.take(block.start, flat_bytes(self.buffer))
            self._copied = True

    @property
    def held(self) -> bool:
        """Whether a borrowed buffer is still to come, or to be released."""
        return self._block is not None or (self._request is None and not self._copied)

    def release(self) -> None:
        """Give a borrowed buffer back. Idempotent."""
        block, self._block = self._block, None
        if block is not None:
            del self.buffer
            block.view.release(block.start)

    @property
    def done(self) -> bool:
        """Whether the whole message is in the buffer. Raises Interrupted when the link broke first."""
        return self._copied or (self._request is not None and completed(self._request, self.peer))


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


Operation = Send | Recv | Task | Arrival


def completed(request: Any, peer: int) -> bool:
    """Whether UCX is done with a request. Raises Interrupted when the link to ``peer`` broke first."""
    if not request.completed:
        return False
    try:
        request.check_error()
    except ucx.UCXError:
        # A link that breaks completes its requests too: half of this message may be garbage.
        raise Interrupted(0, suspects=(peer,)) from None
    return True
