"""Link: an agent's dealings with one coordinator, as a session: what is said comes once and in order, or never."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.simulation.shell.agent import Agent
    from tests.simulation.shell.coordinator import Coordinator
    from tests.simulation.world import World


class Link:
    """Connections may break and be made again; what ends with one end ends for good.

    ``local``: both are in one process.
    """

    def __init__(self, world: World, agent: Agent, coordinator: Coordinator) -> None:
        self.world = world
        self.agent = agent
        self.coordinator = coordinator
        self.local = coordinator.place is agent
        self.node = 0
        """How the coordinator calls the agent."""
        self.open = True
        """Whether what the agent says is heard."""
        self.resigned = False
        """Whether the agent has heard that the coordinator is none any more."""
        self._up: deque[Any] = deque()
        self._down: deque[Any] = deque()
        self._up_at = self._down_at = 0.0

    def tell(self, message: Any) -> None:
        """The agent says something."""
        if self.open:
            self._up.append(message)
            self._up_at = self._when(self._up_at)
            self.world.at(self._up_at, self._arrive)

    def obey(self, message: Any, ranks: tuple[int, ...] = ()) -> None:
        """The coordinator says something: for the agent, or for these of its ranks."""
        if self.open:
            self._down.append((message, ranks, self.coordinator.recorded))
            self._down_at = self._when(self._down_at)
            self.world.at(self._down_at, self._act)

    def _when(self, after: float) -> float:
        now = self.world.now
        return max(after, now) if self.local else max(after, self.agent.cut_until, now + self.world.delay(0.001))

    def _arrive(self) -> None:
        if not self.open or not self._up:
            return
        if self.world.now < self.agent.cut_until and not self.local:
            self.world.at(self.agent.cut_until, self._arrive)
            return
        self.coordinator.hear(self, self._up.popleft())

    def _act(self) -> None:
        if not self._down:
            return
        if self.world.now < self.agent.cut_until and not self.local:
            self.world.at(self.agent.cut_until, self._act)
            return
        message, ranks, recorded = self._down.popleft()
        if self.agent.alive:
            self.agent.obey(message, ranks, recorded)

    def close(self) -> None:
        """It is gone for good, and all that was on its way."""
        self.open = False
        self._up.clear()
        self._down.clear()

    def fade(self, says_so: bool) -> float:
        """The coordinator is gone: some of what was on its way still arrives. Returns when all that has."""
        self.open = False
        self._up.clear()
        cut = self.world.now < self.agent.cut_until
        if cut:
            self._down.clear()
        lost = self.world.rng.randrange(len(self._down) + 1)
        for _ in range(lost):
            self._down.pop()
        self.resigned = says_so and not cut and not lost
        return max(self._down_at, self.world.now + self.world.delay(0.002))

    def silence(self) -> None:
        """The coordinator has given the agent up, and hears nothing from it any more."""
        self.open = False
        self._up.clear()
