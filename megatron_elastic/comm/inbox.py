"""Inbox: matches what arrives with who expects it, by tag.

What nobody expects yet is kept, within a limit: a peer that is broken or hostile cannot fill this rank's memory.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable

from megatron_elastic.comm.host.message import Block, Message, Pieces
from megatron_elastic.comm.operation import Recv
from megatron_elastic.comm.pile import Budget, Pile
from megatron_elastic.comm.tag import is_older, source_of

_MANY = 256
"""Borrowing receives that are remembered before those that are over are pruned for the first time."""


class Inbox:
    """Messages that nobody has asked for yet, and receives whose message is not here yet.

    Args:
        rank: this rank, for messages of errors.
        limit: bytes of this rank's memory that messages may take which nobody has asked for.
    """

    def __init__(self, rank: int, limit: int) -> None:
        self._rank = rank
        self._budget = Budget(limit)
        self._epoch: int | None = None
        """None before the first: to a rank that joins nothing is old."""
        self._lost: set[int] = set()
        self._piles: dict[int, Pile] = {}
        """By who sent what is in them."""
        self._expected: dict[int, deque[Recv]] = defaultdict(deque)
        self._borrowed: list[Recv] = []
        """Borrowing receives, those that are over too until they are pruned: an interrupted reader releases nothing."""
        self._prune_at = _MANY

    def __len__(self) -> int:
        """Tags of which there are messages that nobody has asked for, or pieces of messages."""
        return sum(len(pile.arrived) + len(pile.partial) for pile in self._piles.values())

    def has(self, peer: int, tag: int) -> bool:
        """Whether a message that nobody has asked for is here."""
        pile = self._piles.get(peer)
        return pile is not None and tag in pile.arrived

    def expect(self, recv: Recv) -> Recv:
        """Give a receive its message now or when it arrives."""
        if recv.shape is not None:
            if len(self._borrowed) > self._prune_at:
                self._borrowed = [each for each in self._borrowed if each.held]
                self._prune_at = max(_MANY, 2 * len(self._borrowed))
            self._borrowed.append(recv)
        pile = self._piles.get(recv.peer)
        message = None if pile is None else pile.take(recv.tag)
        if message is None:
            self._expected[recv.tag].append(recv)
        else:
            self._give(message, recv)
        return recv

    def put(self, tag: int, message: Message) -> None:
        """Give an arrived message to who expects it, keep it, or drop it.

        Raises RuntimeError, naming the peer that filled the memory, when there is no room to keep it.
        """
        expected = self._expected.get(tag)
        if expected:  # in this epoch, from somebody alive
            recv = expected.popleft()
            if not expected:
                del self._expected[tag]
            self._give(message, recv)
        elif self._is_over(tag):
            message.drop()
        elif self._budget.used + message.kept > self._budget.limit:
            message.drop()
            raise self._full(source_of(tag))
        else:
            self._pile_of(tag).put(tag, message)

    def put_piece(self, tag: int, size: int, piece: Block) -> None:
        """The next piece of a message of ``size`` bytes."""
        if self._is_over(tag):
            piece.drop()
            return
        pile = self._pile_of(tag)
        pieces = pile.partial.get(tag)
        if pieces is None:
            pile.partial[tag] = pieces = Pieces(size)
            self.put(tag, pieces)
        if not pieces.expected:
            pile.grow(tag)
        if pieces.add(piece):
            del pile.partial[tag]

    def squeeze(self, source: int) -> None:
        """A sender has no room: copy what it sent and nobody expects yet."""
        pile = self._piles.get(source)
        if pile is not None:
            pile.detach()

    def advance(self, epoch: int, lost: Iterable[int]) -> None:
        """Forget who expects anything, and drop what is of older epochs or from ``lost`` ranks."""
        self._epoch = epoch
        self._lost.update(lost)
        for recv in self._borrowed:
            recv.release()
        self._borrowed.clear()
        self._expected.clear()
        for source, pile in list(self._piles.items()):
            pile.drop(self._is_over)
            if not pile.arrived and not pile.partial:
                del self._piles[source]

    def clear(self) -> None:
        """Let go of everything."""
        self._piles.clear()
        self._expected.clear()
        self._borrowed.clear()

    def _pile_of(self, tag: int) -> Pile:
        source = source_of(tag)
        pile = self._piles.get(source)
        if pile is None:
            pile = self._piles[source] = Pile(self._budget)
        return pile

    def _is_over(self, tag: int) -> bool:
        return (self._epoch is not None and is_older(tag, self._epoch)) or source_of(tag) in self._lost

    def _full(self, sender: int) -> RuntimeError:
        most = max(self._piles, key=lambda source: self._piles[source].kept, default=sender)
        kept = self._piles[most].kept if most in self._piles else 0
        return RuntimeError(
            f"rank {self._rank} dropped a message from rank {sender}: messages that nobody expects fill the "
            f"{self._budget.limit} bytes that they may take, and rank {most} sent {kept} bytes of them. It is broken, "
            "or the two ranks disagree about the layout"
        )

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
