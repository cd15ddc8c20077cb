"""Relay: what an agent passes on between its ranks and the coordinator, and what it adds, leaves out and keeps.

What is the same on all ranks is passed on once. The addresses of a node's own ranks come from here, so the coordinator
need not send everybody's to everybody. Steps that were committed are kept until the coordinator has them on record.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import msgspec
from msgspec.structs import replace

from megatron_elastic.cluster import wire
from megatron_elastic.cluster.chorus import Chorus
from megatron_elastic.cluster.messages import (
    Committed,
    Decision,
    FromAgent,
    FromRank,
    Hello,
    Invite,
    Plan,
    RankDying,
    RankExited,
    RankNews,
    Recall,
    Relay,
    Running,
    Said,
    Start,
    ToRank,
)
from megatron_elastic.layout import changed, decode, encode

_KEPT = 4096
"""Steps that are kept at most while no coordinator takes them."""

_decoder: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)


class Post:
    """One node's.

    Args:
        deliver: sends a frame to a rank.
        tell: tells the coordinator.
    """

    def __init__(self, deliver: Callable[[int, bytes], None], tell: Callable[[FromAgent], object]) -> None:
        self.layout = b""
        """The newest that was sent to the ranks of this node; what they have proposed if none was."""
        self.committed: deque[Committed] = deque(maxlen=_KEPT)
        """Steps that may not be on record."""
        self._deliver = deliver
        self._tell = tell
        self._hellos: dict[int, Hello] = {}
        self._chorus = Chorus(tell)

    # ---- from ranks ------------------------------------------------------------------------

    def heard(self, rank: int, message: FromRank) -> None:
        """A rank says something to the coordinator."""
        if isinstance(message, Hello):
            self.layout = self.layout or message.layout
            if rank != 0:
                message = replace(message, layout=b"")
            first = next(iter(self._hellos.values()), message)
            self._hellos[rank] = message
            if first is not message and message.likeness == first.likeness:
                message = replace(message, flags={})
        elif isinstance(message, Committed):
            self.committed.append(message)
            if not message.first:
                return
        self._chorus.say(message, len(self._hellos))

    def news(self, news: RankNews) -> None:
        """Something has happened to a rank's process. What ranks have said before is told first."""
        self._chorus.flush()
        if isinstance(news, RankDying | RankExited):
            self._hellos.pop(news.rank, None)
        self._tell(news)

    def flush(self) -> bool:
        """Tell what waits for others that say the same; returns whether anything did."""
        return self._chorus.flush()

    def running(self, slots: dict[int, int]) -> list[Running]:
        """The ranks of this node, given with their local ranks, as a new coordinator has to know them."""
        return [Running(rank=rank, local_rank=slot, hello=self._hellos.get(rank)) for rank, slot in slots.items()]

    # ---- from the coordinator ----------------------------------------------------------------

    def relay(self, message: Relay) -> None:
        """Pass a message on to ranks."""
        payload = bytes(message.message)
        content = _decoder.decode(payload)
        if isinstance(content, Start):
            near = {rank: hello.address for rank, hello in self._hellos.items()}
            payload = msgspec.msgpack.encode(replace(content, addresses=near))
        if message.differs:
            assert isinstance(content, Invite | Plan | Decision), type(content)
            content = replace(content, layout=restored(self.layout, content.layout))
            payload = msgspec.msgpack.encode(content)
        if isinstance(content, Plan | Decision):
            self.layout = content.layout
        frame = wire.frame(payload)
        for rank in message.ranks:
            self._deliver(rank, frame)

    def recall(self, message: Recall) -> None:
        """The coordinator lacks steps."""
        for each in self.committed:
            if each.vote.step > message.after:
                self._tell(Said(message=each))

    def recorded(self, step: int) -> None:
        """Steps up to this one are on record."""
        while self.committed and self.committed[0].vote.step <= step:
            self.committed.popleft()


def restored(base: bytes, told: bytes) -> bytes:
    """The encoded layout that was told as the difference from ``base``."""
    return encode(changed(decode(base), told))
