"""Message: what has come from a rank of this host, as it waits for who expects it or for the rest of itself."""

from __future__ import annotations

from collections import deque
from typing import Protocol

from megatron_elastic.comm.host.arena import ArenaView, copy
from megatron_elastic.comm.operation import Recv


class Message(Protocol):
    """A message that is here, or the first part of which is."""

    @property
    def length(self) -> int:
        """Bytes of the whole message."""

    @property
    def kept(self) -> int:
        """Bytes of this rank's memory that it takes."""

    @property
    def lent(self) -> bool:
        """Whether it holds memory of its sender's."""

    def give(self, recv: Recv) -> None:
        """Hand it to who expects it; the sizes are the same."""

    def drop(self) -> None:
        """Nobody will ever want it."""

    def detach(self) -> Message:
        """The same message, holding none of its sender's memory any more."""


class Whole:
    """A message that came in its frame."""

    __slots__ = ("_data", "kept", "length")
    lent = False

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.length = self.kept = len(data)

    def give(self, recv: Recv) -> None:
        """Copy it."""
        copy(recv.room().data_ptr(), self._data, self.length)
        recv.finish()

    def drop(self) -> None:
        """Nothing is held."""

    def detach(self) -> Whole:
        """Nothing is held."""
        return self

    def copy_to(self, address: int) -> None:
        """Copy it to an address."""
        copy(address, self._data, self.length)


class Block:
    """A message, or a piece of one, that lies in its sender's arena."""

    __slots__ = ("_release", "_start", "_view", "length")
    kept = 0
    lent = True

    def __init__(self, view: ArenaView, start: int, length: int, release: int) -> None:
        self._view, self._start, self._release = view, start, release
        self.length = length

    def give(self, recv: Recv) -> None:
        """Lend it to who borrows, or copy it."""
        shape = recv.shape
        if shape is not None:
            recv.lend(self._view.tensor(self._start, shape.numel, shape.dtype), self.drop)
            return
        self.copy_to(recv.buffer.data_ptr())
        recv.finish()

    def drop(self) -> None:
        """Let the sender use the block again."""
        self._view.release(self._release)

    def detach(self) -> Whole:
        """Copy it to memory of this rank."""
        data = self._view.memory[self._start : self._start + self.length]
        self.drop()
        return Whole(data)

    def copy_to(self, address: int) -> None:
        """Copy it to an address, and let the sender use the block again."""
        copy(address, self._view.start + self._start, self.length)
        self._view.release(self._release)


class Pieces:
    """A message that is larger than a block: its pieces are copied as they come, or kept until somebody wants them."""

    __slots__ = ("_address", "_kept", "_missing", "_recv", "length")

    def __init__(self, length: int) -> None:
        self.length = length
        self._missing = length
        self._kept: deque[Block | Whole] = deque()
        self._recv: Recv | None = None
        self._address = 0

    @property
    def kept(self) -> int:
        """Bytes of the pieces that were detached."""
        return sum(piece.kept for piece in self._kept)

    @property
    def lent(self) -> bool:
        """Whether any piece is."""
        return any(piece.lent for piece in self._kept)

    @property
    def expected(self) -> bool:
        """Whether somebody has it already, although it is not whole."""
        return self._recv is not None

    def add(self, piece: Block) -> bool:
        """The next piece. Returns whether it was the last."""
        self._missing -= piece.length
        if self._recv is None:
            self._kept.append(piece)
        else:
            self._copy(piece)
        return self._missing == 0

    def give(self, recv: Recv) -> None:
        """Copy what is here; the rest follows."""
        self._recv, self._address = recv, recv.room().data_ptr()
        while self._kept:
            self._copy(self._kept.popleft())

    def drop(self) -> None:
        """Let the sender use the blocks again; nothing is written into the receiver's buffer from now on."""
        self._recv = None
        while self._kept:
            self._kept.popleft().drop()

    def detach(self) -> Message:
        """Copy what is here to memory of this rank."""
        self._kept = deque(piece.detach() for piece in self._kept)
        return self

    def _copy(self, piece: Block | Whole) -> None:
        piece.copy_to(self._address)
        self._address += piece.length
        if self._missing == 0 and not self._kept and self._recv is not None:
            self._recv.finish()
