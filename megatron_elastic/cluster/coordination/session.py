"""Session: what is under way between an agent and a coordinator, over connections that may break and be made again.

Every message has a number, and is kept until the other end has said that it is there. After a break each end says how
far it got, and is sent the rest: nothing is lost, and nothing comes twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import msgspec

from megatron_elastic.cluster import wire
from megatron_elastic.cluster.wire import Unsendable

KEPT = 256 << 20
"""Bytes that are kept at most while the other end does not say that it has them."""


class Letter(msgspec.Struct, frozen=True, tag=True, tag_field="type"):
    """A message on its way."""

    number: int
    """From 1; 0 for one that need not come."""
    received: int
    """Number of the last message of the other end that is here."""
    message: msgspec.Raw


class Session:
    """One end. ``transmit`` sends a frame over the present connection; None while there is none."""

    def __init__(self) -> None:
        self.received = 0
        self.transmit: Callable[[bytes], object] | None = None
        self._sent = 0
        self._kept: deque[tuple[int, bytes]] = deque()
        self._bytes = 0

    def send(self, message: msgspec.Struct) -> Unsendable | None:
        """Send a message now, or when there is a connection again. Returns why it cannot be sent at all."""
        try:
            payload = wire.pack(message)
        except Unsendable as error:
            return error
        if len(payload) > wire.FRAME_LIMIT - 64:
            return Unsendable(f"a {type(message).__name__} of {len(payload)} bytes is longer than a message may be")
        if self._bytes + len(payload) > KEPT:
            return Unsendable(f"the other end has not taken {self._bytes} bytes; a {type(message).__name__} is too "
                              "much")
        self._sent += 1
        self._bytes += len(payload)
        self._kept.append((self._sent, payload))
        self._transmit(self._sent, payload)
        return None

    def beat(self, message: msgspec.Struct) -> None:
        """Send what need not come, over the present connection."""
        self._transmit(0, wire.pack(message))

    def take(self, letter: Letter) -> bytes | None:
        """The message of a letter; None if it has been here before. Raises WireError if one before it is missing."""
        self.acknowledged(letter.received)
        if letter.number and letter.number <= self.received:
            return None
        if letter.number > self.received + 1:
            raise wire.WireError(f"message {letter.number} came after message {self.received}")
        self.received = max(self.received, letter.number)
        return bytes(letter.message)

    def acknowledged(self, number: int) -> None:
        """The other end has everything up to ``number``."""
        while self._kept and self._kept[0][0] <= number:
            self._bytes -= len(self._kept.popleft()[1])

    def resume(self, received: int, transmit: Callable[[bytes], object]) -> None:
        """There is a connection to the other end again, which has everything up to ``received``."""
        self.acknowledged(received)
        self.transmit = transmit
        for number, payload in self._kept:
            self._transmit(number, payload)

    def _transmit(self, number: int, payload: bytes) -> None:
        if self.transmit is not None:
            self.transmit(wire.encode(Letter(number, self.received, msgspec.Raw(payload))))
