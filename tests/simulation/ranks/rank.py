"""Rank: a model of one rank's process, as the scheduler sees it. What it does is in ``ranks.training``.

Its decisions are those of ``cluster.rank.standing``, its messages the real ones. Its main thread is a generator that
yields what it waits for: seconds, during which it notices nothing; message types; a ``Meeting``; a condition. What it
computes are numbers of steps (``tests.simulation.ranks.store``), and whatever would hang, raise or count wrongly is a
violation.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from megatron_elastic.cluster.messages import RankReading
from megatron_elastic.cluster.rank.standing import Standing
from megatron_elastic.faults.odometer import COORDINATOR
from megatron_elastic.layout import Layout
from tests.simulation.errors import Gone, Interrupted, Violation
from tests.simulation.ranks.control import Control
from tests.simulation.ranks.copying import Copies
from tests.simulation.ranks.meeting import Meeting
from tests.simulation.ranks.store import Store
from tests.simulation.ranks.training import interruption, life
from tests.simulation.ranks.training.parameters import Parameters
from tests.simulation.ranks.training.recutting import Recutting
from tests.simulation.ranks.training.tenure import Tenure
from tests.simulation.ranks.transport import Transport
from tests.simulation.ranks.work import Work

if TYPE_CHECKING:
    from tests.simulation.shell.agent import Agent
    from tests.simulation.world import World

Waits = Generator[Any, Any, Any]
"""What the main thread does, from one wait to the next."""
WAIT_LIMIT = 300.0
"""``--elastic-wait-timeout``: a wait that lasts longer has no good reason, unless somebody hangs."""


class Rank:
    """One process, from its hello on."""

    def __init__(self, world: World, agent: Agent, rank: int, first: Layout) -> None:
        self.world = world
        self.agent = agent
        self.rank = rank
        self.alive = True
        self.stopped = False
        self.done = False
        """Whether its program has returned."""
        self.settled = False
        """Whether it has done a step, and knows by now how long things take."""
        self.busy_until = 0.0
        """Fault: it computes, and looks at nothing."""
        self.control = Control(self)
        self.transport = Transport(self, listening=len(first.hosts) > 1)
        self.copies = Copies(self)
        # What training keeps, whatever the layout
        self.layout = first
        self.standing = Standing(
            rank=rank, step=world.start_step + 1, epoch=first.epoch, member=rank in first.ranks
        )
        self.store: Store | None = None
        self.parameters = Parameters()
        self.tenure: Tenure | None = None
        self.recut: Recutting | None = None
        """What it is to have in cells of another shape, while nobody knows whether they will be."""
        self.work: Work | None = None
        """What it has done of the step in progress."""
        self.save_first = world.start_step + 1
        """Checkpoints of earlier steps are not due any more."""
        self.saved = world.start_step
        """Step of the newest checkpoint that is complete for certain."""
        # Main thread
        self.want: Any = None
        """What it waits for."""
        self._main: Waits = life.live(self)
        self._serial = 0
        self._since = 0.0

    def begin(self) -> None:
        """Its program begins."""
        if self.alive:
            self._run(None, None)

    def poke(self) -> None:
        """Something has changed that this rank may wait for."""
        if not self._waiting():
            return
        value, error = self._poll()
        if value is not None or error is not None:
            if type(self.want) is Meeting:
                self.want.waiting.pop(self.rank, None)
                hangs = self.world.kinds.keys() & {"hang", "busy"}  # perhaps all of a stage, which stays
                if (waited := self.world.now - self._since) > WAIT_LIMIT and not hangs:
                    raise Violation("wait limit", f"rank {self.rank} waited {waited:.0f} s")
            self._run(value, error)

    def reading(self) -> RankReading:
        """What its agent sees of it without asking. A stopped one may have waited, or not."""
        return RankReading(
            rank=self.rank, stood=self.world.now - self._since, at="forward", step=self.standing.step, grain=self.rank,
            waits=None if type(self.want) is float or self.want is None else self._waits_for(),
            patient=not self.settled,
        )  # fmt: skip

    def _waits_for(self) -> int:
        if type(self.want) is not Meeting:
            return COORDINATOR
        missing = [rank for rank in self.want.members if rank not in self.want.posted]
        return missing[0] if missing else self.rank

    def woken(self, meeting: Meeting) -> None:
        """All have come to a meeting."""
        if self.want is meeting:
            self.poke()

    def waits(self, seconds: float) -> bool:
        """Whether it has waited so long for others, or for the coordinator."""
        return self._waiting() and self.world.now - self._since > seconds

    def waits_for_a_decision(self, seconds: float) -> bool:
        """Whether it has reported so long ago."""
        return self.waits(seconds) and self.want == interruption.DECISIONS

    # ---- the main thread -------------------------------------------------------------------------

    def _waiting(self) -> bool:
        """Whether it would notice what it waits for."""
        there = self.alive and not self.stopped and not self.done
        return there and self.want is not None and type(self.want) is not float

    def _run(self, value: Any, error: Exception | None) -> None:
        while True:
            try:
                want = self._main.throw(error) if error is not None else self._main.send(value)
            except StopIteration:
                self.done, self.want = True, None
                self.world.returned(self)
                return
            except Gone:
                self.done, self.want = True, None
                self.world.process_ends(self, 1)
                return
            self.want = want
            self._serial += 1
            self._since = self.world.now
            if type(want) is float:
                delay = max(want, self.busy_until - self.world.now)
                self.world.after(delay, self._worked, self._serial)
                return
            value, error = self._poll()
            if value is None and error is None:
                if type(want) is Meeting:
                    want.waiting[self.rank] = None
                return

    def _worked(self, serial: int) -> None:
        if serial == self._serial and self.alive and not self.done:
            if self.stopped:
                self.world.held(self, self._worked, serial)
            else:
                self._run(None, None)

    def _poll(self) -> tuple[Any, Exception | None]:
        """What the wait returns or raises now, if it is over."""
        want = self.want
        if type(want) is tuple:
            found = self.control.take(want)
            return (found, None) if found is not None else (None, self.control.error())
        if type(want) is Meeting:
            complete = len(want.posted) == len(want.members) and self.rank not in want.blind
            if complete and self.transport.broken.isdisjoint(want.members):
                return want, None
        elif want():
            return True, None
        return None, self._trouble()

    def _trouble(self) -> Exception | None:
        if (error := self.control.error()) is not None:
            return error
        suspects = self.transport.suspects()
        return Interrupted(tuple(sorted(suspects))) if suspects else None
