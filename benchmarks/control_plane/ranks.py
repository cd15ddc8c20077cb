"""Ranks: what the ranks of some nodes say to the coordinator, without training anything.

Each has its ``Standing``, as a training rank. They vote in lock-step, so that whoever drives them says when a step ends
and whether they switch to a planned layout at its end; and when the copies that a layout asks for have been made.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

from msgspec.structs import replace

from megatron_elastic.cluster.messages import (
    Back,
    Built,
    Committed,
    Decision,
    Enter,
    Forward,
    FromRank,
    Hello,
    Interrupt,
    Invite,
    Plan,
    Ready,
    Recovered,
    Resume,
    Settled,
    Start,
    Switched,
    ToRank,
    VoteResult,
    Where,
    WorkDone,
)
from megatron_elastic.cluster.rank import standing
from megatron_elastic.cluster.rank.standing import Standing
from megatron_elastic.layout import Holdings, Layout, ParameterShape, SlicePart, UnitShape, decode, encode, gpt_units

NODE = 8
"""Ranks of a node."""
LAYERS = 56
STEPS = 1_000_000
_SHAPE = UnitShape(members=(ParameterShape(1024, 0, 1, 1024),) * 12, dtype="float32")
_FLAGS = {f"flag_{i}": "value" for i in range(300)}
"""Megatron has about as many."""
_ADDRESS = bytes(300)

Say = Callable[[int, FromRank], None]


def grid(ranks: int) -> Layout:
    """About so many ranks, on whole nodes: TP 8 x PP 8, or 2 x 2 where that is too many; K is the data-parallel width.
    """
    tp = pp = 8 if ranks >= 2 * 8 * 8 else 2
    dp = max(2, ranks // (tp * pp))
    dp -= dp * tp * pp % NODE // (tp * pp)
    units, stage_units = gpt_units(LAYERS, pp, tied=True, positions=True)
    return Layout.grid(
        tp=tp, pp=pp, dp=dp, stage_units=stage_units, units=units, num_grains=4 * dp, num_slices=dp, replicas=1,
        ranks_per_host=NODE,
    )  # fmt: skip


_read = lru_cache(maxsize=2)(decode)


class Ranks:
    """The ranks of the nodes of one process.

    Args:
        first: the layout of the beginning.
    """

    def __init__(self, first: Layout) -> None:
        self.informed: dict[int, int] = {}
        """Epoch of a planned layout -> members here that know of it."""
        self.started = 0
        """Ranks here that may train."""
        self.back = 0
        """Members here that have made the newest decided layout true."""
        self.decision = ""
        """The newest one that was decided about a step, by its name."""
        self.step = 1
        """In progress, for all members."""
        self.working = False
        """Whether they are in the middle of it, and what they have done of it can be kept."""
        self._layout = first
        self._encoded = encode(first)
        self._planned: Layout | None = None
        self._ranks: dict[int, Standing] = {}
        self._epoch = 0
        self._copying: dict[int, int] = {}
        """Ranks that have not said that a layout is settled, and its epoch."""
        self._held: dict[int, Sequence[SlicePart]] = {}
        """What ranks hold that have said so. A training rank knows it without looking through a layout."""

    @property
    def members(self) -> int:
        """How many ranks here are in cells."""
        return sum(each.member for each in self._ranks.values())

    def begin(self, rank: int, joins: bool) -> Hello:
        """A rank comes up."""
        self._ranks[rank] = Standing(rank=rank, step=self.step, epoch=0, member=not joins)
        return Hello(
            rank=rank, pid=rank, host="node", address=_ADDRESS, linked=True, layout=self._encoded,
            start_step=0, train_iters=STEPS, flags=_FLAGS, likeness=b"like", tied=True,
        )  # fmt: skip

    def end(self, ranks: Iterable[int]) -> None:
        """These are dead."""
        for rank in ranks:
            del self._ranks[rank]
            self._copying.pop(rank, None)
            self._held.pop(rank, None)

    def hear(self, rank: int, message: ToRank, say: Say) -> None:
        """A rank is told something."""
        match message:
            case Start():
                self.started += 1
                say(rank, Where(rank=rank, ask=1, ranks=self._neighbours(rank)))
                say(rank, Built(rank=rank, shapes=dict.fromkeys(self._layout.held_by(rank), _SHAPE)))
                self._copying[rank] = self._layout.epoch
            case Interrupt():
                self._interrupted(rank, message, say)
            case Forward() | Back() | Resume():
                self._decided(rank, message, say)
            case Invite():
                say(rank, Ready(rank=rank, epoch=message.epoch))
            case Plan():
                self._ranks[rank] = standing.told(self._ranks[rank], message.epoch)
                self._planned = _read(message.layout)
                self.informed[message.epoch] = self.informed.get(message.epoch, 0) + 1
            case Enter():
                self._enter(rank, message.epoch, message.step)
                self._copying[rank] = message.epoch

    def settle(self, say: Say) -> None:
        """All copies that the present layout asks for have been made."""
        copying, self._copying = self._copying, {}
        for rank, epoch in copying.items():
            self._held[rank] = self._asked(rank)
            say(rank, Settled(rank=rank, epoch=epoch))

    def commit(self, say: Say, switch: int | None) -> None:
        """The step in progress ends for all members here, who switch to the layout of epoch ``switch`` if that is due.
        """
        vote = VoteResult(step=self.step, loss=10 / self.step, grad_norm=1.0, lr=1e-4, consumed_samples=self.step,
                          tokens=4096)
        first, now, spoken = self._layout.ranks[0], time.time(), set()
        for rank, each in self._ranks.items():
            if not each.member or each.step > self.step:  # let in already: the ranks of another process were faster
                continue
            self._ranks[rank] = standing.committed(standing.voted(each, vote, switch is not None))
            if rank // NODE not in spoken:  # the ranks of a node follow one another
                spoken.add(rank // NODE)
                say(rank, Committed(rank=rank, epoch=self._layout.epoch, vote=vote, time=now, first=rank == first))
        self.step += 1
        self.working = False
        if switch is not None:
            self._switch(switch, first, say)

    def _switch(self, epoch: int, first: int, say: Say) -> None:
        members = [rank for rank, each in self._ranks.items() if each.member and each.epoch < epoch]
        assert self._planned is not None
        assert self._planned.epoch == epoch
        self._layout = self._planned
        for rank in members:
            self._enter(rank, epoch, self.step)
            if rank == first:
                say(rank, Switched(rank=rank, epoch=epoch, step=self.step))
            self._copying[rank] = epoch

    def _enter(self, rank: int, epoch: int, step: int) -> None:
        self._ranks[rank] = standing.enter(standing.edited(self._ranks[rank], epoch, step, True, False), step)

    def _interrupted(self, rank: int, message: Interrupt, say: Say) -> None:
        if message.epoch != self._epoch:
            self._epoch, self.back = message.epoch, 0
        each = self._ranks[rank]
        held = self._asked(rank) if rank in self._copying else self._held.get(rank, ())
        work = self._done(rank) if each.member else None
        say(rank, standing.report(each, message.epoch, self._layout, held, {}, time.time(), message.layout, 0, work))

    def _asked(self, rank: int) -> Sequence[SlicePart]:
        """What the layout asks a rank to hold."""
        return sorted(Holdings.of(self._layout).of_rank(rank))

    def _done(self, rank: int) -> WorkDone:
        """Nothing of the step, or in its middle a quarter, and the forward of another one."""
        layout = self._layout
        done = WorkDone.none(self.step, layout.num_grains)
        if self.working:
            stage, cell, _ = layout.places[rank]
            numbers = [grain * layout.num_chunks + chunk for grain in cell.share
                       for chunk in range(len(layout.chunks(stage)))]
            quarter = len(numbers) // 4
            done = replace(done, added=numbers[:quarter], live=numbers[quarter : 2 * quarter])
        return done

    def _decided(self, rank: int, decision: Decision, say: Say) -> None:
        self.decision = type(decision).__name__
        self._layout = _read(decision.layout)
        vote = decision.vote if isinstance(decision, Forward) else None
        member = rank in self._layout.places
        each = standing.edited(self._ranks[rank], decision.epoch, decision.step, member, False, vote=vote)
        if vote is not None:
            self._ranks[rank] = standing.forward(each, vote)
        else:
            self._ranks[rank] = standing.back(each, decision.step)
        if each.member:
            self.back += 1
            say(rank, Recovered(rank=rank, epoch=decision.epoch, edit_ms=1.0, state_ms=1.0))
        self._copying[rank] = decision.epoch

    def _neighbours(self, rank: int) -> list[int]:
        """On other nodes: who computes the stages before and after, and who keeps a copy of something."""
        layout = self._layout
        stage, cell, tp = layout.places[rank]
        around = [
            other.ranks[tp]
            for at in (stage - 1, stage + 1)
            if 0 <= at < layout.pipeline_size
            for other, _ in layout.sharers(at, cell.grains[0])
        ]
        copies = [copy for unit, k in layout.owned(rank)[:1] for copy in layout.copies(unit, k, tp)]
        return sorted({other for other in (*around, *copies) if other // NODE != rank // NODE})
