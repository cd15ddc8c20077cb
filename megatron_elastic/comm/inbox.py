"""Inbox: matches what arrives with who expects it, by tag."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable

from megatron_elastic.comm.message import Block, Message, Pieces
from megatron_elastic.comm.operation import Recv
from megatron_elastic.comm.tag import is_older, source_of

_MANY = 256
"""Borrowing receives that are remembered before those that are over are pruned."""


class Inbox:
    """Messages that nobody has asked for yet, and receives whose message is not here yet.

    Args:
        rank: this rank, for messages of errors.
    """

    def __init__(self, rank: int) -> None:
        self.arrived: dict[int, deque[Message]] = defaultdict(deque)
        """By tag, in the order of arrival; no tag is without a message."""
        self._rank = rank
        self._epoch: int | None = None
        """None before the first: to a rank that joins nothing is old."""
        self._lost: set[int] = set()
        self._expected: dict[int, deque[Recv]] = defaultdict(deque)
        self._partial: dict[int, Pieces] = {}
        """Messages some pieces of which are here."""
        self._borrowed: list[Recv] = []
        """Borrowing receives, those that are over too until they are pruned: an interrupted reader releases nothing."""

    def expect(self, recv: Recv) -> Recv:
        """Give a receive its message now or when it arrives."""
        if recv.shape is not None:
            if len(self._borrowed) > _MANY:
                self._borrowed = [each for each in self._borrowed if each.held]
            self._borrowed.append(recv)
        arrived = self.arrived.get(recv.tag)
        if arrived:
            message = arrived.popleft()
            if not arrived:
                del self.arrived[recv.tag]
            self._give(message, recv)
        else:
            self._expected[recv.tag].append(recv)
        return recv

    def put(self, tag: int, message: Message) -> None:
        """Give an arrived message to who expects it, keep it, or drop it."""
        expected = self._expected.get(tag)
        if expected:  # in this epoch, from somebody alive
            recv = expected.popleft()
            if not expected:
                del self._expected[tag]
            self._give(message, recv)
        elif self._is_over(tag):
            message.drop()
        else:
            self.arrived[tag].append(message)

    def put_piece(self, tag: int, size: int, piece: Block) -> None:
        """The next piece of a message of ``size`` bytes."""
        if self._is_over(tag):
            piece.drop()
            return
        pieces = self._partial.get(tag)
        if pieces is None:
            self._partial[tag] = pieces = Pieces(size)
            self.put(tag, pieces)
        if pieces.add(piece):
            del self._partial[tag]

    def squeeze(self, source: int) -> None:
        """A sender has no room: copy what it sent and nobody expects yet."""
        for tag, messages in self.arrived.items():
            if source_of(tag) == source:
                self.arrived[tag] = deque(message.detach() for message in messages)

    def advance(self, epoch: int, lost: Iterable[int]) -> None:
        """Forget who expects anything, and drop what is of older epochs or from ``lost`` ranks."""
        self._epoch = epoch
        self._lost.update(lost)
        for recv in self._borrowed:
            recv.release()
        self._borrowed.clear()
        self._expected.clear()
        for tag in [tag for tag in self.arrived if self._is_over(tag)]:
            for message in self.arrived.pop(tag):
                message.drop()
        for tag in [tag for tag in self._partial if self._is_over(tag)]:
            self._partial.pop(tag).drop()

    def clear(self) -> None:
        """Let go of everything."""
        self.arrived.clear()
        self._expected.clear()
        self._partial.clear()
        self._borrowed.clear()

    def _is_over(self, tag: int) -> bool:
        return (self._epoch is not None and is_older(tag, self._epoch)) or source_of(tag) in self._lost

    def _give(self, message: Message, recv: Recv) -> None:
        if message.length != recv.nbytes:
            recv.fail(
                RuntimeError(
                    f"rank {self._rank} got {message.length} bytes from rank {recv.peer} (tag {recv.tag:#018x}) where "
                    f"it expected {recv.nbytes}: the two ranks disagree about the layout"
                )
            )
            message.drop()
            return
        message.give(recv)
