"""Relay: what an agent passes on between its ranks and the coordinator, and what it adds, leaves out and keeps.

What is the same on all ranks is passed on once. The addresses of a node's own ranks come from here, so the coordinator
need not send everybody's to everybody. Steps that were committed are kept until the coordinator has them on record.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from itertools import chain

import msgspec
from msgspec.structs import replace

from megatron_elastic.cluster import wire
from megatron_elastic.cluster.messages import (
    Built,
    Committed,
    Decision,
    Failed,
    FromAgent,
    FromRank,
    Hello,
    Interrupt,
    Invite,
    LayoutTold,
    Past,
    Plan,
    RankDying,
    RankExited,
    RankNews,
    Reachable,
    Recall,
    Relay,
    Resume,
    Running,
    Said,
    Settled,
    Start,
    Switched,
    ToRank,
    Wanted,
)
from megatron_elastic.cluster.node.chorus import Chorus, Later
from megatron_elastic.layout import UnitShape, changed, decode, encode

_KEPT = 4096
"""Steps that are kept at most while no coordinator takes them."""
_ERRORS = 8
"""Of what ranks have raised, the newest, which a new coordinator is told: with more of it it may be the program's."""

_decoder: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)


class Post:
    """One node's.

    Args:
        deliver: sends a frame to a rank.
        tell: tells the coordinator, if there is one.
        later: calls something after so many seconds.
    """

    def __init__(
        self, deliver: Callable[[int, bytes], None], tell: Callable[[FromAgent], object], later: Later
    ) -> None:
        self._deliver = deliver
        self._tell = tell
        self._hellos: dict[int, Hello] = {}
        self._dying: set[int] = set()
        self._chorus = Chorus(tell, later)
        self._told = b""
        """The layout that was sent here last; what the ranks have proposed if none was."""
        self._layouts: dict[int, bytes] = {}
        """By epoch, the newest that the ranks are in, and what is planned after it."""
        self._in_force = -1
        """Epoch of the layout that they are in."""
        self._epoch = 0
        """The highest one that was begun, as far as they have been told."""
        self._highest = -1
        """The highest rank that is known of otherwise: one that is dead, or is to come."""
        self._shapes: dict[int, UnitShape] = {}
        self._key = b""
        self._recorded = 0
        self.committed: deque[Committed] = deque(maxlen=_KEPT)
        """Steps that may not be on record."""
        self._failed: deque[Failed] = deque(maxlen=_ERRORS)
        self.wanted: Wanted | None = None
        """What somebody has asked for, as it was told here last."""

    @property
    def introduced(self) -> set[int]:
        """The ranks of this node that have said hello, and have not ended."""
        return set(self._hellos)

    def running(self, slots: dict[int, int]) -> list[Running]:
        """The ranks of this node, given with their local ranks, as a coordinator has to know them."""
        hellos = {rank: self._short(hello) for rank, hello in self._hellos.items()}
        return [Running(rank=rank, local_rank=slot, hello=hellos.get(rank)) for rank, slot in slots.items()]

    def _short(self, hello: Hello) -> Hello:
        """Without what the first rank of this node tells."""
        first = next(iter(self._hellos.values()))
        alike = first.rank != hello.rank and first.likeness == hello.likeness
        return replace(hello, flags={}, versions={}) if alike else hello

    def past(self, torch_port: int, alone_since: float, resigned: bool, started: Iterable[int]) -> Past:
        """What is known here of the job, for a new coordinator. ``started``: all ranks that ever were started here."""
        newest = max(self._highest, self._highest_of(*self._layouts.values()), *started)
        return Past(
            in_force=self._in_force, told=self._newest == self._told, epoch=self._epoch, newest=newest,
            torch_port=torch_port, key=self._key, shapes=self._shapes, recorded=self._recorded,
            committed=list(self.committed), alone_since=alone_since, resigned=resigned, failed=list(self._failed),
            wanted=self.wanted,
        )  # fmt: skip

    # ---- from ranks ------------------------------------------------------------------------

    def heard(self, rank: int, message: FromRank) -> None:
        """A rank says something to the coordinator."""
        match message:
            case Hello():
                self._told = self._told or message.layout
                self._hellos[rank] = replace(message, layout=b"")
                # The coordinator compares those of others with rank 0's.
                if rank != 0:
                    message = self._short(self._hellos[rank])
            case Reachable():
                if rank in self._hellos:
                    self._hellos[rank] = replace(self._hellos[rank], address=message.address, linked=True)
            case Built():
                self._shapes |= message.shapes
            case Settled() | Switched():
                self._enter(message.epoch)
            case Failed():
                if message.step is not None and not message.device:
                    self._failed.append(message)
            case Committed():
                self._enter(message.epoch)
                self.committed.append(message)
                if not message.first:
                    return
        self._chorus.say(message, len(self._hellos.keys() - self._dying))

    def news(self, news: RankNews) -> None:
        """Something has happened to a rank's process. What ranks have said before is told first."""
        self._chorus.flush()
        self._tell(news)
        if isinstance(news, RankDying):
            self._dying.add(news.rank)
        elif isinstance(news, RankExited):
            self._dying.discard(news.rank)
            self._hellos.pop(news.rank, None)

    def flush(self) -> bool:
        """Tell what waits for others that say the same; returns whether anything did."""
        return self._chorus.flush()

    # ---- from the coordinator ----------------------------------------------------------------

    def relay(self, message: Relay) -> None:
        """Pass a message on to ranks."""
        payload = bytes(message.message)
        content = _decoder.decode(payload)
        told = content
        if message.differs:
            assert isinstance(content, Invite | Plan | Decision), type(content)
            content = replace(content, layout=restored(self._told, content.layout))
        if message.kept:
            assert isinstance(content, Resume), type(content)
            content = replace(content, kept=message.kept)
        if (passed := self.noted(content)) is not told:
            payload = msgspec.msgpack.encode(passed)
        frame = wire.frame(payload)
        for rank in message.ranks:
            self._deliver(rank, frame)

    def noted(self, content: ToRank) -> ToRank:
        """Remember of a message to ranks what a later coordinator must know; returns it as they are to get it."""
        if isinstance(content, Plan | Decision):
            self._told = content.layout
            self._shapes |= content.shapes
        match content:
            case Start():
                self._key = content.key
                self._layouts[0] = self._told
                self._enter(0)
                return replace(content, addresses={rank: hello.address for rank, hello in self._hellos.items()})
            case Invite():
                self._key = content.key
            case Plan():
                self._layouts[content.epoch] = content.layout
            case Decision():
                self._layouts[content.epoch] = content.layout
                self._enter(content.epoch)
            case Interrupt():
                self._epoch = max(self._epoch, content.epoch)
                self._highest = max(self._highest, *content.lost, -1)
        return content

    def tell_layout(self) -> None:
        """A new coordinator does not know the layout that these ranks are in."""
        self._tell(LayoutTold(layout=self._newest))

    @property
    def _newest(self) -> bytes:
        """The newest layout that the ranks have been in; empty if there is none."""
        return self._layouts.get(self._in_force, b"")

    def recall(self, message: Recall) -> None:
        """The coordinator lacks steps."""
        for each in self.committed:
            if each.vote.step > message.after:
                self._tell(Said(message=each))

    def given(self, newest: int) -> None:
        """Ids up to ``newest`` were given, perhaps on other nodes."""
        self._highest = max(self._highest, newest)

    def want(self, wanted: Wanted) -> None:
        """Somebody has asked for something, or it is there."""
        self.wanted = wanted

    def recorded(self, step: int) -> None:
        """Steps up to this one are on record."""
        self._recorded = max(step, self._recorded)
        while self.committed and self.committed[0].vote.step <= step:
            self.committed.popleft()

    def _enter(self, epoch: int) -> None:
        """A rank is in the layout of ``epoch``, or is about to be."""
        self._epoch = max(self._epoch, epoch)
        if epoch > self._in_force and epoch in self._layouts:
            overtaken = [layout for each, layout in self._layouts.items() if self._in_force < each < epoch]
            self._highest = max(self._highest, self._highest_of(*overtaken))
            self._in_force = epoch
            self._layouts = {each: layout for each, layout in self._layouts.items() if each >= epoch}

    @staticmethod
    def _highest_of(*layouts: bytes) -> int:
        decoded = [decode(layout) for layout in layouts if layout]
        return max(chain((-1,), *((*each.ranks, *each.spares, *each.lost) for each in decoded)))


def restored(base: bytes, told: bytes) -> bytes:
    """The encoded layout that was told as the difference from ``base``."""
    return encode(changed(decode(base), told))
