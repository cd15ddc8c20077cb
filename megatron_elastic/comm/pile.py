"""Pile: what has come from one peer and nobody expects yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from megatron_elastic.comm.host.message import Message, Pieces


class Budget:
    """Bytes of this rank's memory that messages which nobody expects take, and may take."""

    __slots__ = ("limit", "used")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0


class Pile:
    """One peer's unexpected messages, by tag. Every call costs what it touches, however much lies here."""

    def __init__(self, budget: Budget) -> None:
        self.arrived: dict[int, deque[Message]] = {}
        """In the order of arrival; no tag is without a message."""
        self.partial: dict[int, Pieces] = {}
        """Messages of which some pieces are still to come, expected or not."""
        self.kept = 0
        """Bytes of this rank's memory that ``arrived`` takes."""
        self._budget = budget
        self._lent: dict[int, None] = {}
        """Tags of messages that lie in the peer's memory."""

    def put(self, tag: int, message: Message) -> None:
        """Keep a message."""
        messages = self.arrived.get(tag)
        if messages is None:
            self.arrived[tag] = deque((message,))
        else:
            messages.append(message)
        self._keep(message.kept)
        if message.lent:
            self._lent[tag] = None

    def grow(self, tag: int) -> None:
        """A message that lies here has got another piece in the peer's memory."""
        self._lent[tag] = None

    def take(self, tag: int) -> Message | None:
        """The first message with this tag, if there is one; it is not kept any more."""
        messages = self.arrived.get(tag)
        if messages is None:
            return None
        message = messages.popleft()
        self._keep(-message.kept)
        if not messages:
            del self.arrived[tag]
            self._lent.pop(tag, None)
        return message

    def detach(self) -> None:
        """Copy what lies in the peer's memory, so that it has room, as far as this rank may."""
        while self._lent and self._budget.used < self._budget.limit:
            tag, _ = self._lent.popitem()
            messages = self.arrived[tag]
            for i, message in enumerate(messages):
                if message.lent:
                    self._keep(-message.kept)
                    messages[i] = detached = message.detach()
                    self._keep(detached.kept)

    def drop(self, is_over: Callable[[int], bool]) -> None:
        """Drop the messages whose tag says so."""
        for tag in [tag for tag in self.arrived if is_over(tag)]:
            while (message := self.take(tag)) is not None:
                message.drop()
        for tag in [tag for tag in self.partial if is_over(tag)]:
            self.partial.pop(tag).drop()

    def _keep(self, more: int) -> None:
        self.kept += more
        self._budget.used += more
