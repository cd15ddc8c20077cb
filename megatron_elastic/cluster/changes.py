"""Changes: layouts that are planned while all is well: ranks that enter, slices that spread, units that move.

Nobody is interrupted. Ranks that are to enter build first; then everybody is told, and the vote of a step finds out
that all ranks know (``cluster.reshape``). A loss overtakes whatever is planned.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from megatron_elastic.cluster.arrangement import Arrangement
from megatron_elastic.cluster.course import Course
from megatron_elastic.cluster.messages import (
    Answer,
    Commit,
    Hello,
    Invite,
    Plan,
    Profile,
    Ready,
    Scale,
    Settled,
    Switched,
)
from megatron_elastic.cluster.recovery import Part
from megatron_elastic.cluster.reshape import Reshape
from megatron_elastic.cluster.roster import Roster
from megatron_elastic.cluster.suspicion import Record, Suspicion
from megatron_elastic.cluster.timers import Timers
from megatron_elastic.config import ElasticConfig
from megatron_elastic.layout import Layout
from megatron_elastic.plan import NoLayout, improve


class Changes:
    """Plans one change after the other, and sees each through.

    Args:
        course, roster, timers, suspicion, arrangement: the coordinator's.
        config: limits, and whether ranks are to be started in place of dead ones.
        idle: whether nothing else is going on that changes the layout.
        use: makes a layout the present one.
        newest_save: step of the newest complete checkpoint.
        event: writes an event down.
        say: prints one line for people.
    """

    def __init__(
        self,
        course: Course,
        roster: Roster,
        timers: Timers,
        suspicion: Suspicion,
        arrangement: Arrangement,
        config: ElasticConfig,
        *,
        idle: Callable[[], bool],
        use: Callable[[Layout], None],
        newest_save: Callable[[], int],
        event: Record,
        say: Callable[[str], None],
    ) -> None:
        self._course = course
        self._ranks = roster
        self._timers = timers
        self._suspicion = suspicion
        self._arrangement = arrangement
        self._config = config
        self._idle = idle
        self._use = use
        self._newest_save = newest_save
        self._event = event
        self._say = say
        self._reshape: Reshape | None = None
        self._goal: Layout | None = None
        """What the present layout is to lead to, if something is under way."""
        self._told = True
        """Whether people know that the layout has become as good as it can be."""
        self._settled: dict[int, int] = {}
        """Newest epoch for which everything that the layout asks for is live at a rank."""

    def overtaken(self) -> None:
        """A loss has come first."""
        self._reshape = self._goal = None
        self._told = False
        self._timers.cancel("ready")

    def consider(self) -> None:
        """Plan the next layout on the way to an even one over all ranks there are, if nothing else is going on."""
        layout = self._course.layout
        if layout is None or not self._idle() or self._reshape is not None:
            return
        settled = all(self._settled.get(rank) == self._course.epoch for rank in layout.ranks)
        if not settled or not all(self._ranks[rank].standby for rank in layout.spares):
            return
        newcomers = {rank: state.host for rank, state in self._ranks.items()
                     if state.standby and state.hello and not state.lost and rank not in layout.spares}
        arrange = self._arrangement.arrange if self._arrangement.due(layout, bool(newcomers)) else None
        epoch = self._course.newest_epoch + 1
        try:
            better = improve(layout, newcomers, epoch, self._goal, arrange)
        except NoLayout as error:
            # Cells may have been lost since it was asked for.
            self._event("refused", reason=str(error))
            self._say(f"the number of stages stays as it is: {error}")
            self._arrangement.stages = None
            better = improve(layout, newcomers, epoch, self._goal)
        if better is None:
            self._arrangement.reached()
            if not self._told:
                self._told = True
                self._say(f"slices and grains are even over {len(layout.ranks)} ranks, and all copies are there")
            return
        self._course.new_epoch()
        self._reshape = Reshape(*better, frozenset(better[0].ranks) - frozenset(layout.ranks))
        if self._reshape.entrants:
            planned = self._reshape.layout
            invite = Invite(epoch=planned.epoch, layout=planned.to_json(),
                            addresses=self._ranks.addresses(planned.ranks), shapes=self._course.shapes)
            self._ranks.send(invite, self._reshape.entrants)
            self._timers.set("ready", self._config.start_timeout, self._ready_late)
        self._announce_if_ready()

    def scale(self, request: Scale) -> Answer:
        """Somebody asks for another shape of the job. Says whether it will be made; that takes some steps."""
        layout = self._course.layout
        if layout is None:
            return Answer(ok=False, text="the job is not training yet")
        before, self._arrangement.stages = self._arrangement.stages, request.stages
        try:
            self._arrangement.arrange(layout)
        except NoLayout as error:
            self._arrangement.stages = before
            return Answer(ok=False, text=str(error))
        self._event("asked", stages=request.stages)
        self.consider()
        return Answer(ok=True, text=f"the pipeline will have {request.stages} stages, from {layout.pipeline_size}")

    def profiled(self, message: Profile) -> None:
        """A rank has measured its stage."""
        if self._arrangement.measured(message):
            self.consider()

    def _announce_if_ready(self) -> None:
        reshape = self._reshape
        assert reshape is not None and self._course.layout is not None
        if reshape.missing:
            return
        self._timers.cancel("ready")
        reshape.announced = True
        plan = Plan(epoch=reshape.layout.epoch, layout=reshape.layout.to_json(),
                    addresses=self._ranks.addresses(reshape.entrants), held=self._held(), shapes=self._course.shapes)
        self._ranks.send(plan, self._course.layout.ranks)

    def _held(self) -> dict[int, list[Part]]:
        """What every rank holds when all of the present layout is live."""
        layout = self._course.layout
        assert layout is not None
        return {rank: [(unit, k, layout.tp_index(rank)) for unit, k in (*layout.owned(rank), *layout.replicated(rank))]
                for rank in layout.ranks}

    def _ready_late(self) -> None:
        assert self._reshape is not None
        for rank in self._reshape.missing:
            self._suspicion.fence(rank, "fenced", f"it was not ready to join within {self._config.start_timeout:g} s "
                                        "(--elastic-start-timeout)")

    def ready(self, message: Ready) -> None:
        """A rank that is to enter has built its part."""
        if self._reshape is not None and self._reshape.layout.epoch == message.epoch:
            self._reshape.ready.add(message.rank)
            self._announce_if_ready()

    def switched(self, message: Switched) -> None:
        """The planned layout came into force."""
        reshape = self._reshape
        if reshape is None or reshape.layout.epoch != message.epoch:
            return  # a loss has overtaken it
        assert self._course.layout is not None
        held, stages = self._held(), self._course.layout.pipeline_size
        self._reshape, self._goal = None, reshape.goal
        if reshape.goal is None:
            self._arrangement.reached()
        self._course.epoch = reshape.layout.epoch
        self._use(reshape.layout)
        for rank in reshape.entrants:
            self._ranks[rank].standby, self._ranks[rank].joined = False, True
        commit = Commit(epoch=reshape.layout.epoch, layout=reshape.layout.to_json(), decision="switch",
                        step=message.step, vote=None, held=held, shapes=self._course.shapes, gather=False,
                        saved=self._newest_save())
        self._ranks.send(commit, reshape.entrants)
        shadows = [rank for stage in reshape.layout.stages for cell in stage.cells if cell.shadow
                   for rank in cell.ranks]
        self._event("switched", step=message.step, entered=sorted(reshape.entrants), shadows=shadows,
                    world_size=len(reshape.layout.ranks))
        if reshape.entrants:
            self._say(f"ranks {sorted(reshape.entrants)} follow from step {message.step} on, and will take part when "
                      "they have caught up")
        elif reshape.goal is not None:
            self._say(f"units and slices that are to move are being copied from step {message.step} on")
        elif reshape.layout.pipeline_size != stages:
            self._say(f"the pipeline has {reshape.layout.pipeline_size} stages instead of {stages} from step "
                      f"{message.step} on")
        self._told = False
        self.consider()

    def settled(self, message: Settled) -> None:
        """All that the layout asks for is live at a rank; or a spare has nothing any more that others need."""
        assert self._course.layout is not None
        if message.rank in self._course.layout.ranks:
            # The word that they have switched may come later than this one, over another connection.
            self._settled[message.rank] = message.epoch
        elif message.epoch == self._course.epoch:
            self._ranks[message.rank].standby = True
        self.consider()

    def respawn(self, rank: int) -> None:
        """Start a rank in place of one whose process has ended, if that is wanted."""
        state = self._ranks[rank]
        if not self._config.respawn or self._course.layout is None:
            return
        # One that ended before it had joined would probably do so again.
        if state.node in self._ranks.nodes and state.joined:
            assert state.node is not None
            new = self._ranks.spawn(state.node, [state.local_rank], state.host)
            self._event("spawned", ranks=new)
            self._say(f"rank {new[0]} is started in place of rank {rank}")

    def newcomer_connected(self, hello: Hello) -> None:
        """A rank that is to join has introduced itself."""
        assert self._course.first is not None
        wrong = difference(hello, self._course.first)
        if wrong is not None:
            self._suspicion.fence(hello.rank, "refused", f"it is not like the running job: {wrong}")
            return
        self.consider()

    def unneeded(self, rank: int) -> bool:
        """Whether a rank can die without anybody noticing: it has not been let in, and is not about to be."""
        assert self._course.layout is not None
        entering = self._reshape is not None and self._reshape.announced and rank in self._reshape.entrants
        return self._ranks[rank].standby and rank not in self._course.layout.spares and not entering

    def drop(self, ranks: Collection[int], cause: str) -> None:
        """Ranks have ended before they had joined."""
        for rank in ranks:
            self._event("fault", rank=rank, signal=cause, exited_at=time.time())
            self._say(f"rank {rank} ended ({cause}) before it had joined; see rank{rank}.log")
        if self._reshape is not None and not self._reshape.entrants.isdisjoint(ranks):
            self._timers.cancel("ready")
            self._reshape = None
            self.consider()


def difference(hello: Hello, first: Hello) -> str | None:
    """What a rank was told otherwise than the first one, for people; None if they can work together."""
    for name in sorted({*hello.flags, *first.flags}):
        theirs, ours = hello.flags.get(name), first.flags.get(name)
        if theirs != ours:
            return f"its --{name.replace('_', '-')} is {theirs} instead of {ours}"
    if hello.layout != first.layout or hello.train_iters != first.train_iters:
        return "it would begin with another layout or number of steps; give it the same --nproc-per-node"
    return None
