"""Checks: what must hold after every event, as far as the coordinator can be seen to break it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron_elastic.cluster.messages import Back, Decision, Invite, Plan, Reload, ToRank
from megatron_elastic.cluster.protocol import Job
from megatron_elastic.cluster.protocol.effects import End
from megatron_elastic.layout import Layout, LayoutError
from tests.simulation.errors import Violation
from tests.simulation.layouts import decoded

if TYPE_CHECKING:
    from tests.simulation.world import World


class Checks:
    """The invariants of one history."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._layouts: dict[int, bytes] = {}
        self._epoch = -1
        self._redone = 0
        """Steps up to this one may be done again although they are on record: state was lost."""
        self._excuses: set[str] = set()
        self._digested = False
        self._links: list[set[int]] = []
        self._fenced: set[int] = set()

    def broken(self, one: int, other: int) -> None:
        """A link between two ranks has broken."""
        self._links.append({one, other})

    def fenced(self, rank: int) -> None:
        """A rank is killed."""
        self._fenced.add(rank)
        quiet = not self._world.kinds.keys() & {"stop", "busy", "partition", "suspect", "node lost"}
        if quiet and len(self._links) == 1 and self._links[0] <= self._fenced:
            raise Violation("both ends", f"both ends of a bad link are killed, ranks {sorted(self._links[0])}")

    def excuse(self, reason: str) -> None:
        """The job may end for this reason."""
        self._excuses.add(reason)

    # ---- while it goes on ------------------------------------------------------------------------

    def line(self, record: Mapping[str, Any]) -> None:
        """A line of metrics."""
        world, step = self._world, record["step"]
        if step != world.written + 1:
            raise Violation("ledger", f"the line of step {step} follows that of step {world.written}")
        if record["loss"] != 10 / step:
            raise Violation("ledger", f"the line of step {step} has another step's loss")

    def layout(self, layout: Layout) -> None:
        """A layout came into force."""
        if layout.epoch <= self._epoch:
            raise Violation("epoch", f"the layout of epoch {layout.epoch} comes after that of epoch {self._epoch}")
        self._epoch = layout.epoch

    def sent(self, message: ToRank) -> None:
        """The coordinator says something to ranks."""
        if not isinstance(message, Plan | Invite | Decision):
            return
        try:
            layout = decoded(message.layout)
        except LayoutError as error:
            raise Violation("layout", str(error)) from None
        if self._layouts.setdefault(layout.epoch, message.layout) != message.layout:
            raise Violation("epoch", f"two layouts of epoch {layout.epoch}")
        if message.epoch != layout.epoch:
            raise Violation("epoch", f"{type(message).__name__} of epoch {message.epoch} with layout {layout.epoch}")
        if isinstance(message, Reload):
            self._redone = self._world.written
            self._world.passed_step = message.step - 1
        elif isinstance(message, Back):
            if self._world.keeps:
                self._world.passed_step = message.step - 1
            elif self._redone < message.step <= self._world.written:
                raise Violation("redone", f"step {message.step} is done again, but it is on record")

    def after(self, job: Job) -> None:
        """After each event: nobody is waited for without a limit."""
        timers = job.timers
        if job.recovery is not None and job.recovery.collecting and "report" not in timers:
            for rank in job.recovery.awaited:
                if f"killed {rank}" not in timers:
                    raise Violation("no limit", f"the report of rank {rank} is awaited without a timer")
        if job.change is not None and job.change.missing and "ready" not in timers:
            for rank in job.change.missing:
                if f"killed {rank}" not in timers:
                    raise Violation("no limit", f"rank {rank} is to get ready without a timer")
        for rank in job.suspicions:
            if f"suspect {rank}" not in timers:
                raise Violation("no limit", f"rank {rank} is suspected without a timer")

    def digest(self, digest: Mapping[str, Any]) -> None:
        """What was made is written down; ``combine`` has checked that all slices are there."""
        if digest["step"] != self._world.total or len(digest["units"]) != len(self._world.first.units):
            raise Violation("digest", f"the digest is of step {digest['step']} and {len(digest['units'])} units")
        self._digested = True

    # ---- at the end ------------------------------------------------------------------------------

    def over(self, end: End) -> None:
        """The job is over. It must have been for a reason, and that must be true."""
        if end.ok:
            self._finished()
        elif (untrue := self._untrue(end.reason)) is not None:
            raise Violation("ended", f"{untrue}: {end.reason}")

    def _finished(self) -> None:
        world = self._world
        if not self._digested:
            raise Violation("digest", "the job ended well without a digest")
        for step in range(world.written + 1, world.total + 1):
            for agent in world.agents:
                if agent.connected and any(each.vote.step == step for each in agent.post.committed):
                    raise Violation("ledger", f"the line of step {step} is missing; node {agent.node_rank} knows it")

    def _untrue(self, reason: str) -> str | None:
        """What is wrong with an end, if anything."""
        world, job = self._world, self._world.job
        there = [rank for rank in world.ranks.values() if rank.alive and rank.agent.connected]
        if reason.startswith("training cannot go on"):
            assert job.layout is not None
            cells = [cell for stage in job.layout.stages for cell in stage.cells if not cell.shadow]
            if not any(all(world.ranks[rank] in there and not job.ranks[rank].lost for rank in cell.ranks)
                       for cell in cells):
                return None  # no cell is whole, so there is nobody who could go on, from whatever state
            if "the copies of a slice differ" in reason:
                return None if world.kinds["flip"] else "nothing was damaged"
            if job.trust.saves and job.trust.verified is None:
                return "there are checkpoints"
            if any(step for step in job.trust.saves if job.trust.verified is not None and step <= job.trust.verified):
                return "there are sound checkpoints"
            return self._all_there()
        if reason.startswith("every rank of the layout is dead"):
            assert job.layout is not None
            left = [rank.rank for rank in there if rank.rank in job.layout.ranks and rank.standing.member
                    and not job.ranks[rank.rank].lost]
            return f"ranks {left} are there" if left else None
        if reason.startswith("every rank is dead"):
            left = [rank.rank for rank in there if not job.ranks[rank.rank].standby and not job.ranks[rank.rank].lost]
            return f"ranks {left} are there" if left else None
        if "died before training began" in reason:
            return None if job.layout is None else "training had begun"
        if "did not come up" in reason or "no agent came" in reason:
            return None if world.kinds.keys() & {"node lost", "partition", "busy", "stop"} else "nothing has happened"
        if "exit code" in reason:
            return None if "exit code" in self._excuses else "no rank has exited"
        if "raised" in reason:
            return None if "raised" in self._excuses else "no program has raised"
        if reason == "the disk is full":
            return None
        return "that must not be"

    def _all_there(self) -> str | None:
        """Whether all state is there after all, at one step."""
        world, job = self._world, self._world.job
        assert job.layout is not None
        parts = set(job.layout.parts)
        for steps in (world.passed_step, world.passed_step - 1):
            found: set[tuple[int, int, int]] = set()
            for rank in world.ranks.values():
                if not rank.alive or job.ranks[rank.rank].lost or not rank.agent.connected:
                    continue
                if rank.store is None:
                    if rank.standing.member:
                        found.update(rank.held())
                    continue
                for at, state in rank.store.live.items():
                    if not state.bad and (state.step == steps or (state.step == steps - 1 and state.grad)):
                        found.add((*at, rank.store.tp))
            if found >= parts:
                return f"all state after {steps} steps is there"
        return None
