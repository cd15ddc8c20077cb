"""Control: a model rank's line to its agent, as ``cluster.rank.control``, and the interrupt that unwinds the rank."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from megatron_elastic.cluster.messages import Decision, Interrupt, Moves, Stop, ToRank
from tests.simulation.errors import Gone, Interrupted

if TYPE_CHECKING:
    from tests.simulation.ranks.rank import Rank


class Control:
    """What has been said to a rank, and how it answers."""

    def __init__(self, rank: Rank) -> None:
        self.epoch = 0
        """Highest interrupt epoch so far; 0: none."""
        self.acknowledged = 0
        """Epoch for which the rank has unwound."""
        self.lost: frozenset[int] = frozenset()
        """Ranks that the interrupt names as dead."""
        self.layout = 0
        """Epoch of the layout that it names."""
        self._rank = rank
        self._inbox: deque[ToRank] = deque()
        self._over = False
        """Whether the job has failed."""

    @property
    def interrupted(self) -> bool:
        """Whether an interrupt waits to be acknowledged."""
        return self.epoch > self.acknowledged

    def send(self, message: Any) -> None:
        """Say something to the agent, and through it to the coordinator."""
        rank, world = self._rank, self._rank.world
        if world.tracing:
            world.trace(f"rank {rank.rank} says {message}")
        world.said(rank, type(message).__name__)
        rank.agent.heard(rank.rank, message)

    def receive(self, message: ToRank) -> None:
        """The control thread reads a message."""
        rank, world = self._rank, self._rank.world
        if not rank.alive or rank.done:
            return
        if rank.stopped:
            world.held(rank, self.receive, message)
            return
        if isinstance(message, Interrupt):
            if message.epoch > self.epoch:
                self.epoch, self.lost, self.layout = message.epoch, frozenset(message.lost), message.layout
        elif isinstance(message, Stop) and not message.ok:
            self._over = True
        else:
            self._inbox.append(message)
            if isinstance(message, Decision) and world.rng.random() < 0.2:
                world.after(world.delay(0.005), rank.poke)  # its main thread is slow to wake
                return
        rank.poke()

    def take(self, types: tuple[type, ...]) -> ToRank | None:
        """The next message of one of ``types`` if it is here already. A decision of an old epoch is dropped."""
        for message in list(self._inbox):
            if isinstance(message, Decision) and message.epoch < self.epoch:
                self._inbox.remove(message)
            elif isinstance(message, types):
                self._inbox.remove(message)
                return message
        return None

    def moves(self, epoch: int) -> Moves:
        """What this rank has to do with states under the layout of ``epoch``. That of older epochs is forgotten."""
        mine = Moves(epoch=epoch, moves=[], kept=None)
        for message in [each for each in self._inbox if isinstance(each, Moves) and each.epoch <= epoch]:
            self._inbox.remove(message)
            mine = message if message.epoch == epoch else mine
        return mine

    def acknowledge(self, epoch: int) -> None:
        """The rank has unwound for ``epoch``."""
        self.acknowledged = max(self.acknowledged, epoch)

    def error(self) -> Exception | None:
        """What a wait of the main thread raises now, if anything."""
        if self._over:
            return Gone()
        return Interrupted() if self.epoch > self.acknowledged else None

    def check(self) -> None:
        """Raise that."""
        if (error := self.error()) is not None:
            raise error
